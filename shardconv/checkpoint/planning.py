"""Plans of checkpoints on disk, and reports on plans and supported tp sizes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

from shardconv.checkpoint.header import num_bytes
from shardconv.checkpoint.manifest_file import is_split, read_manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.quantization_files import with_settings
from shardconv.checkpoint.source import Source, open_source
from shardconv.checkpoint.stored_plan import resolver_of
from shardconv.errors import PlanError, UsageError
from shardconv.layouts.choice import engine_of
from shardconv.layouts.layout import NATIVE
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, Resolution, resolve
from shardconv.plan.tp_sizes import NO_PADDING, BlockedTp, PaddedTp, PaddingReport, TpSizes

#: A path that a user passes.
StrPath = str | Path


@dataclass(frozen=True, slots=True)
class TensorReport:
    """Placement of one tensor: its full shape, and the shape and bytes of each rank's shard.

    ``shard_shapes`` and ``shard_bytes`` have one entry per rank.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: str
    reason: str
    shard_shapes: tuple[tuple[int, ...], ...]
    shard_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Report of ``shardconv plan``.

    Attributes:
        source: the path.
        family: the model family whose rules were used.
        tp: the tp size of the plan; None for a report on supported sizes only.
        num_tensors: number of tensors.
        num_bytes: bytes of all tensors.
        assumed: assumptions of the plan.
        left_out: name to reason of files of the source that are left out; names of hidden folders end with /.
        supported_tp: the supported tp sizes.
        blocked_tp: the unsupported sizes of :data:`~shardconv.plan.tp_sizes.CANDIDATE_TPS`, each with the first tensor
            that blocks it, and the reason.
        padded_tp: the unsupported sizes that are supported with ``pad``, and the cost of padding.
        padding: padded units of the plan for ``tp``, and their cost.
        rank_bytes: for each rank the bytes of its tensors.
        tensors: the placement of each tensor.
        layout: of the rank files of a split checkpoint; native for a source.
    """

    source: str
    family: str | None
    tp: int | None
    num_tensors: int
    num_bytes: int
    assumed: tuple[str, ...]
    left_out: Mapping[str, str]
    supported_tp: tuple[int, ...]
    blocked_tp: tuple[BlockedTp, ...]
    padded_tp: tuple[PaddedTp, ...]
    padding: PaddingReport
    rank_bytes: tuple[int, ...]
    tensors: tuple[TensorReport, ...]
    layout: str = NATIVE.name


class PlanOptions(TypedDict, total=False):
    """Options for reading and planning a source.

    Attributes:
        plan: a plan file whose rules take precedence over the family's; "auto" for none.
        family: the family to use instead of the one for the config.
        replicate: names or patterns of tensors to replicate.
        head_dim: the head size, if there is no config.
        experts: "tensor" to shard each expert over all ranks, "expert" to distribute the experts over the ranks.
        engine: "vllm" to use the boundaries of that engine; None for those of shardconv's runtime, which also runs
            checkpoints with other boundaries.
        pad: pad units that do not divide with zeros, if outputs stay equal.
        config: a config.json to use instead of the one next to the weights.
        follow_links: follow links that point outside of the folder.
        ignore: glob patterns, relative to the folder, of weights and auxiliary files to leave out.
    """

    plan: StrPath
    family: str | None
    replicate: tuple[str, ...]
    head_dim: int | None
    experts: str
    engine: str | None
    pad: bool
    config: StrPath | None
    follow_links: bool
    ignore: tuple[str, ...]


class PlannedSource(NamedTuple):
    """A source, the user's options for its plan, its rules, and the paths of all files that were read."""

    source: Source
    request: PlanRequest
    resolution: Resolution
    paths: tuple[Path, ...]


