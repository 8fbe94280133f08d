"""SIGINT at any moment: exit code 130 and one line, or the command finishes; no process is left."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import shardconv
from tests.support.checkpoints import DEMO, llama_config, write_checkpoint
from tests.support.command import ENVIRONMENT, finish, start, wait_until
from tests.support.matrix import MATRIX, needs_torch

LINE = "shardconv: interrupted; nothing was left behind"
#: For a signal during the removal of files.
WHILE_REMOVING = "shardconv: interrupted; a signal ended the removal of files, so some may be left behind"
MARK = "SHARDCONV_TEST_MARK"
pytestmark = pytest.mark.timeout(240)

#: Sends SIGINT before the n-th audit event of a name whose first argument ends with a text.
BEFORE = """
import itertools, os, signal, sys
import shardconv.__main__
signal.signal(signal.SIGINT, signal.default_int_handler)
steps = itertools.count(1)
def interrupt(event, arguments):
    if event == {event!r} and str(arguments[0]).endswith({text!r}) and next(steps) == {step}:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
shardconv.__main__.main()
"""

#: Prints when the entry point begins, so that the signal does not arrive while Python starts.
PRINTS_WHEN_STARTED = """
import os, signal, sys
import shardconv.__main__
signal.signal(signal.SIGINT, signal.default_int_handler)
def report(event, arguments):
    if event == "import" and arguments[0] == "shardconv.support.launched":
        os.write(1, b"x")
sys.addaudithook(report)
shardconv.__main__.main()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "tiny", config=llama_config(layers=1))
    shardconv.split(DEMO, folder / "demo-tp2", tp=2)
    return folder


def interrupted(code, arguments, delay=None):
    """Run a command in these lines of Python, with SIGINT after a delay if given; returns its result."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0,
        env={**ENVIRONMENT, MARK: mark}, start_new_session=True,
    )  # fmt: skip
    if delay is not None:
        os.read(process.stdout.fileno(), 1)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
    result = finish(process)
    check_none_left(mark)
    return result


def check_none_left(mark):
    wait_until(lambda: not any(mark.encode() in environment(path) for path in Path("/proc").glob("[0-9]*/environ")), 30)


def environment(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def check(result, done=0):
    assert result.code in {130, done}, result
    assert "Traceback" not in result.err
    assert "Exception ignored" not in result.err
    if result.code == 130:
        assert [line for line in result.err.splitlines() if line] in ([LINE], [WHILE_REMOVING])


RUN = ["run", "{made}/demo-tp2", "--prompt", "A list", "--device", "cpu", "--max-new-tokens", 2]
IMPORTS = [
    *[(["plan", "{made}/tiny", "--tp", 2], step) for step in (1, 2, 3, 5, 10, 20, 60, 120, 180)],
    *[pytest.param(RUN, step, marks=needs_torch) for step in (100, 500, 1100)],
    *[pytest.param(["plan", DEMO, "--prove", "--tp", 2], step, marks=MATRIX) for step in (500, 1500, 2400)],
    *[pytest.param(["plan", DEMO, option], 1500, marks=MATRIX) for option in ("--cost", "--propose")],
]


@pytest.mark.parametrize(("arguments", "step"), IMPORTS)
def test_sigint_before_an_import(made, arguments, step):
    code = BEFORE.format(event="import", text="", step=step)
    check(interrupted(code, [str(one).format(made=made) for one in arguments]))


@needs_torch
def test_sigint_at_any_moment(made, tmp_path):
    """For commands that write, that start processes, and that prove."""
    moments = random.Random(0)
    commands = [
        ["split", made / "tiny", "--tp", 2, "-o", tmp_path / "split"],
        ["run", made / "demo-tp2", "--prompt", "A list", "--device", "cpu"],
        ["plan", DEMO, "--prove"],
    ]
    for arguments in commands:
        for delay in (0, moments.uniform(0, 0.3), moments.uniform(0.3, 1.5)):
            check(interrupted(PRINTS_WHEN_STARTED, arguments, delay))
            shutil.rmtree(tmp_path / "split", ignore_errors=True)


def test_sigint_with_json(made):
    code = BEFORE.format(event="open", text="config.json", step=1)  # no import runs, which would defer the signal
    result = interrupted(code, ["plan", made / "tiny", "--tp", 2, "--json"])
    assert (result.code, result.out) == (130, f'{{"error": "{LINE.removeprefix("shardconv: ")}", "exit_code": 130}}\n')


@needs_torch
def test_sigint_while_ranks_start(made):
    """Processes that were already started are terminated."""
    patch = """
import os, signal, subprocess
signal.signal(signal.SIGINT, signal.default_int_handler)
class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
subprocess.Popen = Popen
"""
    mark = uuid.uuid4().hex
    arguments = ["run", made / "demo-tp2", "--prompt", "A list", "--device", "cpu", "--max-new-tokens", 20000]
    result = finish(start(*arguments, patch=patch, env={MARK: mark}))
    check_none_left(mark)
    assert result.code == 130, result
    check(result)


def test_ignored_sigint_stays_ignored(made):
    """As in a background job of a shell."""
    patch = """
import atexit, os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
import shardconv.checkpoint.operations.plan_report
report_plan = shardconv.checkpoint.operations.plan_report.report_plan
def interrupted(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)
    return report_plan(*arguments, **options)
shardconv.checkpoint.operations.plan_report.report_plan = interrupted
"""
    result = finish(start("plan", made / "tiny", "--tp", 2, patch=patch))
    assert (result.code, result.err) == (0, ""), result
