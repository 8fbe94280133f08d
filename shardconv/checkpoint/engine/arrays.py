"""Copies, comparisons and conversions of the elements in buffers, by numpy.

Importing numpy takes as long as copying some hundred megabytes, and contiguous copies do not need it. The first thread
that needs this module imports it, while the others continue.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shardconv.checkpoint.engine.copy import REMOTE_KEPT_BYTES, Edits, ReadTensor, Scratch
from shardconv.checkpoint.engine.geometry import Box, row_spans
from shardconv.files.fileio import Bytes
from shardconv.plan.grid import SHAPE, ZERO, Grid, GridDim
from shardconv.support.errors import option

# --- copies between a block of a full tensor and a range of a shard ---------------------------------------------------


def _full(block: Bytes, box: Box, at: int = 0) -> NDArray[np.uint8]:
    shape, strides = (box.rows, box.size), (box.full_width, 1)
    return np.ndarray(shape, np.uint8, block, at + box.full + box.offset, strides)


def _local(local: Bytes, box: Box) -> NDArray[np.uint8]:
    shape, strides = (box.rows, box.size), (box.local_width, 1)
    return np.ndarray(shape, np.uint8, local, box.local + box.local_offset, strides)


def scatter(block: Bytes, boxes: Sequence[Box], local: Bytes, *, is_padded: bool, at: int = 0) -> None:
    """Copy the boxes of a block, from the offset ``at`` on, into a shard's range; padding between them becomes zero."""
    if is_padded:
        np.frombuffer(local, np.uint8)[...] = 0
    for box in boxes:
        _local(local, box)[...] = _full(block, box, at)


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
            full[...] = shard
    return is_equal


def copy_boxes(block: Bytes, boxes: Sequence[Box], other: Bytes) -> None:
    """Copy the boxes of a block to the same positions of another one."""
    for box in boxes:
        _full(other, box)[...] = _full(block, box)


def is_padding_zero(boxes: Sequence[Box], local: Bytes) -> bool:
    """Whether a shard's range is zero outside of the boxes. Overwrites the boxes with zeros."""
    for box in boxes:
        _local(local, box)[...] = 0
    return not np.frombuffer(local, np.uint8).any()


def first_difference(left: Bytes, right: Bytes) -> int | None:
    """The first position where two ranges of equal length differ; None if they are equal."""
    first, second = np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)
    if np.array_equal(first, second):
        return None
    return int(np.flatnonzero(first != second)[0])


# --- tensors that are stored with strides, such as a transposed matrix or a slice of columns --------------------------

#: Maximum bytes between two needed ranges that are read with them: reading this many takes as long as another call.
_MAX_GAP = 48 * 2**10
#: Minimum reads of a kept part: each has at most as many bytes as the part, divided by this.
_READS_PER_PART = 8
#: Maximum bytes of a slice that is prefetched: at URLs, slices up to this size are read once.
_MAX_SLICE = REMOTE_KEPT_BYTES

#: For each dim the first index and the end.
_Box = tuple[tuple[int, int], ...]


