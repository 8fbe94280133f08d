"""Ranges of remote files that are fetched before they are read, in bounded memory.

A thread of the copy engine copies one stripe at a time. It announces the ranges of the next stripe before it reads the
current one, so that requests are always under way, and reads announced ranges in about this order.
"""

import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

from msgspec import Struct

from shardconv.files.storage.clients import wait
from shardconv.files.storage.remote_file import RemoteFile

#: Bytes of one request.
CHUNK_BYTES = 8 * 2**20
#: Maximum number of requests of one thread that are under way.
_MAX_CHUNKS = 16
#: Maximum bytes that are fetched and not yet read, of all threads and sources of a process.
MAX_BYTES = 96 * 2**20


class Budget:
    """Bytes of memory that transfers may use."""

    def __init__(self, size: int) -> None:
        self._room = size
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Take some bytes; False without enough room."""
        with self._lock:
            if size > self._room:
                return False
            self._room -= size
            return True

    def give(self, size: int) -> None:
        """Return some bytes."""
        with self._lock:
            self._room += size


#: Shared by all readers, and by uploads while they are written.
BUDGET = Budget(MAX_BYTES)


class Range(NamedTuple):
    """A range of a file, and the number of the announcement that it is part of."""

    file: RemoteFile
    start: int
    stop: int
    number: int


class _Chunk(Struct, eq=False):
    """A range that is being fetched.

    Attributes:
        range: the range.
        data: its bytes.
        num_read: how many of them were read.
    """

    range: Range
    data: Future[memoryview]
    num_read: int = 0


class _Ahead(threading.local):
    """The ranges that one thread fetches ahead: announced ones, ones that are requested, and one that was read."""

    def __init__(self) -> None:
        self.announced: deque[Range] = deque()
        self.chunks: list[_Chunk] = []
        self.read: _Chunk | None = None
        self.number = 0

    def has_room(self, most: int) -> bool:
        """Whether fewer than :data:`_MAX_CHUNKS` requests are under way, of less than ``most`` bytes together."""
        sizes = [chunk.range.stop - chunk.range.start for chunk in self.chunks]
        return len(sizes) < _MAX_CHUNKS and sum(sizes) < most


class ReadAhead:
    """Reads ranges that the same thread announced, from memory if they were fetched."""

    def __init__(self) -> None:
        self._ahead = _Ahead()
        self._under_way: dict[Future[memoryview], int] = {}
        self._num_threads = 0
        self._is_cancelled = False

    def announce(self, ranges: Iterable[tuple[RemoteFile, int, int]]) -> None:
        """Announce the ranges that this thread reads after the last announced ones, and forget earlier ones."""
        self._free_read()
        ahead = self._ahead
        last = ahead.number
        self._num_threads += not last
        ahead.number += 1
        for chunk in [one for one in ahead.chunks if one.range.number < last]:
            self._drop(chunk)
        ahead.announced = deque(one for one in ahead.announced if one.number >= last)
        ahead.announced.extend(Range(file, start, stop, ahead.number) for file, start, stop in ranges if start < stop)
        self._fill()

    def read(self, file: RemoteFile, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from a position; errors as in :meth:`RemoteFile.read`."""
        while len(buffer):
            data = self._fetched_bytes(file, offset, len(buffer))
            if data is None:
                size = self._claim(file, offset, len(buffer))
                data = self._fetch_now(file, offset, offset + size)
            size = len(data)
            buffer[:size] = data
            del data
            self._free_read()
            buffer, offset = buffer[size:], offset + size

    def view(self, file: RemoteFile, offset: int, size: int) -> memoryview | None:
        """A view of the memory with a range, if one request has it; None otherwise.

        It counts as free from the next read on: delete the view before. Errors as in :meth:`RemoteFile.read`.
        """
        return self._fetched_bytes(file, offset, size, size)

    def _fetched_bytes(self, file: RemoteFile, offset: int, most: int, least: int = 1) -> memoryview | None:
        """``least`` to ``most`` bytes from a position on; None if no request has them."""
        self._free_read()
        if not self._ahead.chunks:  # other threads had all memory before
            self._fill()
        chunk = self._find(file, offset)
        if chunk is None or chunk.range.stop < offset + least:
            return None
        at = offset - chunk.range.start
        data = wait(chunk.data)[at : at + most]
        chunk.num_read += len(data)
        if chunk.num_read >= chunk.range.stop - chunk.range.start:
            self._ahead.read = chunk
        return data

    def _free_read(self) -> None:
        """Drop a chunk of which all bytes were read, and fetch other ranges into the room."""
        chunk, self._ahead.read = self._ahead.read, None
        if chunk is not None:
            self._drop(chunk)
            del chunk  # with its memory
            self._fill()

    def _find(self, file: RemoteFile, offset: int) -> _Chunk | None:
        """The chunk with a position. If it is announced only, the chunk before it is dropped to make room."""
        ahead = self._ahead
        if (found := self._fetched(file, offset)) is not None:
            return found
        wanted = next((one for one in ahead.announced if _contains(one, file, offset)), None)
        if wanted is None:
            return None
        before = self._fetched(file, wanted.start - 1) if offset - wanted.start < CHUNK_BYTES else None
        if before is not None and before.num_read:  # tensors that alternate in the file are read one after the other
            self._drop(before)
            ahead.announced.remove(wanted)
            ahead.announced.appendleft(wanted)
            ahead.announced.append(before.range)
            self._fill()
        return self._fetched(file, offset)

    def _fetched(self, file: RemoteFile, offset: int) -> _Chunk | None:
        return next((one for one in self._ahead.chunks if _contains(one.range, file, offset)), None)

    def _fetch_now(self, file: RemoteFile, start: int, stop: int) -> memoryview:
        """A range that was not announced, or that did not fit into memory."""
        data = file.fetch(start, stop)
        self._under_way[data] = 0
        try:
            if self._is_cancelled:
                data.cancel()
            return wait(data)
        finally:
            self._under_way.pop(data, None)

    def _claim(self, file: RemoteFile, offset: int, size: int) -> int:
        """The number of bytes to fetch now: up to the next announced or fetched range, at most one request.

        Removes them from the announced ranges.
        """
        others = (*self._ahead.announced, *(chunk.range for chunk in self._ahead.chunks))
        starts = (one.start for one in others if one.file is file)
        size = min([size, CHUNK_BYTES, *(start - offset for start in starts if start > offset)])
        for one in [one for one in self._ahead.announced if _contains(one, file, offset)]:
            size = min(size, one.stop - offset)
            self._ahead.announced.remove(one)
            if offset + size < one.stop:
                self._ahead.announced.appendleft(one._replace(start=offset + size))
            if one.start < offset:
                self._ahead.announced.append(one._replace(stop=offset))
        return size

    def cancel(self) -> None:
        """Cancel all requests, of all threads: threads that wait for them raise InterruptedError."""
        self._is_cancelled = True
        for future in list(self._under_way):
            future.cancel()
            if (size := self._under_way.pop(future, None)) is not None:
                BUDGET.give(size)

    def _fill(self) -> None:
        """Fetch announced ranges while memory is available, and this thread uses less than an equal part of it."""
        ahead, most = self._ahead, MAX_BYTES // max(self._num_threads, 1)
        while ahead.announced and ahead.has_room(most) and not self._is_cancelled:
            first = ahead.announced[0]
            one = first._replace(stop=min(first.start + CHUNK_BYTES, first.stop))
            size = one.stop - one.start
            if not BUDGET.take(size):
                return
            ahead.announced.popleft()
            if one.stop < first.stop:
                ahead.announced.appendleft(first._replace(start=one.stop))
            chunk = _Chunk(one, one.file.fetch(one.start, one.stop))
            self._under_way[chunk.data] = size
            ahead.chunks.append(chunk)
            if self._is_cancelled:  # before the request was registered, so that it was not cancelled
                self._drop(chunk)

    def _drop(self, chunk: _Chunk) -> None:
        self._ahead.chunks.remove(chunk)
        chunk.data.cancel()
        if (size := self._under_way.pop(chunk.data, None)) is not None:
            BUDGET.give(size)


def _contains(one: Range, file: RemoteFile, offset: int) -> bool:
    return one.file is file and one.start <= offset < one.stop