def plan_source(
    src: StrPath | Source,
    *,
    plan: StrPath = "auto",
    family: str | None = None,
    replicate: tuple[str, ...] = (),
    head_dim: int | None = None,
    experts: str = "tensor",
    engine: str | None = None,
    pad: bool = False,
    config: StrPath | None = None,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    layout: str = NATIVE.name,
) -> PlannedSource:
    """Open a source, unless it is a :class:`Source`, and find its rules.

    The options are those of :class:`PlanOptions`, the errors those of :func:`make_plan`. The plan is for the engine of
    the ``layout``, if it has one.
    """
    if isinstance(src, Source):
        if ignore:
            raise UsageError(f"--ignore {ignore[0]!r}: only applies to folders (got the config {src.path}): remove it")
        source = src
    else:
        config_path = None if config is None else local_path(config)
        source = open_source(local_path(src), config=config_path, follow_links=follow_links, ignore=as_names(ignore))
    plan_file = None if plan == "auto" else _read_plan_file(local_path(plan))
    user_request = PlanRequest(family, plan_file, as_names(replicate), head_dim, experts, engine, pad=int(pad))
    request = request_for(user_request, layout)
    paths = (source.path, *(file.path for file in source.files), *source.auxiliary_files.values())
    resolution = resolve(source.specs, with_settings(source), request)
    return PlannedSource(source, request, resolution, paths if plan_file is None else (*paths, Path(plan)))


def request_for(request: PlanRequest, layout: str) -> PlanRequest:
    """The request for a plan that the engine of a layout can execute; unchanged for a layout without an engine.

    Args:
        request: the user's options for the plan.
        layout: the name of the layout.

    Raises:
        UsageError: if the layout is unknown, or the user's options change the engine's plan.
    """
    if (engine := engine_of(layout)) is None:
        return request
    default = PlanRequest()
    changed = [option for name, option in _PLAN_OPTIONS.items() if getattr(request, name) != getattr(default, name)]
    if changed:
        raise UsageError(
            f"--layout {layout} requires the plan of {engine}, which {', '.join(changed)} changes: remove that, or "
            f"use --layout native"
        )
    return replace(request, engine=engine)


#: The fields of a request that change the plan, and their options.
_PLAN_OPTIONS = {
    "family": "--family", "plan_file": "--plan", "replicate": "--replicate", "head_dim": "--head-dim",
    "experts": "--experts", "pad": "--pad",
}  # fmt: skip


def as_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Convert a single name or a sequence of names to a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


def _read_plan_file(path: Path) -> tuple[str, str]:
    try:
        return path.name, path.read_text("utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not UTF-8") from error


def make_plan(src: StrPath, *, tp: int, **options: Unpack[PlanOptions]) -> Plan:
    """Make the plan of a checkpoint from its headers and config, without reading its data.

    Args:
        src: a ``.safetensors`` file, an index file, or a folder.
        tp: number of ranks.
        options: see :class:`PlanOptions`.

    Raises:
        SourceError: if the checkpoint cannot be read.
        PlanError: if no plan is known to be correct.
    """
    resolver, assumed = plan_source(src, **options).resolution
    return resolver.plan(tp, assumed=assumed)


def report_plan(src: StrPath, *, tp: int | None = None, **options: Unpack[PlanOptions]) -> PlanReport:
    """Report the plan and the supported tp sizes of a checkpoint; arguments and errors as in :func:`make_plan`.

    For a split checkpoint, reports the plan in its manifest, or with another ``tp`` the plan of a reshard.
    """
    if is_split(path := local_path(src)):
        return _report_stored(path, tp, options)
    source, _, (resolver, assumed), _ = plan_source(src, **options)
    sizes = resolver.tp_sizes()
    tp_plan = None if tp is None else resolver.plan(tp, assumed=assumed)
    tensors = () if tp_plan is None else tensor_reports(source.specs, tp_plan)
    return PlanReport(
        source=str(src),
        family=resolver.rules.family,
        tp=tp,
        num_tensors=sum(len(file.header.tensors) for file in source.files),
        num_bytes=source.num_bytes,
        assumed=assumed,
        left_out=source.left_out,
        supported_tp=sizes.supported,
        blocked_tp=sizes.blocked,
        padded_tp=sizes.padded,
        padding=NO_PADDING if tp is None else resolver.padding(tp),
        rank_bytes=() if tp_plan is None else rank_bytes(tensors, tp_plan.tp),
        tensors=tensors,
    )


