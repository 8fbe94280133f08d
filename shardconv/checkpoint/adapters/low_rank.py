"""Weights with the low-rank product of an adapter added, computed by blocks of rows with numpy.

A weight W of shape [output, input] becomes W' = W + s B A, with DoRA (m / |W'|) W', where each row has its norm.
Weights that are stored as [input, output] become the transpose of that. Sums are computed in float32, and
rounded once to the dtype of the weight, to nearest, ties to even.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardconv.checkpoint.engine.arrays.rounding import convert, widen
from shardconv.checkpoint.engine.copy import Scratch
from shardconv.checkpoint.sources.stored_tensors import ReadTensor
from shardconv.files.fileio import Bytes
from shardconv.support.errors import SourceError, option

Array = NDArray[np.float32]

#: numpy's dtypes of the supported floating-point dtypes; BF16 is represented by its bits.
NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
#: Bytes of the matrices that are kept for the next block.
_KEPT_BYTES = 64 * 2**20
#: Elements of a weight that are read at once to compute norms; sums are the same for all dtypes.
_NORM_ELEMENTS = 2**18


class StoredMatrix(NamedTuple):
    """A stored tensor: its name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(NUMPY_DTYPES[self.dtype]).itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; of a vector, of an element."""
        return self.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    def read(self, read: ReadTensor, start: int = 0, stop: int | None = None) -> Array:
        """Read rows, from ``start`` to ``stop``."""
        stop = self.shape[0] if stop is None else stop
        data = memoryview(bytearray((stop - start) * self.row_bytes))
        read(self.name, start * self.row_bytes, data)
        return widen(np.frombuffer(data, NUMPY_DTYPES[self.dtype]), self.dtype).reshape(stop - start, *self.shape[1:])

    def read_columns(self, read: ReadTensor, start: int, stop: int) -> Array:
        """Read columns of a matrix, from ``start`` to ``stop``."""
        size = (stop - start) * self.itemsize
        data = memoryview(bytearray(self.shape[0] * size))
        for row in range(self.shape[0]):
            read(self.name, row * self.row_bytes + start * self.itemsize, data[row * size : (row + 1) * size])
        return widen(np.frombuffer(data, NUMPY_DTYPES[self.dtype]), self.dtype).reshape(self.shape[0], stop - start)


class MatrixCache:
    """The matrices that threads read last, so that the blocks of a weight read its matrix once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[str, Array] = OrderedDict()

    def get(self, matrix: StoredMatrix, read: ReadTensor) -> Array:
        """Read a full matrix, unless it is kept."""
        with self._lock:
            if (found := self._kept.pop(matrix.name, None)) is None:
                found = matrix.read(read)
            self._kept[matrix.name] = found
            while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
            return found


class RowTransform:
    """Base of transforms that compute rows of a tensor, see :class:`Transform`; ``unit`` is at least a row."""

    result: StoredMatrix
    stored: StoredMatrix
    unit: int

    def rows(self, read: ReadTensor, start: int, stop: int) -> Array:
        """Compute rows from ``start`` to ``stop``, in float32."""
        raise NotImplementedError

    def fill(self, block: Bytes, start: int, read: ReadTensor, scratch: Scratch, /) -> None:
        """Fill a block with the bytes of the tensor from ``start`` on.

        Raises:
            SourceError: if a finite element becomes NaN, infinite, or too large for the dtype of the weight.
        """
        row_bytes = self.result.row_bytes
        first, last = start // row_bytes, -(-(start + len(block)) // row_bytes)
        with np.errstate(all="ignore"):  # results are checked
            values = np.ascontiguousarray(self.rows(read, first, last))
        self._check_finite(values, read, first, last)
        data = scratch.take("rows", (last - first) * row_bytes)
        try:
            convert(values.reshape(-1).view("u1").data, "F32", data, self.result.dtype)
        except OverflowError as error:
            raise self._too_large(error.args[1]) from error
        offset = start - first * row_bytes
        block[:] = data[offset : offset + len(block)]

    def reads(self, _start: int, _stop: int) -> tuple[()]:
        """Nothing is prefetched: which rows are read depends on the class."""
        return ()

    def _check_finite(self, values: Array, read: ReadTensor, start: int, stop: int) -> None:
        """Check that elements that are finite in the stored tensor are finite in the rows that were computed of it."""
        is_finite = np.isfinite(values)
        if is_finite.all():
            return
        wrong = values[~is_finite & np.isfinite(self.stored.read(read, start, stop))]
        if len(wrong):
            raise self._too_large(float(wrong[0]))

    def _too_large(self, value: float) -> SourceError:
        problem = "is not a number" if np.isnan(value) else f"is too large for {self.result.dtype}"
        return SourceError(
            f"{self.result.name}: an element becomes {value:g}, which {problem}: split the adapter with the model, "
            f"without {option(merge_adapter=True)}"
        )


