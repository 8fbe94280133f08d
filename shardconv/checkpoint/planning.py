"""From a source on disk to its plan, and to a report on which tp sizes are supported."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

from shardconv.checkpoint.header import num_bytes
from shardconv.checkpoint.manifest import is_split, read_manifest
from shardconv.checkpoint.paths import local_path
from shardconv.checkpoint.quantization_files import with_settings
from shardconv.checkpoint.source import Source, open_source
from shardconv.checkpoint.stored_plan import resolver_of
from shardconv.errors import PlanError, UsageError
from shardconv.layouts.choice import engine_of
from shardconv.layouts.layout import NATIVE
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.plan.request import PlanRequest, Resolution, resolve
from shardconv.plan.sizes import NO_PADDING, BlockedTp, PaddedTp, PaddingReport, TpSizes

#: A path as users give it.
StrPath = str | Path


@dataclass(frozen=True, slots=True)
class TensorReport:
    """How one tensor is cut: full shape, and shape and bytes of the shard of every rank.

    ``shard_shapes`` and ``shard_bytes`` have one entry a rank.
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
    """What ``shardconv plan`` says of a source.

    Attributes:
        source: the path.
        family: whose rules were used.
        tp: the size that was planned for; None where only the supported sizes were asked for.
        num_tensors: number of tensors.
        num_bytes: bytes of all tensors.
        assumed: what was concluded or assumed rather than read.
        left_out: name to reason of files in the folder that are left out; hidden folders have a / behind.
        supported_tp: the supported sizes.
        blocked_tp: the sizes of :data:`~shardconv.plan.sizes.CANDIDATE_TPS` that are not, each with the first
            tensor that blocks it, and why.
        padded_tp: those of them that are supported with ``pad``, and what that costs.
        padding: what the plan for ``tp`` pads, and what that costs.
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
    """How a source is to be read and planned.

    Attributes:
        plan: a plan file whose rules come before the family's; "auto" for none.
        family: the family to use, whatever the config says.
        replicate: names or patterns of tensors that every rank gets whole.
        head_dim: the head size, where there is no config to say it.
        experts: "tensor" to cut each expert over all ranks, "expert" to deal them out over the ranks.
        engine: "vllm" to put boundaries where that engine has them; None for those of shardconv's own runtime, which
            runs the others, too.
        pad: pad units that do not divide with zeros, where outputs stay equal.
        config: a config.json to use instead of the one beside the weights.
        follow_links: read files that are links to outside of the folder.
        ignore: glob patterns, relative to the folder, of files to leave out, weights and auxiliary files alike.
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
    """A source, what the user said about its plan, the rules for it, and all files that this was read from."""

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
    """Open a source and find the rules for it; the options are :class:`PlanOptions`, the errors :func:`make_plan`'s.

    A source that is open is taken as it is. The plan is for the engine of the ``layout``, if it has one.
    """
    if isinstance(src, Source):
        if ignore:
            raise UsageError(f"--ignore {ignore[0]!r}: {src.path} is read without the files beside it")
        source = src
    else:
        beside = None if config is None else local_path(config)
        source = open_source(local_path(src), config=beside, follow_links=follow_links, ignore=as_names(ignore))
    plan_file = None if plan == "auto" else _read_plan_file(local_path(plan))
    asked = PlanRequest(family, plan_file, as_names(replicate), head_dim, experts, engine, pad=int(pad))
    request = request_for(asked, layout)
    paths = (source.path, *(part.path for part in source.parts), *source.side_files.values())
    resolution = resolve(source.specs, with_settings(source), request)
    return PlannedSource(source, request, resolution, paths if plan_file is None else (*paths, Path(plan)))


def request_for(request: PlanRequest, layout: str) -> PlanRequest:
    """The request for a plan that the engine of a layout can execute; as it is for a layout without an engine.

    Args:
        request: what the user said about the plan.
        layout: the name of the layout.

    Raises:
        UsageError: if there is no such layout, or the user asks for another plan than the engine's.
    """
    if (engine := engine_of(layout)) is None:
        return request
    default = PlanRequest()
    asked = [option for name, option in _OF_PLAN.items() if getattr(request, name) != getattr(default, name)]
    if asked:
        raise UsageError(
            f"--layout {layout} is for the plan of {engine}, which {', '.join(asked)} changes: leave that out, or use "
            f"--layout native"
        )
    return replace(request, engine=engine)


