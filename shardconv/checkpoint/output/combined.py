"""One report for a pipeline, from the reports on its components.

The type of a field has the function that joins its values, as in ``num_bytes: Annotated[int, total]``; a field without
one has the same value in all reports.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import fields, replace

from shardconv.checkpoint.sources.pipeline import Pipeline
from shardconv.plan.padded_config import ConfigChange
from shardconv.plan.planner import NO_PADDING, BlockedTp, PaddedTp, PaddingReport

#: The class of a report.
R = TypeVar("R")


class Joined(NamedTuple):
    """A field of the reports on components.

    Attributes:
        name: its name.
        reports: component to the report on it.
    """

    name: str
    reports: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """Component to the value of the field."""
        return {component: getattr(report, self.name) for component, report in self.reports.items()}


def combine(reports: Mapping[str, R], pipeline: Pipeline, **given: object) -> R:
    """The report on a pipeline.

    Args:
        reports: component to the report on it.
        pipeline: the pipeline, which has its components and the files that are left out beside them.
        given: the fields that do not follow from the reports.
    """
    first: Any = next(iter(reports.values()))
    given |= {"components": pipeline.components, "copied": pipeline.copied}
    joins = {one.name: getattr(one.type, "__metadata__", (same,))[0] for one in fields(first)}
    joined: dict[str, Any] = {name: join(Joined(name, reports)) for name, join in joins.items() if name not in given}
    if "left_out" in joined:
        joined["left_out"] |= pipeline.left_out
    combined: R = replace(first, **joined, **given)
    return combined


def same(field: Joined) -> object:
    """The value, which is the same in all reports."""
    first, *others = field.values.values()
    assert all(other == first for other in others), field.values
    return first


def total(field: Joined) -> int:
    """The sum of numbers."""
    return sum(field.values.values())


def totals_per_rank(field: Joined) -> tuple[int, ...]:
    """The sums of numbers of each rank."""
    return tuple(map(sum, zip(*field.values.values(), strict=True)))


def texts(field: Joined) -> tuple[str, ...]:
    """Texts, each after the name of its component."""
    return tuple(f"{component}: {text}" for component, found in field.values.items() for text in found)


def paths(field: Joined) -> tuple[str, ...]:
    """Names of files in the folders of components, as names in the folder of the pipeline."""
    return tuple(f"{component}/{name}" for component, names in field.values.items() for name in names)


def path_keys(field: Joined) -> dict[str, Any]:
    """Tables by names of files, as in :func:`paths`."""
    return {f"{component}/{name}": one for component, table in field.values.items() for name, one in table.items()}


def union(field: Joined) -> tuple[object, ...]:
    """The values of all reports, without repetitions."""
    return tuple(dict.fromkeys(one for several in field.values.values() for one in several))


def listed(field: Joined) -> str:
    """Texts in one line, without repetitions."""
    return ", ".join(dict.fromkeys(filter(None, field.values.values())))


def every(field: Joined) -> bool | None:
    """Whether all are true; None if that is unknown of some, and true of the others."""
    found = {*field.values.values()}
    return False if False in found else None if None in found else True


def some(field: Joined) -> bool:
    """Whether one is true."""
    return any(field.values.values())


def tensors_by_path(field: Joined) -> tuple[Struct, ...]:
    """Reports on tensors, whose names begin with their component."""
    tensors = ((component, one) for component, several in field.values.items() for one in several)
    return tuple(replace(one, name=f"{component}/{one.name}") for component, one in tensors)


def padding_of_all(field: Joined) -> PaddingReport:
    """The padded units of all components, and all bytes of padding divided by all other bytes."""
    units, shares = [], []
    for component, report in field.reports.items():
        units += [replace(unit, name=f"{component}: {unit.name}") for unit in report.padding.units]
        shares.append((sum(getattr(report, "rank_bytes", ())) or report.num_bytes, report.padding.memory))
    return PaddingReport(tuple(units), _padding_share(shares)) if units else NO_PADDING


def _padding_share(shares: Sequence[tuple[int, float]]) -> float:
    """All bytes of padding divided by all other bytes, from pairs of all bytes and this share of a component."""
    others = sum(size / (1 + share) for size, share in shares)
    return (sum(size for size, _ in shares) - others) / others


def config_changes(field: Joined) -> tuple[ConfigChange, ...]:
    """Changed fields of configs, whose names begin with their component."""
    changes = ((component, one) for component, several in field.values.items() for one in several)
    return tuple(replace(one, field=f"{component}/{one.field}") for component, one in changes)


def supported(field: Joined) -> tuple[int, ...]:
    """The sizes that all components support."""
    return tuple(_supported(field.reports))


def supported_bytes(field: Joined) -> tuple[int, ...]:
    """The bytes of the rank that has most, for each of the sizes that all components support."""
    return tuple(_supported(field.reports).values())


def _supported(reports: Mapping[str, Any]) -> dict[int, int]:
    first, *others = (dict(zip(one.supported_tp, one.supported_bytes, strict=True)) for one in reports.values())
    return {tp: size + sum(one[tp] for one in others) for tp, size in first.items() if all(tp in one for one in others)}


def blocked(field: Joined) -> tuple[BlockedTp, ...]:
    """The sizes that some component does not support, each with the tensor of the first one."""
    found: dict[int, BlockedTp] = {}
    for component, sizes in field.values.items():
        for one in sizes:
            found.setdefault(one.tp, replace(one, tensor=f"{component}/{one.tensor}"))
    return tuple(found[tp] for tp in sorted(found))


def padded(field: Joined) -> tuple[PaddedTp, ...]:
    """The sizes that all components support, where at least one component needs padding.

    Components that support a size without padding are counted without it.
    """
    found = []
    for tp in sorted({one.tp for several in field.values.values() for one in several}):
        sizes = [one for report in field.reports.values() if (one := _size(report, tp)) is not None]
        if len(sizes) == len(field.reports):
            memory = _padding_share([(one.num_bytes, one.memory) for one in sizes])
            found.append(PaddedTp(tp, memory, sum(one.num_bytes for one in sizes)))
    return tuple(found)


def _size(report: Any, tp: int) -> PaddedTp | None:  # noqa: ANN401 - a report on a plan
    """A size of a component, perhaps without padding; None if it is not supported."""
    supported = {size: PaddedTp(size, 0.0, size * most) for size, most in _supported({"": report}).items()}
    return {**supported, **{one.tp: one for one in report.padded_tp}}.get(tp)
