"""New files that the threads of the copy engine write at any position, local or remote."""

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

from shardconv.files.fileio import CREATE, Bytes, allow_open_files, read_exactly, write_exactly

if TYPE_CHECKING:
    from shardconv.files.storage.upload import UploadFiles

#: New files that are open, with the same methods wherever they are.
OutputFiles: TypeAlias = "LocalOutputFiles | UploadFiles"


class LocalOutputFiles:
    """New files of known sizes, written at any position.

    Args:
        paths: the files.
        prefixes: for each file its first bytes.
        sizes: for each file its size in bytes; bytes that are not written are zero.
        mode: their permissions, before the umask.
        may_exist: whether files of an interrupted run may exist, whose bytes are kept.

    Attributes:
        num_files: their number.
        in_order: whether they should be written from the beginning to the end, as far as possible.
        threads: the default number of threads that write them; None for the default of the reader.
    """

    in_order = False
    threads: int | None = None

    def __init__(
        self,
        paths: Sequence[Path],
        prefixes: Sequence[bytes],
        sizes: Sequence[int],
        mode: int,
        *,
        may_exist: bool,
    ) -> None:
        self.num_files = len(paths)
        self.descriptors: list[int] = []
        # The kernel serializes writes to a file, and writers that wait may spin: these locks make them sleep instead.
        self._locks = [threading.Lock() for _ in paths]
        allow_open_files(len(paths))
        flags = os.O_RDWR | (CREATE & ~os.O_EXCL if may_exist else CREATE)
        try:
            for path, prefix, size in zip(paths, prefixes, sizes, strict=True):
                self.descriptors.append(os.open(path, flags, mode))
                os.ftruncate(self.descriptors[-1], size)
                write_exactly(self.descriptors[-1], prefix, 0)
        except BaseException:
            self.close()
            raise

    def cancel(self) -> None:
        """Do nothing: writes do not wait."""

    def write_ranges(self, number: int, data: Bytes, ranges: Iterable[tuple[int, int]]) -> None:
        """Write to ranges of file ``number``: the offset and size of each, as long as the data together."""
        with self._locks[number]:
            for offset, size in ranges:
                write_exactly(self.descriptors[number], data[:size], offset)
                data = data[size:]

    def read(self, number: int, buffer: Bytes, offset: int) -> None:
        """Fill a buffer from a position of file ``number``."""
        read_exactly(self.descriptors[number], buffer, offset)

    def close(self) -> None:
        """Close the files."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
