"""From a source on disk to its plan, and to a report on which tp sizes are legal."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardconv.checkpoint.header import num_bytes
from shardconv.checkpoint.source import Source, open_source
from shardconv.errors import PlanError
from shardconv.plan.plan import Plan
from shardconv.plan.request import PlanRequest, Resolution, resolve

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
        tp: the size that was planned for; None where only the legal sizes were asked for.
        num_tensors: number of tensors.
        num_bytes: bytes of all tensors.
        assumed: what was concluded or assumed rather than read.
        left_out: files with weights in the folder that are no part of the checkpoint.
        legal_tp: the legal sizes.
        blocked_tp: size to the first tensor that blocks it, and why.
        rank_bytes: for each rank the bytes of its tensors.
        tensors: the placement of each tensor.
    """

    source: str
    family: str | None
    tp: int | None
    num_tensors: int
    num_bytes: int
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]
    legal_tp: tuple[int, ...]
    blocked_tp: dict[int, str]
    rank_bytes: tuple[int, ...]
    tensors: tuple[TensorReport, ...]


def read_request(
    *,
    plan: StrPath = "auto",
    family: str | None = None,
    replicate: tuple[str, ...] = (),
    head_dim: int | None = None,
) -> PlanRequest:
    """What a user said, with the plan file read.

    Raises:
        PlanError: if the plan file cannot be read.
    """
    names = (replicate,) if isinstance(replicate, str) else tuple(replicate)
    if plan == "auto":
        return PlanRequest(family, None, names, head_dim)
    path = Path(plan)
    try:
        return PlanRequest(family, (path.name, path.read_text("utf-8")), names, head_dim)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error}") from error


def resolve_source(source: Source, request: PlanRequest) -> Resolution:
    """The rules for a source."""
    return resolve(source.specs, source.config, request)


def make_plan(
    src: StrPath,
    *,
    tp: int,
    plan: StrPath = "auto",
    family: str | None = None,
    replicate: tuple[str, ...] = (),
    head_dim: int | None = None,
    config: StrPath | None = None,
    follow_links: bool = False,
) -> Plan:
    """Plan a checkpoint from its headers and its config, without reading its data.

    Args:
        src: a ``.safetensors`` file, an index file, or a folder.
        tp: number of ranks.
        plan: a plan file whose rules come before the family's; "auto" for none.
        family: the family to use, whatever the config says.
        replicate: names or patterns of tensors that every rank gets whole.
        head_dim: the head size, where there is no config to say it.
        config: a config.json to use instead of the one beside the weights.
        follow_links: read files that are links to outside of the folder.

    Raises:
        SourceError: if the checkpoint cannot be read.
        PlanError: if no plan is known to be right.
    """
    source = open_source(Path(src), config=_path(config), follow_links=follow_links)
    request = read_request(plan=plan, family=family, replicate=replicate, head_dim=head_dim)
    resolution = resolve_source(source, request)
    return resolution.resolver.plan(tp, assumed=resolution.assumed)


def report_plan(
    src: StrPath,
    *,
    tp: int | None = None,
    plan: StrPath = "auto",
    family: str | None = None,
    replicate: tuple[str, ...] = (),
    head_dim: int | None = None,
    config: StrPath | None = None,
    follow_links: bool = False,
) -> PlanReport:
    """Report how a checkpoint is cut, and for which sizes it can be; arguments and errors as in :func:`make_plan`."""
    source = open_source(Path(src), config=_path(config), follow_links=follow_links)
    request = read_request(plan=plan, family=family, replicate=replicate, head_dim=head_dim)
    resolver, assumed = resolve_source(source, request)
    sizes = resolver.legal_sizes()
    made = None if tp is None else resolver.plan(tp, assumed=assumed)
    tensors = () if made is None else tensor_reports(source, made)
    return PlanReport(
        source=str(src),
        family=resolver.family_name,
        tp=tp,
        num_tensors=sum(len(part.header.tensors) for part in source.parts),
        num_bytes=source.num_bytes,
        assumed=assumed,
        left_out=source.left_out,
        legal_tp=sizes.legal,
        blocked_tp=dict(sizes.blocked),
        rank_bytes=tuple(sum(column) for column in zip(*(tensor.shard_bytes for tensor in tensors), strict=True)),
        tensors=tensors,
    )


def tensor_reports(source: Source, plan: Plan) -> tuple[TensorReport, ...]:
    """How each tensor of a source is cut."""
    cut: dict[Any, tuple[str, str, tuple[tuple[int, ...], ...], tuple[int, ...]]] = {}  # tensors share placements
    reports = []
    for name, spec in source.specs.items():
        placed = plan.tensors[name]
        if (id(placed), spec) not in cut:
            shapes = tuple(placed.placement.shard_shape(spec.shape, rank) for rank in range(plan.tp))
            sizes = tuple(num_bytes(spec.dtype, shape) for shape in shapes)
            cut[id(placed), spec] = (placed.placement.describe(), str(placed.reason), shapes, sizes)
        reports.append(TensorReport(name, spec.dtype, spec.shape, *cut[id(placed), spec]))
    return tuple(reports)


def _path(path: StrPath | None) -> Path | None:
    return None if path is None else Path(path)
