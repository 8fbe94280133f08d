"""Positioned reads and writes, without short ones, on every POSIX system, and open input files, local or remote."""

import mmap
import os
import resource
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from shardconv.files import storage
from shardconv.files.byte_ranges import merged_ranges
from shardconv.files.file_state import FileState
from shardconv.files.storage.table import remote_file
from shardconv.support.errors import SourceError

#: A writable one-dimensional buffer.
Bytes = memoryview
#: Maximum bytes of one write. For larger writes a file system may allocate huge pages of 2 MiB, which a virtual machine
#: may have returned to its host: there, writes of 2 MiB take twice as long.
_WRITE_BYTES = 256 * 2**10
_AGAIN = "download or copy it again"
#: Threads that copy remote files, by default: they mostly wait.
_REMOTE_THREADS = 4
#: Fail if the file exists or is a link.
CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


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
    return os.fdopen(os.open(path, CREATE | os.O_WRONLY, mode), "wb")


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


class InputFile(Protocol):
    """An open input file.

    Attributes:
        size: in bytes.
        mode: its permissions.
    """

    @property
    def size(self) -> int:
        """See the class."""

    @property
    def mode(self) -> int:
        """See the class."""

    def read(self, buffer: Bytes, offset: int) -> None:
        """Fill a buffer from a position; raises SourceError if the file is too short, or cannot be read."""

    def check_unchanged(self) -> None:
        """Raise SourceError if the file was modified since it was opened."""

    def close(self) -> None:
        """Close the file."""


