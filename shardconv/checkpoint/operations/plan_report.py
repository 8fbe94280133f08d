"""Reports on the plans of checkpoints, and on the supported tensor parallel sizes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, Unpack

from msgspec import Struct
from msgspec.structs import replace

from shardconv.checkpoint.operations.pipeline import on_pipelines, report_each
from shardconv.checkpoint.operations.split_sources import plan_sources
from shardconv.checkpoint.output.combined import (
    blocked,
    listed,
    padded,
    padding_of_all,
    path_keys,
    paths,
    supported,
    supported_bytes,
    tensors_by_path,
    texts,
    total,
    totals_per_rank,
    union,
)
from shardconv.checkpoint.sources.planning import PlanOptions, StrPath, refuse_changes
from shardconv.checkpoint.split.loadable import quantized_tensors, stored_planner
from shardconv.checkpoint.split.manifest_file import is_split, read_manifest
from shardconv.files.containers.safetensors import num_bytes, total_bytes
from shardconv.files.folder import AnyPath
from shardconv.files.paths import SourcePath, open_path
from shardconv.files.weight_formats import ADAPTER_CONFIG
from shardconv.formats.settings import describe_settings
from shardconv.layouts.layout import NATIVE
from shardconv.plan.placement import IntervalOrPadding
from shardconv.plan.plan import Plan, TensorPlan, TensorSpec, num_quantized, quantized_blocks
from shardconv.plan.planner import NO_PADDING, BlockedTp, PaddedTp, PaddingReport, Planner, padding_report, tp_sizes
from shardconv.plan.stages import StageFinder, chosen_stages, even_stages
from shardconv.support.arguments import checked
from shardconv.support.errors import UsageError, option


class TensorReport(Struct, frozen=True):
    """Placement of one tensor.

    Attributes:
        name: the name of the tensor.
        dtype: the dtype, as safetensors names it.
        shape: the shape of the full tensor.
        placement: the placement in words.
        reason: the rule that determines the placement.
        shard_shapes: for each rank of a pipeline stage the shape of its shard.
        shard_bytes: for each rank of all stages the bytes of its shard.
        style: the style of the rule, such as ``colwise``.
        units: the units that no boundary divides, such as ``kv_head``; empty for single elements.
        dim: the sharded dim, from 0; None if the tensor is replicated.
        intervals: for each rank of a stage its intervals of ``dim`` as ``[start, stop]``, and padding between them as
            ``{"padding": size}``; empty if the tensor is replicated.
        stages: the pipeline stages that hold the tensor, from 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: str
    reason: str
    shard_shapes: tuple[tuple[int, ...], ...]
    shard_bytes: tuple[int, ...]
    style: str
    units: tuple[str, ...]
    dim: int | None
    intervals: tuple[tuple[IntervalOrPadding, ...], ...]
    stages: tuple[int, ...] = (0,)


class PlanReport(Struct, frozen=True):
    """Report of ``shardconv plan``.

    Attributes:
        source: the path.
        family: the model family whose rules were used.
        tp: the tensor parallel size of the plan; None for a report on supported sizes only.
        stages: number of layers of each pipeline stage of the plan; empty for one stage.
        num_tensors: number of tensors.
        num_bytes: bytes of all tensors.
        assumed: assumptions of the plan.
        left_out: name to reason of files of the source that are left out; names of hidden folders end with /.
        supported_tp: the supported tp sizes.
        supported_bytes: for each supported size the bytes of the tensors of the rank that has most.
        blocked_tp: the unsupported sizes of :data:`~shardconv.plan.planner.CANDIDATE_TPS`, each with a tensor that
            blocks it, and the reason.
        padded_tp: the sizes among them up to :data:`~shardconv.plan.planner.MAX_PADDED_TP` that ``pad`` supports, and
            the cost of padding.
        padding: padded units of the plan for ``tp``, and their cost.
        rank_bytes: for each rank the bytes of its tensors.
        tensors: the placement of each tensor.
        layout: of the rank files of a split checkpoint; native for a source.
        num_quantized: number of quantized weights.
        quantized_blocks: their groups, blocks and packed words, such as ``128-wide group``.
        ep: the expert parallel size of the plan; 1 if each expert is sharded.
        stored_tp: tensor parallel size of a split checkpoint; None for a source.
        stored_ep: its expert parallel size; 1 for a source.
        stored_stages: number of layers of each pipeline stage of a split checkpoint; empty for one stage.
        even_stages: number of layers of each stage that minimizes the bytes of the largest rank; empty for one stage.
        even_bytes: bytes of that rank.
        ranks: the ranks whose files the folder of a split checkpoint has; empty for a source.
        quantization: method, format and bits of quantized weights, as their settings have them; "" without any.
        adapters: names of the adapters of a split checkpoint.
        engine: the engine at whose boundaries tensors are sharded; None for shardconv.
        components: name to class of the components of a pipeline that are sharded; empty for a model.
        copied: name to class of the other components, with the reason why they are copied.
    """

    source: str
    family: Annotated[str | None, listed]
    tp: int | None
    num_tensors: Annotated[int, total]
    num_bytes: Annotated[int, total]
    assumed: Annotated[tuple[str, ...], texts]
    left_out: Annotated[Mapping[str, str], path_keys]
    supported_tp: Annotated[tuple[int, ...], supported]
    supported_bytes: Annotated[tuple[int, ...], supported_bytes]
    blocked_tp: Annotated[tuple[BlockedTp, ...], blocked]
    padded_tp: Annotated[tuple[PaddedTp, ...], padded]
    padding: Annotated[PaddingReport, padding_of_all]
    rank_bytes: Annotated[tuple[int, ...], totals_per_rank]
    tensors: Annotated[tuple[TensorReport, ...], tensors_by_path]
    layout: str = NATIVE.name
    num_quantized: Annotated[int, total] = 0
    quantized_blocks: Annotated[tuple[str, ...], union] = ()
    ep: int = 1
    stored_tp: int | None = None
    stored_ep: int = 1
    stored_stages: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    even_stages: tuple[int, ...] = ()
    even_bytes: int = 0
    ranks: tuple[int, ...] = ()
    quantization: Annotated[str, listed] = ""
    adapters: Annotated[tuple[str, ...], paths] = ()
    engine: str | None = None
    components: Mapping[str, str] = {}
    copied: Mapping[str, str] = {}


