"""One self-contained page: the template, its styles and scripts, and the reports as data.

Text of a checkpoint is data: it is in a block of JSON, which the browser does not execute, and the scripts make text
nodes of it. The content security policy of the page allows its own script and styles, by their checksums, and no
request. A plan is in the page in a compact form: distinct placements, patterns of names, and bytes per layer and rank.
"""

import base64
import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from shardconv import __version__
from shardconv.checkpoint.operations.plan_report import PlanReport, TensorReport
from shardconv.files.containers.safetensors import num_bytes
from shardconv.plan.placement import IntervalOrPadding, Padding
from shardconv.support.formatting import json_text, visible

if TYPE_CHECKING:
    from shardconv.checkpoint.operations.verify import VerifyReport
    from shardconv.runtime.estimate import CostReport

_ASSETS = Path(__file__).parent / "assets"
#: In the order of their dependencies.
_SCRIPTS = ("base.js", "table.js", "chart.js", "sizes.js", "layers.js", "tensors.js", "cost.js", "verify.js", "page.js")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def write_page(
    plan: "PlanReport | None",
    *,
    no_plan: str | None = None,
    cost: "CostReport | None" = None,
    verify: "VerifyReport | None" = None,
    remedy: str = "",
) -> bytes:
    """The page of a plan, its cost, or a verification.

    Its data are the reports as ``--json`` prints them, the plan without its tensors, and their compact form with a tp.

    Args:
        plan: the plan; None if it is not shown.
        no_plan: why it is not shown.
        cost: the cost at several tp sizes.
        verify: a verification of the split checkpoint whose plan it is.
        remedy: the remedy for its differences.
    """
    table = None if plan is None or plan.tp is None else tensor_table(plan)
    summary = None if plan is None else replace(plan, tensors=())
    found = {"version": __version__, "plan": summary, "no_plan": no_plan, "tensors": table}
    data = json_text({**found, "cost": cost, "verify": verify, "remedy": remedy})
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    parts = {
        "title": html.escape(visible(_title(plan, cost, verify))),
        "style": _asset("page.css"),
        "script": f"'use strict';\n{{\n{script}}}\n",  # a block: its names are not names of the window
        "data": data.replace("<", "\\u003c"),  # no name can close the block of data, or open another
    }
    parts["policy"] = _policy(parts["script"], parts["style"])
    page = _PLACEHOLDER.sub(lambda match: parts[match[1]], _asset("page.html"))
    return page.encode()


def _title(plan: "PlanReport | None", cost: "CostReport | None", verify: "VerifyReport | None") -> str:
    if verify is not None:
        return f"{', '.join(verify.paths)}: verification"
    if plan is not None:
        return f"{plan.source}: plan" + ("" if plan.tp is None else f" for tp {plan.tp}")
    return "cost" if cost is None else f"{cost.source}: cost"


