"""The message and the exit code of each exception that ends a command."""

import signal

import click

from shardconv.support.errors import ShardconvError
from shardconv.support.exits import NOTHING_LEFT, Terminated, describe_signal

#: Package to the extra of shardconv with which commands that import it run.
_EXTRAS = {"torch": "transformers", "safetensors": "transformers", "transformers": "transformers"}


def describe(error: BaseException) -> tuple[str, int]:
    """The message of an exception, with its notes, and the exit code."""
    if isinstance(error, click.Abort) and error.__cause__ is not None:
        error = error.__cause__  # click raises Abort from KeyboardInterrupt and EOFError
    if isinstance(error, KeyboardInterrupt):
        return describe_signal(signal.SIGINT, _left(error))
    if isinstance(error, Terminated):
        return describe_signal(signal.SIGTERM, _left(error))
    notes = "; ".join(getattr(error, "__notes__", []))
    message, code = _describe(error)
    return f"{message}; {notes}" if notes else message, code


def _left(error: BaseException) -> str:
    """The notes of a signal and of earlier ones that it replaced, on files that may be left behind."""
    notes: dict[str, None] = {}
    other: BaseException | None = error
    while other is not None:
        if isinstance(other, (KeyboardInterrupt, Terminated)):
            notes |= dict.fromkeys(getattr(other, "__notes__", []))
        other = other.__context__
    return "; ".join(notes) or NOTHING_LEFT


def _describe(error: BaseException) -> tuple[str, int]:  # noqa: PLR0911 - a table: the first match counts
    """The message and the exit code of an exception other than a signal."""
    if isinstance(error, click.UsageError):
        usage = f"\n{error.ctx.get_usage()}" if error.ctx else ""
        return error.format_message() + usage, error.exit_code
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, ShardconvError):
        return error.with_options(), error.exit_code
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get(error.name or "")):
        return f"this command needs {error.name}, which is not installed: pip install 'shardconv[{extra}]'", 1
    if isinstance(error, MemoryError):
        return "there is not enough memory", 1
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", 1
    return f"internal error: {type(error).__name__}: {error} (--debug shows the traceback; please report it)", 1
