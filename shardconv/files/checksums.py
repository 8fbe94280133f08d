"""Checksums of files, xxh3-128, in bounded memory."""

from collections.abc import Iterator

import xxhash

from shardconv.files.folder import AnyPath, file_bytes
from shardconv.files.input_files import InputFiles

#: Bytes of a file that are in memory at once.
_CHUNK_BYTES = 2**20


def checksum(data: bytes) -> str:
    """The xxh3-128 checksum of data."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_file(path: AnyPath) -> str:
    """Compute the xxh3-128 checksum of a file in bounded memory."""
    size = file_bytes(path)
    running = xxhash.xxh3_128()
    with InputFiles([path], [b""], [size]) as inputs:
        inputs.prefetch([(0, 0, size)])
        for chunk in chunks(inputs, size):
            running.update(chunk)
    return running.hexdigest()


def chunks(inputs: InputFiles, size: int) -> Iterator[memoryview]:
    """The contents of the only input file."""
    for start in range(0, size, _CHUNK_BYTES):
        chunk = memoryview(bytearray(min(_CHUNK_BYTES, size - start)))
        inputs.read(0, chunk, start)
        yield chunk
