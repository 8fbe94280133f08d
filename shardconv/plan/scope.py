"""A scope: the rules of one family, and the config that they read, over a whole model or over one of its submodels."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.config_fields import Fields, fields_in, reads_stage
from shardconv.plan.family import Family
from shardconv.plan.matcher import name_regex
from shardconv.plan.module_override import ModuleRule
from shardconv.plan.padding import UNKNOWN, Padding, padding_of, unit_paddings
from shardconv.plan.placement import IndivisibleError, Interval, Placement, Unit, cut
from shardconv.plan.rule import Rule


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """Where a family's rules count.

    Attributes:
        family: the rules.
        config: what they read; None where there is none.
        at: a pattern of what names begin with; "" for all names.
        pad: what does not divide is padded to a multiple of this and of the tensor parallel size; 0 for no padding.
        used: the rules that match a tensor, from which padding follows, to the names of the layers and parameters that
            they match; None for all rules.
        stage: the number of the stage that ``field[stage]`` reads; None where names tell.
    """

    family: Family
    config: Mapping[str, Any] | None
    at: str = ""
    pad: int = 0
    used: Mapping[Rule, frozenset[str]] | None = None
    stage: int | None = None

    def fields(self, stage: int | None = None, **others: int) -> Fields:
        """The config seen through the family, and other fields; each tells what was read through it."""
        config = {**(self.config or {}), **others} if others else self.config
        return Fields(config, self.family.config or {}, self.stage if stage is None else stage)

    def stage_of(self, name: str) -> int | None:
        """The number of the stage that a tensor or module is in: the first in its name; None where there is none."""
        inside = re.sub(f"^{name_regex(self.at)}", "", name) if self.at else name
        found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", inside)
        return int(found[1]) if found else None

    def at_stage(self, name: str) -> "Scope":
        """The scope for one module, where units differ from stage to stage."""
        has_stages = any(map(self._reads_stage, self.family.units or {}))
        return replace(self, stage=self.stage_of(name)) if has_stages else self

    def reads_stage(self, rule: Rule) -> bool:
        """Whether the units of a rule differ from stage to stage."""
        return any(map(self._reads_stage, rule.units))

    def _reads_stage(self, unit: str) -> bool:
        found = (self.family.units or {})[unit]
        return any(reads_stage(one or 0, self.family.config or {}) for one in (found.count, found.size))

    def rules(self) -> Iterator[Rule]:
        """The rules that count with this config."""
        fields = self.fields()
        return (rule for rule in self.family.rules if all(fields.has(*condition) for condition in rule.when))

    def used_rules(self) -> Iterator[Rule]:
        """The rules that count with this config and match a tensor."""
        return (rule for rule in self.rules() if self.used is None or rule in self.used)

    def modules(self) -> Iterator[tuple[re.Pattern[str], ModuleRule]]:
        """The module overrides that apply with this config, each with the regular expression of module names.

        Where no rule matches a tensor, the modules are those of another scope, which has their units.
        """
        fields, units = self.fields(), (self.family.units or {}).keys()
        is_used = self.used is None or any(True for _ in self.used_rules())
        for rule in self.family.modules:
            if all(fields.has(*condition) for condition in rule.when) and (is_used or not rule.reads() & units):
                yield re.compile(self.regex(rule.pattern)), rule

    def on_rank(self, expression: str | int, tp: int, **others: int) -> int:
        """The value of an expression in which a unit stands for how many of it a rank has; and other fields."""
        units = self.family.units or {}
        counts = {name: self.units(name, tp).local_size(0) for name in fields_in(expression) if name in units}
        return self.fields(**counts, **others).evaluate(expression)

    def units(self, name: str, tp: int, *, dim: int = 0, size: int = 1) -> Placement:
        """The placement of a dim that has ``size`` elements for each unit.

        Raises:
            PlanError: if how many units there are depends on a tensor.
            IndivisibleError: if they cannot be shared among ``tp`` ranks.
        """
        unit = self.unit(name, tp, size=size)
        if self.is_sharded(name, tp):
            return cut(dim, [unit], tp)
        return Placement(dim, unit.width, ((Interval(0, unit.width),),) * tp)

    def is_sharded(self, name: str, tp: int) -> bool:
        """Whether a rank has a part of the units only; not where they are ``whole`` and do not divide."""
        unit = (self.family.units or {})[name]
        return not unit.whole or unit.count is None or self.fields().evaluate(unit.count) % tp == 0

    def unit(self, name: str, tp: int, *, size: int = 1) -> Unit:
        """A unit of ``size`` elements, with its padding for ``tp`` ranks.

        Raises:
            PlanError: if how many units there are depends on a tensor, or they would be padded and it is not known how.
        """
        unit = (self.family.units or {})[name]
        if unit.count is None:
            raise PlanError(f"unit {name}: has no count of its own")
        whole = Unit(self.fields().evaluate(unit.count), size, unit.copies)
        padding = unit_paddings(self).get(name, UNKNOWN) if self.pad and not unit.whole else None
        if padding is None or not padding.refusal:
            return whole if padding is None else padding.apply(whole, self.multiple(tp))
        try:
            cut(0, [whole], tp)
        except IndivisibleError as error:
            raise PlanError(f"unit {name}: {error}, and is not padded: {padding.refusal}") from error
        return whole

    def padding(self, rule: Rule, unit: str | None) -> Padding | None:
        """How a unit of a rule is padded; None where nothing is."""
        return padding_of(self, rule, unit) if self.pad else None

    def used_units(self) -> set[str]:
        """The units that the rules name."""
        return {name for rule in self.used_rules() for name in rule.units}

    def multiple(self, tp: int) -> int:
        """What is padded is padded to a multiple of this."""
        return lcm(self.pad, tp)

    def regex(self, pattern: str) -> str:
        """What the full names have to match for a pattern of the family's."""
        start = name_regex(self.at) + r"\." if self.at else ""
        return start + name_regex(pattern, self.family.prefix)
