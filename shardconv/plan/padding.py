"""Padding: units that do not divide get units of zeros, so that every rank has as many.

Owns which units are padded together and how far. Zeros add nothing to what a row parallel layer sums, so outputs are
equal as long as query heads keep their KV heads. Where that does not follow from the rules, units are not padded.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from shardconv.errors import PlanError
from shardconv.plan.placement import Unit, round_up
from shardconv.plan.rule import CHOICE, STYLES, Rule

if TYPE_CHECKING:
    from shardconv.plan.scope import Scope


#: Features: kernels of torch for grouped products need rows of a multiple of 16 bytes, and others are faster with them.
_ALIGN = 8

#: The largest unit of a width: gate and up of one feature. A unit of at most this size is a width, or a number for each
#: head of some module. Neither has to be told from the other: the order of the features of a width is free, so that a
#: width of as many features as there are query heads may be padded as those are. What could be of two is refused.
_MAX_PAIR = 2


class Heads(NamedTuple):
    """KV heads, and how many query heads each has."""

    kv_heads: int
    group: int

    def padded(self, multiple: int) -> "Heads":
        """The heads with padding, for a ``multiple`` of ranks: those that take the least memory of all ranks.

        Either whole groups are added, or query heads to each group, whose KV head then several ranks hold.
        """
        whole = Heads(round_up(self.kv_heads, multiple), self.group)
        shared = (kv for kv in range(self.kv_heads, multiple + 1) if multiple % kv == 0)
        each = [Heads(kv, round_up(self.group, multiple // kv)) for kv in shared]
        return min([whole, *each], key=lambda heads: (heads.query_heads + max(heads.kv_heads, multiple), heads))

    @property
    def query_heads(self) -> int:
        """The query heads of all groups."""
        return self.kv_heads * self.group


@dataclass(frozen=True, slots=True)
class Padding:
    """How one unit is padded.

    Attributes:
        heads: that it is one of; None for units that are padded by themselves.
        align: a width is padded to a multiple of this on each rank, if it is padded at all.
        of_group: whether the unit is counted in each group of query heads, as in a projection that is interleaved.
        refusal: why it is not padded; "" where it is.
    """

    heads: Heads | None = None
    align: int = 1
    of_group: bool = False
    refusal: str = ""

    def apply(self, unit: Unit, multiple: int) -> Unit:
        """The unit, padded for a ``multiple`` of ranks."""
        if self.refusal or unit.pad:
            return unit
        padded = None if self.heads is None else self.heads.padded(multiple)
        if self.heads is None or padded is None:
            count = round_up(unit.count, multiple * self.align) if unit.count % multiple else unit.count
            return Unit(unit.count, unit.size, unit.copies, padded=(1, count))
        if self.of_group:
            group = unit.count if unit.copies else padded.group
            return Unit(unit.count, unit.size, unit.copies, padded=(1, group))
        group = 1 if unit.copies else padded.group
        return Unit(unit.count, unit.size, unit.copies, groups=self.heads.kv_heads, padded=(padded.kv_heads, group))


#: Of a unit that module overrides name, and no rule of a module that they match.
UNKNOWN = Padding(refusal="no rule tells which units it is padded with")


#: Of a unit of which there are as many as KV heads of other modules, or as heads of several kinds.
UNSURE = Padding(refusal="there are as many as heads of other modules, and it is not known of which")


@dataclass(slots=True)
class _Together:
    """Units that meet in modules, which are padded together.

    Attributes:
        names: of the units.
        groups: how often rules repeat their segments, once for each KV head.
        of_group: the names of those that such rules count in each group.
        refusal: why they are not padded; "" where they may be.
    """

    names: set[str] = field(default_factory=set)
    groups: set[str | int] = field(default_factory=set)
    of_group: set[str] = field(default_factory=set)
    refusal: str = ""

    def add(self, other: "_Together") -> None:
        """Join what is of another module."""
        self.names |= other.names
        self.groups |= other.groups
        self.of_group |= other.of_group
        self.refusal = self.refusal or other.refusal


@lru_cache(maxsize=64)
def unit_paddings(scope: "Scope") -> Mapping[str, Padding]:
    """How each unit of a scope that its rules name is padded."""
    joined: list[_Together] = []
    for one in _by_module(scope).values():
        meeting = [other for other in joined if other.names & one.names]
        for other in meeting:
            one.add(other)
        joined = [*(other for other in joined if other not in meeting), one]
    found = [_paddings(together, scope) for together in joined]
    heads = {padding.heads for paddings in found for padding in paddings.values() if padding.heads is not None}
    return {name: padding for paddings in found for name, padding in _with_heads(paddings, heads, scope)}


def _with_heads(paddings: dict[str, Padding], heads: set[Heads], scope: "Scope") -> Iterator[tuple[str, Padding]]:
    """The paddings of units that meet in modules; those of widths that may be numbers of query heads, as of those."""
    counted = {name: _counted(name, scope) for name in paddings}
    is_open = all(not padding.refusal and padding.heads is None for padding in paddings.values())
    is_open = is_open and all(size <= _MAX_PAIR for _, size in counted.values())
    for name, padding in paddings.items():
        count = counted[name][0]
        if not is_open or not (found := {each for each in heads if count in (each.query_heads, each.kv_heads)}):
            yield name, padding
        elif len(found) == 1 and count == (own := found.pop()).query_heads:
            yield name, Padding(own)
        else:
            yield name, UNSURE


@lru_cache(maxsize=1024)
def padding_of(scope: "Scope", rule: Rule, unit: str | None) -> Padding:
    """How a unit of a rule is padded; without units element by element, where no heads are in the rule's modules."""
    if unit is not None:
        return unit_paddings(scope)[unit]
    modules = _by_module(scope)
    paddings = unit_paddings(scope)
    for module in _modules_of(rule.pattern):
        together = modules[module]
        if together.refusal:
            return Padding(refusal=together.refusal)
        if any(paddings[name].heads for name in together.names):
            return Padding(refusal=f"{rule.pattern} is sharded by elements, beside heads of the same module")
    return Padding(align=_ALIGN)


