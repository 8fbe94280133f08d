"""A family and the config that it reads, over a whole model or over one of the models that it consists of.

Owns the way from a model made of models (text, vision, speech) to a family for each: their names begin alike, and they
have configs of their own inside the model's.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.family import Family, ModuleRule, Part, Rule
from shardconv.plan.family_file import family_for, load_family
from shardconv.plan.fields import Fields, lookup, names_in
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
        counts = {name: self.local_units(name, tp, 0)[1] for name in names_in(expression) if name in units}
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


#: How deep models lie in models.
_MAX_DEPTH = 4


def scopes_of(family: Family, config: Mapping[str, Any] | None, at: str = "", depth: int = 0) -> Iterator[Scope]:
    """The scopes of a model: its own first, then those of the models in it.

    Raises:
        PlanError: if configs lie in configs deeper than in any model.
    """
    if depth > _MAX_DEPTH:
        raise PlanError(f"the config has configs in it more than {_MAX_DEPTH} deep, as no model has")
    yield Scope(family, config, at)
    for start, part in (family.parts or {}).items():
        inner, known = _part(part, config or {})
        if known is not None:
            yield from scopes_of(known, inner, f"{at}.{start}" if at else start, depth + 1)


def _part(part: Part, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Family | None]:
    """The config and the family of a model in a model.

    In configs as hubs have them fields of the text may stand in the model's own, and a config in it may have the
    model's type, or none: its family is then that of the type and of what the field says it is.
    """
    found = lookup(config, part.field)
    inner = found if isinstance(found, Mapping) else config
    if part.family:
        return inner, load_family(part.family)
    own = config.get("model_type")
    kind = inner.get("model_type") or own
    if kind == own:
        kind = f"{own}_{part.field.rpartition('.')[2].removesuffix('_config')}"
    return inner, family_for(kind) if isinstance(kind, str) else None
