"""A scope: the rules of one family, and the config that they read, over a whole model or over one of its submodels."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.family import Family, ModuleRule, Rule
from shardconv.plan.fields import Fields, fields_in
from shardconv.plan.matcher import name_regex
from shardconv.plan.placement import Unit


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """Where a family's rules count.

    Attributes:
        family: the rules.
        config: what they read; None where there is none.
        at: a pattern of what names begin with; "" for all names.
    """

    family: Family
    config: Mapping[str, Any] | None
    at: str = ""

    def fields(self, **others: int) -> Fields:
        """The config seen through the family, and other fields; each tells what was read through it."""
        return Fields({**(self.config or {}), **others} if others else self.config, self.family.config or {})

    def rules(self) -> Iterator[Rule]:
        """The rules that count with this config."""
        fields = self.fields()
        return (rule for rule in self.family.rules if all(fields.has(*condition) for condition in rule.when))

    def modules(self) -> Iterator[tuple[re.Pattern[str], ModuleRule]]:
        """What modules have to be told, with what their names have to match."""
        fields = self.fields()
        for rule in self.family.modules:
            if all(fields.has(*condition) for condition in rule.when):
                yield re.compile(self.regex(rule.pattern)), rule

    def on_rank(self, expression: str | int, tp: int, **others: int) -> int:
        """The value of an expression in which a unit stands for how many of it a rank has; and other fields."""
        units = self.family.units or {}
        counts = {name: self.local_units(name, tp, 0)[1] for name in fields_in(expression) if name in units}
        return Fields({**(self.config or {}), **counts, **others}, self.family.config or {}).evaluate(expression)

    def local_units(self, name: str, tp: int, rank: int) -> tuple[int, int, int]:
        """The first unit that a rank has, how many it has, and how many there are.

        Raises:
            PlanError: if that depends on a tensor.
        """
        unit = (self.family.units or {})[name]
        if unit.count is None:
            raise PlanError(f"unit {name}: has no count of its own")
        count = self.fields().evaluate(unit.count)
        first, last, _ = Unit(count, copies=unit.copies).share(tp, rank)
        return first, last - first, count

    def regex(self, pattern: str) -> str:
        """What the full names have to match for a pattern of the family's."""
        start = name_regex(self.at) + r"\." if self.at else ""
        return start + name_regex(pattern, self.family.prefix)
