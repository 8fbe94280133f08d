"""Open input files, local or remote: read at any position by several threads, and checked for modifications."""

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from shardconv.files import storage
from shardconv.files.fileio import Bytes, allow_open_files, enlarge_read_ahead, read_exactly, will_need
from shardconv.files.folder import AnyPath, RemotePath, file_bytes
from shardconv.support.errors import SourceError

if TYPE_CHECKING:
    from shardconv.files.storage.remote_file import RemoteFile


class ModifiedError(SourceError):
    """A file is not as it was when it was opened, or as its header or manifest describes it."""


#: An open file, with the same methods wherever it is.
InputFile: TypeAlias = "LocalFile | MemoryFile | RemoteFile"
_AGAIN = "download or copy it again"


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


def file_states(paths: Iterable[AnyPath]) -> tuple[FileState, ...]:
    """The state of each file: only the size of a remote one; zeros for a missing one, which its reader reports.

    Raises:
        SourceError: if a remote file cannot be read.
    """
    return tuple(map(_state, paths))


def _state(path: AnyPath) -> FileState:
    if not path.exists():
        return FileState(0, 0, 0)
    return FileState(path.file.size, 0, 0) if isinstance(path, RemotePath) else FileState.of(path.stat())


class LocalFile:
    """An open file of this machine.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        self.state = FileState.of(status)
        self.size = status.st_size
        self.mode = status.st_mode

    def read(self, buffer: Bytes, offset: int) -> None:
        """Fill a buffer from a position.

        Raises:
            ModifiedError: if the file is too short.
            SourceError: if it cannot be read.
        """
        try:
            read_exactly(self.descriptor, buffer, offset)
        except EOFError as error:
            raise ModifiedError(f"{self._path}: was truncated while it was read: {error}") from error
        except OSError as error:
            raise SourceError(f"{self._path}: cannot be read: {error.strerror or error}") from error

    def check_unchanged(self) -> None:
        """Raise ModifiedError if the file was modified since it was opened."""
        if FileState.of(os.fstat(self.descriptor))[:2] != self.state[:2]:  # a new hard link is not a modification
            raise ModifiedError(f"{self._path}: changed while it was read: run the command again")

    def check_state(self, expected: FileState) -> None:
        """Check that the file is the one with a state.

        Raises:
            ModifiedError: if it is not.
        """
        if self.state != expected:
            raise ModifiedError(
                f"{self._path}: was modified or replaced since its tensors were listed: run the command again"
            )

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


class MemoryFile:
    """A file that was read into memory, with the permissions ``mode``."""

    def __init__(self, data: Bytes, mode: int) -> None:
        self.data, self.mode, self.size = data, mode, len(data)

    def read(self, buffer: Bytes, offset: int) -> None:
        """Fill a buffer from a position."""
        buffer[:] = self.data[offset : offset + len(buffer)]

    def check_unchanged(self) -> None:
        """Do nothing: it cannot change."""

    def close(self) -> None:
        """Do nothing: memory is freed with its last view."""


def open_input(path: AnyPath) -> InputFile:
    """Open a file.

    Raises:
        SourceError: if it cannot be opened.
    """
    try:
        return open_file(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened: {error.strerror or error}") from error


def open_file(path: AnyPath) -> "LocalFile | RemoteFile":
    """Open a file.

    Raises:
        OSError: if it cannot be opened.
    """
    return path.file if isinstance(path, RemotePath) else LocalFile(path)


class InputFiles:
    """Open input files that are checked for modifications.

    Args:
        paths: the files.
        prefixes: for each file its expected first bytes.
        sizes: for each file its expected size in bytes.
        states: for each file its state when the positions of its tensors were read; None if its prefix has them.
        remedy: the end of messages about a file that was modified.

    Attributes:
        mode: the intersection of the permissions of all files, for a file that is copied from them, before the umask.
        is_remote: whether one of them is remote.

    Raises:
        ModifiedError: if a file has another size, prefix or state.
        SourceError: if a file cannot be opened or read.
    """

    def __init__(
        self,
        paths: Sequence[AnyPath],
        prefixes: Iterable[bytes],
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
        self._remote = {number: path.file for number, path in enumerate(paths) if isinstance(path, RemotePath)}
        self._ahead = storage.read_ahead.ReadAhead() if self._remote else None
        self.is_remote = bool(self._remote)

    def _open(self, path: AnyPath, prefix: bytes, size: int, remedy: str) -> None:
        file = open_input(path)
        self._files.append(file)
        self.mode &= file.mode
        if file.size != size:
            raise ModifiedError(f"{path}: was modified or truncated (got {file.size} bytes, expected {size}){remedy}")
        start = memoryview(bytearray(len(prefix)))
        file.read(start, 0)
        if start != prefix:
            raise ModifiedError(
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

    def view(self, number: int, offset: int, size: int) -> Bytes | None:
        """A view of the memory that holds a range of file ``number``, see :meth:`Reader.gather`; None to read it.

        Raises:
            SourceError: if the file cannot be read.
        """
        if isinstance(file := self._files[number], MemoryFile):
            return file.data[offset : offset + size]
        if self._ahead is not None and number in self._remote:
            return self._ahead.view(self._remote[number], offset, size)
        return None

    def prefetch(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Prefetch the ranges that this thread reads next: number of the file, offset and size of each."""
        if self._ahead is not None:
            ranges = [*ranges]
            merged = _merged(one for one in ranges if one[0] in self._remote)
            self._ahead.announce((self._remote[number], start, stop) for number, start, stop in merged)
        for number, start, stop in _joined_by_file(ranges):
            if isinstance(file := self._files[number], LocalFile):
                will_need(file.descriptor, start, stop - start)

    def views(self) -> list[Bytes]:
        """The bytes of each file: mapped into memory, or read into it where it is remote or cannot be mapped.

        Raises:
            SourceError: if a file cannot be read.
        """
        self.prefetch((number, 0, self._files[number].size) for number in self._remote)
        return [self.map(number) or self._fetch(number) for number in range(len(self._files))]

    def _fetch(self, number: int) -> Bytes:
        file = self._files[number]
        data = memoryview(mmap.mmap(-1, file.size))
        self.read(number, data, 0)
        self._files[number] = MemoryFile(data, file.mode)
        self._remote.pop(number, None)
        return data

    def map(self, number: int) -> Bytes | None:
        """Map file ``number`` into memory, until its last view is freed; None if it is remote or cannot be mapped.

        The mapping is private: callers may write into views. The file must not be modified meanwhile.
        """
        file = self._files[number]
        if isinstance(file, MemoryFile):
            return file.data
        if not isinstance(file, LocalFile):
            return None
        # Asking for ranges would fill the page cache in small units, and take longer than the faults.
        enlarge_read_ahead(file.descriptor)
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
        """Cancel pending requests: threads that wait for them raise InterruptedError."""
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


