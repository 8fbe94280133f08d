"""The full tensors of rank files of another tool, under the names of a Hugging Face checkpoint, by their layout.

Most layouts name the dim that ranks shard. For rank files of an engine, the dims follow from the plan of its model:
the tensors of every rank must equal a split by this plan.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.engine.geometry import geometry, unsharded
from shardconv.checkpoint.engine.layout import in_file_order, lay_out_ranks
from shardconv.checkpoint.sources.joined import RotaryRows
from shardconv.checkpoint.sources.layout_files import RankFiles, RankFileTensor, refuse_missing
from shardconv.checkpoint.sources.stored_tensors import StoredTensors, Transform
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.folder import AnyPath
from shardconv.layouts.choice import choose_layout
from shardconv.layouts.full_shapes import FullTensor, check_layers, check_pairs, full_tensor, num_ranks, planned_tensors
from shardconv.layouts.layout import FileLayout
from shardconv.layouts.layout_file import LayoutFile
from shardconv.layouts.relation import Related, find_target
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.support.errors import IntegrityError, PlanError, SourceError

#: Name to dtype and shape of each full tensor, and where they are stored.
FullTensors = tuple[dict[str, TensorSpec], StoredTensors]
_AGAIN = "copy the folder again"
_OTHERS = f"{_AGAIN}, or pass the checkpoint that the ranks have shards of"
_OTHER_MODEL = (
    "rank files are missing, or config.json belongs to another model: save the folder again, or use the checkpoint "
    "that the engine was started with"
)


def read_full_tensors(
    folder: AnyPath, layout: LayoutFile, found: RankFiles, config: Mapping[str, object]
) -> FullTensors:
    """Assemble the full tensors.

    Args:
        folder: the folder, for messages.
        layout: of its rank files.
        found: the rank files.
        config: the config that their shapes must fit.

    Raises:
        SourceError: if a tensor is unknown, missing on a rank, or does not fit the config.
        IntegrityError: if a constant has another value.
    """
    if layout.engine is not None:
        return _by_plan(folder, layout, found, config)
    rules = layout.all_rules
    names = [name for name in _names(found) if not rules.is_without_source(name)]
    related = {name: one for name in names if (one := find_target(rules.rules, name)) is not None}
    _check_even(folder, related, found)
    _check_ranks(folder, layout, related, found, config)
    specs: dict[str, TensorSpec] = {}
    shards: dict[str, Shards] = {}
    transforms: dict[str, Transform] = {}
    for name in names:
        if name not in related:
            raise SourceError(
                f"{folder}: tensor {name} is unknown in {layout.title}: only models that this layout describes are "
                f"supported"
            )
        (source,), held = related[name].sources, _shards_of(folder, name, found, related[name])
        if source in specs:
            raise SourceError(f"{folder}: two tensors are {source} (got {name} as the second, expected one)")
        full = _full_tensor(folder, name, related[name], held, config)
        spec = specs[source] = TensorSpec(held[0].spec.dtype, full.shape)
        try:
            whole = unsharded(num_bytes(*spec[:2])) if len(held) == 1 else geometry(full.placement, *spec[:2])
        except ValueError as error:
            raise SourceError(f"{folder}: {name} cannot be merged: {error}: {_AGAIN}") from error
        stored = name if full.rotary_heads else source
        shards[stored] = Shards(whole, tuple(one.file for one in held), tuple(one.offset for one in held))
        if full.rotary_heads:
            row_bytes = num_bytes(spec.dtype, spec.shape[1:])
            transforms[source] = RotaryRows(name, spec.shape[0] // full.rotary_heads, row_bytes)
    try:
        check_layers(specs, config)
    except PlanError as error:
        raise SourceError(f"{folder}: {error.message}: {_AGAIN}") from error
    return specs, StoredTensors(found.files, shards).with_layer(transforms)


def _names(found: RankFiles) -> list[str]:
    return list(dict.fromkeys(name for rank in found.ranks for name in rank))


def _full_tensor(
    folder: AnyPath, name: str, related: Related, shards: Sequence[RankFileTensor], config: Mapping[str, object]
) -> FullTensor:
    try:
        return full_tensor(related.rule.options, [shard.spec.shape for shard in shards], config)
    except PlanError as error:
        raise SourceError(
            f"{folder}: {name}: {error.message}: files of a rank are missing, or the config belongs to another model"
        ) from error


def _shards_of(folder: AnyPath, name: str, found: RankFiles, related: Related | None = None) -> list[RankFileTensor]:
    """The shards of a tensor by rank, all of the same dtype; every rank has one unless a rule says otherwise."""
    shards = [rank[name] for rank in found.ranks if name in rank]
    on_all = related is None or not related.rule.options.on_one_rank
    if len(shards) < len(found.ranks) and on_all:
        missing = next(rank for rank, held in enumerate(found.ranks) if name not in held)
        raise SourceError(f"{folder}: rank {missing} does not have {name}, which other ranks have: {_OTHERS}")
    dtypes = sorted({shard.spec.dtype for shard in shards})
    if len(dtypes) > 1:
        raise SourceError(
            f"{folder}: {name} has several dtypes (got {', '.join(dtypes)}, expected the same on all ranks)"
        )
    return shards


def _check_even(folder: AnyPath, related: Mapping[str, Related], found: RankFiles) -> None:
    """Check that each tensor of one rank is on no other, and that ranks have equal numbers of them."""
    single = [
        [name for name in rank if name in related and related[name].rule.options.on_one_rank] for rank in found.ranks
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


def _check_ranks(
    folder: AnyPath, layout: LayoutFile, related: Mapping[str, Related], found: RankFiles, config: Mapping[str, object]
) -> None:
    """Check the number of files where their names do not have it: the last ones may be missing."""
    for name, one in related.items():
        if (shard := found.ranks[0].get(name)) is None:
            continue
        try:
            expected = num_ranks(one.rule.options, shard.spec.shape, config)
        except PlanError as error:
            raise SourceError(f"{folder}: {name}: {error.message}: correct the config") from error
        if expected is not None:
            refuse_missing(folder, layout, [file.path.name for file in found.files], range(len(found.ranks), expected))
            return


# --- rank files of an engine ----------------------------------------------------------------------------------------


def _by_plan(folder: AnyPath, layout: LayoutFile, found: RankFiles, config: Mapping[str, object]) -> FullTensors:
    """The full tensors of which a split in this layout has the same rank files, except for the order of tensors."""
    for name in _names(found):
        _shards_of(folder, name, found)
    tp, request = len(found.ranks), PlanRequest(engine=layout.engine)
    rank_tensors = {name: stored.spec for name, stored in found.ranks[0].items()}
    try:
        full = planned_tensors(layout.key, rank_tensors, tp, config, request)
        planner = planner_for(full, config, request)
        file_layout = choose_layout(layout.key, full, config)
        try:
            plan = planner.plan(tp)
        except PlanError as error:
            raise SourceError(
                f"{folder}: has files of {tp} ranks, but its model cannot be sharded for tp {tp} ({error.problem}): "
                f"{_OTHER_MODEL}"
            ) from error
        check_pairs(plan, full)
        tensors = in_file_order(full)
        file_layout.check(tensors, plan)
    except PlanError as error:
        raise SourceError(
            f"{folder}: was saved by {layout.engine}, and its full tensors cannot be derived: {error.problem}. Only "
            f"dense unquantized models are supported: for others, use the checkpoint that the engine was started with"
        ) from error
    _check_tensors(folder, found, tensors, plan, file_layout)
    stored = StoredTensors(found.files, dict(_planned_shards(found, tensors, plan, file_layout)))
    _check_constants(found, stored, file_layout)
    return tensors, stored


def _check_tensors(
    folder: AnyPath, found: RankFiles, tensors: Mapping[str, TensorSpec], plan: Plan, layout: FileLayout
) -> None:
    """Check that ranks have the tensors of the layout; constants may be missing, as no source tensor is in them."""
    constants = {constant.name for constant in layout.constants}
    for rank, header in enumerate(lay_out_ranks(tensors, plan, {}, layout=layout).headers):
        expected, held = header.specs, {name: stored.spec for name, stored in found.ranks[rank].items()}
        for name in [*held, *(expected.keys() - constants)]:
            if held.get(name) != expected.get(name):
                raise SourceError(
                    f"{folder}: {name} is {_describe(held.get(name))} on rank {rank} (expected "
                    f"{_describe(expected.get(name))} by config.json for {plan.tp} ranks): {_OTHER_MODEL}"
                )


def _describe(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _check_constants(found: RankFiles, stored: StoredTensors, layout: FileLayout) -> None:
    """Check the values of constants, because they are not in the full tensors."""
    with stored.open() as inputs:
        for constant, rank in product(layout.constants, found.ranks):
            if (held := rank.get(constant.name)) is None:
                continue
            data = memoryview(bytearray(len(constant.data)))
            inputs.read(held.file, data, held.offset)
            if data != constant.data:
                raise IntegrityError(
                    f"{found.files[held.file].path}: {constant.name} has other values (expected the constant "
                    f"{constant.value:g}): use the checkpoint that the engine was started with"
                )


def _planned_shards(
    found: RankFiles, tensors: Mapping[str, TensorSpec], plan: Plan, layout: FileLayout
) -> Iterator[tuple[str, Shards]]:
    """Each tensor with the positions of its shards, which are one behind the other in a file tensor."""
    for file_tensor in layout.file_tensors(tensors):
        stored = [rank[file_tensor.name] for rank in found.ranks]
        files, offsets = [one.file for one in stored], [one.offset for one in stored]
        for name in file_tensor.members:
            placement, (dtype, shape, *_) = plan.placement(name), tensors[name]
            yield name, Shards(geometry(placement, dtype, shape), tuple(files), tuple(offsets))
            sizes = [num_bytes(dtype, placement.shard_shape(shape, rank)) for rank in range(plan.tp)]
            offsets = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
