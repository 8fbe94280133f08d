"""A family: the rules, units and module overrides for the models of one architecture; and the blocks of families.

Plain data, which parsing.py parses. tensor_groups.py applies the rules to tensors.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from typing import NamedTuple

from msgspec.structs import replace

from shardconv.plan.families.config_fields import fields_in
from shardconv.plan.families.rule import ModuleRule, Rule, UnitRule
from shardconv.support.errors import PlanError
from shardconv.support.structs import Data

#: The family of rules by common names of layers, used where no family serves the model type.
NAMES_FAMILY = "by_name"

#: The name of a family that is read from transformers' own plan, used where no family serves the model type.
TRANSFORMERS = "transformers"

#: How the origin of a rule of a plan file begins.
PLAN_FILE = "plan file"


class Mount(NamedTuple):
    """A block at a module of a family.

    Attributes:
        pattern: names of the module; "" for the model itself.
        block: the block's name.
        fields: config field that the block reads to the field or expression that replaces it.
        optional: whether the block of a plan file may match no tensor.
    """

    pattern: str
    block: str
    fields: tuple[tuple[str, str | int], ...] = ()
    optional: bool = False

    def describe(self) -> str:
        """The entry as a plan file has it."""
        fields = ", ".join(f"{name} = {value!r}" for name, value in self.fields)
        return f"blocks {self.pattern!r} = {self.block!r}" + (f" with {fields}" if fields else "")


class Submodel(NamedTuple):
    """A submodel of a composite model.

    An entry of ``[submodels]``.

    Attributes:
        field: the config field that holds its config.
        family: the family whose rules apply; "" for that of the ``model_type`` of its config.
        by_user: whether it is from a plan file; then the config has to have the field.
    """

    field: str
    family: str = ""
    by_user: bool = False


class Family(Data, frozen=True):
    """The rules for the models of one architecture; or a block, the rules for one kind of module.

    A block has names relative to its module, of which the pattern is "". It has neither model types nor a prefix,
    inherits nothing and does not have submodels.

    Attributes:
        name: of the family, or of the file of the block without its ending.
        model_types: the values of config.json's ``model_type`` that it serves.
        prefix: a prefix of patterns that names may lack, as in checkpoints of a base model; followed by prefixes that
            names may have instead.
        inherits: the family whose rules are tried after its own; "" for none.
        config: defaults of config fields: expressions, true or false.
        units: name to unit.
        rules: in the order in which they are tried; the first whose pattern matches applies.
        modules: module overrides; all that match apply, where two set the same attribute, the last one.
        submodels: of a composite model, prefix of the names of each submodel to the submodel.
        blocks: the blocks that it mounts; their rules are tried after its own.
        origin: where it comes from, for the report.
        gathered: why attention is not sharded by heads; "" where it is.
        numbered: units of blocks that are named by the order of blocks; only rules of blocks refer to them.
        empty: attributes that are empty in its file, and so are not inherited.
    """

    name: str
    model_types: tuple[str, ...] = ()
    inherits: str = ""
    prefix: tuple[str, ...] = ()
    config: Mapping[str, str | int | bool] = {}
    units: Mapping[str, UnitRule] = {}
    rules: tuple[Rule, ...] = ()
    modules: tuple[ModuleRule, ...] = ()
    submodels: Mapping[str, Submodel] = {}
    blocks: tuple[Mount, ...] = ()
    origin: str = ""
    gathered: str = ""
    numbered: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()

    def with_base(self, base: "Family") -> "Family":
        """Add the rules, units, defaults and submodels of ``base``; those of this family take precedence.

        Raises:
            PlanError: if a rule names a unit that neither has.
        """
        base = replace(base, **{name: getattr(Family(""), name) for name in self.empty})
        family = replace(
            self,
            prefix=self.prefix or base.prefix,
            config={**base.config, **self.config},
            units={**base.units, **self.units},
            rules=self.rules + base.rules,
            modules=base.modules + self.modules,
            submodels={**base.submodels, **self.submodels},
            gathered=self.gathered or base.gathered,
            numbered=self.numbered | base.numbered,
        )
        check_units(family.units, family.rules, family.modules, hidden=family.numbered)
        return family


def fields_read(family: Family) -> set[str]:
    """The names in all expressions and conditions of a family or a block: config fields and units."""
    rules: tuple[Rule | ModuleRule, ...] = (*family.rules, *family.modules)
    expressions = [one for unit in family.units.values() for one in (unit.count, unit.size)]
    expressions += [one for rule in rules for one in rule.expressions()]
    expressions += [one for rule in family.modules for one in rule.sizes()]
    expressions += family.config.values()
    found = set().union(*(fields_in(one) for one in expressions if one is not None and not isinstance(one, bool)))
    return found.union(*(rule.when for rule in rules))


def units_named(rules: Sequence[Rule], modules: Sequence[ModuleRule]) -> set[str]:
    """The names that may be units."""
    found = {unit for rule in rules for unit in (rule.unit, *rule.segments) if unit is not None}
    return found.union(*(module.reads() for module in modules))


def check_units(
    units: Mapping[str, UnitRule],
    rules: Sequence[Rule],
    modules: Sequence[ModuleRule],
    hidden: AbstractSet[str] = frozenset(),
) -> None:
    """Check that every named unit exists, and that rules with ``shard_if_divisible`` units have ``otherwise``.

    The error for an unknown unit lists the others, except ``hidden`` ones.

    Raises:
        PlanError: if a rule or a module override names another unit, or ``otherwise`` is missing or not needed.
    """
    for rule in rules:
        where = f"{rule.origin}: rule {rule.pattern!r}"
        for unit in rule.units:
            if unit not in units:
                raise PlanError(f"{where}: {_unknown_unit(unit, units.keys() - hidden)}")
        kinds = {units[unit].shard_if_divisible for unit in rule.units} or {False}
        if kinds != {bool(rule.otherwise)}:
            raise PlanError(
                f"{where}: set otherwise for the rule and shard_if_divisible = true for all of its units, or neither"
            )
    for module in modules:
        for unit in module.units():
            if unit not in units:
                where = f"{module.origin}: modules {module.pattern!r}"
                raise PlanError(f"{where}: {_unknown_unit(unit, units.keys() - hidden)}")


def _unknown_unit(name: str, units: AbstractSet[str]) -> str:
    """The message for a unit that does not exist: the units, and the remedy with the most similar ones."""
    similar = get_close_matches(name, sorted(units), n=2, cutoff=0.5)
    remedy = f"write {' or '.join(similar)}, or add it to [units]" if similar else "add it to [units]"
    known = ", ".join(sorted(units)) or "a unit of [units], which is empty"
    return f"unit {name!r} is unknown (expected {known}): {remedy}"
