"""The rules of one family and the config that they read, for a model or one of its submodels."""

import re
from collections.abc import Iterator, Mapping
from itertools import starmap
from math import lcm
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from shardconv.plan.families.config_fields import Fields, fields_in, reads_stage
from shardconv.plan.families.family import Family
from shardconv.plan.families.matcher import name_regex
from shardconv.plan.families.rule import ModuleRule, Rule
from shardconv.plan.padding import UNKNOWN, UnitPadding, padding_of, unit_paddings
from shardconv.plan.placement import IndivisibleError, Interval, Placement, Unit, shard_dim
from shardconv.support.errors import PlanError
from shardconv.support.structs import Data

#: The largest multiple to which a size is padded.
MAX_MULTIPLE = 2**16
#: A multiple to which sizes are padded, or 0.
Multiple = Annotated[int, Meta(ge=0, le=MAX_MULTIPLE)]


class UsedRules(dict[Rule, frozenset[str]]):
    """Rule to the names of the layers and parameters that it matches. Not stored, as it follows from the tensors."""


class ModelRules(Data, frozen=True, eq=False):
    """The rules of one family and the config that they read, for a model or one of its submodels.

    Attributes:
        family: the rules.
        config: the config that the rules read; None without a config.
        at: the pattern of the submodel's module; "" for the model itself.
        pad: counts that tp does not divide are padded to a multiple of this and of tp; 0 for no padding.
        used: rule to the names of the layers and parameters that it matches, without rules that match nothing; None if
            tensors are not known. Determines which units are padded together.
        blocks: pattern of a rule to the elements of a block of padding along the dim that it shards, of quantized
            matrices; also where the same matrices are in memory without quantization.
        stage: index of the stage that ``field[stage]`` reads; None if it follows from names.
    """

    family: Family
    config: Mapping[str, Any] | None
    at: str = ""
    pad: Multiple = 0
    used: UsedRules | None = None
    blocks: Mapping[str, Annotated[int, Meta(ge=1, le=MAX_MULTIPLE)]] = {}
    stage: int | None = None

    def fields(self, stage: int | None = None, **others: int) -> Fields:
        """The config fields with the defaults of the family and with other fields; records which fields are read."""
        config = {**(self.config or {}), **others} if others else self.config
        return Fields(config, self.family.config, self.stage if stage is None else stage)

    def stage_of(self, name: str) -> int | None:
        """The stage of a tensor or module: the first number in its name; None without a number."""
        relative = re.sub(f"^{name_regex(self.at)}", "", name) if self.at else name
        match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", relative)
        return int(match[1]) if match else None

    def at_stage(self, name: str) -> "ModelRules":
        """The rules for one module if units differ by stage; otherwise these rules."""
        has_stages = any(map(self._reads_stage, self.family.units))
        return replace(self, stage=self.stage_of(name)) if has_stages else self

    def reads_stage(self, rule: Rule) -> bool:
        """Whether the units of a rule differ by stage."""
        return any(map(self._reads_stage, rule.units))

    def _reads_stage(self, unit: str) -> bool:
        rule = self.family.units[unit]
        return any(reads_stage(expression or 0, self.family.config) for expression in (rule.count, rule.size))

    def rules(self) -> Iterator[Rule]:
        """The rules whose ``when`` holds for the config."""
        fields = self.fields()
        return (rule for rule in self.family.rules if all(starmap(fields.has, rule.when.items())))

    def patterns(self) -> Iterator[str]:
        """The patterns of all rules and module overrides, and of the place of the model."""
        yield self.at
        yield from (rule.pattern for rule in self.family.rules)
        yield from (rule.pattern for rule in self.family.modules)

    def used_rules(self) -> Iterator[Rule]:
        """The rules whose ``when`` holds for the config and that match a tensor."""
        return (rule for rule in self.rules() if self.used is None or rule in self.used)

    def modules(self) -> Iterator[tuple[re.Pattern[str], ModuleRule]]:
        """The module overrides whose ``when`` holds, each with the regular expression of module names.

        Where no rule matches a tensor, the modules belong to another submodel, which has their units.
        """
        fields, units = self.fields(), self.family.units.keys()
        is_used = self.used is None or any(True for _ in self.used_rules())
        for rule in self.family.modules:
            if all(starmap(fields.has, rule.when.items())) and (is_used or not rule.reads() & units):
                yield re.compile(self.regex(rule.pattern)), rule

    def on_rank(self, expression: str | int, tp: int, **others: int) -> int:
        """The value of an expression in which the name of a unit is its count per rank, with other fields."""
        units = self.family.units
        counts = {name: self.units(name, tp).local_size(0) for name in fields_in(expression) if name in units}
        return self.fields(**counts, **others).evaluate(expression)

    def units(self, name: str, tp: int, *, dim: int = 0, size: int = 1) -> Placement:
        """The placement of a dim that has ``size`` elements per unit.

        Raises:
            PlanError: if the number of units follows from a tensor.
            IndivisibleError: if the units cannot be divided over ``tp`` ranks.
        """
        unit = self.unit(name, tp, size=size)
        if self.is_sharded(name, tp):
            return shard_dim(dim, [unit], tp)
        return Placement(dim, unit.width, ((Interval(0, unit.width),),) * tp)

    def is_sharded(self, name: str, tp: int) -> bool:
        """Whether units are sharded over ``tp`` ranks: with ``shard_if_divisible``, if ``tp`` divides their count."""
        unit = self.family.units[name]
        return not unit.shard_if_divisible or unit.count is None or self.fields().evaluate(unit.count) % tp == 0

    def unit(self, name: str, tp: int, *, size: int = 1) -> Unit:
        """Units of ``size`` elements, with their padding for ``tp`` ranks.

        Raises:
            PlanError: if the number of units follows from a tensor, or units that need padding cannot be padded.
        """
        rule = self.family.units[name]
        if rule.count is None:
            raise PlanError(f"unit {name}: its count follows from a tensor: add a count to [units]")
        unpadded = Unit(self.fields().evaluate(rule.count), size, rule.replicate)
        padding = unit_paddings(self).get(name, UNKNOWN) if self.pad and not rule.shard_if_divisible else None
        if padding is None or not padding.refusal:
            return unpadded if padding is None else padding.apply(unpadded, self.multiple(tp))
        try:
            shard_dim(0, [unpadded], tp)
        except IndivisibleError as error:
            raise PlanError(f"unit {name}: {error}, and is not padded: {padding.refusal}") from error
        return unpadded

    def padding(self, rule: Rule, unit: str | None) -> UnitPadding | None:
        """The padding of a unit of a rule; None without padding."""
        return padding_of(self, rule, unit) if self.pad else None

    def used_units(self) -> set[str]:
        """The names of the units of :meth:`used_rules`."""
        return {name for rule in self.used_rules() for name in rule.units}

    def multiple(self, tp: int) -> int:
        """The multiple to which counts are padded for ``tp`` ranks."""
        return lcm(self.pad, tp)

    def regex(self, pattern: str) -> str:
        """The regular expression of full names for a pattern of the family."""
        start = name_regex(self.at) + r"\." if self.at else ""
        return start + name_regex(pattern, self.family.prefix)
