"""The entry of the command line: the group of commands, and how the process exits."""

import gc
import os
import sys
from typing import NoReturn

import click

from shardconv import __version__
from shardconv.commands.merge import merge
from shardconv.commands.pad import pad, unpad
from shardconv.commands.plan import plan
from shardconv.commands.prove_rank import prove_rank
from shardconv.commands.reshard import reshard
from shardconv.commands.run import run
from shardconv.commands.split import split
from shardconv.commands.verify import verify
from shardconv.console import open_streams, show_error
from shardconv.errors import PeerError, WorldSizeError, is_connection_error
from shardconv.exits import Terminated, default_signals, describe, exit_at_once, ignore_signals, raise_on_signals
from shardconv.parent import PARENT, exit_with_parent


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="shardconv %(version)s")
def cli() -> None:
    """Split safetensors checkpoints into tensor-parallel shards, one per rank, and merge them back byte for byte."""


for _command in (split, merge, reshard, verify, plan, run, pad, unpad, prove_rank):
    cli.add_command(_command)


def main() -> NoReturn:
    """Run the command line, and exit."""
    if PARENT in os.environ:
        default_signals()
    else:
        raise_on_signals()
    exit_with_parent()
    open_streams()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's linear algebra would start threads that nothing uses
    gc.disable()  # headers and plans are many objects and no cycles; a collection takes as long as the plan itself
    code: str | int | None = 0
    try:
        cli.main(prog_name="shardconv", standalone_mode=False)
    except SystemExit as exit_:
        code = exit_.code
    except (Exception, KeyboardInterrupt, Terminated) as error:
        ignore_signals()
        if "--debug" in sys.argv:
            raise
        if os.environ.get("RANK"):
            exit_at_once(_report_rank(error))
        code = _report(error)
    ignore_signals()
    sys.exit(code)


def _report(error: BaseException) -> int:
    """Print the message of an exception; returns its exit code."""
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has closed the pipe
    return show_error(error, as_json="--json" in sys.argv)


def _report_rank(error: BaseException) -> int:
    """Report the exception of a rank; returns its exit code.

    The launching process prints one message for all ranks. Under torchrun each rank prints its own, unless another
    process reports the same error or its cause.
    """
    from shardconv.runtime.launch import is_launched, write_failure

    is_consequence = _is_consequence(error)
    if is_launched():
        message, code = describe(error)
        write_failure(message, is_consequence=is_consequence)
        return code
    return 1 if is_consequence else _report(error)


def _is_consequence(error: BaseException) -> bool:
    """Whether another process reports the cause, or rank 0 reports the same error."""
    if isinstance(error, WorldSizeError):
        return os.environ["RANK"] != "0"
    return isinstance(error, PeerError) or is_connection_error(error)