def _by_module(scope: "Scope") -> dict[str, _Together]:
    """The units of each module, by its pattern."""
    found: dict[str, _Together] = {}
    units = scope.family.units or {}
    for rule in scope.used_rules():
        if STYLES[rule.style].weight is None:
            continue
        for module in _modules_of(rule.pattern):
            together = found.setdefault(module, _Together())
            names = {name for name in (rule.unit, *rule.parts) if name is not None}
            together.names |= names
            if rule.groups != 1:
                together.groups.add(rule.groups)
                together.of_group |= names
            if rule.style == "by_rows" and len(names) != 1:
                together.refusal = f"{rule.pattern} computes along the dim that would be padded (style by_rows)"
    for regex, override in scope.modules():
        if names := override.reads() & units.keys():
            for module in found.keys() & {*expanded(override.pattern), *_matched(scope, regex)}:
                found[module].names |= names
    gathering = (rule.pattern for _, rule in scope.modules() if rule.gathered_output)
    for module in (one for pattern in gathering for one in expanded(pattern) if one in found):
        found[module].refusal = f"the output of {module} is gathered with its padding"
    return found


def _matched(scope: "Scope", regex: re.Pattern[str]) -> Iterator[str]:
    """The patterns of the modules of rules with a tensor in a module that an override matches, or in a layer of it."""
    for rule, layers in (scope.used or {}).items():
        names = [name for name in layers if regex.fullmatch(name) or regex.fullmatch(name.rpartition(".")[0])]
        for pattern in expanded(rule.pattern) if names else ():
            own = re.compile(scope.regex(pattern.removesuffix(".weight").removesuffix(".bias")))
            if any(map(own.fullmatch, names)):
                yield pattern.rpartition(".")[0]