class StridedTensor(Struct, frozen=True):
    """A transform that gathers the elements of a tensor from the bytes that hold them.

    The elements of a block of a transposed tensor are far apart in the stored bytes. Of such a tensor, a part that is
    larger than a block is gathered, and kept for the next blocks.

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

    def fill(self, block: Bytes, start: int, read: ReadTensor, scratch: Scratch) -> None:
        """Fill a block of full elements with the bytes of the tensor from ``start`` on."""
        scratch = scratch.parts()
        if not (self._is_transposed and len(block)):
            self._gather(start, read, scratch, block)
            return
        stop, size, end = start + len(block), self._part_bytes(scratch.kept_bytes), self.unit * prod(self.shape)
        for first in range(start // size * size, stop, size):
            low, high, last = max(first, start), min(first + size, stop), min(first + size, end)
            piece, gather = block[low - start : high - start], partial(self._gather, first, read, scratch)
            if len(piece) == last - first:
                gather(piece)
            else:
                piece[:] = scratch.keep("part", (self, first), last - first, gather)[low - first : high - first]

    def reads(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield the range of the slices with these bytes, if they are read once."""
        size = self._slice_bytes
        if self._is_transposed and size is not None and size <= _MAX_SLICE:
            yield self.name, start // size * size, -(-stop // size) * size

    @property
    def _is_transposed(self) -> bool:
        """Whether indices of a dim are farther apart than those of a dim before it."""
        strides = [stride for size, stride in zip(self.shape, self.strides, strict=True) if size > 1 and stride]
        return any(inner > outer for outer, inner in pairwise(strides))

    @property
    def _slice_bytes(self) -> int | None:
        """Bytes of a slice along dim 0 that is contiguous, such as the matrix of an expert; None if it is not."""
        size = prod(self.shape[1:])
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape[1:], self.strides[1:], strict=True))
        return size * self.unit if len(self.shape) > 1 and self.strides[0] == extent == size else None

    def _part_bytes(self, most: int) -> int:
        """Bytes of a part of a transposed tensor: a contiguous slice, or as many rows as fit into ``most`` bytes."""
        if self._slice_bytes is not None and self._slice_bytes <= most:
            return self._slice_bytes
        rows = (self.unit * prod(self.shape[dim:]) for dim in range(1, len(self.shape)))
        row = next((size for size in rows if size <= most), self.unit)
        return max(most // row, 1) * row

    def _gather(self, start: int, read: ReadTensor, scratch: Scratch, data: Bytes) -> None:
        """Fill a buffer with the bytes of the tensor from ``start`` on."""
        elements = np.frombuffer(data, f"u{self.unit}")
        first = start // self.unit
        for box in _boxes(first, first + len(elements), self.shape):
            shape = [high - low for low, high in box]
            target, elements = np.split(elements, [prod(shape)])
            offset = sum(low * stride for (low, _), stride in zip(box, self.strides, strict=True))
            self._gather_box(target.reshape(shape), offset, read, scratch)

    def _gather_box(self, target: NDArray[np.unsignedinteger], offset: int, read: ReadTensor, scratch: Scratch) -> None:
        """Fill an array from elements at the offset, with reads of bounded size; those also read small gaps."""
        most = max(scratch.kept_bytes // _READS_PER_PART, self.unit)
        extent, gaps = 1, dict[int, int]()
        for stride, dim, size in sorted(zip(self.strides, range(target.ndim), target.shape, strict=True)):
            if size > 1:
                gaps[dim] = stride - extent
                extent += (size - 1) * stride
        widest = max(gaps, key=gaps.__getitem__, default=0)
        has_wide_gap = bool(gaps) and gaps[widest] * self.unit > _MAX_GAP
        if extent * self.unit <= most and not has_wide_gap:
            data = scratch.take("strided", most)[: extent * self.unit]
            read(self.name, offset * self.unit, data)
            strides = [stride * self.unit for stride in self.strides]
            np.copyto(target, np.ndarray(target.shape, target.dtype, data, strides=strides))
            return
        dim = widest if has_wide_gap else [*gaps][-1]
        stride, size = self.strides[dim], target.shape[dim]
        step = 1 if has_wide_gap else min(max(most // (stride * self.unit), 1), size - 1)
        for start in range(0, size, step):
            part = target[(slice(None),) * dim + (slice(start, start + step),)]
            self._gather_box(part, offset + start * stride, read, scratch)


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


# --- edits: integers of a quantization format, most of which depend on the rank ---------------------------------------

# Indices of groups count from the first group of a rank, and the stored shape of a packed weight is the shard's: an
# integer is subtracted from the values of a shard, and added again when the full tensor is read. The values of the full
# tensor follow from the quantization settings, and are compared with them.

_INTEGERS: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8"), "U8": np.dtype("<u1")}
#: Ranges whose expected values are kept: layers repeat the shapes of their tensors.
_NUM_EXPECTED = 16

_DAMAGED = f"the checkpoint is damaged, or it needs {option(config='FILE')} with another quantization_config"


def add_integers(data: Bytes, dtype: str, offset: int, values: Sequence[int], *, sign: int = 1) -> None:
    """Add integers to the elements of a shard, in place. Sums that are too large for the dtype wrap around.

    Args:
        data: bytes of the shard.
        dtype: its dtype in safetensors, ``I32`` or ``I64``.
        offset: offset of ``data`` in the shard, in bytes.
        values: one integer of the dtype for all elements, or one for each element of the shard.
        sign: -1 to subtract.
    """
    elements = np.frombuffer(data, _INTEGERS[dtype])
    first = offset // elements.itemsize
    added = values[0] if len(values) == 1 else np.array(values[first : first + len(elements)], elements.dtype)
    elements += sign * added


def fill_expected(data: Bytes, edits: Edits, offset: int) -> None:
    """Write the values of a full tensor that follow from its grid; arguments as for :func:`unexpected`."""
    elements = np.frombuffer(data, _INTEGERS[edits.dtype])
    elements[:] = _expected(edits.grid, elements.dtype, offset // elements.itemsize, len(elements))


@lru_cache(_NUM_EXPECTED)
def _expected(grid: Grid, dtype: np.dtype[Any], first: int, count: int) -> NDArray[Any]:
    """The values of a full tensor from the element ``first`` on, of this dtype if it can have them."""
    positions = np.arange(first, first + count)
    if grid.content == SHAPE:
        values = np.array(grid.shape)[positions]
    elif grid.numbers == ZERO or not grid.group:
        values = np.zeros_like(positions)
    else:
        values = positions % grid.shape[grid.dims[-1].dim or 0] // grid.group
    values = values.astype(dtype) if values.max(initial=0) <= np.iinfo(dtype).max else values
    values.flags.writeable = False  # threads share it
    return values


def unexpected(data: Bytes, edits: Edits, offset: int) -> str:
    """Compare values of a full tensor with the values that its grid allows.

    Args:
        data: bytes of the full tensor.
        edits: of the tensor.
        offset: offset of ``data`` in the full tensor, in bytes.

    Returns:
        The first difference and how to fix it; "" if there is none.
    """
    elements, grid = np.frombuffer(data, _INTEGERS[edits.dtype]), edits.grid
    first = offset // elements.itemsize
    if not grid.is_implied:
        return _group_outside(edits.name, grid, elements, first)
    expected = _expected(grid, elements.dtype, first, len(elements))
    if not len(different := np.flatnonzero(elements != expected)):
        return ""
    at = different[0]
    if grid.numbers == ZERO:
        return f"{edits.name}: is {elements[at]} (expected 0, the order of rows): {_DAMAGED}"
    if grid.content == SHAPE:
        return (
            f"{edits.name}: dim {first + at} is {elements[at]} (expected {expected[at]}, from the shape of the "
            f"stored weight): {_DAMAGED}"
        )
    return (
        f"{edits.name}: input feature {first + at} is in group {elements[at]} (expected {expected[at]}, from "
        f"quantization_config): pass {option(config='FILE')} with the quantization_config of this checkpoint. It has "
        "desc_act (GPTQ) or actorder (compressed-tensors) if groups are in the order of activations"
    )


def _group_outside(name: str, grid: Grid, elements: NDArray[np.int64], first: int) -> str:
    """The first index of a group that does not exist, where groups are not consecutive; "" if there is none."""
    size = grid.shape[grid.dims[-1].dim or 0]
    last = GridDim(None, grid.group).count(size) - 1
    outside = np.flatnonzero((elements < 0) | (elements > last))
    if not len(outside):
        return ""
    at = outside[0]
    return (
        f"{name}: input feature {(first + at) % size} is in group {elements[at]} (expected 0 to {last}, as "
        f"quantization_config has groups of {grid.group}): {_DAMAGED}"
    )


# --- rounding of floating-point elements to another dtype -------------------------------------------------------------

# Elements round to the nearest value, ties to even, also to subnormal numbers. F64 rounds to F32 first. Both are as in
# ``torch.Tensor.to``.

#: Elements of a chunk, whose intermediate values stay in the processor's cache.
_CHUNK = 2**15
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
#: Bits of dtypes with 16 bits: infinity, all but the sign, and the first of the mantissa of BF16, as in a quiet NaN.
_INFINITY, _MAGNITUDE, _QUIET = {"F16": 0x7C00, "BF16": 0x7F80}, 0x7FFF, 0x40
#: Bits of F32: the least value that overflows in F16, the least normal number of F16, and minus the difference of the
#: biases of the exponents.
_F16_OVERFLOW, _F16_NORMAL, _F16_EXPONENT = 0x477FF000, 0x38800000, np.uint32(0xC8000000)


def round_to(data: Bytes, dtype: str, target: Bytes, target_dtype: str) -> None:
    """Convert the elements of a buffer.

    Args:
        data: the elements.
        dtype: their dtype in safetensors: F64, F32, F16 or BF16.
        target: the buffer for as many elements.
        target_dtype: their dtype: F32, F16 or BF16.

    Raises:
        OverflowError: if a finite element is too large; the arguments are its index and its value.
    """
    elements, converted = np.frombuffer(data, _FLOATS[dtype]), np.frombuffer(target, _FLOATS[target_dtype])
    with np.errstate(all="ignore"):  # overflow is checked here, and NaN stays NaN
        for start in range(0, len(elements), _CHUNK):
            chunk = elements[start : start + _CHUNK]
            rounded = converted[start : start + _CHUNK]
            rounded[:] = _narrow(widen(chunk, dtype), target_dtype)
            infinite = _is_infinite(rounded, target_dtype)
            if infinite.any() and len(wrong := np.flatnonzero(infinite & ~_is_infinite(chunk, dtype))):
                raise OverflowError(start + int(wrong[0]), float(widen(chunk, dtype, "<f8")[wrong[0]]))


def widen(elements: NDArray[Any], dtype: str, to: str = "<f4") -> NDArray[Any]:
    """Convert elements of a safetensors dtype to a dtype of numpy; elements of BF16 are given as their bits."""
    if dtype == "BF16":
        elements = (elements.astype("<u4") << 16).view("<f4")
    return elements.astype(to, copy=False)


def _narrow(elements: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    return _to_f16(elements) if dtype == "F16" else _to_bf16(elements) if dtype == "BF16" else elements


def _to_f16(elements: NDArray[np.float32]) -> NDArray[Any]:
    """Round in integers, which is faster than numpy's conversion."""
    bits = elements.view("<u4")
    magnitude = bits & 0x7FFFFFFF
    if magnitude.size and magnitude.max() >= _F16_OVERFLOW:
        return elements.astype("<f2")
    rounded = magnitude >> 13
    rounded &= 1  # a tie rounds up to an even mantissa
    rounded += magnitude
    rounded += _F16_EXPONENT + 0xFFF
    rounded >>= 13
    is_subnormal = magnitude < _F16_NORMAL
    magnitude.view("<f4")[:] += 0.5  # its last bit is worth the least subnormal number, so this rounds
    magnitude -= np.float32(0.5).view("<u4")
    np.copyto(rounded, magnitude, where=is_subnormal)
    bits = bits >> 16
    bits &= 0x8000
    rounded |= bits
    return rounded.astype("<u2").view("<f2")


def _to_bf16(elements: NDArray[np.float32]) -> NDArray[Any]:
    bits = elements.view("<u4")
    rounded = bits >> 16
    rounded &= 1  # a tie rounds up to an even mantissa
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    if (nan := np.isnan(elements)).any():
        rounded[nan] = bits[nan] >> 16 | _QUIET
    return rounded


def _is_infinite(elements: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    infinity = _INFINITY.get(dtype)
    infinite: NDArray[np.bool_] = (
        np.isinf(elements) if infinity is None else elements.view("<u2") & _MAGNITUDE == infinity
    )
    return infinite
