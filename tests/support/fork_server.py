"""A process that has imported torch and transformers, and forks a process for each request.

    python -m tests.support.fork_server LISTENER ALIVE SOCKET

Started by :mod:`tests.support.forked`. LISTENER is the descriptor of a listening Unix socket at the path SOCKET; the
server exits when the other end of the pipe ALIVE is closed. A request is a message with the descriptors of
stdin, stdout and stderr; the answers are the process id, once the process is set up, and its wait status.

A forked process has the standard streams, environment, folder, signals and session of its request, and exits as Python
does, without the teardown of modules and the finalizers of the server's objects. It lists PyTorch files itself, as it
has imported torch. Of the server's state it has only the imported modules and a table of transformers: the server has
one thread, reads no random numbers and runs no operations of torch.
"""

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from shardconv import commands
from shardconv.support.launched import PARENT
from tests.support.forked import MESSAGE_BYTES, ForkedPopen

IMPORTED = (
    "torch.distributed.nn",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "transformers.generation.utils",
    "transformers.generation.streamers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.encoder_decoder",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
    "shardconv.checkpoint.engine.arrays",
    "shardconv.checkpoint.operations.foreign_writer",
    "shardconv.checkpoint.operations.plan_report",
    "shardconv.checkpoint.operations.split",
    "shardconv.cli",
    *(f"shardconv.commands.{name}" for name in commands.__all__),
    "shardconv.proof.compare",
    "shardconv.proof.model_check",
    "shardconv.proof.prove",
    "shardconv.runtime.launch",
    "shardconv.runtime.run",
    "shardconv.tensor",
)


def main() -> None:
    """Serve, and run the request in each forked process."""
    listener, alive, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for name in IMPORTED:
        importlib.import_module(name)
    # ranks that a forked process launches are forked by this server, too
    handler = sys.modules["torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"]
    handler.Popen = lambda *arguments, **options: ForkedPopen(*arguments, server=path, **options)
    get_checkpoint_conversion_mapping("llama")  # builds a table of all model types once
    for finalizer in list(weakref.finalize._registry):  # of torch's operators; a forked process only ends
        finalizer.atexit = False
    assert threading.active_count() == 1
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    gc.collect()
    gc.freeze()  # no collection in a forked process copies their pages
    request = Server(listener, alive).serve()
    if request is not None:
        leave(execute(request["arguments"]))


class Server:
    """Forks processes and reports how they exit."""

    def __init__(self, listener: int, alive: int) -> None:
        self._listener = socket.socket(fileno=listener)
        self._alive = alive
        self._requests: dict[int, socket.socket] = {}  # without a process yet, by descriptor
        self._processes: dict[int, socket.socket] = {}  # by process id
        self._woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakes = wakes

    def serve(self) -> dict[str, Any] | None:
        """Serve until all clients have exited; in a forked process, returns its request."""
        while True:
            processes = {connection.fileno(): pid for pid, connection in self._processes.items()}
            waited = [self._listener.fileno(), self._alive, self._woken, *self._requests, *processes]
            ready, _, _ = select.select(waited, [], [])
            if self._alive in ready:
                for pid in self._processes:
                    os.kill(pid, signal.SIGKILL)
                return None
            for descriptor in ready:
                if descriptor == self._listener.fileno():
                    connection, _ = self._listener.accept()
                    self._requests[connection.fileno()] = connection
                elif descriptor == self._woken:
                    os.read(self._woken, 4096)
                elif descriptor in self._requests:
                    request = self._fork(self._requests.pop(descriptor))
                    if request is not None:
                        return request
                elif processes[descriptor] in self._processes:  # its client has exited
                    os.kill(processes[descriptor], signal.SIGKILL)
                    self._processes.pop(processes[descriptor]).close()
            self._reap()

    def _fork(self, connection: socket.socket) -> dict[str, Any] | None:
        """Fork a process for a request; returns the request in the forked process."""
        message, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not message:
            connection.close()
            return None
        pid = os.fork()
        if pid:
            self._processes[pid] = connection
            for stream in streams:
                os.close(stream)
            return None
        request: dict[str, Any] = json.loads(message)
        self._leave(connection)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        set_up(request)
        connection.send(json.dumps({"pid": os.getpid()}).encode())
        connection.close()
        return request

    def _leave(self, kept: socket.socket) -> None:
        """Close the server's descriptors in a forked process."""
        signal.set_wakeup_fd(-1)
        for connection in (self._listener, *self._requests.values(), *self._processes.values()):
            if connection is not kept:
                connection.close()
        for descriptor in (self._alive, self._woken, self._wakes):
            os.close(descriptor)

    def _reap(self) -> None:
        while self._processes or self._requests:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if connection := self._processes.pop(pid, None):
                with connection:
                    connection.send(json.dumps({"status": status}).encode())


def set_up(request: dict[str, Any]) -> None:
    """Set up a forked process like a started one."""
    if request["start_new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if PARENT in os.environ:  # a rank watches it
        os.environ[PARENT] = str(os.getppid())
    ignored = set(request["ignored"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    random.seed()


def execute(arguments: list[str]) -> int:
    """Run ``[-u] -m MODULE ...`` or ``[-u] SCRIPT ...``; returns the exit code."""
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        arguments = arguments[1:]
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = str(Path(arguments[0]).parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            raise
        return error.code or 0
    return 0


def leave(code: int) -> None:
    """Exit as Python does, but without the teardown of modules, which would copy all memory of the server."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:
                code = 120  # as Python's own
    os._exit(code)


if __name__ == "__main__":
    main()
