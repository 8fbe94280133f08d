"""One report for a pipeline, from the reports on its components."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from msgspec import Struct, structs

from shardconv.checkpoint.sources.pipeline import Pipeline
from shardconv.plan.padded_config import ConfigChange
from shardconv.plan.tp_sizes import NO_PADDING, BlockedTp, PaddingReport

#: The class of a report, a dataclass.
R = TypeVar("R")
#: Component to its report, or to the value of a field of it.
_Of = Mapping[str, Any]


def combine(reports: Mapping[str, R], pipeline: Pipeline, **given: object) -> R:
    """The report on a pipeline.

    Args:
        reports: component to the report on it.
        pipeline: the pipeline, which has its components and the files that are left out beside them.
        given: the fields that do not follow from the reports.
    """
    first: Any = next(iter(reports.values()))
    given |= {"components": pipeline.components, "copied": pipeline.copied}
    names = [field.name for field in fields(first) if field.name not in given]
    combined: R = replace(first, **{name: _combine_field(name, reports, pipeline) for name in names}, **given)
    return combined


def _combine_field(name: str, reports: _Of, pipeline: Pipeline) -> object:
    if name in _OF_REPORTS:
        return _OF_REPORTS[name](reports)
    values = {one: getattr(report, name) for one, report in reports.items()}
    if name == "left_out":
        return {**_path_keys(values), **pipeline.left_out}
    return _OF_VALUES.get(name, _same)(values)


# --- from the values of a field -------------------------------------------------------------------------------------


def _same(values: _Of) -> object:
    first, *others = values.values()
    assert all(other == first for other in others), values
    return first


def _total(values: _Of) -> int:
    return sum(values.values())


def _totals_per_rank(values: _Of) -> tuple[int, ...]:
    return tuple(map(sum, zip(*values.values(), strict=True)))


def _texts(values: _Of) -> tuple[str, ...]:
    return tuple(f"{component}: {text}" for component, texts in values.items() for text in texts)


def _paths(values: _Of) -> tuple[str, ...]:
    return tuple(f"{component}/{name}" for component, names in values.items() for name in names)


def _path_keys(values: _Of) -> dict[str, Any]:
    return {f"{component}/{name}": value for component, table in values.items() for name, value in table.items()}


def _union(values: _Of) -> tuple[object, ...]:
    return tuple(dict.fromkeys(one for several in values.values() for one in several))


def _joined(values: _Of) -> str:
    return ", ".join(dict.fromkeys(filter(None, values.values())))


def _every(values: _Of) -> bool | None:
    """Whether all are true; None if that is unknown of some, and true of the others."""
    found = {*values.values()}
    return False if False in found else None if None in found else True


def _any(values: _Of) -> bool:
    return any(values.values())


def _renamed(values: _Of) -> tuple[Struct, ...]:
    tensors = ((component, one) for component, several in values.items() for one in several)
    return tuple(structs.replace(one, name=f"{component}/{one.name}") for component, one in tensors)


_FIELDS: dict[Callable[[_Of], object], Iterable[str]] = {
    _total: ("num_tensors", "num_bytes", "source_bytes", "files_per_rank", "num_quantized"),
    _totals_per_rank: ("rank_bytes",),
    _texts: ("assumed", "derived", "notes", "differences"),
    _paths: ("adapters", "files", "other_weights"),
    _union: ("checked", "quantized_blocks"),
    _joined: ("family", "quantization"),
    _every: ("is_identical", "is_compared", "has_checksums"),
    _any: ("is_damaged",),
    _renamed: ("tensors",),
}
#: Field to the function that combines its values; other fields are the same in all reports.
_OF_VALUES = {name: function for function, names in _FIELDS.items() for name in names}


# --- from several fields --------------------------------------------------------------------------------------------


def _padding(reports: _Of) -> PaddingReport:
    """The padded units of all components, and all bytes of padding divided by all other bytes."""
    units, padding, others = [], 0.0, 0.0
    for component, report in reports.items():
        size, memory = sum(getattr(report, "rank_bytes", ())) or report.num_bytes, report.padding.memory
        units += [replace(unit, name=f"{component}: {unit.name}") for unit in report.padding.units]
        padding, others = padding + size * memory / (1 + memory), others + size / (1 + memory)
    return PaddingReport(tuple(units), padding / others) if units else NO_PADDING


def _config(reports: _Of) -> tuple[ConfigChange, ...]:
    changes = ((component, one) for component, report in reports.items() for one in report.config)
    return tuple(replace(one, field=f"{component}/{one.field}") for component, one in changes)


def _supported(reports: _Of) -> dict[int, int]:
    """The sizes that all components support, and the bytes of the rank that has most."""
    first, *others = (dict(zip(one.supported_tp, one.supported_bytes, strict=True)) for one in reports.values())
    return {tp: size + sum(one[tp] for one in others) for tp, size in first.items() if all(tp in one for one in others)}


def _blocked(reports: _Of) -> tuple[BlockedTp, ...]:
    """The sizes that some component does not support, each with the tensor of the first one."""
    found: dict[int, BlockedTp] = {}
    for component, report in reports.items():
        for one in report.blocked_tp:
            found.setdefault(one.tp, replace(one, tensor=f"{component}/{one.tensor}"))
    return tuple(found[tp] for tp in sorted(found))


#: Field to the function that computes it from the reports.
_OF_REPORTS: dict[str, Callable[[_Of], object]] = {
    "padding": _padding,
    "config": _config,
    "supported_tp": lambda reports: tuple(_supported(reports)),
    "supported_bytes": lambda reports: tuple(_supported(reports).values()),
    "blocked_tp": _blocked,
    "padded_tp": lambda _: (),
}
