"""Ranks that :func:`~shardconv.runtime.launch.launch` started: they exit with it, and leave their errors for it.

Imports nothing slow.
"""

import os
import threading
import time
from pathlib import Path

#: The environment variable with the id of the process that started this rank, set by
#: :func:`~shardconv.runtime.launch.launch`.
PARENT = "SHARDCONV_PARENT"
_WATCH_SECONDS = 1.0


def exit_with_parent() -> None:
    """Exit when the process that started this rank does, which may already be the case. Does nothing elsewhere."""
    if PARENT not in os.environ:
        return
    parent = int(os.environ.pop(PARENT))  # not for processes that this one starts

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


#: The environment variable with the rendezvous of ranks that :func:`~shardconv.runtime.launch.launch` started: a file,
#: in whose folder ranks write their messages.
RENDEZVOUS = "SHARDCONV_RENDEZVOUS"
_CAUSE, _CONSEQUENCE = "cause", "consequence"


def local_ranks() -> int:
    """Number of ranks on this host, as torchrun and :func:`~shardconv.runtime.launch.launch` set it; 1 without them."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(value), 1) if value.isdecimal() else 1


def is_launched() -> bool:
    """Whether :func:`~shardconv.runtime.launch.launch` started this process, and reports its errors and signals."""
    return RENDEZVOUS in os.environ


def write_failure(message: str, *, is_consequence: bool) -> None:
    """Write the error of this rank where the process that started it reads it, which prints one for all ranks.

    Args:
        message: the error message.
        is_consequence: whether the cause is in another process.
    """
    folder = Path(os.environ[RENDEZVOUS].removeprefix("file://")).parent
    written = folder / f"writing-{os.environ['RANK']}"
    written.write_text(message)
    written.rename(folder / f"{_CONSEQUENCE if is_consequence else _CAUSE}-{os.environ['RANK']}")


def read_failures(folder: Path) -> list[list[tuple[int, str]]]:
    """Read the messages of failed ranks, oldest first: causes, then consequences of failures of other ranks."""

    def messages(kind: str) -> list[tuple[int, str]]:
        paths = sorted(folder.glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime_ns)
        return [(int(path.name.rpartition("-")[2]), path.read_text()) for path in paths]

    return [messages(_CAUSE), messages(_CONSEQUENCE)]
