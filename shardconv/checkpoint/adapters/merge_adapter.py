"""Merge a LoRA adapter into its base model while the model is split, as transforms of the source.

Tensors of model and adapter that are computed while they are read, such as from Meta's files, are read through
their transforms. Equals ``merge_and_unload`` of PEFT except for rounding.

A weight W of shape [output, input] becomes W' = W + s B A, with DoRA (m / |W'|) W', where each row has its norm.
Weights that are stored as [input, output] become the transpose of that. numpy computes blocks of rows: sums in float32,
rounded once to the dtype of the weight, to nearest, ties to even.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shardconv.checkpoint.adapters.adapter import AnyAdapter, fitted
from shardconv.checkpoint.adapters.adapter_settings import Adapter
from shardconv.checkpoint.engine.arrays import round_to, widen
from shardconv.checkpoint.engine.copy import ReadTensor, Scratch
from shardconv.checkpoint.sources.dtype_conversion import DtypeConversion
from shardconv.checkpoint.sources.planning import PlannedSource
from shardconv.checkpoint.sources.source import Source, StoredTensors
from shardconv.files.fileio import Bytes
from shardconv.files.weight_formats import ADAPTER_CONFIG
from shardconv.plan.adapter_plan import BIAS, INPUT, MAGNITUDE, A, AdaptedLayer, AdapterTensors, B, in_base
from shardconv.plan.families.loading import model_type_of
from shardconv.plan.grid import VALUES
from shardconv.plan.plan import TensorSpec
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.tensor_groups import matcher_of
from shardconv.support.errors import PlanError, SourceError, option

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
        """Bytes of a row, or of an element of a vector."""
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
            found = self._kept.get(matrix.name)
        if found is None:
            found = matrix.read(read)  # without the lock: it may wait for buffers of a thread that waits for the lock
        with self._lock:
            self._kept[matrix.name] = found
            self._kept.move_to_end(matrix.name)
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
            round_to(values.reshape(-1).view("u1").data, "F32", data, self.result.dtype)
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
        if not self._factor:  # without a lock: reads may wait for buffers of a thread that waits for it
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


def with_merged_adapter(planned: PlannedSource, adapter: AnyAdapter) -> PlannedSource:
    """A model with an adapter merged into it.

    Args:
        planned: the base model.
        adapter: the adapter.

    Raises:
        PlanError: if the adapter does not fit the base model, or the base model is quantized.
    """
    source = planned.source
    grids = {name: spec.grid for name, spec in planned.tensors.items() if spec.grid is not None}
    if layer := next((grid.logical_name(name) for name, grid in grids.items() if grid.role == VALUES), None):
        raise PlanError(
            f"{source.path}: is quantized (got {layer.removesuffix('.weight')}, ...), and an adapter cannot be merged "
            f"into quantized weights: split the model with {option('adapters')}, without {option(merge_adapter=True)}"
        )
    adapter = adapter.on(source.specs, planned.planner.rules, model_type_of(source.config or {}))
    merge = _Merge(adapter, source, planned.planner.rules)
    settings = [path for name, path in adapter.source.auxiliary_files.items() if name == ADAPTER_CONFIG]
    merged = replace(
        source,
        converted_from=merge.stored(),
        derived=(*source.derived, f"the adapter {adapter.source.name} is merged into it"),
        merged_adapter=adapter.source.name,
    )
    return planned._replace(
        source=merged,
        planner=planned.planner.assuming(*planned.planner.assumed, *merge.assumed()),
        paths=(*planned.paths, *adapter.source.paths, *settings),
    )


class _Merge:
    """An adapter and the tensors of its base model.

    Sums are computed of the values before a conversion to another dtype, and rounded once, to that dtype.

    Args:
        adapter: the adapter.
        source: the base model.
        rules: of the base model.
    """

    def __init__(self, adapter: Adapter, source: Source, rules: RuleSet) -> None:
        self._settings, self._base, self._rules = adapter.settings, source.specs, rules
        *lower, last = source.stored.layers or ({},)
        self._conversions = {
            name: one
            for name, one in last.items()
            if isinstance(one, DtypeConversion) and one.stored_dtype in NUMPY_DTYPES
        }
        others = {name: one for name, one in last.items() if name not in self._conversions}
        self._inputs = replace(source.stored, layers=(*lower, others)).joined(adapter.source.stored)
        self._specs = fitted(adapter, rules, source.specs)
        self._tensors = AdapterTensors.of_names(self._specs)
        self._cache, self._matching = MatrixCache(), matcher_of(rules)

    def stored(self) -> StoredTensors:
        """The tensors of the merged model.

        Raises:
            PlanError: if a tensor cannot be merged.
        """
        return self._inputs.with_layer({**self._conversions, **self._transforms()})

    def _transforms(self) -> dict[str, RowTransform]:
        """The transform of each tensor of the base model that changes."""
        found: dict[str, RowTransform] = {}
        for target, name in self._tensors.replaced.items():
            self._check_tie(target, name)
            result = self._of_base(target, name)
            replacement = self._of_adapter(name)
            found[result.name] = Vector(result, replacement, self._unit(result, replacement))
        for layer in self._tensors.layers.values():
            found |= self._of_layer(layer)
        return found

    def assumed(self) -> Iterator[str]:
        """Yield which of the adapted embedding tables may be tied to the head, which then changes, too."""
        for layer in self._tensors.layers.values():
            table = in_base(f"{layer.module}.weight", self._base, self._rules)
            if table is not None and self._is_only_table(table):
                yield (
                    f"{table}: the adapter is merged into it, and into the head if the two are tied, as by PEFT's "
                    f"merge_and_unload; an adapter that is not merged changes the embedding only"
                )

    def _unit(self, result: StoredMatrix, stored: StoredMatrix) -> int:
        """Bytes of a row of the result, or the unit of the transform that computes the stored tensor."""
        transform = self._inputs.transform_of(stored.name)
        inner = transform.unit * result.itemsize // stored.itemsize if transform else 0
        return max(inner, result.row_bytes)

    def _of_layer(self, layer: AdaptedLayer) -> Iterator[tuple[str, RowTransform]]:
        """Yield the transforms of the weight of an adapted layer, and of its bias if the adapter has one."""
        parts = {part: self._of_adapter(name) for part, name in layer.tensors.items()}
        scaling = self._settings.scaling(layer.module)
        result = self._of_base(f"{layer.module}.weight", layer.tensors[A])
        grid = self._specs[layer.tensors[A]].grid
        assert grid is not None
        before = self._before(f"{layer.module}.weight", result)
        yield (
            result.name,
            LowRankUpdate(
                result, before, self._unit(result, before), parts[A], parts[B], scaling, grid.axes[0] == INPUT,
                parts.get(MAGNITUDE), self._cache,
            ),
        )  # fmt: skip
        if BIAS in parts:
            bias = self._of_base(f"{layer.module}.bias", layer.tensors[BIAS])
            before = self._before(f"{layer.module}.bias", bias)
            yield bias.name, Vector(bias, before, self._unit(bias, before), parts[BIAS], scaling)

    def _before(self, target: str, result: StoredMatrix) -> StoredMatrix:
        """The tensor to which a product is added: of the base model, or its replacement."""
        if (name := self._tensors.replaced.get(target)) is not None:
            return self._of_adapter(name)
        conversion = self._conversions.get(result.name)
        return result if conversion is None else result._replace(dtype=conversion.stored_dtype)

    def _of_base(self, target: str, name: str) -> StoredMatrix:
        """A tensor of the base model, which the tensor ``name`` of the adapter changes."""
        found = in_base(target, self._base, self._rules)
        if found is None:
            raise PlanError(f"{name}: cannot be merged, as the base model does not have {target}")
        return _matrix(found, self._base[found])

    def _of_adapter(self, name: str) -> StoredMatrix:
        return _matrix(name, self._specs[name])

    def _check_tie(self, target: str, name: str) -> None:
        """Refuse to replace an embedding table that may be tied to the head, whose weight PEFT keeps."""
        if ".base_layer." not in name and self._is_only_table(self._of_base(target, name).name):
            raise PlanError(
                f"{name}: replaces {target}, which may be tied to the head: merge the adapter with PEFT, and save the "
                f"model with both"
            )

    def _is_only_table(self, name: str) -> bool:
        """Whether no other table has the shape of this embedding table of the base model: a head may be tied."""
        shape = self._base[name].shape
        return (
            len(shape) > 1
            and "embed" in self._style(name)
            and sum(spec.shape == shape and "embed" in self._style(one) for one, spec in self._base.items()) < 2
        )

    def _style(self, name: str) -> str:
        ruled, matcher = self._matching
        match = matcher.match(name)
        return "" if match is None else ruled[match.pattern_index][0].style


def _matrix(name: str, spec: TensorSpec) -> StoredMatrix:
    if spec.dtype not in NUMPY_DTYPES:
        raise PlanError(
            f"{name}: has dtype {spec.dtype} (expected {', '.join(NUMPY_DTYPES)}): an adapter cannot be merged with it"
        )
    return StoredMatrix(name, spec.dtype, spec.shape)
