"""A scope: the rules of one family, and the config that they read, over a whole model or over one of its submodels."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.family import Family, ModuleRule, Rule
from shardconv.plan.fields import Fields, fields_in
from shardconv.plan.matcher import name_regex
from shardconv.plan.padding import UNKNOWN, Padding, padding_of, unit_paddings
from shardconv.plan.placement import IndivisibleError, Placement, Unit, cut


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
    """

    family: Family
    config: Mapping[str, Any] | None
    at: str = ""
    pad: int = 0
    used: Mapping[Rule, frozenset[str]] | None = None

    def fields(self, **others: int) -> Fields:
        """The config seen through the family, and other fields; each tells what was read through it."""
        return Fields({**(self.config or {}), **others} if others else self.config, self.family.config or {})

    def rules(self) -> Iterator[Rule]:
        """The rules that count with this config."""
        fields = self.fields()
        return (rule for rule in self.family.rules if all(fields.has(*condition) for condition in rule.when))

    def used_rules(self) -> Iterator[Rule]:
        """The rules that count with this config and match a tensor."""
        return (rule for rule in self.rules() if self.used is None or rule in self.used)

    def modules(self) -> Iterator[tuple[re.Pattern[str], ModuleRule]]:
        """What modules have to be told, with what their names have to match."""
        fields = self.fields()
        for rule in self.family.modules:
            if all(fields.has(*condition) for condition in rule.when):
                yield re.compile(self.regex(rule.pattern)), rule

    def on_rank(self, expression: str | int, tp: int, **others: int) -> int:
        """The value of an expression in which a unit stands for how many of it a rank has; and other fields."""
        units = self.family.units or {}
        counts = {name: self.units(name, tp).local_size(0) for name in fields_in(expression) if name in units}
        return Fields({**(self.config or {}), **counts, **others}, self.family.config or {}).evaluate(expression)

    def units(self, name: str, tp: int, *, dim: int = 0, size: int = 1) -> Placement:
        """The placement of a dim that has ``size`` elements for each unit.

        Raises:
            PlanError: if how many units there are depends on a tensor.
            IndivisibleError: if they cannot be shared among ``tp`` ranks.
        """
        return cut(dim, [self.unit(name, tp, size=size)], tp)

    def unit(self, name: str, tp: int, *, size: int = 1) -> Unit:
        """A unit of ``size`` elements, with its padding for ``tp`` ranks.

        Raises:
            PlanError: if how many units there are depends on a tensor, or they would be padded and it is not known how.
        """
        unit = (self.family.units or {})[name]
        if unit.count is None:
            raise PlanError(f"unit {name}: has no count of its own")
        whole = Unit(self.fields().evaluate(unit.count), size, unit.copies)
        padding = unit_paddings(self).get(name, UNKNOWN) if self.pad else None
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
        return {name for rule in self.used_rules() for name in (rule.unit, *rule.parts) if name is not None}

    def multiple(self, tp: int) -> int:
        """What is padded is padded to a multiple of this."""
        return lcm(self.pad, tp)

    def regex(self, pattern: str) -> str:
        """What the full names have to match for a pattern of the family's."""
        start = name_regex(self.at) + r"\." if self.at else ""
        return start + name_regex(pattern, self.family.prefix)
