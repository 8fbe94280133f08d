"""Checksums of files, xxh3-128, in bounded memory.

Apart from the module of input files: the command line imports that one at its start, and may not import xxhash then.
"""

import xxhash

from shardconv.files.folder import AnyPath
from shardconv.files.input_files import chunks


def checksum(data: bytes) -> str:
    """The xxh3-128 checksum of data."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_file(path: AnyPath) -> str:
    """Compute the xxh3-128 checksum of a file in bounded memory; errors as in :func:`chunks`."""
    running = xxhash.xxh3_128()
    for chunk in chunks(path):
        running.update(chunk)
    return running.hexdigest()
