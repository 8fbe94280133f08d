"""Parts of new remote files: ranges of equal size, which threads fill in any order.

A store gets the parts of a file one after the other. All other parts are kept in memory, and in a temporary file when
the memory is used up.
"""

import mmap
import os
import tempfile
import threading
import weakref
from typing import BinaryIO

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
