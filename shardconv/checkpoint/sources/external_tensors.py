"""The full tensors of rank files of other tools, by the layout that describes them."""

import re
from collections import Counter
from collections.abc import Collection, Mapping

from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import geometry, unsharded
from shardconv.checkpoint.sources.external_files import FullTensors, RankFiles, refuse_missing
from shardconv.checkpoint.sources.row_order import RotaryRows
from shardconv.checkpoint.sources.vllm_files import StoredTensor
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.folder import AnyPath
from shardconv.layouts.external import ExternalLayout, FullTensor, Known
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError, SourceError
from shardconv.support.formatting import counted

#: The number of a layer in a name.
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")
_AGAIN = "copy the folder again"
_OTHERS = f"{_AGAIN}, or pass the checkpoint that the ranks have shards of"


def full_tensors(
    folder: AnyPath, layout: ExternalLayout, found: RankFiles, config: Mapping[str, object]
) -> FullTensors:
    """Assemble the full tensors.

    Args:
        folder: the folder, for messages.
        layout: of its rank files.
        found: the rank files.
        config: the config that their shapes must fit.

    Raises:
        SourceError: if a tensor is unknown, missing on a rank, or does not fit the config.
    """
    tensors = FullTensors({}, {}, {}, {})
    names = list(dict.fromkeys(name for rank in found.ranks for name in rank))
    _check_even(folder, layout, found)
    _check_ranks(folder, layout, found, config)
    for name in names:
        if layout.is_left_out(name):
            continue
        if (known := layout.known(name)) is None:
            raise SourceError(
                f"{folder}: tensor {name} is unknown in {layout.title}: only models that this layout describes are "
                f"supported"
            )
        _add(tensors, folder, name, known, found, config)
    _check_layers(folder, tensors.specs, config)
    return tensors


def _add(
    tensors: FullTensors, folder: AnyPath, name: str, known: Known, found: RankFiles, config: Mapping[str, object]
) -> None:
    """Add one full tensor."""
    shards = [rank[name] for rank in found.ranks if name in rank]
    dtypes = sorted({shard.spec.dtype for shard in shards})
    if len(shards) < len(found.ranks) and not known.rule.is_on_one_rank:
        missing = next(rank for rank, held in enumerate(found.ranks) if name not in held)
        raise SourceError(f"{folder}: rank {missing} does not have {name}, which other ranks have: {_OTHERS}")
    if len(dtypes) > 1:
        raise SourceError(
            f"{folder}: {name} has several dtypes (got {', '.join(dtypes)}, expected the same on all ranks)"
        )
    if known.name in tensors.specs:
        raise SourceError(f"{folder}: two tensors are {known.name} (got {name} as the second, expected one)")
    try:
        full = known.rule.full([shard.spec.shape for shard in shards], config)
    except PlanError as error:
        raise SourceError(
            f"{folder}: {name}: {error}: files of a rank are missing, or the config is that of another model"
        ) from error
    spec = TensorSpec(dtypes[0], full.shape)
    tensors.specs[known.name] = spec
    stored = name if full.rotary_heads else known.name
    tensors.stored[stored] = spec
    tensors.shards[stored] = _shards(folder, name, spec, full, shards)
    if full.rotary_heads:
        row_bytes = num_bytes(spec.dtype, spec.shape[1:])
        tensors.transforms[known.name] = RotaryRows(name, spec.shape[0] // full.rotary_heads, row_bytes)


def _shards(folder: AnyPath, name: str, spec: TensorSpec, full: FullTensor, shards: list[StoredTensor]) -> Shards:
    files, offsets = tuple(shard.file for shard in shards), tuple(shard.offset for shard in shards)
    try:
        if len(shards) == 1:
            return Shards(unsharded(num_bytes(*spec[:2])), files, offsets)
        return Shards(geometry(full.placement, spec.dtype, spec.shape), files, offsets)
    except ValueError as error:
        raise SourceError(f"{folder}: {name} cannot be merged: {error}") from error


def _check_even(folder: AnyPath, layout: ExternalLayout, found: RankFiles) -> None:
    """Check that each tensor of one rank is on no other, and that ranks have equal numbers of them."""
    single = [
        [name for name in rank if (known := layout.known(name)) is not None and known.rule.is_on_one_rank]
        for rank in found.ranks
    ]
    counts = Counter(name for names in single for name in names)
    if (name := next((name for name, count in counts.items() if count > 1), None)) is not None:
        raise SourceError(f"{folder}: {name} is on {counts[name]} ranks (expected one): {_AGAIN}")
    if len({len(names) for names in single}) > 1:
        numbers = ", ".join(str(len(names)) for names in single)
        raise SourceError(
            f"{folder}: ranks have different numbers of experts' tensors (got {numbers}, "
            f"expected equal numbers): {_AGAIN}"
        )


def _check_ranks(folder: AnyPath, layout: ExternalLayout, found: RankFiles, config: Mapping[str, object]) -> None:
    """Check the number of files where their names do not have it: the last ones may be missing."""
    for name, shard in found.ranks[0].items():
        if (known := layout.known(name)) is None:
            continue
        try:
            expected = known.rule.num_ranks(shard.spec.shape, config)
        except PlanError as error:
            raise SourceError(f"{folder}: {name}: {error}: correct the config") from error
        if expected is not None:
            refuse_missing(folder, layout, [path.name for path in found.paths], range(len(found.ranks), expected))
            return


def _check_layers(folder: AnyPath, specs: Collection[str], config: Mapping[str, object]) -> None:
    """Check that all layers of the config have tensors."""
    layers = {int(match[1]) for name in specs if (match := _LAYER.match(name)) is not None}
    expected = config.get("num_hidden_layers", len(layers))
    if layers != set(range(len(layers))) or len(layers) != expected:
        raise SourceError(f"{folder}: has tensors of {counted(len(layers), 'layer')} (expected {expected}): {_AGAIN}")
