"""Merge a LoRA adapter into its base model while the model is split, as transforms of the source.

Tensors of model and adapter that are computed while they are read, such as from Meta's files, are read through
their transforms. Equals ``merge_and_unload`` of PEFT except for rounding.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from shardconv.checkpoint.adapters.adapter import AnyAdapter, fitted
from shardconv.checkpoint.adapters.adapter_settings import Adapter
from shardconv.checkpoint.adapters.low_rank import (
    NUMPY_DTYPES,
    LowRankUpdate,
    MatrixCache,
    RowTransform,
    StoredMatrix,
    Vector,
)
from shardconv.checkpoint.sources.dtype_conversion import DtypeConversion
from shardconv.checkpoint.sources.planning import PlannedSource
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import StoredTensors
from shardconv.files.weight_formats import ADAPTER_CONFIG
from shardconv.plan.adapter_plan import BIAS, INPUT, MAGNITUDE, A, AdaptedLayer, AdapterTensors, B, in_base
from shardconv.plan.families.loading import model_type_of
from shardconv.plan.grid import VALUES
from shardconv.plan.plan import TensorSpec
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.tensor_groups import matcher_of
from shardconv.support.errors import PlanError, option


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
