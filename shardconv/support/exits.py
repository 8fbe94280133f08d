"""Signals and exit codes of the command line.

Owns the signal handlers of each phase of a process, and the message and exit code of each signal. It is the first
module that a command imports, so it imports nothing slow and knows no command.
"""

import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes longer to import than the modules above
    from collections.abc import Callable
    from typing import NoReturn

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_MESSAGES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
NOTHING_LEFT = "nothing was left behind"
_SOME_LEFT = "a signal ended the removal of files, so some may be left behind"
#: Seconds between two attempts to raise an exception that would be lost now, and the largest number of attempts.
_RETRY_SECONDS, _MAX_RETRIES = 0.05, 400


class Terminated(BaseException):
    """SIGTERM was received. As with KeyboardInterrupt, no ``except Exception`` stops it."""


def describe_signal(number: int, left: str = NOTHING_LEFT) -> tuple[str, int]:
    """The message and the exit code of a signal."""
    return f"{_MESSAGES[signal.Signals(number)]}; {left}", 128 + number


class Removal:
    """A context that removes files: a signal that ends it gets a note that some may be left behind."""

    def __enter__(self) -> None:
        """Do nothing; the note is added on exit."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Add the note to a signal."""
        if isinstance(error, (KeyboardInterrupt, Terminated)):
            error.add_note(_SOME_LEFT)


def exit_at_once(code: int) -> "NoReturn":
    """Exit without destructors, which abort if threads still run: of a process group, or of the client of a store."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader may have closed the pipe
            stream.flush()
    os._exit(code)


def exit_on_signals() -> None:
    """Exit in the handler: for phases in which there is nothing to clean up and an exception could get lost."""
    _install(_exit)


def raise_on_signals() -> None:
    """Raise KeyboardInterrupt or :class:`Terminated`, but not in the middle of an import."""
    _install(_Raise())


def ignore_signals() -> None:
    """Ignore both signals: the command has finished or failed, and exits in a moment."""
    if isinstance(signal.getsignal(signal.SIGALRM), _Again):
        signal.setitimer(signal.ITIMER_REAL, 0)
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def default_signals() -> None:
    """Exit at once and without a message, in a rank: the process that started it reports the signal."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)  # blocked while a rank is started


class ImportPhase:
    """Exit on a signal while this context is open: for imports of torch, in which an exception could get lost.

    Enables garbage collection, which the command line disables: models have reference cycles.
    """

    def __enter__(self) -> None:
        """Install the handlers."""
        gc.enable()
        self._handlers = {number: signal.getsignal(number) for number in _NUMBERS}
        exit_on_signals()

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


class _Raise:
    """A handler that raises an exception once no import is running, and no object is finalized.

    Python discards exceptions that are raised in some of the functions that an import calls, and extension modules turn
    them into other errors.
    """

    def __init__(self) -> None:
        self._retries = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise the exception, or try again soon."""
        if _would_be_lost(frame) and self._retries < _MAX_RETRIES:
            self._retries += 1
            signal.signal(signal.SIGALRM, _Again(number))
            signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)
            return
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


class _Again:
    """A handler of SIGALRM that delivers a deferred signal."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, *_: object) -> None:
        """Deliver it."""
        signal.raise_signal(self._number)


def _would_be_lost(frame: FrameType | None) -> bool:
    """Whether an exception that is raised now would be discarded: in an import, or while an object is finalized."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib") or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _exit(number: int, _: FrameType | None) -> None:
    """Write the message without any library, as most of them may be half imported."""
    text, code = describe_signal(number)
    try:
        if "--json" in sys.argv:
            os.write(1, f'{{"error": "{text}", "exit_code": {code}}}\n'.encode())
        os.write(2, f"shardconv: {text}\n".encode())
    finally:
        os._exit(code)


def _install(handler: "Callable[[int, FrameType | None], object]") -> None:
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell lets background jobs ignore SIGINT
            signal.signal(number, handler)
