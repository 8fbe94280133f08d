"""Strided copies between a block of a full tensor and a byte range of a shard, one box at a time."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardconv.checkpoint.engine.geometry import Box
from shardconv.files.fileio import Bytes


def _full(block: Bytes, box: Box) -> NDArray[np.uint8]:
    shape, strides = (box.rows, box.size), (box.full_width, 1)
    return np.ndarray(shape, np.uint8, block, box.full + box.offset, strides)


def _local(local: Bytes, box: Box) -> NDArray[np.uint8]:
    shape, strides = (box.rows, box.size), (box.local_width, 1)
    return np.ndarray(shape, np.uint8, local, box.local + box.local_offset, strides)


def scatter(block: Bytes, boxes: Sequence[Box], local: Bytes, *, is_padded: bool) -> None:
    """Copy the boxes of a block into a shard's range; the padding between them becomes zero."""
    if is_padded:
        np.frombuffer(local, np.uint8)[...] = 0
    for box in boxes:
        np.copyto(_local(local, box), _full(block, box))


def gather(local: Bytes, boxes: Sequence[Box], block: Bytes) -> bool:
    """Copy the boxes of a shard's range into a block; replicas are only compared.

    Returns:
        Whether all replicas are equal to the block.
    """
    is_equal = True
    for box in boxes:
        full, shard = _full(block, box), _local(local, box)
        if box.is_replica:
            is_equal = is_equal and np.array_equal(full, shard)
        else:
            np.copyto(full, shard)
    return is_equal


def copy_boxes(block: Bytes, boxes: Sequence[Box], other: Bytes) -> None:
    """Copy the boxes of a block to the same positions of another one."""
    for box in boxes:
        np.copyto(_full(other, box), _full(block, box))


def is_padding_zero(boxes: Sequence[Box], local: Bytes) -> bool:
    """Whether a shard's range is zero outside of the boxes; overwrites the boxes with zero."""
    for box in boxes:
        _local(local, box)[...] = 0
    return not np.frombuffer(local, np.uint8).any()


def first_difference(left: Bytes, right: Bytes) -> int | None:
    """The first position where two ranges of equal length differ; None if they are equal."""
    first, second = np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)
    if np.array_equal(first, second):
        return None
    return int(np.flatnonzero(first != second)[0])


def transpose_inner(data: Bytes, shape: tuple[int, int, int, int], result: Bytes) -> None:
    """Copy bytes of a shape (a, b, c, d) as (a, c, b, d)."""
    count, rows, columns, size = shape
    target = np.frombuffer(result, np.uint8).reshape(count, columns, rows, size)
    np.copyto(target, np.frombuffer(data, np.uint8).reshape(shape).swapaxes(1, 2))
