"""New files in stores: multipart uploads that become visible at their end, or not at all.

Parts are ranges of equal size, which threads fill in any order. A store gets the parts of a file one after the other;
all other parts are kept in memory, and in a temporary file when the memory is used up.
"""

import asyncio
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, Self

from shardconv.files.storage.clients import Key, finish, obstore, submit, wait
from shardconv.files.storage.errors import explain_write, explained
from shardconv.files.storage.read_ahead import BUDGET
from shardconv.support.errors import OutputError

#: Bytes of a part, unless a file would have too many; stores require at least 5 MiB.
PART_BYTES = 8 * 2**20
#: Maximum number of parts of a file.
MAX_PARTS = 10_000
#: Bytes of the parts in memory, of all files that one command writes at a time.
MEMORY_BYTES = 64 * 2**20


def part_bytes(largest: int) -> int:
    """Bytes of the parts of files, the largest of which has ``largest`` bytes: a multiple of 1 MiB."""
    return max(PART_BYTES, -(-largest // MAX_PARTS // 2**20) * 2**20)


class Part:
    """A range of a new file.

    Args:
        size: in bytes.
        memory: at least as large; None to store the part in a file.
        spool: the file, which has room for the part from ``offset`` on.
        offset: a multiple of the page size.
    """

    def __init__(self, size: int, memory: mmap.mmap | None, spool: BinaryIO | None = None, offset: int = 0) -> None:
        self.size, self.memory, self.spool, self.offset = size, memory, spool, offset
        self.num_written = 0

    def write(self, data: memoryview, at: int) -> None:
        """Write to a position; threads may write to different ranges at a time."""
        if self.memory is not None:
            self.memory[at : at + len(data)] = data
        while self.spool is not None and data:
            count = os.pwrite(self.spool.fileno(), data, self.offset + at)
            data, at = data[count:], at + count

    def view(self) -> memoryview:
        """The bytes of the part, which must not be written after that."""
        if self.memory is not None:
            return memoryview(self.memory)[: self.size]
        assert self.spool is not None
        return memoryview(mmap.mmap(self.spool.fileno(), self.size, access=mmap.ACCESS_READ, offset=self.offset))


class PartMemory:
    """Memory and the temporary file for the parts of files that are written together.

    Args:
        part_bytes: bytes of a part, or more.

    Attributes:
        condition: notified when a part was freed, or all writing stopped; guards all parts.
        error: why writing stopped; None if it did not.
    """

    def __init__(self, part_bytes: int) -> None:
        self.condition = threading.Condition()
        self.error: BaseException | None = None
        self._part_bytes = part_bytes
        self._taken = MEMORY_BYTES if BUDGET.take(MEMORY_BYTES) else 0
        self._room = self._taken // part_bytes  # without any, all parts are in the temporary file
        self._free: list[mmap.mmap] = []
        self._is_trimmed = False
        self._num_sending = 0
        self._spool: BinaryIO | None = None
        self._unused: list[int] = []
        self._end = 0

    def part(self, parts: dict[int, Part], number: int, size: int) -> Part:
        """The part of a file with this number, which is made if there is none.

        Waits for memory while parts are being sent, because these become free without further writes.

        Raises:
            OutputError: if the temporary file cannot be created.
        """
        with self.condition:
            while (part := parts.get(number)) is None:
                self.check()
                if self._free:
                    parts[number] = Part(size, self._free.pop())
                elif self._room:
                    self._room -= 1
                    parts[number] = Part(size, mmap.mmap(-1, self._part_bytes))
                elif self._num_sending:
                    self.condition.wait()
                else:
                    parts[number] = self._spooled(size)
            return part

    def sending(self, count: int) -> None:
        """Count parts that the store gets without further writes; the caller holds :attr:`condition`."""
        self._num_sending += count

    def free(self, part: Part) -> None:
        """Reuse the room of a part that the store got."""
        with self.condition:
            self._num_sending -= 1
            if part.memory is None:
                self._unused.append(part.offset)
            elif not self._is_trimmed:
                self._free.append(part.memory)
            self.condition.notify_all()

    def trim(self) -> None:
        """Release memory that is not in use, and later all that becomes free: no more parts are made."""
        with self.condition:
            self._is_trimmed = True
            self._free.clear()
            BUDGET.give(self._taken)
            self._taken = 0

    def stop(self, error: BaseException) -> None:
        """Make :meth:`check` raise this error from now on, unless it already raises another one."""
        with self.condition:
            self.error = self.error or error
            self.condition.notify_all()

    def check(self) -> None:
        """Raise the error if writing stopped."""
        if self.error is not None:
            raise self.error

    def _spooled(self, size: int) -> Part:
        try:
            if self._spool is None:
                self._spool = tempfile.TemporaryFile(prefix="shardconv-")  # noqa: SIM115 - closed with this object
                weakref.finalize(self, self._spool.close)
            if not self._unused:
                self._end += self._part_bytes
                self._spool.truncate(self._end)
                self._unused.append(self._end - self._part_bytes)
        except OSError as error:
            raise no_room(error) from error
        return Part(size, None, self._spool, self._unused.pop())


def no_room(error: OSError) -> OutputError:
    """The error for a temporary file that cannot be written."""
    return OutputError(
        f"{tempfile.gettempdir()}: cannot store data that is uploaded later: {error.strerror or error}: free some "
        f"space, or set TMPDIR to a folder on another disk"
    )


if TYPE_CHECKING:
    from obstore import AsyncWritableFile

#: Maximum number of parts that are sent at a time, of all files of a command.
MAX_SENDING = 8
#: Bytes of those parts that are in the temporary file, which are mapped into memory while they are sent.
FROM_FILE_BYTES = 16 * 2**20


class Rooms:
    """Limits on the parts that are sent at the same time, of all files of a command.

    Args:
        part_bytes: bytes of a part, or more.
    """

    def __init__(self, part_bytes: int) -> None:
        self._all = asyncio.Semaphore(MAX_SENDING)
        self._from_file = asyncio.Semaphore(max(FROM_FILE_BYTES // part_bytes, 1))

    def of(self, part: Part) -> tuple[asyncio.Semaphore, ...]:
        """The semaphores to acquire in this order: a part that waits for one does not hold room that others need."""
        return (self._all,) if part.memory is not None else (self._from_file, self._all)


class Upload:
    """A new file of a known size, which threads write at any position. It is visible after :meth:`complete` only.

    Args:
        key: its key in the store.
        size: its size in bytes.
        part_bytes: bytes of each part except the last one.
        memory: the memory for parts.
        rooms: the limits of requests, shared by all files.

    Attributes:
        is_completing: whether the file may be visible.
    """

    def __init__(self, key: Key, size: int, part_bytes: int, memory: PartMemory, rooms: Rooms) -> None:
        self.key, self._size, self._part_bytes, self._memory, self._rooms = key, size, part_bytes, memory, rooms
        self._last = max(-(-size // part_bytes) - 1, 0)
        self._parts: dict[int, Part] = {}
        self._num_ready = self._num_sent = 0
        self._writer: AsyncWritableFile | None = None
        self._task: Future[None] | None = None
        self.is_completing = False

    def write(self, data: memoryview, offset: int) -> None:
        """Write to a position.

        Raises:
            OutputError: if the store refuses an earlier part, or the temporary disk is full.
        """
        while data:
            number, at = divmod(offset, self._part_bytes)
            piece = data[: self._part_bytes - at]
            part = self._memory.part(self._parts, number, self._bytes_of(number))
            try:
                part.write(piece, at)
            except OSError as error:
                raise no_room(error) from error
            with self._memory.condition:
                part.num_written += len(piece)
                self._send_ready()
            data, offset = data[len(piece) :], offset + len(piece)

    def _bytes_of(self, number: int) -> int:
        return min(self._part_bytes, self._size - number * self._part_bytes)

    def _send_ready(self) -> None:
        """Send the parts whose turn it is; the last one waits for :meth:`complete`. The caller holds the lock."""
        before = self._num_ready
        while self._num_ready < self._last and self._is_full(self._num_ready):
            self._num_ready += 1
        self._memory.sending(self._num_ready - before)
        if self._task is None and self._num_sent < self._num_ready:
            self._task = submit(self._send())

    def _is_full(self, number: int) -> bool:
        part = self._parts.get(number)
        return part is not None and part.num_written == part.size

    async def _send(self) -> None:
        """Send the parts whose turn it is, until there are none."""
        while (part := self._next()) is not None:
            try:
                await self._send_part(part)
            except Exception as error:  # noqa: BLE001 - as in explained(), whose error would keep the part in memory
                self._memory.stop(explain_write(error, self.key.shown))

    def _next(self) -> Part | None:
        with self._memory.condition:
            if self._num_sent == self._num_ready or self._memory.error is not None:
                self._task = None
                self._memory.condition.notify_all()
                return None
            self._num_sent += 1
            return self._parts.pop(self._num_sent - 1)

    async def _send_part(self, part: Part) -> None:
        """Hand a part to the client, which frees its memory when the store has it."""
        rooms = self._rooms.of(part)
        for room in rooms:
            await room.acquire()
        loop, data = asyncio.get_running_loop(), part.view()

        def free() -> None:
            self._memory.free(part)
            for room in rooms:
                loop.call_soon_threadsafe(room.release)

        weakref.finalize(data, free).atexit = False
        if self._writer is None:
            self._writer = obstore().open_writer_async(
                self.key.store, self.key.name, buffer_size=self._part_bytes, max_concurrency=MAX_SENDING
            )
        await self._writer.write(data)

    def flush(self) -> None:
        """Wait until the client has all parts but the last one.

        Raises:
            OutputError: if the store refuses one.
        """
        memory = self._memory
        with memory.condition:
            memory.condition.wait_for(lambda: memory.error is not None or self._task is None)
            memory.check()
        if self._num_sent != self._last or not self._is_full(self._last):
            raise AssertionError(f"{self.key.shown}: bytes of part {self._num_sent} were not written")

    def complete(self) -> Future[None]:
        """Start to make the file visible; after :meth:`flush`."""
        self.is_completing = True
        self._task = submit(self._complete())
        return self._task

    async def _complete(self) -> None:
        with self._memory.condition:
            self._memory.sending(1)
        with explained(self.key.shown, explain_write):
            await self._send_part(self._parts.pop(self._last))
            assert self._writer is not None
            await self._writer.close()

    @property
    def task(self) -> Future[None] | None:
        """The request that is under way; None if there is none."""
        return self._task

    async def abort(self) -> None:
        """Remove the parts that are not visible; after :attr:`task` is done."""
        self._parts.clear()
        writer, self._writer = self._writer, None
        with suppress(Exception):  # the error that led here is the one to report
            if writer is not None and not await writer.closed():
                await writer.__aexit__(OutputError, OutputError(), None)


class UploadFiles:
    """New files in a store, with the methods of :class:`~shardconv.files.fileio.LocalOutputFiles`.

    Args:
        keys: their places.
        prefixes: for each file its first bytes.
        sizes: for each file its size in bytes.
    """

    #: Data of more threads would have to wait for its turn.
    in_order = True
    threads: int | None = 2

    def __init__(self, keys: Sequence[Key], prefixes: Sequence[bytes], sizes: Sequence[int]) -> None:
        self.num_files = len(keys)
        size = part_bytes(max(sizes, default=0))
        self._memory, rooms = PartMemory(size), Rooms(size)
        self.uploads = [
            Upload(key, num_bytes, size, self._memory, rooms) for key, num_bytes in zip(keys, sizes, strict=True)
        ]
        try:
            for upload, prefix in zip(self.uploads, prefixes, strict=True):
                upload.write(memoryview(prefix), 0)
        except BaseException:
            self._memory.trim()
            raise

    def would_wait(self, number: int) -> bool:  # noqa: ARG002
        """Whether a write to file ``number`` would probably wait for one of another thread: no, it goes to memory."""
        return False

    def write_ranges(self, number: int, data: memoryview, ranges: Iterable[tuple[int, int]]) -> None:
        """Write to ranges of file ``number``: offset and size of each, as long as the data together."""
        for offset, size in ranges:
            self.uploads[number].write(data[:size], offset)
            data = data[size:]

    def cancel(self) -> None:
        """Cancel pending requests: threads that wait for them raise InterruptedError."""
        self._memory.stop(InterruptedError("another thread failed, or the user interrupted the transfer"))

    def flush(self) -> None:
        """Wait until the store's client has all files, except for the last part of each."""
        for upload in self.uploads:
            upload.flush()

    def complete(self) -> None:
        """Make the files visible, all at a time.

        Raises:
            OutputError: if the store refuses one.
        """
        for future in [upload.complete() for upload in self.uploads]:
            wait(future)

    def abort(self) -> list[str]:
        """Remove the parts that are not visible; returns the URLs of files for which the store does not answer."""
        self.cancel()
        late = finish({upload.task: upload.key.shown for upload in self.uploads if upload.task is not None})
        return [*late, *finish({submit(upload.abort()): upload.key.shown for upload in self.uploads})]

    def release(self) -> None:
        """Release memory, also after an error."""
        self._memory.trim()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Release memory. The destination completes or aborts the files."""
        self.release()
