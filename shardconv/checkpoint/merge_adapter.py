"""Merge a LoRA adapter into its base model while the model is split, as transforms of the source.

Equals ``merge_and_unload`` of PEFT except for rounding. Importing this module imports numpy, which only this needs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardconv.checkpoint.adapter import Adapter, fitted
from shardconv.checkpoint.formats import MERGED
from shardconv.checkpoint.low_rank import NUMPY_DTYPES, LowRankUpdate, MatrixCache, StoredMatrix, Vector
from shardconv.checkpoint.planning import PlannedSource
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.source_reader import StoredFiles, Transform, stored_files
from shardconv.errors import PlanError
from shardconv.plan.adapter import BIAS, INPUT, MAGNITUDE, A, AdaptedLayer, AdapterTensors, B, in_base
from shardconv.plan.plan import TensorSpec
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.tensor_groups import matcher_of


def merged_source(planned: PlannedSource, adapter: Adapter) -> Source:
    """The source of a model with an adapter merged into it.

    Args:
        planned: the base model.
        adapter: the adapter.

    Raises:
        PlanError: if the adapter does not fit the base model, or the base model is quantized.
    """
    source = planned.source
    if name := next((name for name, spec in planned.tensors.items() if spec.grid is not None), None):
        raise PlanError(
            f"{name}: is quantized, and an adapter cannot be merged into quantized weights: split the model with "
            f"--adapter, without --merge-adapter"
        )
    if source.transforms:
        raise PlanError(
            f"{source.path}: its tensors are converted while they are read: write the checkpoint first (shardconv "
            f"merge, after a split), and merge the adapter into the result"
        )
    merge = _Merge(adapter, source.specs, planned.resolution.resolver.rules)
    return replace(
        source,
        stored=_with_files(source.stored or stored_files(source), stored_files(adapter.source)),
        transforms=merge.transforms(),
        derived=(*source.derived, f"the adapter {adapter.source.name} {MERGED}"),
    )


def _with_files(one: StoredFiles, other: StoredFiles) -> StoredFiles:
    """The files of both."""
    moved = {
        name: shards._replace(files=tuple(file + len(one.paths) for file in shards.files))
        for name, shards in other.shards.items()
    }
    return StoredFiles(
        (*one.paths, *other.paths),
        (*one.prefixes, *other.prefixes),
        (*one.sizes, *other.sizes),
        {**one.tensors, **other.tensors},
        {**one.shards, **moved},
    )


class _Merge:
    """An adapter and the tensors of its base model.

    Args:
        adapter: the adapter.
        base: name to dtype and shape of the tensors of the base model.
        rules: of the base model.
    """

    def __init__(self, adapter: Adapter, base: Mapping[str, TensorSpec], rules: RuleSet) -> None:
        self._settings, self._base, self._rules = adapter.settings, base, rules
        self._specs = fitted(adapter, rules, base)
        self._tensors = AdapterTensors.of_names(self._specs)
        self._cache, self._matching = MatrixCache(), matcher_of(rules)

    def transforms(self) -> dict[str, Transform]:
        """The transform of each tensor of the base model that changes.

        Raises:
            PlanError: if a tensor cannot be merged.
        """
        found: dict[str, Transform] = {}
        for target, name in self._tensors.replaced.items():
            self._check_tie(target, name)
            result = self._of_base(target, name)
            found[result.name] = Vector(result, self._of_adapter(name))
        for layer in self._tensors.layers.values():
            found |= self._of_layer(layer)
        return found

    def _of_layer(self, layer: AdaptedLayer) -> Iterator[tuple[str, Transform]]:
        """Yield the transform of the weight of an adapted layer, and that of its bias if the adapter has one."""
        parts = {part: self._of_adapter(name) for part, name in layer.tensors.items()}
        scaling = self._settings.scaling(layer.module)
        result = self._of_base(f"{layer.module}.weight", layer.tensors[A])
        grid = self._specs[layer.tensors[A]].grid
        assert grid is not None
        yield (
            result.name,
            LowRankUpdate(
                result,
                self._before(f"{layer.module}.weight", result),
                parts[A],
                parts[B],
                scaling,
                grid.axes[0] == INPUT,
                parts.get(MAGNITUDE),
                self._cache,
            ),
        )
        if BIAS in parts:
            bias = self._of_base(f"{layer.module}.bias", layer.tensors[BIAS])
            yield bias.name, Vector(bias, self._before(f"{layer.module}.bias", bias), parts[BIAS], scaling)

    def _before(self, target: str, result: StoredMatrix) -> StoredMatrix:
        """The tensor to which a product is added: that of the base model, or the one that replaces it."""
        name = self._tensors.replaced.get(target)
        return result if name is None else self._of_adapter(name)

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
        table = self._specs[name].shape
        is_table = len(table) > 1 and ".base_layer." not in name and "embed" in self._style(target)
        if (
            is_table
            and sum(spec.shape == table and "embed" in self._style(one) for one, spec in self._base.items()) < 2
        ):
            raise PlanError(
                f"{name}: replaces {target}, which may be tied to the head: merge the adapter with PEFT, and save the "
                f"model with both"
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
