"""Forked processes compared with started ones."""

import json
import subprocess
import sys

import pytest

from tests.support import forked
from tests.support.command import ENVIRONMENT
from tests.support.matrix import needs_torch

pytestmark = [
    pytest.mark.skipif(forked.Popen is subprocess.Popen, reason="forks on Linux only"),
    needs_torch,
]

#: Prints the state of a process; for state that differs between any two processes, whether it is as expected.
SCRIPT = """
import json, os, signal, sys, threading
print(json.dumps({
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "path": sys.path[0],
    "environment": dict(os.environ),
    "stdin": sys.stdin.read(),
    "is in a session of its own": os.getsid(0) == os.getpid(),
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) < 3),
    "threads": len(os.listdir("/proc/self/task")),
    "handlers": {number: str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "name": __name__,
    "is main": sys.modules["__main__"].__dict__ is globals(),
}))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("is_session", [False, True])
def test_forked_process_has_the_state_of_a_started_one(script, tmp_path, is_session):
    environment = {**ENVIRONMENT, "ONLY": "here"}
    options = {"cwd": tmp_path, "env": environment, "start_new_session": is_session, "text": True}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    found = []
    for popen in (subprocess.Popen, forked.ForkedPopen):
        with popen([sys.executable, str(script), "a", "b c"], **streams, **options) as process:
            out, err = process.communicate("given")
        found.append((json.loads(out), err, process.returncode))
    assert found[1] == found[0]
    assert found[0][0]["is in a session of its own"] is is_session
