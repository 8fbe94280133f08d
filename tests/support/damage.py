"""Damage files: flip bits and change bytes, as a disk or a transfer does."""

import os
from pathlib import Path

from shardconv.files.containers.safetensors import read_header


def flip(path: Path, position: int = -1, bit: int = 0, *, keeps_times: bool = False) -> None:
    """Flip one bit of a file; a negative position counts from its end."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))
    if keeps_times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def place(path: Path, tensor: str) -> range:
    """The positions of a tensor's bytes in a file."""
    header = read_header(path)
    info = header.tensors()[tensor]
    return range(header.data_offset + info.start, header.data_offset + info.stop)