def _policy(script: str, style: str) -> str:
    """The content security policy: no request, and no script or style but these."""
    return (
        f"default-src 'none'; script-src '{_checksum(script)}'; style-src '{_checksum(style)}'; base-uri 'none'; "
        f"form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _checksum(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text("utf-8")


#: The beginning of every page, by which a page is known before it is replaced.
MARK = _asset("page.html").partition("<meta charset")[0].encode()


Value = TypeVar("Value")
#: Values of consecutive ranks: each value with the number of ranks that have it.
Runs = tuple[tuple[Value, int], ...]


#: A path component that is a number as :func:`str` prints it.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")
#: The most numbers that a pattern replaces: of a layer, of an expert, and of submodels.
_MAX_NUMBERS = 4

#: Tuples of numbers as nested ranges: ``[first, last]``, and with further numbers ``[first, last, RANGES]``.
Ranges = list[list["int | Ranges"]]


def parse_name(name: str) -> tuple[str, tuple[int, ...]]:
    """The pattern of a name, with ``*`` for each number, and the numbers."""
    if "*" in name:
        return name, ()
    found = _NUMBER.findall(name)[:_MAX_NUMBERS]
    return _NUMBER.sub("*", name, count=_MAX_NUMBERS), tuple(map(int, found))


def layer_of(pattern: str, numbers: tuple[int, ...]) -> tuple[str, int | None]:
    """The layer of a tensor: its path up to the first number, and the number.

    Tensors without a number belong to their module.
    """
    if not numbers:
        return pattern.rpartition(".")[0] or pattern, None
    return pattern[: pattern.index("*") + 1], numbers[0]


def number_ranges(tuples: Iterable[tuple[int, ...]]) -> Ranges:
    """Distinct tuples of equally many numbers as nested ranges."""
    inner: dict[int, list[tuple[int, ...]]] = {}
    for numbers in sorted(tuples):
        inner.setdefault(numbers[0], []).append(numbers[1:])
    ranges: Ranges = []
    for number, others in inner.items():
        rest: list[int | Ranges] = [number_ranges(others)] if others[0] else []
        if ranges and ranges[-1][1:] == [number - 1, *rest]:
            ranges[-1][1] = number
        else:
            ranges.append([number, number, *rest])
    return ranges


class Held(NamedTuple):
    """Bytes on one rank.

    Attributes:
        sharded: of elements that no other rank holds.
        shared: of sharded tensors some of whose elements are on several ranks.
        replicated: of replicated tensors.
        padding: of padding.
    """

    sharded: int = 0
    shared: int = 0
    replicated: int = 0
    padding: int = 0


class TensorKind(Struct, frozen=True):
    """Tensors with the same placement and shape: the fields of :class:`TensorReport` that are equal for all of them."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    placement: str
    reason: str
    style: str
    units: tuple[str, ...]
    dim: int | None
    rank_bytes: Runs[int]
    intervals: Runs[tuple[IntervalOrPadding, ...]]


class Layers(Struct, frozen=True):
    """Consecutive layers with equal tensors.

    Attributes:
        name: their path, with ``*`` for the number; of tensors without a number, the path of their module.
        first: the number of the first layer, or None.
        last: the number of the last.
        num_tensors: the number of tensors of each layer.
        num_bytes: bytes of the full tensors of each layer.
        ranks: the bytes of each layer on each rank.
    """

    name: str
    first: int | None
    last: int | None
    num_tensors: int
    num_bytes: int
    ranks: Runs[Held]


class TensorTable(Struct, frozen=True):
    """The tensors of a plan.

    Attributes:
        kinds: the distinct placements and shapes.
        names: patterns of names, each with the index of its kind, and the numbers that ``*`` stands for.
        layers: bytes per layer and rank.
    """

    kinds: tuple[TensorKind, ...]
    names: tuple[tuple[str, int, Ranges], ...]
    layers: tuple[Layers, ...]


def tensor_table(report: PlanReport) -> TensorTable:
    """The compact form of the tensors of a plan."""
    index_of: dict[int, int] = {}  # by the object that reports of equal placement and shape share
    kinds: dict[TensorKind, int] = {}
    held: list[list[Held]] = []
    names: dict[tuple[str, int, int], list[tuple[int, ...]]] = {}  # by pattern, kind, and how many numbers it has
    counts: dict[tuple[str, int | None], Counter[int]] = {}
    for tensor in report.tensors:
        if (index := index_of.get(id(tensor.shard_bytes))) is None:
            index = index_of[id(tensor.shard_bytes)] = kinds.setdefault(_kind(tensor), len(kinds))
            if index == len(held):
                held.append(_held(tensor))
        pattern, numbers = parse_name(tensor.name)
        names.setdefault((pattern, index, len(numbers)), []).append(numbers)
        counts.setdefault(layer_of(pattern, numbers), Counter())[index] += 1
    ranges = ((pattern, kind, number_ranges(found) if count else []) for (pattern, kind, count), found in names.items())
    return TensorTable(tuple(kinds), tuple(ranges), tuple(_layers(counts, tuple(kinds), held)))


def runs(values: Iterable[Value]) -> Runs[Value]:
    """Values, each with the number of times that it follows itself."""
    return tuple((value, len(list(equal))) for value, equal in groupby(values))


def _kind(tensor: TensorReport) -> TensorKind:
    return TensorKind(
        dtype=tensor.dtype,
        shape=tensor.shape,
        num_bytes=num_bytes(tensor.dtype, tensor.shape),
        placement=tensor.placement,
        reason=tensor.reason,
        style=tensor.style,
        units=tensor.units,
        dim=tensor.dim,
        rank_bytes=runs(tensor.shard_bytes),
        intervals=runs(_intervals(tensor)),
    )


def _intervals(tensor: TensorReport) -> list[tuple[IntervalOrPadding, ...]]:
    """The intervals of each rank of all pipeline stages; none where another stage holds the tensor."""
    tp = len(tensor.shard_shapes)
    stages = range(len(tensor.shard_bytes) // tp)
    return [entries if stage in tensor.stages else () for stage in stages for entries in tensor.intervals]


def _held(tensor: TensorReport) -> list[Held]:
    """The bytes of one tensor on each rank."""
    if tensor.dim is None:
        return [Held(replicated=total) for total in tensor.shard_bytes]
    intervals = _intervals(tensor)
    sizes = [sum(entry.size for entry in entries) for entries in intervals]
    paddings = [sum(entry.size for entry in entries if isinstance(entry, Padding)) for entries in intervals]
    has_replicas = sum(sizes) - sum(paddings) > tensor.shape[tensor.dim]
    ranks = []
    for total, size, padding in zip(tensor.shard_bytes, sizes, paddings, strict=True):
        zeros = total * padding // max(size, 1)
        held = total - zeros
        ranks.append(Held(shared=held, padding=zeros) if has_replicas else Held(sharded=held, padding=zeros))
    return ranks


def _layers(
    counts: Mapping[tuple[str, int | None], Counter[int]], kinds: Sequence[TensorKind], held: Sequence[Sequence[Held]]
) -> Iterator[Layers]:
    """The layers by name and number; consecutive ones with equal tensors are one entry."""
    equal: list[tuple[str, int | None, int | None]] = []
    for name, number in sorted(counts, key=lambda layer: (layer[0], layer[1] or 0)):
        before, first, last = equal[-1] if equal else ("", None, None)
        if (before, last) == (name, (number or 0) - 1) and counts[name, number] == counts[name, first]:
            equal[-1] = (name, first, number)
        else:
            equal.append((name, number, number))
    for name, first, last in equal:
        tensors = counts[name, first]
        size = sum(count * kinds[kind].num_bytes for kind, count in tensors.items())
        ranks = [_sum((held[kind][rank], count) for kind, count in tensors.items()) for rank in range(len(held[0]))]
        yield Layers(name, first, last, tensors.total(), size, runs(ranks))


def _sum(counted: Iterable[tuple[Held, int]]) -> Held:
    """The bytes of several tensors of each kind."""
    totals = [0] * len(Held._fields)
    for held, count in counted:
        totals = [total + count * added for total, added in zip(totals, held, strict=True)]
    return Held(*totals)
