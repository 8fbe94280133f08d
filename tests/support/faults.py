"""Commands that write files, faults that make them fail, and checks of what they leave.

The fixtures that make the jobs are in tests/checkpoint/conftest.py.
"""

import errno
import itertools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shardconv.checkpoint.engine.copy import CopyJob
from shardconv.checkpoint.operations.merge import merge
from shardconv.checkpoint.operations.reshard import reshard
from shardconv.checkpoint.operations.split import split
from tests.support.checkpoints import contents
from tests.support.command import Result, call

COMMANDS: dict[str, tuple[str, list[str], Callable[..., Any]]] = {
    "split": ("source", ["--tp", "4"], partial(split, tp=4)),
    "merge": ("split", [], merge),
    "reshard": ("split", ["--tp", "2"], partial(reshard, tp=2)),
}

#: A slow disk, so that tests can interrupt a copy; restores SIGINT, as pytest may have been started with it
#: ignored.
SLOW = """
import os, signal, time
write = os.pwrite
def slow(*arguments):
    time.sleep(0.05)
    return write(*arguments)
os.pwrite = slow
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


class Job(NamedTuple):
    """A command and the files that it writes.

    Attributes:
        arguments: the command line without the output.
        function: the equivalent function of source and destination.
        source: the checkpoint that it reads.
        expected: name to bytes of the files it writes.
    """

    arguments: list[str]
    function: Callable[..., Any]
    source: Path
    expected: dict[str, bytes]

    def call(self, target: Path, *options: str) -> Result:
        """Run it in this process."""
        return call(*self.arguments, "-o", target, *options)

    def on(self, source: Path) -> "Job":
        """The same with another source."""
        return self._replace(arguments=[self.arguments[0], str(source), *self.arguments[2:]], source=source)


def beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


def check_failed(result: Result, target: Path, message: str, code: int = 1) -> None:
    """Check the message, the exit code, and that no file was left."""
    assert result.code == code
    assert message in result.err
    assert result.err.strip().startswith("shardconv: ")
    assert result.err.strip().count("\n") == 0
    assert result.out == ""
    assert beside(target) == []


def check_done(result: Result, job: Job, target: Path) -> None:
    assert result.code == 0, result.err
    assert beside(target) == [target.name]
    assert contents(target) == job.expected


def failing(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """A function that fails after a number of calls."""
    calls = itertools.count()

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*arguments, **options)

    return fail


#: Modules of shardconv.checkpoint that have a STRIPE_BYTES for what they write.
STRIPE_MODULES = ("split.manifest", "operations.foreign_writer")


@contextmanager
def failing_after(num_stripes: int) -> Iterator[None]:
    """Let every copy fail after some stripes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyJob, "copy_stripe", failing(CopyJob.copy_stripe, num_stripes))
        yield


def interrupt(job: Job, target: Path, num_stripes: int, *options: str) -> Result:
    """Run it in this process with --resume, and let it fail after it has copied some stripes."""
    with failing_after(num_stripes):
        return job.call(target, "--resume", "--threads", "1", *options)


def before_copying(patch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Call a function after the files are open and before the first byte is copied."""
    copy = CopyJob.run
    patch.setattr(CopyJob, "run", lambda *arguments, **options: (action(), copy(*arguments, **options))[1])


def refuse_locks(patch: pytest.MonkeyPatch) -> None:
    """Let the file system not support locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    patch.setattr("fcntl.flock", refuse)


@contextmanager
def writing(run: Callable[[], object]) -> Iterator[None]:
    """Run a command in another thread, which does not copy anything before the end of this context."""
    is_writing, may_go_on = threading.Event(), threading.Event()
    copy_stripe = CopyJob.copy_stripe

    def wait_then_pass(*arguments: Any) -> None:
        is_writing.set()
        assert may_go_on.wait(60)
        copy_stripe(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopyJob, "copy_stripe", wait_then_pass)
        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert is_writing.wait(60)
            yield
        finally:
            may_go_on.set()
            thread.join()


def refuse_to_list(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make a folder unreadable, also for root."""
    for name in ("scandir", "listdir"):
        original = getattr(os, name)

        def refuse(path: Any, original: Callable[..., Any] = original) -> Any:
            if Path(path) == folder:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return original(path)

        monkeypatch.setattr(os, name, refuse)


def put_file(target: Path) -> None:
    target.write_text("mine")


def put_notes(target: Path) -> None:
    target.mkdir()
    (target / "notes.txt").write_text("mine")


def put_checkpoint(target: Path) -> None:
    target.mkdir()
    (target / "model.safetensors").write_text("old")
    (target / "tokenizer.json").write_text("old")


def put_link(target: Path) -> None:
    elsewhere = target.parent.parent / "elsewhere"
    put_checkpoint(elsewhere)
    target.symlink_to(elsewhere)


def put_dangling_link(target: Path) -> None:
    target.symlink_to("nowhere")


#: Audit events of Python that are steps, besides every write.
AUDITED = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "open"}


def kill_before(step: int, folder: Path) -> None:
    """Kill this process before its n-th step that changes the disk."""
    steps = itertools.count(1)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        is_ours = event != "open" or str(folder) in str(arguments[0])
        if event in AUDITED and is_ours and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    write = os.pwrite

    def counted(*arguments: Any) -> int:
        count("os.truncate", ())
        return write(*arguments)

    sys.addaudithook(count)
    os.pwrite = counted


def status_of_child(function: Callable[[], int]) -> int:
    """Run a function in a forked process, which is faster than starting Python; returns its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's idle threads do no harm
        pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
