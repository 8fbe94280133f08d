"""Positioned reads and writes that finish what they begin, on every POSIX system.

Owns the system calls of the copy engine. Where a call is missing, a portable one takes its place.
"""

import os
import resource
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from shardconv.errors import SourceError

#: Writable bytes, one dimension.
Bytes = memoryview
#: The most bytes of one write. For larger ones a file system may take memory in pieces of 2 MiB, which a virtual
#: machine tends to have given back to its host: on such a machine writes of 2 MiB take twice as long.
_WRITE_BYTES = 256 * 2**10
#: A file that is made is new, and no link to another.
_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def _pread_into(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
    """``os.preadv`` of one buffer, for systems without it."""
    (buffer,) = buffers
    data = os.pread(descriptor, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


_preadv = getattr(os, "preadv", _pread_into)
_fadvise = getattr(os, "posix_fadvise", None)


def read_exactly(descriptor: int, buffer: Bytes, offset: int) -> None:
    """Fill a buffer from a position of a file.

    Raises:
        EOFError: if the file ends before.
    """
    while len(buffer):
        count = _preadv(descriptor, [buffer], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}, {len(buffer)} bytes too early")
        buffer, offset = buffer[count:], offset + count


def write_exactly(descriptor: int, data: Bytes | bytes, offset: int) -> None:
    """Write all of a buffer to a position of a file."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view[:_WRITE_BYTES], offset)
        view, offset = view[count:], offset + count


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Make a new file, with these permissions before the umask."""
    return os.fdopen(os.open(path, _CREATE | os.O_WRONLY, mode), "wb")


def permissions(paths: Iterable[Path]) -> int:
    """The permissions that all of these files have."""
    mode = 0o777
    for path in paths:
        mode &= path.stat().st_mode
    return mode


def will_need(descriptor: int, offset: int, size: int) -> None:
    """Tell the system what is read next, so that it reads ahead; a hint, where the system takes one."""
    if _fadvise is not None:
        with suppress(OSError):
            _fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def allow_open_files(count: int) -> None:
    """Raise the limit of open files so that ``count`` more can be opened, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + count + 64  # noqa: PTH208 - names only
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))


class InputFiles:
    """Files that are read, held open, and checked not to change meanwhile.

    Args:
        paths: the files.
        heads: for each the bytes that it has to begin with.
        sizes: the bytes that each has to have.

    Attributes:
        mode: the permissions that all of them have: those of a file that is written from them, before the umask.

    Raises:
        SourceError: if a file cannot be opened, has another size or begins otherwise.
    """

    def __init__(self, paths: Sequence[Path], heads: Sequence[bytes], sizes: Sequence[int]) -> None:
        self.paths = paths
        self.descriptors: list[int] = []
        self._states: list[tuple[int, int]] = []
        self.mode = 0o777
        allow_open_files(len(paths))
        try:
            for path, head, size in zip(paths, heads, sizes, strict=True):
                self._open(path, head, size)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, head: bytes, size: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened: {error.strerror or error}") from error
        self.descriptors.append(descriptor)
        self._states.append(self._state(descriptor))
        self.mode &= os.fstat(descriptor).st_mode
        found, _ = self._states[-1]
        if found != size:
            raise SourceError(f"{path}: has {found} bytes, expected {size}: it changed or is truncated")
        start = memoryview(bytearray(len(head)))
        self.read(len(self.descriptors) - 1, start, 0)
        if start != head:
            raise SourceError(
                f"{path}: its header is not the one that was expected: it changed, or is of another checkpoint"
            )

    @staticmethod
    def _state(descriptor: int) -> tuple[int, int]:
        status = os.fstat(descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, number: int, buffer: Bytes, offset: int) -> None:
        """Fill a buffer from a position of file ``number``.

        Raises:
            SourceError: if the file ends before.
        """
        try:
            read_exactly(self.descriptors[number], buffer, offset)
        except EOFError as error:
            raise SourceError(f"{self.paths[number]}: shrank while it was read: {error}") from error
        except OSError as error:
            raise SourceError(f"{self.paths[number]}: cannot be read: {error.strerror or error}") from error

    def check_unchanged(self, number: int | None = None) -> None:
        """Check that no file was written to since it was opened, or not file ``number``.

        Raises:
            SourceError: if one was.
        """
        of_files = list(zip(self.paths, self.descriptors, self._states, strict=True))
        for path, descriptor, state in of_files if number is None else [of_files[number]]:
            if self._state(descriptor) != state:
                raise SourceError(f"{path}: changed while it was read; run the command again when it is at rest")

    def close(self) -> None:
        """Close the files."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OutputFiles:
    """New files of known sizes, written at any position.

    The kernel lets one thread at a time write to a file, and lets others spin for their turn. Here they sleep, so that
    one thread reads while another writes.

    Args:
        paths: the files; none may exist.
        heads: for each the bytes that it begins with.
        sizes: the bytes of each file in the end; what is not written stays zero.
        mode: their permissions, before the umask.
    """

    def __init__(self, paths: Sequence[Path], heads: Sequence[bytes], sizes: Sequence[int], mode: int = 0o666) -> None:
        self.descriptors: list[int] = []
        self._turns = [threading.Lock() for _ in paths]
        allow_open_files(len(paths))
        try:
            for path, head, size in zip(paths, heads, sizes, strict=True):
                self.descriptors.append(os.open(path, _CREATE | os.O_RDWR, mode))
                os.ftruncate(self.descriptors[-1], size)
                write_exactly(self.descriptors[-1], head, 0)
        except BaseException:
            self.close()
            raise

    def write(self, number: int, data: Bytes, offset: int) -> None:
        """Write to a position of file ``number``."""
        with self._turns[number]:
            write_exactly(self.descriptors[number], data, offset)

    def close(self) -> None:
        """Close the files."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
