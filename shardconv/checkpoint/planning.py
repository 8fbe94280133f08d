"""Plans of checkpoints on disk, and reports on plans and supported tp sizes."""

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
from shardconv.plan.resolve import Resolver
from shardconv.plan.rules import AUTO, Rules, plan_file_of, request_of
from shardconv.plan.sizes import NO_PADDING, BlockedTp, PaddedTp, PaddingReport, TpSizes

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
        blocked_tp: the unsupported sizes of :data:`~shardconv.plan.sizes.CANDIDATE_TPS`, each with the first tensor
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
        rules: "auto", a family name, a plan file or a Plan: see :data:`~shardconv.plan.rules.Rules`.
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

    rules: Rules
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
    rules: Rules = AUTO,
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
    changes: dict[str, Any] = {
        "replicate": as_names(replicate), "head_dim": head_dim, "experts": experts, "engine": engine, "pad": int(pad)
    }  # fmt: skip
    paths = (source.path, *(file.path for file in source.files), *source.auxiliary_files.values())
    if isinstance(rules, Plan):
        request, resolution = _resolution_of(rules, source, changes)
        return PlannedSource(source, request_for(request, layout), resolution, paths)
    if (plan_file := plan_file_of(rules)) is not None:
        local_path(str(rules))
        paths = (*paths, plan_file)
    request = request_for(replace(_named(rules), **changes), layout)
    return PlannedSource(source, request, resolve(source.specs, with_settings(source), request), paths)


def _named(rules: Rules) -> PlanRequest:
    """The request for a family or plan file; refuses policies, which apply to modules."""
    try:
        return request_of(rules)
    except TypeError as error:
        raise UsageError(
            f"{error}: a policy matches modules by class, which a checkpoint does not have: use it with convert_model, "
            f"or write its rules to a plan file"
        ) from error


def _resolution_of(plan: Plan, source: Source, changes: Mapping[str, Any]) -> tuple[PlanRequest, Resolution]:
    """The request and rules of a plan that a user passes.

    Raises:
        UsageError: if other options change the plan.
        PlanError: if the plan does not store its rules, or they give other placements for this source.
    """
    if changed := [name for name, value in changes.items() if value != getattr(PlanRequest(), name)]:
        raise UsageError(f"{changed[0]} cannot change a plan (rules is a Plan): make another one with make_plan")
    if plan.rules is None:
        raise PlanError("the plan is from a manifest of format 1 or 2, which does not store rules: make it again")
    resolver = Resolver(source.specs, plan.rules).padded(plan.rules.pad)
    if (name := plan.first_difference(resolver.plan(plan.tp))) is not None:
        raise PlanError(f"{name}: the plan was made for another checkpoint, or was changed: make it again")
    return PlanRequest(engine=plan.rules.engine, pad=plan.rules.pad), Resolution(resolver, plan.assumed)


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
    "family": "--rules", "plan_file": "--rules", "replicate": "--replicate", "head_dim": "--head-dim",
    "experts": "--experts", "pad": "--pad",
}  # fmt: skip


def as_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Convert a single name or a sequence of names to a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


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
_DEFAULTS: dict[str, Any] = {
    "rules": AUTO, "replicate": (), "head_dim": None, "experts": "tensor", "engine": None,
    "pad": False, "config": None, "follow_links": False, "ignore": (),
}  # fmt: skip


def rank_bytes(tensors: Iterable[TensorReport], tp: int) -> tuple[int, ...]:
    """For each of ``tp`` ranks the bytes of its tensors."""
    counts = Counter(tensor.shard_bytes for tensor in tensors)  # faster: many tensors have equal shards
    return tuple(sum(sizes[rank] * count for sizes, count in counts.items()) for rank in range(tp))


def tensor_reports(specs: Mapping[str, TensorSpec], plan: Plan) -> tuple[TensorReport, ...]:
    """The placement of each tensor of a checkpoint."""
    cache: dict[Any, tuple[str, str, tuple[tuple[int, ...], ...], tuple[int, ...]]] = {}  # tensors share placements
    reports = []
    for name, spec in specs.items():
        planned = plan.tensors[name]
        if (id(planned), spec) not in cache:
            shapes = tuple(planned.placement.shard_shape(spec.shape, rank) for rank in range(plan.tp))
            sizes = tuple(num_bytes(spec.dtype, shape) for shape in shapes)
            cache[id(planned), spec] = (planned.placement.describe(), planned.describe(), shapes, sizes)
        reports.append(TensorReport(name, spec.dtype, spec.shape, *cache[id(planned), spec]))
    return tuple(reports)
