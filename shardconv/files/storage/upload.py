"""New files in stores: multipart uploads that become visible at their end, or not at all."""

import asyncio
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from shardconv.files.storage.clients import Key, finish, obstore, submit, wait
from shardconv.files.storage.errors import explain_write, explained
from shardconv.files.storage.parts import Part, PartMemory, no_room, part_bytes
from shardconv.support.errors import OutputError

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
        key: its place.
        size: in bytes.
        part_bytes: bytes of each part except the last one.
        memory: of the parts.
        rooms: of the requests of all files.

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

    def write_ranges(self, number: int, data: memoryview, ranges: Iterable[tuple[int, int]]) -> None:
        """Write to ranges of file ``number``: the offset and size of each, as long as the data together."""
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
