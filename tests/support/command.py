"""Run the command line in this process or in a new one."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import shardconv

#: Environment of a new process, which imports the package under test. Python is as its user has it: output is buffered.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    "PYTHONPATH": str(Path(shardconv.__file__).parents[1]),
}


class Result(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def call(*arguments: object) -> Result:
    """Run a command in this process, as the console script does."""
    from shardconv.cli import main  # noqa: PLC0415 - forked_client.py imports this module, and starts often

    out, err = io.StringIO(), io.StringIO()
    argv, handlers = sys.argv, {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = ["shardconv", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        raise AssertionError("main came back")
    except SystemExit as exit_:
        code = exit_.code
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    result = Result(code, out.getvalue(), err.getvalue())
    assert not re.search(r"u\{1e\}|u001e", result.out + result.err), f"an option that is not rendered: {result}"
    return result


def start(*arguments: object, patch: str = "", popen=subprocess.Popen, **options) -> subprocess.Popen[str]:
    """Start a command in a new process, which first runs ``patch``, some lines of Python."""
    command = ["-m", "shardconv"] if not patch else ["-c", f"{patch}\nfrom shardconv.cli import main\nmain()"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    streams["env"] = {**ENVIRONMENT, **options.get("env", {})}
    return popen([sys.executable, *command, *map(str, arguments)], text=True, **streams)


def finish(process: subprocess.Popen[str]) -> Result:
    """Wait for a started command."""
    out, err = process.communicate(timeout=200)
    return Result(process.returncode, out, err)


def run(*arguments: object, **options) -> Result:
    """Run a command in a new process."""
    return finish(start(*arguments, **options))


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Wait for the first result of a condition that is true, and return it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"timed out after {seconds} s"
        time.sleep(0.02)
    return found
