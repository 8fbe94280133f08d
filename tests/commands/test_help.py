"""Help texts: they fit a terminal, every option is under a heading, and the examples are valid commands."""

import re
import shlex

import click
import pytest

from shardconv.cli import cli
from shardconv.commands.command import Option
from tests.support.command import call

COMMANDS = [name for name, command in cli.commands.items() if not command.hidden]
each_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["-h"], *([name, "-h"] for name in COMMANDS)], ids=" ".join)
def test_help_fits_80_columns(arguments, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = call(*arguments)
    lines = (result.out + result.err).splitlines()
    assert len(lines) > 5
    assert [line for line in lines if len(line) > 80] == []


@each_command
def test_every_option_is_under_a_heading(command):
    options = [option for option in cli.commands[command].params if isinstance(option, click.Option)]
    assert [option.name for option in options if not isinstance(option, Option)] == []


@each_command
def test_help_lists_every_option_once(command):
    listed = re.findall(r"^  (-[\w-]+)", call(command, "-h").out, re.MULTILINE)
    options = [option for option in cli.commands[command].params if isinstance(option, click.Option)]
    assert sorted(listed) == sorted(["-h", *(min(option.opts, key=len) for option in options)])


def test_headings_have_an_order(monkeypatch):
    shown = call("split", "-h").out
    headings = ["Source:", "Plan:", "Adapters:", "Output:", "Checks:", "Display:", "Examples:"]
    assert [line for line in shown.splitlines() if line in headings] == headings


@each_command
def test_examples_are_valid(command):
    """``--help`` runs nothing, but unknown options are still refused."""
    examples = (cli.commands[command].epilog or "").splitlines()
    assert examples
    for example in examples:
        words = shlex.split(example)
        words = words[words.index("shardconv") + 1 :]
        assert words[0] == command
        assert call(*words, "--help").code == 0
        assert call(*words, "--no-such-option", "--help").code == 2


def test_without_a_command_the_first_steps_are_shown():
    result = call()
    assert (result.code, result.out) == (2, "")
    steps = [line.split()[1] for line in result.err.splitlines() if line.startswith("  shardconv ")]
    assert steps == ["plan", "split", "run"]