#: The fields of a request that change the plan, and their options.
_OF_PLAN = {
    "family": "--family", "plan_file": "--plan", "replicate": "--replicate", "head_dim": "--head-dim",
    "experts": "--experts", "pad": "--pad",
}  # fmt: skip


def as_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Several names, or a single one that was not put into a sequence."""
    return (names,) if isinstance(names, str) else tuple(names)


def _read_plan_file(path: Path) -> tuple[str, str]:
    try:
        return path.name, path.read_text("utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not UTF-8") from error


def make_plan(src: StrPath, *, tp: int, **options: Unpack[PlanOptions]) -> Plan:
    """Plan a checkpoint from its headers and its config, without reading its data.

    Args:
        src: a ``.safetensors`` file, an index file, or a folder.
        tp: number of ranks.
        options: see :class:`PlanOptions`.

    Raises:
        SourceError: if the checkpoint cannot be read.
        PlanError: if no plan is known to be right.
    """
    resolver, assumed = plan_source(src, **options).resolution
    return resolver.plan(tp, assumed=assumed)


def report_plan(src: StrPath, *, tp: int | None = None, **options: Unpack[PlanOptions]) -> PlanReport:
    """Report how a checkpoint is sharded, and for which tp it can be; arguments and errors as in :func:`make_plan`.

    Of a split checkpoint the report is of the plan that it holds, or of what a reshard for ``tp`` would use.
    """
    if is_split(path := local_path(src)):
        return _report_stored(path, tp, options)
    source, _, (resolver, assumed), _ = plan_source(src, **options)
    sizes = resolver.tp_sizes()
    made = None if tp is None else resolver.plan(tp, assumed=assumed)
    tensors = () if made is None else tensor_reports(source.specs, made)
    return PlanReport(
        source=str(src),
        family=resolver.rules.family,
        tp=tp,
        num_tensors=sum(len(part.header.tensors) for part in source.parts),
        num_bytes=source.num_bytes,
        assumed=assumed,
        left_out=source.left_out,
        supported_tp=sizes.supported,
        blocked_tp=sizes.blocked,
        padded_tp=sizes.padded,
        padding=NO_PADDING if tp is None else resolver.padding(tp),
        rank_bytes=() if made is None else rank_bytes(tensors, made.tp),
        tensors=tensors,
    )


def _report_stored(folder: Path, tp: int | None, options: PlanOptions) -> PlanReport:
    """The report on the plan of a split checkpoint."""
    pad = options.pop("pad", False)  # of a reshard, which may be asked for it
    if asked := sorted(name for name, value in options.items() if value != _DEFAULTS[name]):
        named = ", ".join("--for" if name == "engine" else name for name in asked)
        raise UsageError(
            f"{folder}: is a split checkpoint, which holds its plan: {named} cannot change it; name the source to plan "
            f"it in another way"
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
        assumed = (*assumed, "a manifest of format 1 or 2 has no rules: other tp would follow the installed ones")
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


#: The options of :class:`PlanOptions` that a user did not give.
_DEFAULTS: dict[str, Any] = {
    "plan": "auto", "family": None, "replicate": (), "head_dim": None, "experts": "tensor", "engine": None,
    "pad": False, "config": None, "follow_links": False, "ignore": (),
}  # fmt: skip


def rank_bytes(tensors: Iterable[TensorReport], tp: int) -> tuple[int, ...]:
    """For each of ``tp`` ranks the bytes of its tensors."""
    counts = Counter(tensor.shard_bytes for tensor in tensors)  # few are different
    return tuple(sum(sizes[rank] * count for sizes, count in counts.items()) for rank in range(tp))


def tensor_reports(specs: Mapping[str, TensorSpec], plan: Plan) -> tuple[TensorReport, ...]:
    """How each tensor of a checkpoint is sharded."""
    cut: dict[Any, tuple[str, str, tuple[tuple[int, ...], ...], tuple[int, ...]]] = {}  # tensors share placements
    reports = []
    for name, spec in specs.items():
        placed = plan.tensors[name]
        if (id(placed), spec) not in cut:
            shapes = tuple(placed.placement.shard_shape(spec.shape, rank) for rank in range(plan.tp))
            sizes = tuple(num_bytes(spec.dtype, shape) for shape in shapes)
            cut[id(placed), spec] = (placed.placement.describe(), placed.describe(), shapes, sizes)
        reports.append(TensorReport(name, spec.dtype, spec.shape, *cut[id(placed), spec]))
    return tuple(reports)