@dataclass(frozen=True, slots=True)
class Vector(RowTransform):
    """The sum of a stored tensor and a scaled vector, or a tensor that is converted to another dtype.

    Attributes:
        result: name, dtype and shape of the result; it need not be stored.
        stored: the tensor.
        unit: see the base.
        added: the vector; None for none.
        scaling: its factor.
    """

    result: StoredMatrix
    stored: StoredMatrix
    unit: int
    added: StoredMatrix | None = None
    scaling: float = 1.0

    def rows(self, read: ReadTensor, start: int, stop: int) -> Array:
        """See the base."""
        values = self.stored.read(read, start, stop)
        return values if self.added is None else values + np.float32(self.scaling) * self.added.read(read, start, stop)


@dataclass(frozen=True, eq=False)
class LowRankUpdate(RowTransform):
    """A weight with the product of two low-rank matrices.

    Attributes:
        result: name, dtype and shape of the weight.
        stored: the tensor that it is computed from: the weight, or one that replaces it.
        unit: see the base.
        a: A, [rank, input].
        b: B, [output, rank].
        scaling: factor of B A.
        is_transposed: whether the weight is stored as [input, output].
        magnitude: with DoRA the norms of the result over input features, [output].
        cache: of the matrices that all rows read.
    """

    result: StoredMatrix
    stored: StoredMatrix
    unit: int
    a: StoredMatrix
    b: StoredMatrix
    scaling: float
    is_transposed: bool
    magnitude: StoredMatrix | None
    cache: MatrixCache
    _factor: list[Array] = field(default_factory=list)
    _lock: Any = field(default_factory=Lock)

    def rows(self, read: ReadTensor, start: int, stop: int) -> Array:
        """See the base."""
        values = self._sums(read, start, stop)
        if self.magnitude is None:
            return values
        if self.is_transposed:
            return values * self._column_factor(read)
        return values * self._ratio(self.magnitude.read(read, start, stop), np.square(values).sum(1))[:, None]

    def _sums(self, read: ReadTensor, start: int, stop: int) -> Array:
        """Rows of W + s B A as it is stored."""
        if self.is_transposed:
            left, right = self.a.read_columns(read, start, stop).T, self.cache.get(self.b, read).T
        else:
            left, right = self.b.read(read, start, stop), self.cache.get(self.a, read)
        values = self.stored.read(read, start, stop)
        values += (np.float32(self.scaling) * left) @ right
        return values

    def _column_factor(self, read: ReadTensor) -> Array:
        """The factors of the columns of a transposed weight, whose norms need all rows: the first block reads them."""
        with self._lock:
            if not self._factor:
                assert self.magnitude is not None
                squares = np.zeros(self.stored.shape[1], np.float32)
                for rows in self._row_blocks():
                    squares += np.square(self._sums(read, *rows)).sum(0)
                self._factor.append(self._ratio(self.magnitude.read(read), squares))
        return self._factor[0]

    def _row_blocks(self) -> Iterator[tuple[int, int]]:
        count, columns = self.stored.shape
        step = max(_NORM_ELEMENTS // max(columns, 1), 1)
        return ((start, min(start + step, count)) for start in range(0, count, step))

    def _ratio(self, magnitude: Array, squares: NDArray[np.float32]) -> Array:
        if not squares.all():
            raise SourceError(
                f"{self.result.name}: DoRA divides by the norm of a weight that is zero: split the adapter with the "
                f"model, without {option(merge_adapter=True)}"
            )
        return (magnitude / np.sqrt(squares)).astype(np.float32)
