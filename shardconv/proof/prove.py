"""Prove a plan: a small model, sharded by the same rules, computes the same as the unsharded small model.

Reads headers and config of the source only. The small model is randomly initialized. The report lists the tensors of
the source that the small model does not have, which the proof does not cover.

For a quantized source, dequantizing the shard of a weight must give the shard of the dequantized weight. Weights with
equal grids and placements are one kind, of which one is compared. It has random values, and in a dim that is not
sharded only a few blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import lcm
from typing import Any, Unpack

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from shardconv.checkpoint.engine.copy import Progress
from shardconv.checkpoint.operations.pipeline import Options, call_on_each, on_pipelines, open_source_pipeline
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.planning import PlanOptions, plan_source
from shardconv.checkpoint.sources.source import Source
from shardconv.convert.model import DTYPE_NAMES
from shardconv.files.folder import AnyPath
from shardconv.files.paths import SourcePath, open_path
from shardconv.layers.sharding import take_shard
from shardconv.plan.families.family import NAMES_FAMILY
from shardconv.plan.families.matcher import starred
from shardconv.plan.grid import GROUP_INDEX, PLAIN, SCALE, SHAPE, VALUES, ZERO_POINT, Grid
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan, TensorPlan, TensorSpec, logical_tensors
from shardconv.plan.planner import Planner, tp_sizes
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.proof.compare import SMALL, heads_for, padding_mismatch, write_small_model
from shardconv.proof.model_check import require_model
from shardconv.proof.ranks import Proof, prove_all
from shardconv.runtime.rank_tensors import Stored, dequantize, is_readable
from shardconv.support.errors import PlanError, RunError, UsageError, option
from shardconv.support.temporary import temporary_folder

#: The tensor parallel sizes to try: small models have four heads and two KV heads.
PROOF_TPS = (2, 4)
#: Further sizes to try if the plan supports them, which can be wrong if it splits inside heads.
_BEYOND = (8,)


class ProofReport(Struct, frozen=True):
    """Report of ``shardconv plan --prove``.

    Attributes:
        source: the path.
        family: the model family whose rules were used.
        model: the class of the small model.
        num_parameters: of the small model.
        proofs: one for each tensor parallel size that was tried.
        skipped: the tensor parallel sizes that were not tried, each with the reason.
        note: the heads of the small model that are smaller than the source's; "" if there are none.
        supported_tp: the tensor parallel sizes that the source supports.
        num_grids: kinds of quantized weights, of which dequantized shards were compared; 0 without quantization.
        grid_differences: the tensors whose dequantized shards are not the shards of the dequantized weight.
        unreached: names of tensors of the source that the small model does not have, and the proof does not cover; with
            a star for each layer number.
        is_proven: whether there is a proof, every proof is right, and all dequantized shards are.
    """

    source: str
    family: str
    model: str
    num_parameters: int
    proofs: tuple[Proof, ...]
    skipped: tuple[str, ...]
    note: str
    supported_tp: tuple[int, ...]
    num_grids: int
    grid_differences: tuple[str, ...]
    unreached: tuple[str, ...]
    is_proven: bool


class PipelineProof(Struct, frozen=True):
    """Proofs of the components of a pipeline of diffusers that are sharded.

    Attributes:
        source: the path.
        components: name to the proof of each component.
        is_proven: whether all are proven.
    """

    source: str
    components: Mapping[str, ProofReport]
    is_proven: bool


def prove_each(operation: Callable[..., ProofReport], paths: list[AnyPath], options: Options) -> Any:
    """Prove the plan of each component of a pipeline: a :class:`PipelineProof`."""
    reports = call_on_each(operation, open_source_pipeline(paths, options), options)
    return PipelineProof(str(paths[0]), reports, all(one.is_proven for one in reports.values()))


@on_pipelines(prove_each)
def prove(
    src: SourcePath,
    *,
    tps: Sequence[int] = (),
    check_model: bool = True,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> ProofReport:
    """Prove the plan of a source on the CPU, with a small model.

    The heads of the small model have the size of the source's, and with ``pad`` their number, if such a model can be
    built. A tensor parallel size at which the small model is padded differently from the source is skipped. The small
    model is not quantized; for a quantized source, dequantized shards of random values are compared as well.

    Args:
        src: a ``.safetensors`` or PyTorch file, an index file, or a folder, with a config that names a class of
            transformers. Of a pipeline of diffusers, the result is a :class:`PipelineProof`.
        tps: tensor parallel sizes to try; by default 2 and 4, and 8 if the plan of the small model supports it.
        check_model: first compare names and shapes of the source with the model that its config names.
        progress: called with the number of tensor parallel sizes that were compared, and of all.
        options: see :class:`~shardconv.checkpoint.sources.planning.PlanOptions`.

    Raises:
        SourceError: if the checkpoint cannot be read, or with ``check_model`` does not have the tensors of its model.
        PlanError: if no rules exist for it.
        UsageError: if the family or a tensor parallel size is not valid, or an option does not apply to it.
        RunError: if the small model cannot be built or run.

    Example:
        >>> shardconv.prove("llama").is_proven  # doctest: +SKIP
        True
    """
    path = open_path(src)
    planned = plan_source(path, **options)
    source, request = planned.source, replace(planned.request, allow_unmatched_rules=True)
    config, tensors = require_config(source), logical_tensors(planned.tensors)
    if check_model:
        require_model(config, tensors, str(path))
    planner, pads = planned.planner, bool(request.pad)
    possible, unsupported = _plans(planner, tps)
    with temporary_folder() as folder:
        model, note = write_small_model(config, folder, heads=heads_for([*possible]), has_real_counts=pads)
        small = open_source(folder / SMALL)
        of_small = planner_for(small.specs, small.config, request)
        plans, not_small = ({}, {}) if unsupported and not possible else _small_plans(of_small, [*possible])
        mismatched = {tp: reason for tp in plans if (reason := padding_mismatch(planner, of_small, tp))}
        proofs = prove_all(folder, small, {tp: plans[tp] for tp in plans if tp not in mismatched}, request, progress)
        proofs = tuple(_with_remedy(proof, of_small, request) for proof in proofs)
    grids = list(_compare_grids(planned.tensors, planner, _plans(planner, [proof.tp for proof in proofs])[0]))
    differences = tuple(f"{name}: {difference}" for name, difference in grids if difference)
    return ProofReport(
        source=str(path),
        family=planner.rules.family,
        model=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        proofs=proofs,
        skipped=(
            *skipped_sizes(str(path), unsupported, not_small, has_plan_file=request.plan_file is not None),
            *(f"tp {tp}: {reason}" for tp, reason in mismatched.items()),
        ),
        note=note,
        supported_tp=tp_sizes(planner).usable(pad=pads),
        num_grids=len({name for name, _ in grids}),
        grid_differences=differences,
        unreached=tuple(sorted({*map(starred, tensors)} - {*map(starred, small.specs)})),
        is_proven=bool(proofs) and all(proof.has_passed for proof in proofs) and not differences,
    )


def _with_remedy(proof: Proof, planner: Planner, request: PlanRequest) -> Proof:
    """Add to the note of a model that failed to run that module overrides do not have to fit rules of a plan file."""
    overrides = [rule for model_rules in planner.rules.models for _, rule in model_rules.modules()]
    if proof.output is not None or request.plan_file is None or all(rule.by_user for rule in overrides):
        return proof
    name, family = request.plan_file[0], planner.rules.family
    return replace(
        proof,
        note=f"{proof.note.rstrip()}. The module overrides of family {family} apply, too: if they do not fit the rules "
        f'of {name}, begin it with inherits = "{NAMES_FAMILY}", and add rules for the other tensors',
    )


def _compare_grids(
    tensors: Mapping[str, TensorSpec], planner: Planner, plans: Mapping[int, Plan]
) -> Iterator[tuple[str, str]]:
    """As :func:`~shardconv.proof.prove.grid_differences`, for each tensor parallel size."""
    if not any(spec.grid for spec in tensors.values()):
        return
    of_weights = Planner(logical_tensors(tensors), planner.rules)
    for tp, plan in plans.items():
        yield from grid_differences(tensors, of_weights.plan(tp), plan)


def require_config(source: Source) -> Mapping[str, object]:
    """The config of a source, which names the class of the small model.

    Raises:
        RunError: if the source does not have a config.
    """
    if source.config is None:
        raise RunError(
            f"{source.path}: a proof builds a small model from config.json, and this source does not have one: pass "
            f"{option(config='FILE')}"
        )
    return source.config


def _small_plans(planner: Planner, tps: Sequence[int]) -> tuple[dict[int, Plan], dict[int, str]]:
    """As :func:`_plans`; without sizes, the plans of the default sizes."""
    plans, reasons = _plans(planner, tps or PROOF_TPS)
    return plans | ({} if tps else _plans(planner, _BEYOND)[0]), reasons


def _plans(planner: Planner, tps: Sequence[int]) -> tuple[dict[int, Plan], dict[int, str]]:
    """The plans by tensor parallel size, and the reasons why there are none for other sizes."""
    plans, reasons = {}, {}
    for tp in tps:
        try:
            plan = planner.plan(tp)
            if plan.ranks_per_stage > tp:
                raise PlanError("a proof has one data group", f"pass {option(ep=tp)}")
        except (PlanError, UsageError) as error:
            reasons[tp] = error.with_options()
        else:
            plans[tp] = plan
    return plans, reasons


def skipped_sizes(
    source: str, unsupported: Mapping[int, str], not_small: Mapping[int, str], *, has_plan_file: bool
) -> Iterator[str]:
    """The tensor parallel sizes that the source or the small model does not support."""
    for tp, reason in unsupported.items():
        yield f"tp {tp}: {source} cannot be sharded for it: {reason}"
    numbers = " If the plan file has numbers of the large model, write fields of its config instead." * has_plan_file
    for tp, reason in not_small.items():
        yield f"tp {tp}: the small model cannot be sharded for it, though {source} may be: {reason}{numbers}"


# --- the grids of a quantized source ----------------------------------------------------------------------------------

#: Blocks of a dim that is not sharded.
_BLOCKS = 2
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

#: The stored tensors of a weight, by name.
_Weight = dict[str, TensorSpec]


def grid_differences(tensors: Mapping[str, TensorSpec], weights: Plan, stored: Plan) -> Iterator[tuple[str, str]]:
    """Yield the name of a weight of each kind, and the difference of its shards; "" if there is none.

    Args:
        tensors: of the source, with grids.
        weights: the plan of the unquantized weights.
        stored: the plan of the stored tensors, for as many ranks.
    """
    layers: dict[str, _Weight] = {}
    for name, spec in tensors.items():
        if spec.grid is not None and spec.grid.axes:
            layers.setdefault(spec.grid.logical_name(name), {})[name] = spec
    kinds: dict[object, str] = {}
    for name, layer in layers.items():
        placed = [(stored.tensors[each].placement, stored.tensors[each].edits) for each in layer]
        kinds.setdefault((weights.placement(name), *layer.values(), *placed), name)
    for name in kinds.values():
        if not all(is_readable(spec.grid) for spec in layers[name].values() if spec.grid is not None):
            continue  # packed for the kernels of one GPU
        planned = {each: stored.tensors[each] for each in layers[name]}
        yield name, _difference(layers[name], weights.placement(name), planned)


def _difference(layer: _Weight, placement: Placement, planned: Mapping[str, TensorPlan]) -> str:
    grids = {name: spec.grid for name, spec in layer.items() if spec.grid is not None}
    shape = _reduced([*grids.values()], placement)
    generator = torch.Generator().manual_seed(0)
    groups = max((size for spec in layer.values() for size in _group_counts(spec)), default=1)
    full = {name: _random(spec, shape, groups, generator) for name, spec in layer.items()}
    expected = dequantize([Stored(full[name], grid) for name, grid in grids.items()], shape, torch.float32)
    for rank in range(placement.num_ranks):
        shards = {name: Stored(_shard(tensor, planned[name], rank), grids[name]) for name, tensor in full.items()}
        if problem := _shard_difference(shards, take_shard(expected, placement, rank)):
            return f"rank {rank} of {placement.num_ranks} has {problem}"
    return ""


def _shard_difference(shards: Mapping[str, Stored], expected: Tensor) -> str:
    """Compare the stored tensors of a rank with its shard of the dequantized weight; return the difference, or ""."""
    if not expected.numel():  # the rank does not have this weight
        has_values = any(one.tensor.numel() for one in shards.values() if one.grid.role == VALUES)
        return "values of a weight that it does not have" if has_values else ""
    for name, (tensor, grid) in shards.items():
        if grid.content != PLAIN and not torch.equal(tensor, _integers(grid, expected.shape).to(tensor.dtype)):
            return f"integers of another shard in {name}"
    found = dequantize([*shards.values()], expected.shape, torch.float32)
    return "" if torch.equal(found, expected) else "values of another shard"


def _reduced(grids: list[Grid], placement: Placement) -> tuple[int, ...]:
    """The shape of the weight, with a few blocks in each dim that is not sharded."""
    dims = [dim for grid in grids for dim in grid.dims]
    return tuple(
        size if at == placement.dim else min(size, _BLOCKS * lcm(*(dim.elements for dim in dims if dim.dim == at)))
        for at, size in enumerate(grids[0].shape)
    )


def _group_counts(spec: TensorSpec) -> Iterator[int]:
    """Yield the number of groups, for scales and zero points of groups that are not consecutive."""
    if spec.grid is not None and spec.grid.role in (SCALE, ZERO_POINT):
        yield from (size for size, dim in zip(spec.shape, spec.grid.dims, strict=True) if dim.dim is None)


def _random(spec: TensorSpec, shape: tuple[int, ...], groups: int, generator: torch.Generator) -> Tensor:
    """A stored tensor of a weight of this shape, with random values where its format does not determine them."""
    assert spec.grid is not None
    grid, dtype = spec.grid, _DTYPES[spec.dtype]
    if grid.content != PLAIN:
        return _integers(grid, shape).to(dtype)
    sizes = [
        size if dim.dim is None else -(-shape[dim.dim] // dim.elements) * dim.entries
        for size, dim in zip(spec.shape, grid.dims, strict=True)
    ]
    if grid.role == GROUP_INDEX:
        return torch.randint(groups, sizes, generator=generator).to(dtype)
    if dtype.is_floating_point:
        return (torch.rand(sizes, generator=generator) + 0.5).to(dtype)
    if grid.numbers == "e8m0":
        return torch.randint(120, 134, sizes, generator=generator).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, sizes, generator=generator, dtype=torch.int64).to(dtype)


def _integers(grid: Grid, shape: Sequence[int]) -> Tensor:
    """The integers of a tensor whose values follow from the shape of the weight, or of a shard."""
    if grid.content == SHAPE:
        return torch.tensor([*shape])
    assert grid.content == GROUP_INDEX
    size = shape[grid.dims[-1].dim or 0]
    return torch.arange(size) // (grid.group or size or 1)


def _shard(tensor: Tensor, planned: TensorPlan, rank: int) -> Tensor:
    shard = take_shard(tensor, planned.placement, rank)
    return shard if planned.edits is None else shard - torch.tensor(planned.edits[rank], dtype=shard.dtype)
