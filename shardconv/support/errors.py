"""The exceptions of shardconv and their exit codes.

    ShardconvError                1   base class: an error that the user can act on
    ├── UsageError                2   contradicting, unknown or unusable options or arguments
    ├── SourceError               1   the source cannot be read: a header, a source file, an index, a config
    ├── PlanError                 1   no plan: no family, no rule, or a size that does not divide
    │   ├── ConfigError           1   a field of the config is missing or unusable
    │   └── ShapeError            1   the shape of a tensor contradicts the config
    ├── SplitCheckpointError      1   the split checkpoint is incomplete or its manifest cannot be read
    │   └── IntegrityError        1   checksums, replicas, padding or indices of groups are not as expected
    ├── OutputError               1   the destination exists, is in use, or is full
    └── RunError                  1   wrong number of processes, or a model that cannot be built, loaded or run
        ├── PeerError             1   another rank failed and reported why
        └── NotHeldError          1   an engine reads elements of a tensor that are not on this rank

A message is one text: what is wrong, in which file, tensor and rank, what was got and expected, and how to fix it. It
names options as the command line has them; in Python, exceptions show arguments instead (``option_names.py``).
:class:`PlanWarning` is the only warning: a model is loaded with a plan that is based on assumptions.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from shardconv.support.option_names import in_python

#: Whether this process is the command line.
_is_command_line = False


@contextmanager
def command_line() -> Iterator[None]:
    """Show options instead of arguments in messages, while this process is the command line."""
    global _is_command_line  # noqa: PLW0603 - a fact about the process, which threads and nested messages share
    before, _is_command_line = _is_command_line, True
    try:
        yield
    finally:
        _is_command_line = before


class _NamesOptions(Exception):  # noqa: N818 - the base of errors and of a warning
    """Its message names options of the command line."""

    def __str__(self) -> str:
        """The message, in Python with arguments in place of options. It is the arguments, joined by colons."""
        text = ": ".join(map(str, self.args))
        return text if _is_command_line else in_python(text)


class ShardconvError(_NamesOptions):
    """Base class of all errors that shardconv raises on purpose.

    Attributes:
        exit_code: of a command that fails with it.
        is_repeated: whether another process raises the same error, and reports it.
    """

    exit_code = 1
    is_repeated = False


class UsageError(ShardconvError):
    """Options contradict each other, are unknown, or cannot be used."""

    exit_code = 2


class SourceError(ShardconvError):
    """The source checkpoint cannot be read or is invalid."""


class PlanError(ShardconvError):
    """No plan is known to be correct."""


class ConfigError(PlanError):
    """A field of the config is missing or unusable. Its arguments are the problem and the remedy."""


class ShapeError(PlanError):
    """The shape of a tensor contradicts the config. Its arguments are the problem and the remedy."""


class SplitCheckpointError(ShardconvError):
    """A split checkpoint is incomplete, or its manifest cannot be read."""


class IntegrityError(SplitCheckpointError):
    """Bytes on disk differ from the bytes that were written."""


class OutputError(ShardconvError):
    """The destination cannot be written."""


class RunError(ShardconvError):
    """A model cannot be run: wrong number of processes, or it cannot be built or loaded."""


class PlanWarning(_NamesOptions, UserWarning):
    """A model is loaded with a plan that is based on assumptions or on user rules instead of a family."""


class PeerError(RunError):
    """Another rank failed and reported why."""


class NotHeldError(RunError):
    """An operation reads elements of a tensor that are not on this rank."""


class WorldSizeError(RunError):
    """The number of processes differs from the number of ranks."""


def is_connection_error(error: BaseException) -> bool:
    """Whether an error is a lost connection between ranks, so that the error of another rank is the cause."""
    lost = re.compile("gloo|[nx]ccl|[Cc]onnection|TCPStore|FileStore")
    return isinstance(error, RuntimeError) and lost.search(str(error)) is not None


def one_line(error: BaseException) -> str:
    """An error of another library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
