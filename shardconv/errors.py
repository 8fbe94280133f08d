"""The exceptions of shardconv and the exit code of each.

    ShardconvError                1   something that the user can act on went wrong
    ├── UsageError                2   options that contradict each other or name nothing
    ├── SourceError               1   the source cannot be read: a header, a part, an index, a config
    ├── PlanError                 1   no plan: no family, no rule, a size that does not divide
    ├── SplitCheckpointError      1   the split checkpoint is incomplete or its manifest unreadable
    │   └── IntegrityError        1   bytes differ from their checksum, copies differ, padding is not zero
    ├── OutputError               1   the destination exists, is in use, or has no room
    └── RunError                  1   too few or too many processes, or a model that cannot be built, filled or run
        ├── PeerError             1   another rank failed, and has said why
        └── NotHeldError          1   an engine reads elements of a tensor that are not on this rank

A message is one text: what, which file, tensor and rank, got and expected, what to do. :class:`PlanWarning` is the one
warning: a model is loaded by a plan that rests on assumptions.
"""

import re


class ShardconvError(Exception):
    """Base of every error that shardconv raises on purpose."""

    exit_code = 1


class UsageError(ShardconvError):
    """Options that contradict each other, name nothing, or cannot be used."""

    exit_code = 2


class SourceError(ShardconvError):
    """The source checkpoint cannot be read or is not what it says."""


class PlanError(ShardconvError):
    """No plan can be made that is known to be right."""


class SplitCheckpointError(ShardconvError):
    """A split checkpoint is incomplete, or its manifest cannot be read."""


class IntegrityError(SplitCheckpointError):
    """Bytes on disk are not the bytes that were written."""


class OutputError(ShardconvError):
    """The destination cannot be written."""


class RunError(ShardconvError):
    """A model cannot be run: the processes do not fit it, or it cannot be built or filled."""


class PlanWarning(UserWarning):
    """A model is loaded by a plan that rests on what was assumed, or on a user's rules, rather than on a family."""


class PeerError(RunError):
    """Another rank failed, and has said why."""


class NotHeldError(RunError):
    """Elements of a tensor are used that are not on this rank."""


class WorldSizeError(RunError):
    """There are not as many processes as ranks, which each of them sees by itself."""


def is_lost(error: BaseException) -> bool:
    """Whether an error is that of a connection between ranks, so that another rank says better what went wrong."""
    lost = re.compile("gloo|nccl|[Cc]onnection|TCPStore|FileStore")
    return isinstance(error, RuntimeError) and lost.search(str(error)) is not None


def one_line(error: BaseException) -> str:
    """An error of another library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
