"""Start Python processes by a fork of one that has imported torch and transformers: see fork_server.py.

They are real processes with their own streams, signals and exit codes, but save seconds of imports. Not for tests of
the start of Python and its imports, of process trees, or with a GPU.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import command

MESSAGE_BYTES = 2**17
_CAN_FORK = sys.platform == "linux"


class ForkedPopen(subprocess.Popen):
    """A :class:`subprocess.Popen` of ``[sys.executable, [-u], -m MODULE or SCRIPT, ...]`` that a server forks.

    Args:
        server: the path of the server's socket; by default of this process's own server.
    """

    def __init__(self, *arguments: Any, server: str | None = None, **options: Any) -> None:
        self._server = server
        super().__init__(*arguments, **options)

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ):  # fmt: skip
        assert args[0] == sys.executable, args
        request = {
            "arguments": [os.fspath(each) for each in args[1:]],
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or Path.cwd()),
            "start_new_session": start_new_session,
            "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
            "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        assert request["env"].get("OMP_NUM_THREADS") == "1", "the server's threads were counted when it imported torch"
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(self._server or server())
        socket.send_fds(self._connection, [json.dumps(request).encode()], streams)
        self.pid = json.loads(self._connection.recv(MESSAGE_BYTES))["pid"]
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags):
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        with self._connection:
            answer = self._connection.recv(MESSAGE_BYTES)
        return self.pid, json.loads(answer)["status"] if answer else signal.SIGKILL

    def _internal_poll(self, _deadstate=None, **_: Any):
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


@cache
def server() -> str:
    """Start the server of this process unless it runs; returns the path of its socket."""
    folder = tempfile.TemporaryDirectory(prefix="fork-")
    path = f"{folder.name}/socket"
    alive, ours = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        words = [sys.executable, "-m", "tests.support.fork_server", str(listener.fileno()), str(alive), path]
        process = subprocess.Popen(
            words, pass_fds=(listener.fileno(), alive), env=command.ENVIRONMENT, stdin=subprocess.DEVNULL
        )
    os.close(alive)

    def stop() -> None:
        os.close(ours)
        process.wait()
        folder.cleanup()

    atexit.register(stop)
    return path


def python_command() -> list[str]:
    """The command line of a Python that has imported torch, for a shell; followed by ``-m MODULE`` or a script."""
    return [sys.executable, *(["-m", "tests.support.forked_client", server()] if _CAN_FORK else [])]


#: For commands without a GPU. On systems other than Linux, processes are started as usual.
Popen = ForkedPopen if _CAN_FORK else subprocess.Popen


def run(*arguments: object, **options: Any) -> command.Result:
    """Run a command of shardconv, as :func:`tests.support.command.run` does."""
    return command.finish(command.start(*arguments, popen=Popen, **options))


def run_python(
    *words: object, given: str | bytes | None = None, is_text: bool = True, timeout: float = 200, **options: Any
) -> subprocess.CompletedProcess:
    """Run ``python WORDS`` with ``given`` as stdin."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": is_text}
    options["env"] = {**command.ENVIRONMENT, **options.get("env", {})}
    with Popen([sys.executable, *map(str, words)], **streams, **options) as process:
        try:
            out, err = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)