def _report_stored(folder: Path, tp: int | None, options: PlanOptions) -> PlanReport:
    """Report the plan of a split checkpoint."""
    pad = options.pop("pad", False)  # an option of reshard, too
    if changed := sorted(name for name, value in options.items() if value != _DEFAULTS[name]):
        named = ", ".join("--for" if name == "engine" else name for name in changed)
        raise UsageError(
            f"{folder}: is a split checkpoint, and {named} cannot change its stored plan: pass the source instead"
        )
    manifest = read_manifest(folder)
    plan, specs = manifest.plan, manifest.source_tensors
    sizes = TpSizes((), ())
    assumed, padding = plan.assumed, NO_PADDING
    if plan.rules is not None or tp not in (None, plan.tp):
        stored = resolver_of(manifest, manifest.request.engine)
        resolver = stored if tp in (None, plan.tp) else stored.padded(int(pad))
        sizes = resolver.tp_sizes()
        plan = plan if tp in (None, plan.tp) else resolver.plan(tp, assumed=plan.assumed)
        padding = resolver.padding(plan.tp)
    if manifest.plan.rules is None:
        assumed = (*assumed, "a manifest of format 1 or 2 does not store rules: other tp sizes use the installed rules")
    tensors = tensor_reports(specs, plan)
    return PlanReport(
        source=str(folder),
        family=plan.family,
        tp=plan.tp,
        num_tensors=len(specs),
        num_bytes=sum(num_bytes(spec.dtype, spec.shape) for spec in specs.values()),
        assumed=assumed,
        left_out={},
        supported_tp=sizes.supported,
        blocked_tp=sizes.blocked,
        padded_tp=sizes.padded,
        padding=padding,
        rank_bytes=rank_bytes(tensors, plan.tp),
        tensors=tensors,
        layout=manifest.layout.name,
    )


#: Defaults of :class:`PlanOptions`.
_DEFAULTS: dict[str, object] = {
    "plan": "auto", "family": None, "replicate": (), "head_dim": None, "experts": "tensor", "engine": None,
    "pad": False, "config": None, "follow_links": False, "ignore": (),
}  # fmt: skip


def rank_bytes(tensors: Iterable[TensorReport], tp: int) -> tuple[int, ...]:
    """For each of ``tp`` ranks the bytes of its tensors."""
    counts = Counter(tensor.shard_bytes for tensor in tensors)  # faster: many tensors have equal shards
    return tuple(sum(sizes[rank] * count for sizes, count in counts.items()) for rank in range(tp))


def tensor_reports(specs: Mapping[str, TensorSpec], plan: Plan) -> tuple[TensorReport, ...]:
    """The placement of each tensor of a checkpoint."""
    cache: dict[tuple[int, TensorSpec], TensorReport] = {}  # of the first tensor with this plan and shape
    reports = []
    for name, spec in specs.items():
        planned = plan.tensors[name]
        if (first := cache.get((id(planned), spec))) is None:
            shapes = tuple(planned.placement.shard_shape(spec.shape, rank) for rank in range(plan.tp))
            sizes = tuple(num_bytes(spec.dtype, shape) for shape in shapes)
            placement, reason = planned.placement.describe(), planned.describe()
            first = TensorReport(name, spec.dtype, spec.shape, placement, reason, shapes, sizes)
            cache[id(planned), spec] = first
        reports.append(
            TensorReport(
                name, spec.dtype, spec.shape, first.placement, first.reason, first.shard_shapes, first.shard_bytes
            )
        )
    return tuple(reports)