def _modules_of(pattern: str) -> list[str]:
    """The patterns of the modules that have the layers or parameters of a pattern."""
    return list(dict.fromkeys(one.rpartition(".")[0] for one in expanded(pattern)))


def expanded(pattern: str) -> Iterator[str]:
    """The patterns without choices that a pattern with choices stands for."""
    texts = CHOICE.split(pattern)
    choices = [found[1:-1].split(",") for found in CHOICE.findall(pattern)]
    for chosen in product(*choices):
        yield "".join(text + choice for text, choice in zip(texts, (*chosen, ""), strict=True))


def _paddings(together: _Together, scope: "Scope") -> dict[str, Padding]:
    """How units that meet in modules are padded."""
    heads, refusal = None, together.refusal
    if any((scope.family.units or {})[name].whole for name in together.names):
        refusal = refusal or "units that do not divide are not sharded"
    if not refusal:
        try:
            heads, refusal = _heads(together, scope)
        except PlanError as error:  # of rules that match nothing, maybe: a field is missing
            refusal = str(error)
    align = _ALIGN if heads is None and not refusal and _is_width(together.names, scope) else 1
    return {name: Padding(heads, align, name in together.of_group, refusal) for name in together.names}


def _is_width(names: set[str], scope: "Scope") -> bool:
    """Whether units are features, or pairs of gate and up of a feature, and not heads, nor one number for each head."""
    sizes = {name: _counted(name, scope) for name in scope.family.units or {}}
    heads = {count for count, size in sizes.values() if count and size > _MAX_PAIR}
    return all(sizes[name][1] <= _MAX_PAIR and sizes[name][0] not in heads for name in names)


def _counted(name: str, scope: "Scope") -> tuple[int, int]:
    """How many of a unit there are, and its size; a size over that of a pair where that is not known."""
    unit = (scope.family.units or {})[name]
    try:
        count = 0 if unit.count is None else scope.fields().evaluate(unit.count)
        return count, scope.fields().evaluate(unit.size)
    except PlanError:  # it differs from tensor to tensor, or nothing has such a unit
        return 0, _MAX_PAIR + 1


def _heads(together: _Together, scope: "Scope") -> tuple[Heads | None, str]:
    """The heads among units that meet in modules, if there are KV heads; and why the units are not padded, if so."""
    units = scope.family.units or {}
    outer = together.names - together.of_group
    has_kv = bool(together.groups) or any(units[name].copies for name in outer)
    if not has_kv:
        return None, _without_kv(together.names, scope)
    counts: dict[str, int] = {}
    for name in sorted(together.names):
        if (count := units[name].count) is None:
            return None, f"how many {name} there are differs from tensor to tensor"
        counts[name] = scope.fields().evaluate(count)
    kv_heads = {counts[name] for name in outer if units[name].copies}
    kv_heads |= {scope.fields().evaluate(groups) for groups in together.groups}
    inner = {counts[name] for name in together.of_group if not units[name].copies}
    queries = {counts[name] for name in outer if not units[name].copies}
    queries |= {next(iter(kv_heads)) * group for group in inner}
    if len(kv_heads) != 1 or len(queries) > 1 or min(kv_heads) < 1 or any(q % min(kv_heads) for q in queries):
        return None, f"which query head has which KV head is not known ({_listed(counts)})"
    return Heads(min(kv_heads), max(queries, default=min(kv_heads)) // min(kv_heads)), ""


def _without_kv(names: set[str], scope: "Scope") -> str:
    """Why units without KV heads are not padded: heads of which there are different numbers may belong together."""
    counts = {name: found[0] for name in sorted(names) if (found := _counted(name, scope))[1] > _MAX_PAIR}
    if unknown := [name for name in counts if (scope.family.units or {})[name].count is None]:
        return f"how many {unknown[0]} there are differs from tensor to tensor"
    return f"which of them belong together is not known ({_listed(counts)})" if len({*counts.values()}) > 1 else ""


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())
