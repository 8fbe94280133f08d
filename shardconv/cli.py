"""The entry of the command line: the group of commands, and how the process exits."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NoReturn

import click

from shardconv import __version__, commands
from shardconv.support.console import discard_unwritten, echo, open_streams
from shardconv.support.errors import PeerError, ShardconvError, install, is_connection_error
from shardconv.support.exits import (
    NOTHING_LEFT,
    Terminated,
    default_signals,
    describe_signal,
    exit_at_once,
    ignore_signals,
    raise_on_signals,
)
from shardconv.support.launched import PARENT, exit_with_parent, is_launched, write_failure

#: Seconds in which torchrun ends a process that leaves its error to another one. Rank 0 may still be importing torch.
_END_SECONDS = 60.0
_FIRST_STEPS = """\
shardconv shards checkpoints for tensor parallelism, one file per rank.

  shardconv plan SRC                       Show the supported numbers of ranks.
  shardconv split SRC --tp 8               Write SRC-tp8, one file per rank.
  shardconv run SRC-tp8 --prompt "Hello"   Run it, one process per rank.

SRC is a checkpoint: a folder, a file, or a URL such as hf://org/model.
shardconv -h lists the commands, and shardconv COMMAND -h the options of one.\
"""


#: Each command and the module of its function, in the order of ``--help``.
_MODULES = {
    "plan": "plan", "split": "split", "run": "run", "merge": "merge", "reshard": "reshard", "verify": "verify",
    "pad": "pad", "unpad": "pad", "prove-rank": "plan",
}  # fmt: skip


class _Commands(Mapping[str, click.Command]):
    """The commands by name, each imported when it is used."""

    def __getitem__(self, name: str) -> click.Command:
        command: click.Command = getattr(getattr(commands, _MODULES[name]), name.replace("-", "_"))
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class _Group(click.Group):
    """The commands, in the order of ``_MODULES``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands."""
        del ctx
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with a name; an error in its module is not an unknown command, as for ``Mapping.get``."""
        del ctx
        return self.commands[cmd_name] if cmd_name in _MODULES else None


@click.group(
    cls=_Group, commands=_Commands(), invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
@click.version_option(__version__, message="shardconv %(version)s", help="Show the version, and exit.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Shard checkpoints for tensor parallelism, one file per rank, and merge them back byte for byte."""
    if ctx.invoked_subcommand is None:
        echo(_FIRST_STEPS, err=True)
        sys.exit(2)


def main() -> NoReturn:
    """Run the command line, and exit."""
    if PARENT in os.environ:
        default_signals()
    else:
        raise_on_signals()
    exit_with_parent()
    open_streams()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's linear algebra would start threads that nothing uses
    code = _run()
    ignore_signals()
    sys.exit(code)


def _run() -> str | int | None:
    """Run the command of the arguments; returns the exit code."""
    try:
        code = _invoke()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt, Terminated) as error:
        ignore_signals()
        if "--debug" in sys.argv:
            raise
        if os.environ.get("RANK"):
            exit_at_once(_report_rank(error))
        return _report(error)
    return code


def _invoke() -> str | int | None:
    """Run the command; returns the exit code."""
    try:
        cli.main(prog_name="shardconv", standalone_mode=False)
    except SystemExit as exit_:
        return exit_.code
    return 0


def _report(error: BaseException) -> int:
    """Print the message of an exception; returns its exit code."""
    unwritten = discard_unwritten()
    if isinstance(error, OSError) and error.filename is None:
        error.filename = next(iter(unwritten), None)
    code = _show_error(error, as_json="--json" in sys.argv)
    discard_unwritten()
    return code


def _report_rank(error: BaseException) -> int:
    """Report the exception of a rank; returns its exit code.

    The launching process prints one message for all ranks. Under torchrun each rank prints its own, unless another
    process reports the same error or its cause. torchrun ends all processes when one exits, so a rank that leaves its
    error to another one waits until torchrun ends it.
    """
    is_consequence = _is_consequence(error)
    if is_launched():
        message, code = describe(error)
        write_failure(message, is_consequence=is_consequence)
        return code
    if is_consequence and "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    if is_consequence:
        default_signals()
        time.sleep(_END_SECONDS)  # still running: the other process is on another host, or was killed
    return _report(error)


def _is_consequence(error: BaseException) -> bool:
    """Whether another process reports the cause, or the same error."""
    is_repeated = isinstance(error, ShardconvError) and error.is_repeated
    return is_repeated or isinstance(error, PeerError) or is_connection_error(error)


def _show_error(error: BaseException, *, as_json: bool) -> int:
    """Print the message of an exception, with ``as_json`` also as an object; returns its exit code."""
    message, code = describe(error)
    with suppress(OSError):  # the error may be that a stream cannot be written
        if as_json:
            echo(json.dumps({"error": message, "exit_code": code}))
    with suppress(OSError):
        if message:
            echo(f"shardconv: {message}", err=True)
    return code


#: Packages of the extra ``transformers`` that commands import when they run.
_OPTIONAL = {"torch", "safetensors", "transformers"}


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
    if isinstance(error, ModuleNotFoundError) and error.name in _OPTIONAL:
        return f"this command needs {error.name}, which is not installed: {install('transformers')}", 1
    if isinstance(error, MemoryError):
        return "there is not enough memory", 1
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", 1
    return f"internal error: {type(error).__name__}: {error} (--debug shows the traceback; please report it)", 1