@checked
@on_pipelines(report_each)
def report_plan(
    src: SourcePath,
    *,
    tp: int | None = None,
    pp: int | None = None,
    stages: str | Sequence[int] = (),
    base: StrPath | None = None,
    dtype: str | None = None,
    **options: Unpack[PlanOptions],
) -> PlanReport:
    """Report the plan and the supported tp sizes of a checkpoint; arguments and errors as in :func:`make_plan`.

    For a split checkpoint, reports the plan in its manifest, or with another ``tp`` the plan of a reshard.
    With ``base``, ``src`` is a LoRA adapter of this base model, as in :func:`~shardconv.split`.
    With ``dtype``, dtypes and sizes are as in a split with it.
    """
    if (pp is not None or stages) and tp is None:
        raise UsageError(f"{option('pp')} and {option('stages')} are for the plan of one size: pass one {option('tp')}")
    if is_split(path := open_path(src)):
        if dtype is not None:
            raise UsageError(
                f"{path}: is a split checkpoint, which {option('dtype')} cannot convert: pass the source instead"
            )
        if base is not None:
            raise UsageError(f"{path}: is a split checkpoint, which stores its plan: remove {option('base')}")
        return _report_stored(path, tp, pp, stages, options)
    planned = plan_sources(path, base, (), NATIVE.name, options, merge_adapter=False, dtype=dtype).source
    source, planner = planned.source, planned.planner
    plan = None if tp is None else planner.plan(tp, planner.stages(chosen_stages(pp, stages)))
    settings = source.config_with_quantization()
    report = _report(path, planner, planned.tensors, plan, settings, is_adapter=base is not None)
    return replace(report, left_out=source.left_out, engine=options.get("engine"))


def _report_stored(
    folder: AnyPath, tp: int | None, pp: int | None, stages: str | Sequence[int], options: PlanOptions
) -> PlanReport:
    """Report the plan of a split checkpoint."""
    pad, ep = options.pop("pad", False), options.pop("ep", None)  # options of reshard, too
    refuse_changes(folder, options)
    manifest = read_manifest(folder)
    is_adapter = ADAPTER_CONFIG in manifest.auxiliary_files
    if pad and is_adapter:
        raise UsageError(f"{folder}: is an adapter, for which {option(pad=True)} is not supported: remove it")
    plan = manifest.plan
    planner = stored_planner(manifest, manifest.request.engine, ep=ep)
    chosen = chosen_stages(pp, stages, default=plan.stages)
    tp = plan.tp if tp is None else tp
    if (tp, planner.rules.ep, planner.stages(chosen)) != (plan.tp, plan.ep, plan.stages):
        planner = planner.padded(int(pad)) if tp != plan.tp else planner
        plan = planner.plan(tp, planner.stages(chosen))
    report = _report(folder, planner, quantized_tensors(manifest), plan, manifest.config, is_adapter=is_adapter)
    return replace(
        report,
        layout=manifest.layout.name,
        stored_tp=manifest.tp,
        stored_ep=manifest.plan.ep,
        stored_stages=manifest.plan.num_layers,
        ranks=manifest.ranks,
        adapters=manifest.adapters,
        engine=manifest.request.engine,
    )


