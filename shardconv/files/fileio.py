"""Positioned reads and writes, without short ones, on every POSIX system."""

import errno
import mmap
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

#: A writable one-dimensional buffer.
Bytes = memoryview
#: Maximum bytes of one write. For larger writes a file system may allocate huge pages of 2 MiB, which a virtual machine
#: may have returned to its host: there, writes of 2 MiB take twice as long.
_WRITE_BYTES = 256 * 2**10
#: Linux's MADV_POPULATE_READ, from 5.14 on.
_POPULATE_READ = 22
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


def will_need(descriptor: int, offset: int, size: int) -> None:
    """Ask the operating system to read a byte range ahead, if it supports that."""
    if fadvise is not None:
        with suppress(OSError):
            fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)


def populate(view: Bytes) -> bool:
    """Read the bytes of a mapping into memory, without the interpreter lock; False if some of them cannot be read.

    An access to bytes that cannot be read, because the file was truncated or its storage fails, ends the process.
    Systems without this call return True.
    """
    if sys.platform != "linux" or not len(view):
        return True
    import ctypes  # noqa: PLC0415 - only loading needs it

    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + len(view) - start)
    failed = ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), size, _POPULATE_READ) != 0
    return not (failed and ctypes.get_errno() == errno.EFAULT)


def allow_open_files(count: int) -> None:
    """Raise the limit of open files so that ``count`` more can be opened, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(list(Path("/dev/fd").iterdir())) + count + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
