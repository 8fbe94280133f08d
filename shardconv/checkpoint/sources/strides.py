"""Tensors that are stored with strides, as of a transposed matrix or of a slice of columns, read in bounded memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardconv.checkpoint.engine.copy import Scratch
from shardconv.checkpoint.engine.geometry import row_spans
from shardconv.checkpoint.sources.source_reader import ReadStored
from shardconv.files.fileio import Bytes

#: Maximum bytes of a read of which few are needed: reading this many takes as long as another call.
_SMALL_READ = 48 * 2**10
#: Maximum bytes of a read of which at least half are needed.
_LARGE_READ = 4 * 2**20

#: For each dim the first index and the end.
_Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StridedTensor:
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

    def fill(self, block: Bytes, start: int, read: ReadStored, scratch: Scratch) -> None:
        """Fill a block of full elements with the bytes of the tensor from ``start`` on."""
        elements = np.frombuffer(block, f"u{self.unit}")
        first = start // self.unit
        for box in _boxes(first, first + len(elements), self.shape):
            shape = [high - low for low, high in box]
            target, elements = np.split(elements, [prod(shape)])
            offset = sum(low * stride for (low, _), stride in zip(box, self.strides, strict=True))
            self._gather(target.reshape(shape), offset, read, scratch)

    def _gather(self, target: NDArray[np.unsignedinteger], offset: int, read: ReadStored, scratch: Scratch) -> None:
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
