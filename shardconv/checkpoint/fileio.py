"""Positioned reads and writes of the copy engine, without short reads or writes, on every POSIX system."""

import os
import resource
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from shardconv.errors import SourceError

#: A writable one-dimensional buffer.
Bytes = memoryview
#: Maximum bytes of one write. For larger writes a file system may allocate huge pages of 2 MiB, which a virtual machine
#: may have returned to its host: there, writes of 2 MiB take twice as long.
_WRITE_BYTES = 256 * 2**10
#: Fail if the file exists or is a link.
_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def pread_into(descriptor: int, buffers: Sequence[Bytes], offset: int) -> int:
    """Replacement of ``os.preadv`` for one buffer, on systems without it."""
    (buffer,) = buffers
    data = os.pread(descriptor, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


preadv = getattr(os, "preadv", pread_into)
fadvise = getattr(os, "posix_fadvise", None)


def read_exactly(descriptor: int, buffer: Bytes, offset: int) -> None:
    """Fill a buffer from a position of a file.

    Raises:
        EOFError: if the file is too short.
    """
    while len(buffer):
        count = preadv(descriptor, [buffer], offset)
        if count == 0:
            raise EOFError(f"it ends at byte {offset} (expected at least {offset + len(buffer)} bytes)")
        buffer, offset = buffer[count:], offset + count


def write_exactly(descriptor: int, data: Bytes | bytes, offset: int) -> None:
    """Write all of a buffer to a position of a file."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view[:_WRITE_BYTES], offset)
        view, offset = view[count:], offset + count


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a new file with the permissions ``mode``, before the umask."""
    return os.fdopen(os.open(path, _CREATE | os.O_WRONLY, mode), "wb")


def permissions(paths: Iterable[Path]) -> int:
    """The intersection of the permissions of files."""
    mode = 0o777
    for path in paths:
        mode &= path.stat().st_mode
    return mode


def will_need(descriptor: int, offset: int, size: int) -> None:
    """Ask the operating system to read a byte range ahead, if it supports that."""
    if fadvise is not None:
        with suppress(OSError):
            fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def allow_open_files(count: int) -> None:
    """Raise the limit of open files so that ``count`` more can be opened, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(list(Path("/dev/fd").iterdir())) + count + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))


class InputFiles:
    """Open input files that are checked for modifications.

    Args:
        paths: the files.
        prefixes: for each file its expected first bytes.
        sizes: for each file its expected size in bytes.

    Attributes:
        mode: the permissions that all files have; a file that is copied from them gets these, before the umask.

    Raises:
        SourceError: if a file cannot be opened, or has another size or prefix.
    """

    def __init__(self, paths: Sequence[Path], prefixes: Sequence[bytes], sizes: Sequence[int]) -> None:
        self.paths = paths
        self.descriptors: list[int] = []
        self._states: list[tuple[int, int]] = []
        self.mode = 0o777
        allow_open_files(len(paths))
        try:
            for path, prefix, size in zip(paths, prefixes, sizes, strict=True):
                self._open(path, prefix, size)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, prefix: bytes, size: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened: {error.strerror or error}") from error
        self.descriptors.append(descriptor)
        self._states.append(self._state(descriptor))
        self.mode &= os.fstat(descriptor).st_mode
        actual_size, _ = self._states[-1]
        if actual_size != size:
            raise SourceError(f"{path}: was modified or truncated (got {actual_size} bytes, expected {size})")
        start = memoryview(bytearray(len(prefix)))
        self.read(len(self.descriptors) - 1, start, 0)
        if start != prefix:
            raise SourceError(
                f"{path}: its header is not the expected one: it was modified or is of another checkpoint"
            )

    @staticmethod
    def _state(descriptor: int) -> tuple[int, int]:
        status = os.fstat(descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, number: int, buffer: Bytes, offset: int) -> None:
        """Fill a buffer from a position of file ``number``.

        Raises:
            SourceError: if the file is too short, or cannot be read.
        """
        try:
            read_exactly(self.descriptors[number], buffer, offset)
        except EOFError as error:
            raise SourceError(f"{self.paths[number]}: was truncated while it was read: {error}") from error
        except OSError as error:
            raise SourceError(f"{self.paths[number]}: cannot be read: {error.strerror or error}") from error

    def check_unchanged(self, number: int | None = None) -> None:
        """Check that file ``number``, or by default no file, was modified since it was opened.

        Raises:
            SourceError: if one was.
        """
        files = list(zip(self.paths, self.descriptors, self._states, strict=True))
        for path, descriptor, state in files if number is None else [files[number]]:
            if self._state(descriptor) != state:
                raise SourceError(f"{path}: changed while it was read: run the command again")

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

    The kernel serializes writes to a file with a spin lock. These locks put waiting threads to sleep instead, so that
    other threads can read.

    Args:
        paths: the files; none may exist.
        prefixes: for each file its first bytes.
        sizes: for each file its size in bytes; bytes that are not written are zero.
        mode: their permissions, before the umask.
    """

    def __init__(
        self, paths: Sequence[Path], prefixes: Sequence[bytes], sizes: Sequence[int], mode: int = 0o666
    ) -> None:
        self.descriptors: list[int] = []
        self._locks = [threading.Lock() for _ in paths]
        allow_open_files(len(paths))
        try:
            for path, prefix, size in zip(paths, prefixes, sizes, strict=True):
                self.descriptors.append(os.open(path, _CREATE | os.O_RDWR, mode))
                os.ftruncate(self.descriptors[-1], size)
                write_exactly(self.descriptors[-1], prefix, 0)
        except BaseException:
            self.close()
            raise

    def write(self, number: int, data: Bytes, offset: int) -> None:
        """Write to a position of file ``number``."""
        with self._locks[number]:
            write_exactly(self.descriptors[number], data, offset)

    def close(self) -> None:
        """Close the files."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
