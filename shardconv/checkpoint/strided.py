"""Strided copies between a block of a full tensor and its range of a shard, a box at a time, by numpy.

numpy takes as long to import as some hundred megabytes take to copy, and what is contiguous needs none of it; so this
module is imported by the first thread that meets a box, and the others go on meanwhile.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardconv.checkpoint.fileio import Bytes
from shardconv.checkpoint.geometry import Box


def _full(block: Bytes, box: Box) -> NDArray[np.uint8]:
    shape, strides = (box.rows, box.size), (box.full_width, 1)
    return np.ndarray(shape, np.uint8, block, box.full + box.offset, strides)


def _local(local: Bytes, box: Box) -> NDArray[np.uint8]:
    shape, strides = (box.rows, box.size), (box.local_width, 1)
    return np.ndarray(shape, np.uint8, local, box.local + box.local_offset, strides)


def scatter(block: Bytes, boxes: Sequence[Box], local: Bytes, *, is_padded: bool) -> None:
    """Fill a shard's range from a block; what no box covers becomes zero."""
    if is_padded:
        np.frombuffer(local, np.uint8)[...] = 0
    for box in boxes:
        np.copyto(_local(local, box), _full(block, box))


def gather(local: Bytes, boxes: Sequence[Box], block: Bytes) -> bool:
    """Bring a shard's range into a block; copies are only compared. Returns whether they are equal."""
    is_equal = True
    for box in boxes:
        full, ours = _full(block, box), _local(local, box)
        if box.is_copy:
            is_equal = is_equal and np.array_equal(full, ours)
        else:
            np.copyto(full, ours)
    return is_equal


def is_zero_beside(boxes: Sequence[Box], local: Bytes) -> bool:
    """Whether a shard's range is zero wherever no box covers it; the boxes are zero afterwards."""
    for box in boxes:
        _local(local, box)[...] = 0
    return not np.frombuffer(local, np.uint8).any()


def first_difference(left: Bytes, right: Bytes) -> int | None:
    """The first place where two ranges of equal length differ."""
    ours, theirs = np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)
    if np.array_equal(ours, theirs):
        return None
    return int(np.flatnonzero(ours != theirs)[0])
