"""Positioned reads and writes, without short ones, on every POSIX system; and new files that threads write so."""

import mmap
import os
import resource
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, TypeAlias

if TYPE_CHECKING:
    from shardconv.files.storage.upload import UploadFiles


#: A writable one-dimensional buffer.
Bytes = memoryview
#: Maximum bytes of one write. For larger writes a file system may allocate huge pages of 2 MiB, which a virtual machine
#: may have returned to its host: there, writes of 2 MiB take twice as long.
_WRITE_BYTES = 256 * 2**10
#: Options of mallopt(3) in the GNU C library, with values: M_ARENA_MAX, one arena for all threads; M_TRIM_THRESHOLD,
#: keep all freed memory, and M_MMAP_THRESHOLD, use it for allocations of up to 32 MiB (the option's maximum).
_MALLOC_OPTIONS = ((-8, 1), (-1, 2**31 - 1), (-3, 32 * 2**20))
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


def _writes(data: Bytes, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[Bytes, int]]:
    """Yield the data of each write to ranges, and its offset."""
    position = 0
    for offset, size in ranges:
        for at in range(0, size, _WRITE_BYTES):
            yield data[position + at : position + min(at + _WRITE_BYTES, size)], offset + at
        position += size


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a new file with the permissions ``mode``, before the umask."""
    return os.fdopen(os.open(path, CREATE | os.O_WRONLY, mode), "wb")


def will_need(descriptor: int, offset: int, size: int) -> None:
    """Ask the operating system to read a byte range ahead, if it supports that and the range is not in memory."""
    if fadvise is not None and not _is_cached(descriptor, offset, size):
        with suppress(OSError):
            fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def enlarge_read_ahead(descriptor: int) -> None:
    """Double how much of a file the operating system reads ahead, also at page faults of mappings, if it can."""
    if fadvise is not None:
        with suppress(OSError):
            fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _is_cached(descriptor: int, offset: int, size: int) -> bool:
    """Whether a byte range is probably in memory, as its middle and the pages beside its first and last one are.

    Other ranges may share the first and the last page. This takes 3 us; asking Linux for a range that is in memory
    takes 70 us, as it looks at each of the first pages.
    """
    if not hasattr(os, "RWF_NOWAIT") or size < 3 * mmap.PAGESIZE:
        return False
    at = (offset + mmap.PAGESIZE, offset + size // 2, offset + size - 1 - mmap.PAGESIZE)
    try:
        return all(os.preadv(descriptor, [bytearray(1)], one, os.RWF_NOWAIT) for one in at)
    except OSError:  # one of them is not, or the file system does not support the flag
        return False


def reuse_freed_memory() -> None:
    """Let the C library keep freed memory, in this whole process, for the next allocations of all its threads.

    Clients of stores receive each range into new memory, and comparing two blocks allocates an array of flags. Memory
    from the kernel takes 5 to 10 % of a copy, and a third of a verification. A thread that imports numpy takes 2 MB
    more if it has an arena of its own. Other C libraries than GNU's do not have these settings.
    """
    with suppress(ImportError, AttributeError, OSError):
        import ctypes  # noqa: PLC0415 - only commands that copy need it

        set_option = ctypes.CDLL(None).mallopt
        for option, value in _MALLOC_OPTIONS:
            set_option(option, value)


def allow_open_files(count: int) -> None:
    """Raise the limit of open files so that ``count`` more can be opened, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(list(Path("/dev/fd").iterdir())) + count + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))


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

    def would_wait(self, number: int) -> bool:
        """Whether a write to file ``number`` would probably wait for one of another thread."""
        return self._locks[number].locked()

    def write_ranges(self, number: int, data: Bytes, ranges: Iterable[tuple[int, int]]) -> None:
        """Write to ranges of file ``number``: offset and size of each, as long as the data together.

        Each range is a write of its own: callers join those that touch.
        """
        writes = list(_writes(data, ranges))
        locked = writes[:-1] or writes
        with self._locks[number]:
            for one, offset in locked:
                write_exactly(self.descriptors[number], one, offset)
        for one, offset in writes[len(locked) :]:  # without the lock: the next writer takes about 0.1 ms to wake up
            write_exactly(self.descriptors[number], one, offset)

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
