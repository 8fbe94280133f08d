"""Padding: units of zeros that are added where tp does not divide the number of units.

Determines which units are padded together and to which count. Zeros add nothing to the sums of row parallel layers, so
outputs stay equal as long as query heads keep their KV heads. Units for which the rules do not ensure that are not
padded.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache, reduce
from math import gcd, lcm
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from shardconv.plan.families.matcher import pattern_for
from shardconv.plan.families.rule import STYLES, Rule
from shardconv.plan.placement import Unit, round_up
from shardconv.support.errors import PlanError

if TYPE_CHECKING:
    from shardconv.plan.rule_set import ModelRules


#: Padded widths are multiples of this many features per rank: torch's grouped matmul kernels need rows of a multiple of
#: 16 bytes, and other kernels are faster with them.
_ALIGN = 8

#: The largest unit of a width: gate and up of one feature. Units up to this size are features of a width, or one value
#: per head. They need not be distinguished: features may be in any order, so a width with as many features as there
#: are query heads may be padded like the heads. A count that fits several kinds of heads is refused.
_MAX_PAIR = 2


class Heads(NamedTuple):
    """The number of KV heads, and the number of query heads per KV head.

    The number of query heads per rank is a multiple of ``block``, without or with padding: heads that share a block of
    a quantized matrix are on the same rank, and a block with heads does not have padding.
    """

    kv_heads: int
    group: int
    block: int = 1

    def padded(self, multiple: int) -> "Heads":
        """The heads with padding for ``multiple`` ranks that take the least memory on all ranks together.

        Either full groups are added, or query heads are added to each group, whose KV head is then replicated. Groups
        that do not have full blocks stay as they are, unless there is only one.
        """
        blocked = multiple * (self.block // gcd(self.block, self.group))
        full_groups = self._replace(kv_heads=round_up(self.kv_heads, blocked))
        is_extensible = self.kv_heads == 1 or self.group % self.block == 0
        divisors = [kv for kv in range(self.kv_heads, multiple + 1) if multiple % kv == 0] if is_extensible else []
        larger_groups = [Heads(kv, round_up(self.group, multiple // kv * self.block), self.block) for kv in divisors]
        candidates = [full_groups, *larger_groups]
        return min(candidates, key=lambda heads: (heads.query_heads, heads))

    @property
    def query_heads(self) -> int:
        """Number of query heads of all groups."""
        return self.kv_heads * self.group


class UnitPadding(Struct, frozen=True):
    """The padding of one unit.

    Attributes:
        heads: the heads with which the unit is padded; None for units that are padded independently.
        align: the padded count per rank is a multiple of this.
        block: the count per rank is a multiple of this, without or with padding: blocks of quantized matrices.
        of_group: whether the count of the unit is per group of query heads, as in a projection interleaved per KV head.
        refusal: the reason why the unit is not padded; "" if it is.
    """

    heads: Heads | None = None
    align: int = 1
    block: int = 1
    of_group: bool = False
    refusal: str = ""

    def apply(self, unit: Unit, multiple: int) -> Unit:
        """The unit with padding for ``multiple`` ranks."""
        if self.refusal or unit.pad:
            return unit
        padded = None if self.heads is None else self.heads.padded(multiple)
        if self.heads is None or padded is None:
            is_divided = unit.count % (multiple * self.block) == 0
            count = unit.count if is_divided else round_up(unit.count, multiple * lcm(self.align, self.block))
            return Unit(unit.count, unit.size, unit.replicate, padded=(1, count))
        if self.of_group:
            group = unit.count if unit.replicate else padded.group
            return Unit(unit.count, unit.size, unit.replicate, padded=(1, group))
        group = 1 if unit.replicate else padded.group
        return Unit(unit.count, unit.size, unit.replicate, groups=self.heads.kv_heads, padded=(padded.kv_heads, group))


#: For a unit that a module override names, and no rule of a module that the override matches.
UNKNOWN = UnitPadding(refusal="no rule determines the units that it is padded with")


#: For a unit whose count equals the number of KV heads of other modules, or the number of heads of several kinds.
AMBIGUOUS = UnitPadding(
    refusal="its count equals the number of heads of other modules, so the heads that it belongs to are ambiguous"
)


class _LinkedUnits(Struct):
    """Units of common modules, which are padded together.

    Attributes:
        names: the units.
        groups: the numbers of groups of the rules, one group per KV head.
        of_group: the units that such rules count per group.
        refusal: why the units are not padded; "" if they may be.
        block: the units in blocks of all quantized matrices.
    """

    names: set[str] = set()
    groups: set[str | int] = set()
    of_group: set[str] = set()
    refusal: str = ""
    block: int = 1

    def joined(self, other: "_LinkedUnits") -> "_LinkedUnits":
        """The units of both modules."""
        return _LinkedUnits(
            self.names | other.names, self.groups | other.groups, self.of_group | other.of_group,
            self.refusal or other.refusal, lcm(self.block, other.block),
        )  # fmt: skip


@lru_cache(maxsize=64)
def unit_paddings(model_rules: "ModelRules") -> Mapping[str, UnitPadding]:
    """The padding of each unit that the rules of a model name."""
    components: list[_LinkedUnits] = []
    for units in _units_by_module(model_rules).values():
        linked = [other for other in components if other.names & units.names]
        components = [
            *(other for other in components if other not in linked),
            reduce(_LinkedUnits.joined, linked, units),
        ]
    by_component = [_paddings(units, model_rules) for units in components]
    heads = {padding.heads for paddings in by_component for padding in paddings.values() if padding.heads is not None}
    return {
        name: padding for paddings in by_component for name, padding in _widths_as_heads(paddings, heads, model_rules)
    }


def _widths_as_heads(
    paddings: dict[str, UnitPadding], heads: set[Heads], model_rules: "ModelRules"
) -> Iterator[tuple[str, UnitPadding]]:
    """The paddings of linked units; widths with as many features as there are query heads are padded like the heads."""
    sizes = {name: _count_and_size(name, model_rules) for name in paddings}
    are_widths = all(not padding.refusal and padding.heads is None for padding in paddings.values())
    are_widths = are_widths and all(size <= _MAX_PAIR for _, size in sizes.values())
    for name, padding in paddings.items():
        count = sizes[name][0]
        candidates = {each for each in heads if are_widths and count in (each.query_heads, each.kv_heads)}
        if not candidates:
            yield name, padding
        elif len(candidates) == 1 and count == (only := candidates.pop()).query_heads:
            yield name, UnitPadding(only)
        else:
            yield name, AMBIGUOUS


@lru_cache(maxsize=1024)
def padding_of(model_rules: "ModelRules", rule: Rule, unit: str | None) -> UnitPadding:
    """The padding of a unit of a rule; for None the padding of elements, which modules with heads do not allow."""
    if unit is not None:
        return unit_paddings(model_rules)[unit]
    by_module, paddings = _units_by_module(model_rules), unit_paddings(model_rules)
    modules = [by_module[module] for module in {*map(_parent, _layers_of(model_rules, rule))}]
    for units in modules:
        if units.refusal:
            return UnitPadding(refusal=units.refusal)
        if any(paddings[name].heads for name in units.names):
            return UnitPadding(refusal=f"{rule.pattern} is sharded by elements in a module with heads")
    block = lcm(*(units.block for units in modules))
    return UnitPadding(align=_ALIGN, block=block)


@lru_cache(maxsize=64)
def _units_by_module(model_rules: "ModelRules") -> dict[str, _LinkedUnits]:
    """The units of each module, by its name."""
    by_module: dict[str, _LinkedUnits] = {}
    layers: set[str] = set()
    for rule in model_rules.used_rules():
        if STYLES[rule.style].weight is None:
            continue
        layers |= (of_rule := _layers_of(model_rules, rule))
        units, block = _LinkedUnits({*rule.units}), model_rules.blocks.get(rule.pattern, 1)
        sizes = [_count_and_size(name, model_rules)[1] for name in units.names] or [1]
        units.block = lcm(*(block // gcd(block, size) for size in sizes))
        if rule.groups != 1:
            units.groups, units.of_group = {rule.groups}, units.names
        if rule.style == "by_rows" and len(units.names) != 1:
            units.refusal = f"{rule.pattern} computes along the dim that would be padded (style by_rows)"
        for module in {*map(_parent, of_rule)}:
            by_module[module] = by_module.get(module, _LinkedUnits()).joined(units)
    for regex, override in model_rules.modules():
        names = override.reads() & model_rules.family.units.keys()
        for module in matched_modules(layers, regex) if names else ():
            by_module[module].names |= names
        for module in filter(regex.fullmatch, by_module) if override.gathered_output else ():
            by_module[module].refusal = f"the output of {pattern_for(module)} is gathered with its padding"
    return by_module


def _layers_of(model_rules: "ModelRules", rule: Rule) -> frozenset[str]:
    """The names of the layers and parameters that a rule matches, or a rule of the same pattern."""
    used: Mapping[Rule, frozenset[str]] = model_rules.used or {}
    return frozenset[str]().union(*(names for one, names in used.items() if one.pattern == rule.pattern))


def _parent(name: str) -> str:
    """The module of a layer or parameter."""
    return name.rpartition(".")[0]


def matched_modules(layers: Collection[str], regex: re.Pattern[str]) -> set[str]:
    """The modules with a layer that an override matches, or a layer of a module that it matches.

    The layer may be inside of a module of its own, such as ``self_attn.q_proj.linear``.
    """
    modules = {*map(_parent, layers)}
    found = {module for module in modules if regex.fullmatch(module) or regex.fullmatch(_parent(module))}
    return found | {_parent(layer) for layer in layers if regex.fullmatch(layer)}


def _paddings(linked: _LinkedUnits, model_rules: "ModelRules") -> dict[str, UnitPadding]:
    """The paddings of linked units."""
    heads, refusal = None, linked.refusal
    if any(model_rules.family.units[name].shard_if_divisible for name in linked.names):
        refusal = refusal or "units that do not divide are not sharded"
    if not refusal:
        try:
            heads, refusal = _heads(linked, model_rules)
        except PlanError as error:  # a missing field is not an error if the rules that need it match no tensor
            refusal = error.message
    align = _ALIGN if heads is None and not refusal and _is_width(linked.names, model_rules) else 1
    return {name: UnitPadding(heads, align, linked.block, name in linked.of_group, refusal) for name in linked.names}


def _is_width(names: set[str], model_rules: "ModelRules") -> bool:
    """Whether units are features or pairs of gate and up, and neither heads nor one value per head."""
    sizes = {name: _count_and_size(name, model_rules) for name in model_rules.family.units}
    heads = {count for count, size in sizes.values() if count and size > _MAX_PAIR}
    return all(sizes[name][1] <= _MAX_PAIR and sizes[name][0] not in heads for name in names)


def _count_and_size(name: str, model_rules: "ModelRules") -> tuple[int, int]:
    """Count and size of a unit; count 0 if it is unknown, and a size larger than a pair if that is unknown."""
    unit = model_rules.family.units[name]
    try:
        count = 0 if unit.count is None else model_rules.fields().evaluate(unit.count)
        return count, model_rules.fields().evaluate(unit.size)
    except PlanError:  # the size differs between tensors, or no tensor has the unit
        return 0, _MAX_PAIR + 1


def _heads(linked: _LinkedUnits, model_rules: "ModelRules") -> tuple[Heads | None, str]:
    """The heads of linked units, None without KV heads; and the reason why the units are not padded, or ""."""
    units = model_rules.family.units
    outer = linked.names - linked.of_group
    has_kv = bool(linked.groups) or any(units[name].replicate for name in outer)
    if not has_kv:
        return None, _refusal_without_kv(linked.names, model_rules)
    counts: dict[str, int] = {}
    for name in sorted(linked.names):
        if (count := units[name].count) is None:
            return None, f"the number of {name} units differs between tensors"
        counts[name] = model_rules.fields().evaluate(count)
    kv_heads = {counts[name] for name in outer if units[name].replicate}
    kv_heads |= {model_rules.fields().evaluate(groups) for groups in linked.groups}
    inner = {counts[name] for name in linked.of_group if not units[name].replicate}
    queries = {counts[name] for name in outer if not units[name].replicate}
    queries |= {next(iter(kv_heads)) * group for group in inner}
    if len(kv_heads) != 1 or len(queries) > 1 or min(kv_heads) < 1 or any(q % min(kv_heads) for q in queries):
        return None, f"the KV head of each query head is unknown ({_format_counts(counts)})"
    heads = Heads(min(kv_heads), max(queries, default=min(kv_heads)) // min(kv_heads))
    is_full = heads.query_heads % linked.block == 0  # if not, padding would follow a block that is not full
    return heads._replace(block=linked.block if is_full else 1), ""


def _refusal_without_kv(names: set[str], model_rules: "ModelRules") -> str:
    """The reason not to pad units without KV heads, or "": heads with different counts may belong together."""
    sizes = {name: _count_and_size(name, model_rules) for name in sorted(names)}
    counts = {name: count for name, (count, size) in sizes.items() if size > _MAX_PAIR}
    if unknown := [name for name in counts if model_rules.family.units[name].count is None]:
        return f"the number of {unknown[0]} units differs between tensors"
    return f"the correspondence of heads is unknown ({_format_counts(counts)})" if len({*counts.values()}) > 1 else ""


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())