def _report(
    path: AnyPath,
    planner: Planner,
    specs: Mapping[str, TensorSpec],
    plan: Plan | None,
    settings: Mapping[str, object] | None,
    *,
    is_adapter: bool,
) -> PlanReport:
    """The report on a planner of tensors, some of which may be quantized by settings, and on one of its plans."""
    sizes = tp_sizes(planner)
    tensors = () if plan is None else tensor_reports(specs, plan)
    held = () if plan is None else rank_bytes(tensors, plan.num_ranks)
    even_stages, even_bytes = ((), 0) if plan is None else _even_stages(planner, tensors, plan, held)
    return PlanReport(
        source=str(path),
        family=planner.rules.family,
        tp=None if plan is None else plan.tp,
        ep=planner.rules.ep,
        stages=() if plan is None else plan.num_layers,
        num_tensors=len(specs),
        num_bytes=total_bytes(specs.values()),
        assumed=planner.assumed if plan is None else plan.assumed,
        left_out={},
        supported_tp=sizes.supported,
        supported_bytes=sizes.rank_bytes,
        blocked_tp=sizes.blocked,
        padded_tp=() if is_adapter else sizes.padded,
        padding=NO_PADDING if plan is None else padding_report(planner, plan.tp),
        rank_bytes=held,
        even_stages=even_stages,
        even_bytes=even_bytes,
        tensors=tensors,
        num_quantized=num_quantized(specs),
        quantized_blocks=quantized_blocks(specs),
        quantization=describe_settings(settings),
    )


def _even_stages(
    planner: Planner, tensors: Sequence[TensorReport], plan: Plan, held: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """The stages whose largest rank has fewest bytes, and these bytes; the plan's own if it is not larger."""
    if plan.stages is None:
        return (), 0
    finder, finest, per_stage = StageFinder(planner.rules), plan.stages.finest, plan.ranks_per_stage
    of_layer, on_all = [[0] * per_stage for _ in range(finest.count)], [0] * per_stage
    for tensor in tensors:
        first = tensor.stages[0] * per_stage
        layers = finder.stages_of(planner.group_of[tensor.name].matrix_of(tensor.name), finest)
        for totals in [on_all] if len(layers) == finest.count else [of_layer[layer] for layer in layers]:
            for rank, size in enumerate(tensor.shard_bytes[first : first + per_stage]):
                totals[rank] += size
    even = even_stages([max(sizes) for sizes in of_layer], plan.pp, finder.least_in_first)
    bounds = pairwise(accumulate(even, initial=0))
    stages = ([sum(sizes) for sizes in zip(*of_layer[start:stop], strict=True)] for start, stop in bounds)
    largest = max(size + shared for sizes in stages for size, shared in zip(sizes, on_all, strict=True))
    return (even, largest) if largest < max(held) else (plan.num_layers, max(held))


def rank_bytes(tensors: Iterable[TensorReport], num_ranks: int) -> tuple[int, ...]:
    """For each of ``num_ranks`` ranks the bytes of its tensors."""
    counts = Counter(tensor.shard_bytes for tensor in tensors)  # faster: many tensors have equal shards
    return tuple(sum(sizes[rank] * count for sizes, count in counts.items()) for rank in range(num_ranks))


def tensor_reports(specs: Mapping[str, TensorSpec], plan: Plan) -> tuple[TensorReport, ...]:
    """The placement of each tensor of a checkpoint."""
    known: dict[tuple[int, TensorSpec], tuple[Any, ...]] = {}  # equal plan and shape: all but the name
    reports = []
    for name, spec in specs.items():
        index = plan.index_of[name]
        if (fields := known.get((index, spec))) is None:
            fields = known[index, spec] = _fields(spec, plan.distinct[index], plan)
        reports.append(TensorReport(name, *fields))
    return tuple(reports)


def _describe(planned: TensorPlan) -> str:
    """The placement in words, and whether the values of shards differ from the source."""
    text = planned.placement.describe()
    if not planned.edits:
        return text
    return f"{text}, rewritten per rank" if planned.placement.dim is not None else "rewritten per rank"


def _fields(spec: TensorSpec, planned: TensorPlan, plan: Plan) -> tuple[Any, ...]:
    """The fields of a report on a tensor after its name."""
    placement = planned.placement
    shapes = tuple(placement.shard_shape(spec.shape, rank) for rank in range(placement.num_ranks))
    shard_bytes = tuple(num_bytes(spec.dtype, shape) for shape in shapes)
    return (
        spec.dtype, spec.shape, _describe(planned), planned.describe(), shapes,
        tuple(size if stage in planned.stages else 0 for stage in range(plan.pp) for size in shard_bytes),
        planned.style, planned.units, placement.dim, () if placement.dim is None else placement.ranks, planned.stages,
    )  # fmt: skip
