"""Edits: integers that are subtracted from the values of a shard, and added again when the full tensor is read.

Indices of quantization groups count from the first group of a rank, and the stored shape of a packed weight is that of
the shard. Imports numpy, which few checkpoints need.
"""

from collections.abc import Sequence

import numpy as np

from shardconv.checkpoint.fileio import Bytes
from shardconv.errors import IntegrityError

_DTYPES = {"I32": "<i4", "I64": "<i8"}


def add(data: Bytes, dtype: str, offset: int, values: Sequence[int], *, sign: int = 1) -> None:
    """Add integers to the elements of a shard, in place.

    Args:
        data: bytes of the shard.
        dtype: its dtype in safetensors, ``I32`` or ``I64``.
        offset: offset of ``data`` in the shard, in bytes.
        values: one integer for all elements, or one for each element of the shard.
        sign: -1 to subtract.

    Raises:
        IntegrityError: if a result is negative, or is too large for the dtype.
    """
    elements = np.frombuffer(data, _DTYPES[dtype])
    first = offset // elements.itemsize
    added = values[0] if len(values) == 1 else np.array(values[first : first + len(elements)], elements.dtype)
    result = elements.astype(np.int64) + sign * np.asarray(added, np.int64)
    if len(result) and (result.min() < 0 or result.max() > np.iinfo(elements.dtype).max):
        raise IntegrityError(f"an index of groups or a stored shape is out of range (got {result.min()})")
    elements[:] = result
