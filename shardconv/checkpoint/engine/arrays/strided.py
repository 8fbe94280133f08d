"""Strided copies: between a block of a full tensor and a range of a shard, and of tensors stored with strides."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shardconv.checkpoint.engine.copy import Scratch
from shardconv.checkpoint.engine.geometry import Box, row_spans
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


# --- tensors that are stored with strides, such as a transposed matrix or a slice of columns --------------------------

#: Maximum bytes of a read that needs only a few of them: reading this many takes as long as another call.
_SMALL_READ = 48 * 2**10
#: Maximum bytes of a read that needs at least half of them.
_LARGE_READ = 4 * 2**20

#: Maximum bytes of a full slice that is read at once.
_MAX_SLICE = 48 * 2**20

#: Fills a buffer with the bytes of a stored tensor from an offset on.
_Read = Callable[[str, int, Bytes], None]
#: For each dim the first index and the end.
_Box = tuple[tuple[int, int], ...]


class StridedTensor(Struct, frozen=True):
    """A transform that gathers the elements of a tensor from the bytes that hold them.

    Attributes:
        name: of the stored bytes, from the first element to the end of the last one.
        unit: bytes of an element.
        shape: of the tensor.
        strides: for each dim the distance of its indices in the stored bytes, in elements.
    """

    name: str
    unit: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def fill(self, block: Bytes, start: int, read: _Read, scratch: Scratch) -> None:
        """Fill a block of full elements with the bytes of the tensor from ``start`` on."""
        elements = np.frombuffer(block, f"u{self.unit}")
        first = start // self.unit
        for box in _boxes(first, first + len(elements), self.shape):
            shape = [high - low for low, high in box]
            target, elements = np.split(elements, [prod(shape)])
            if self._slice_bytes is not None:
                self._copy_slices(target.reshape(shape), box, read, scratch)
                continue
            offset = sum(low * stride for (low, _), stride in zip(box, self.strides, strict=True))
            self._gather(target.reshape(shape), offset, read, scratch)

    def reads(self, _start: int, _stop: int) -> tuple[()]:
        """Nothing is prefetched: slices are kept, and of other ranges only parts may be read."""
        return ()

    @property
    def _slice_bytes(self) -> int | None:
        """Bytes of a slice along dim 0 that is contiguous and small, such as the matrix of an expert; else None."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape[1:], self.strides[1:], strict=True))
        is_contiguous = len(self.shape) > 1 and self.strides[0] == extent == prod(self.shape[1:])
        return extent * self.unit if is_contiguous and extent * self.unit <= _MAX_SLICE else None

    def _copy_slices(self, target: NDArray[np.unsignedinteger], box: _Box, read: _Read, scratch: Scratch) -> None:
        """Copy a box from whole slices along dim 0, of which the last one is kept for the next block."""
        size = self._slice_bytes or 0
        (first, _), *inner = box
        offset = sum(low * stride for (low, _), stride in zip(inner, self.strides[1:], strict=True)) * self.unit
        strides = [stride * self.unit for stride in self.strides[1:]]
        for at, part in enumerate(target, first):
            data = scratch.keep("slice", (self, at), size, partial(read, self.name, at * size))
            np.copyto(part, np.ndarray(part.shape, part.dtype, data, offset, strides))

    def _gather(
        self,
        target: NDArray[np.unsignedinteger],
        offset: int,
        read: _Read,
        scratch: Scratch,
    ) -> None:
        """Fill an array from elements at the offset; a range of which little is needed is read in halves."""
        reach = [(size - 1) * stride for size, stride in zip(target.shape, self.strides, strict=True)]
        extent = (sum(reach) + 1) * self.unit
        if extent <= _SMALL_READ or (extent <= _LARGE_READ and extent <= 2 * target.nbytes):
            data = scratch.take("strided", extent)
            read(self.name, offset * self.unit, data)
            strides = [stride * self.unit for stride in self.strides]
            np.copyto(target, np.ndarray(target.shape, target.dtype, data, strides=strides))
            return
        dim = reach.index(max(reach))
        half = target.shape[dim] // 2
        for part, start in zip(np.split(target, [half], dim), (0, half), strict=True):
            self._gather(part, offset + start * self.strides[dim], read, scratch)


def _boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[_Box]:
    """Split a flat range of a tensor into boxes, in order."""
    if len(shape) == 1:
        yield ((start, stop),)
        return
    width = prod(shape[1:])
    for row, rows, first, last in row_spans(start, stop, width):
        if last - first == width:
            yield ((row, row + rows), *((0, size) for size in shape[1:]))
        else:
            for box in _boxes(first, last, shape[1:]):
                yield ((row, row + 1), *box)
