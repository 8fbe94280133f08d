"""Completion in real shells, set up as docs/commands.md describes; a shell that is not installed is skipped."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command import ENVIRONMENT
from tests.support.matrix import cases

DOCS = (Path(__file__).parents[2] / "docs" / "commands.md").read_text("utf-8")
_SECONDS = 30


def requires(shell: str):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def setup_line(shell: str) -> str:
    """The line that the docs have for a shell, in a table."""
    (line,) = re.findall(rf"`([^`]*_SHARDCONV_COMPLETE={shell}_source.*?)` \| `", DOCS)
    return line.replace(r"\|", "|")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """An environment with the console script, in which shells read no files of the user."""
    home = tmp_path_factory.mktemp("home")
    script = home / "bin" / "shardconv"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shardconv "$@"\n')
    script.chmod(0o755)
    (home / "plan-of-mine.toml").touch()
    path = f"{script.parent}:{os.environ['PATH']}"
    return {**ENVIRONMENT, "PATH": path, "HOME": str(home), "TERM": "dumb", "PS1": "$ "}


def typed(shell: list[str], setup: str, text: str, wanted: str, environment: dict[str, str]) -> str:
    """Type a text and two tabs into an interactive shell; returns what it shows, at the latest after some seconds."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        shell, stdin=end, stdout=end, stderr=end, env=environment, cwd=environment["HOME"], start_new_session=True
    )
    os.close(end)
    shown = b""
    try:
        os.write(terminal, f"{setup}; echo 're'ady\n".encode())
        shown = _read_until(terminal, b"ready\r")
        os.write(terminal, f"{text}\t\t".encode())
        shown = _read_until(terminal, wanted.encode())
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return shown.decode(errors="replace")


def _read_until(terminal: int, wanted: bytes) -> bytes:
    shown, end = b"", time.monotonic() + _SECONDS
    while wanted not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 2**16)
    return shown


#: Typed text to a completion that is not typed.
LINES = {
    "shardconv unp": "unpad",
    "shardconv split x --dtype b": "bf16",
    "shardconv split x --layout vl": "vllm",
    "shardconv split x --from deepsp": "deepspeed",
    "shardconv plan --rules gpt_ne": "gpt_neox",
    "shardconv plan --list-families qwen3_m": "qwen3_moe",
    "shardconv plan --rules plan-of": "plan-of-mine.toml",
}
BY_DEFAULT = {"bf16", "gpt_neox"}
each_line = pytest.mark.parametrize(
    ("text", "completion"), cases(LINES.items(), lambda _, completion: completion in BY_DEFAULT)
)


@requires("bash")
@each_line
def test_bash(environment, text, completion):
    setup = setup_line("bash")
    assert completion in typed(["bash", "--norc", "--noprofile", "-i"], setup, text, completion, environment)


@requires("zsh")
@each_line
def test_zsh(environment, text, completion):
    setup = f"autoload -Uz compinit; compinit -u; {setup_line('zsh')}"
    assert completion in typed(["zsh", "-f", "-i"], setup, text, completion, environment)


@requires("fish")
@each_line
def test_fish(environment, text, completion):
    """By the command of fish that lists completions."""
    command = f"{setup_line('fish')}; complete --do-complete {text!r}"
    done = subprocess.run(
        ["fish", "-c", command], check=True, env=environment, cwd=environment["HOME"], capture_output=True, text=True
    )
    assert completion in [line.split("\t")[0] for line in done.stdout.splitlines()], done
