"""The state of local files, to detect one that is modified or replaced between two steps that read it."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self


class FileState(NamedTuple):
    """The state of a file of this machine.

    Attributes:
        size: in bytes.
        modified: when its bytes were last written.
        changed: when its bytes, name or permissions were last changed, also where its time of modification was set.
    """

    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """The state in a status."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def file_states(paths: Iterable[Path]) -> tuple[FileState, ...]:
    """The state of each file; that of a file that does not exist, which its reader reports, is all zeros."""
    return tuple(FileState.of(path.stat()) if path.exists() else FileState(0, 0, 0) for path in paths)
