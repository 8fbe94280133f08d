"""Options in messages: of the command line in commands and reports, arguments in Python."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import click
import pytest

import shardconv
from shardconv.cli import cli
from shardconv.support.errors import EXTRAS, ConfigError, UsageError, option
from tests.support.checkpoints import DEMO
from tests.support.command import call

PACKAGE = Path(shardconv.__file__).parent
#: Options that no function has: of ``shardconv run`` and ``plan``, and of other programs.
COMMANDS_ONLY = {
    "--chat", "--check", "--engine", "--load-format", "--local-dir", "--max-new-tokens", "--multiple-of",
    "--nproc-per-node", "--prompt", "--recursive", "--token-ids", "--upgrade",
}  # fmt: skip
#: Texts of reports, which name options as commands have them, and the origin of a rule.
REPORTS = {
    ("checkpoint/operations/verify.py", "--config"), ("checkpoint/sources/layout_source.py", "--from"),
    ("checkpoint/split/loadable.py", "--adapter"),
    ("plan/request.py", "--config"), ("plan/request.py", "--head-dim"),
    ("plan/request.py", "--rules"), ("plan/families/rule.py", "--replicate"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "on_command_line", "in_python"),
    [
        (option("dst"), "-o", "dst"),
        (option("head_dim"), "--head-dim", "head_dim"),
        (option(overwrite=True), "--overwrite", "overwrite=True"),
        (option(checksums=False), "--no-checksums", "checksums=False"),
        (option(config="FILE"), "--config FILE", "config=FILE"),
        (option(config=Path("a b.json")), "--config 'a b.json'", 'config="a b.json"'),
        (option(engine="vllm"), "--for vllm", 'engine="vllm"'),
        (option(source_layout="meta"), "--from meta", 'source_layout="meta"'),
        (option(tp=3), "--tp 3", "tp=3"),
        (option(tp="N"), "--tp N", "tp=N"),
        (option(ranks="0,2,5-7"), "--ranks 0,2,5-7", 'ranks="0,2,5-7"'),
        (option(ignore=["x*", "é y"]), "--ignore 'x*' --ignore 'é y'", 'ignore=["x*", "é y"]'),
        (option(adapters=["NAME"]), "--adapter NAME", "adapters=[NAME]"),
        ("'--pad' of the user: shardconv split SRC --tp 4", *["'--pad' of the user: shardconv split SRC --tp 4"] * 2),
    ],
)
def test_an_option_is_an_argument_in_python(text, on_command_line, in_python):
    error = UsageError(f"a {text}: pass {text}, or")
    assert error.with_options() == f"a {on_command_line}: pass {on_command_line}, or"
    assert str(error) == f"a {in_python}: pass {in_python}, or"


def test_a_message_is_part_of_another():
    error = ConfigError("no head_dim", f"pass {option('head_dim')}")
    assert str(UsageError(f"x: {error.message}")) == "x: no head_dim: pass head_dim"
    assert UsageError(f"x: {error.message}").with_options() == "x: no head_dim: pass --head-dim"
    assert error.problem == "no head_dim"


@pytest.mark.parametrize("name", ["\x1e", "\x1f", "\x1e1\x1f", "\x1e{\x1f", "\x1e[1, 2\x1f"])
def test_control_characters_of_a_name_are_not_an_option(name):
    error = UsageError(f"{name}: pass {option(tp=4)}")
    assert (str(error), error.with_options()) == (f"{name}: pass tp=4", f"{name}: pass --tp 4")


def test_the_same_error_in_both_forms(tmp_path):
    shardconv.split(DEMO, tmp_path / "x", tp=2)
    with pytest.raises(shardconv.ShardconvError, match=r"choose another path with dst, or pass overwrite=True$"):
        shardconv.split(DEMO, tmp_path / "x", tp=2)
    result = call("split", DEMO, "-o", tmp_path / "x", "--tp", 2)
    assert result.err.endswith("choose another path with -o, or pass --overwrite\n")


def modules():
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(("commands/", "support/")) and name != "cli.py":
            yield name, ast.parse(path.read_text("utf-8"))


def texts(tree):
    """The strings of a module except for docstrings, with a placeholder for each expression in them."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in docstrings | parts:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_options_of_functions_are_data_in_messages():
    shell = re.compile(r"\b(?:shardconv |BASE |SRC )(?:(?![,;)]|[.:](?:\s|$)).)*")
    found = {
        (name, flag)
        for name, tree in modules()
        for text in texts(tree)
        if not text.startswith(" --")  # the rest of a command
        for flag in re.findall(r"(?<![\w-])(?:--[a-z][a-z-]*|-o)(?![\w-])", shell.sub("", text))
    }
    assert {(name, flag) for name, flag in found if flag not in COMMANDS_ONLY} == REPORTS


def test_options_in_messages_exist():
    arguments = {
        (call.args[0].value if call.args else call.keywords[0].arg)
        for _, tree in modules()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "option"
        if not call.args or isinstance(call.args[0], ast.Constant)
    } - {None}
    functions = [one for one in (getattr(shardconv, name) for name in shardconv.__all__) if inspect.isfunction(one)]
    known = {name for function in functions for name in inspect.signature(function).parameters}
    assert arguments <= known | shardconv.PlanOptions.__annotations__.keys()
    flags = {
        flag
        for command in cli.commands.values()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    assert {UsageError(option(argument)).with_options() for argument in arguments} <= flags


def packages(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """The packages of an extra of pyproject.toml, and of the extras of shardconv that it includes."""
    found = set()
    for package in extras[extra]:
        included = re.fullmatch(r"shardconv\[(\w+)\]", package)
        found |= packages(included[1], extras) if included else {package}
    return found


def test_install_commands_have_the_packages_of_the_extras():
    extras = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra: {*found} for extra, found in EXTRAS.items()} == {extra: packages(extra, extras) for extra in EXTRAS}