def _joined_by_file(ranges: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield number of the file, start and stop of ranges. A range that touches the last one of its file extends it.

    Args:
        ranges: number of the file, offset and size of each; there may be many thousands.
    """
    last: dict[int, tuple[int, int]] = {}
    for number, offset, size in ranges:
        start, stop = last.get(number, (offset, offset))
        if offset != stop:
            yield number, start, stop
            start = offset
        last[number] = start, offset + size
    yield from ((number, start, stop) for number, (start, stop) in last.items())


def _merged(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Number of the file, start and stop of ranges. Ranges that overlap or touch are merged, in the order of the first.

    Args:
        ranges: number of the file, offset and size of each.
    """
    merged: list[tuple[int, int, int, int]] = []
    for number, offset, size, position in sorted((*one, position) for position, one in enumerate(ranges)):
        if merged and merged[-1][0] == number and offset <= merged[-1][2]:
            _, start, stop, first = merged.pop()
            merged.append((number, start, max(stop, offset + size), min(first, position)))
        else:
            merged.append((number, offset, offset + size, position))
    return [one[:3] for one in sorted(merged, key=lambda one: one[3])]


#: Bytes of a file that are in memory at once.
_CHUNK_BYTES = 2**20


def chunks(path: AnyPath) -> Iterator[Bytes]:
    """The contents of a file.

    Raises:
        SourceError: if it cannot be read, or is modified meanwhile.
    """
    size = file_bytes(path)
    with InputFiles([path], [b""], [size]) as inputs:
        inputs.prefetch([(0, 0, size)])
        for start in range(0, size, _CHUNK_BYTES):
            chunk = memoryview(bytearray(min(_CHUNK_BYTES, size - start)))
            inputs.read(0, chunk, start)
            yield chunk
        inputs.check_unchanged()