class LocalFile:
    """An open file of this machine.

    Raises:
        SourceError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened: {error.strerror or error}") from error
        status = os.fstat(self.descriptor)
        self.state = FileState.of(status)
        self.size = status.st_size
        self.mode = status.st_mode

    def read(self, buffer: Bytes, offset: int) -> None:
        """See :class:`InputFile`."""
        try:
            read_exactly(self.descriptor, buffer, offset)
        except EOFError as error:
            raise SourceError(f"{self._path}: was truncated while it was read: {error}") from error
        except OSError as error:
            raise SourceError(f"{self._path}: cannot be read: {error.strerror or error}") from error

    def check_unchanged(self) -> None:
        """See :class:`InputFile`."""
        if FileState.of(os.fstat(self.descriptor))[:2] != self.state[:2]:  # a new hard link is not a modification
            raise SourceError(f"{self._path}: changed while it was read: run the command again")

    def check_state(self, expected: FileState) -> None:
        """Check that the file is the one with a state.

        Raises:
            SourceError: if it is not.
        """
        if self.state != expected:
            raise SourceError(
                f"{self._path}: was modified or replaced since its tensors were listed: run the command again"
            )

    def close(self) -> None:
        """See :class:`InputFile`."""
        os.close(self.descriptor)


class MemoryFile:
    """A file that was read into memory, with the permissions ``mode``."""

    def __init__(self, data: Bytes, mode: int) -> None:
        self.data, self.mode, self.size = data, mode, len(data)

    def read(self, buffer: Bytes, offset: int) -> None:
        """See :class:`InputFile`."""
        buffer[:] = self.data[offset : offset + len(buffer)]

    def check_unchanged(self) -> None:
        """Do nothing: it cannot change."""

    def close(self) -> None:
        """Do nothing: memory is freed with its last view."""


def open_input(path: Path) -> InputFile:
    """Open a file, or the remote file that it stands for.

    Raises:
        SourceError: if it cannot be opened.
    """
    return remote_file(path) or LocalFile(path)


def file_bytes(path: Path) -> int:
    """The size of a file, or of the remote file that it stands for.

    Raises:
        OSError: if it cannot be read.
    """
    remote = remote_file(path)
    return path.stat().st_size if remote is None else remote.size


def file_state(path: Path) -> str:
    """The size, version and permissions of a file, or of the remote file that it stands for.

    Raises:
        OSError: if it cannot be read.
    """
    if (remote := remote_file(path)) is not None:
        return remote.state
    status = path.stat()
    return f"{status.st_size} bytes, time {status.st_mtime_ns}, mode {status.st_mode & 0o777:o}"


class InputFiles:
    """Open input files that are checked for modifications.

    Args:
        paths: the files.
        prefixes: for each file its expected first bytes.
        sizes: for each file its expected size in bytes.
        states: for each file its state when the positions of its tensors were read; None if its prefix has them.
        remedy: the end of messages about a file that was modified.

    Attributes:
        mode: the permissions that all files have; a file that is copied from them gets these, before the umask.
        is_remote: whether one of them is remote.
        threads: the default number of threads that read them; None for the default of local files.

    Raises:
        SourceError: if a file cannot be opened, or has another size, prefix or state.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        prefixes: Sequence[bytes],
        sizes: Sequence[int],
        states: Iterable[FileState | None] = (),
        *,
        remedy: str = f": {_AGAIN}",
    ) -> None:
        self.paths = paths
        self._files: list[InputFile] = []
        self.mode = 0o777
        allow_open_files(len(paths))
        try:
            for path, prefix, size in zip(paths, prefixes, sizes, strict=True):
                self._open(path, prefix, size, remedy)
            for opened, state in zip(self._files, states, strict=False):
                if state is not None and isinstance(opened, LocalFile):
                    opened.check_state(state)
        except BaseException:
            self._close_files()
            raise
        self._remote = {number: file for number, path in enumerate(paths) if (file := remote_file(path)) is not None}
        self._ahead = storage.read_ahead.ReadAhead() if self._remote else None
        self.threads = _REMOTE_THREADS if self._remote else None
        self.is_remote = bool(self._remote)

    def _open(self, path: Path, prefix: bytes, size: int, remedy: str) -> None:
        file = open_input(path)
        self._files.append(file)
        self.mode &= file.mode
        if file.size != size:
            raise SourceError(f"{path}: was modified or truncated (got {file.size} bytes, expected {size}){remedy}")
        start = memoryview(bytearray(len(prefix)))
        file.read(start, 0)
        if start != prefix:
            raise SourceError(
                f"{path}: its header is not the expected one: it was modified or is of another checkpoint{remedy}"
            )

    def read(self, number: int, buffer: Bytes, offset: int) -> None:
        """Fill a buffer from a position of file ``number``.

        Raises:
            SourceError: if the file is too short, or cannot be read.
        """
        if self._ahead is not None and number in self._remote:
            self._ahead.read(self._remote[number], buffer, offset)
        else:
            self._files[number].read(buffer, offset)

    def prefetch(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Read ranges ahead, which this thread reads next: number of the file, offset and size of each."""
        merged = merged_ranges(ranges)
        for number, start, stop in merged:
            if isinstance(file := self._files[number], LocalFile):
                will_need(file.descriptor, start, stop - start)
        if self._ahead is not None:
            self._ahead.announce((self._remote[one[0]], one[1], one[2]) for one in merged if one[0] in self._remote)

    def fetch(self) -> None:
        """Read remote files into memory, so that each byte is fetched once, however often it is read.

        Raises:
            SourceError: if one cannot be read.
        """
        self.prefetch((number, 0, file.size) for number, file in self._remote.items())
        for number, file in self._remote.items():
            data = memoryview(mmap.mmap(-1, file.size))
            self.read(number, data, 0)
            self._files[number] = MemoryFile(data, file.mode)
        self._remote = {}

    def map(self, number: int) -> Bytes | None:
        """Map file ``number`` into memory, until its last view is freed; None if it is remote or cannot be mapped.

        The mapping is private: callers may write into views. The file must not be modified meanwhile.
        """
        file = self._files[number]
        if isinstance(file, MemoryFile):
            return file.data
        if not isinstance(file, LocalFile):
            return None
        allow_open_files(1)  # a mapping has a descriptor of its own
        try:
            return memoryview(mmap.mmap(file.descriptor, file.size, access=mmap.ACCESS_COPY))
        except OSError:
            return None

    def read_ranges(self, number: int, buffer: Bytes, ranges: Iterable[tuple[int, int]]) -> None:
        """Fill a buffer with ranges of file ``number``, one after the other.

        Args:
            number: of the file.
            buffer: as long as all ranges together.
            ranges: the offset and size of each.

        Raises:
            SourceError: if the file is too short, or cannot be read.
        """
        for offset, size in ranges:
            self.read(number, buffer[:size], offset)
            buffer = buffer[size:]

    def check_unchanged(self, number: int | None = None) -> None:
        """Check that no file was modified since it was opened; with ``number``, only that file.

        Raises:
            SourceError: if one was.
        """
        for file in self._files if number is None else [self._files[number]]:
            file.check_unchanged()

    def cancel(self) -> None:
        """Cancel what threads are waiting for: they raise InterruptedError."""
        if self._ahead is not None:
            self._ahead.cancel()

    def close(self) -> None:
        """Close the files."""
        self.cancel()
        self._close_files()

    def _close_files(self) -> None:
        while self._files:
            self._files.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
