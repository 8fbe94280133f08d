"""A family: the rules, units and module overrides for the models of one architecture; and the blocks of families.

Plain data, which loading.py parses. tensor_groups.py applies the rules to tensors.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from shardconv.plan.families.config_fields import check_expression, fields_in
from shardconv.plan.families.rule import ModuleRule, Rule, UnitRule, check_pattern
from shardconv.support.errors import PlanError
from shardconv.support.structs import Data

#: The family of rules by common names of layers, used where no family serves the model type.
NAMES_FAMILY = "by_name"

#: The names of families that are read from a library's own plan, used where no family serves the model type.
LIBRARIES = TRANSFORMERS, DIFFUSERS = "transformers", "diffusers"

#: The beginning of the origin of a rule of a plan file.
PLAN_FILE = "plan file"


#: Kinds of modules in ``[stages]``: a sequence of layers; the embedding table, to which a head may be tied; and a head.
LAYERS, EMBEDDING, HEAD = "layers", "embedding", "head"

#: Kind of modules to the part of all stages that holds their tensors. Layers, which are divided, are not among them.
#: Encoders of images are on all of them, as in vLLM.
_FIRST, _LAST, _ALL, ALL, ENCODER = slice(1), slice(-1, None), slice(None), "all", "encoder"
STAGES = {EMBEDDING: _FIRST, "first": _FIRST, "last": _LAST, HEAD: _LAST, ALL: _ALL, ENCODER: _ALL}


#: The config fields that stages read: the number of layers, for which a family may have a default such as ``n_layer``,
#: and whether the head is the embedding table.
NUM_LAYERS, TIED = "num_hidden_layers", "tie_word_embeddings"


class Mount(Data, frozen=True):
    """A block at a module of a family: an entry of ``[blocks]``.

    Attributes:
        pattern: names of the module; "" for the model itself.
        block: the block's name.
        fields: config field that the block reads to the field or expression that replaces it.
        optional: whether the block of a plan file may match no tensor.
    """

    pattern: str
    block: str
    fields: Mapping[str, str | int] = {}
    optional: bool = False

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        for expression in self.fields.values():
            check_expression(expression)

    def describe(self) -> str:
        """The entry as a plan file has it."""
        fields = ", ".join(f"{name} = {value!r}" for name, value in self.fields.items())
        return f"blocks {self.pattern!r} = {self.block!r}" + (f" with {fields}" if fields else "")


class Submodel(Data, frozen=True):
    """A submodel of a composite model: an entry of ``[submodels]``.

    Attributes:
        config: the config field that holds its config.
        family: the family whose rules apply; "" for the family of its config's ``model_type``.
        by_user: whether it is from a plan file; then the config has to have the field.
    """

    config: str
    family: str
    by_user: bool = False


class Family(Data, frozen=True):
    """The rules for the models of one architecture; or a block, the rules for one kind of module.

    A block has names relative to its module, of which the pattern is "". It has neither model types nor a prefix,
    inherits nothing and does not have submodels.

    Attributes:
        name: name of the family, or of the block's file without its ending.
        model_types: the values of config.json's ``model_type`` that it serves.
        prefix: a prefix of patterns that names may lack, as in checkpoints of a base model; followed by prefixes that
            names may have instead.
        inherits: the family whose rules are tried after its own; "" for none.
        config: defaults of config fields: expressions, true or false.
        units: name to unit.
        rules: rules in the order in which they are tried; the first whose pattern matches applies.
        modules: module overrides; all that match apply, where two set the same attribute, the last one.
        submodels: prefix of the tensor names of each submodel of a composite model, to the submodel.
        stages: pattern of modules to their kind, ``layers`` or one of :data:`STAGES`: which pipeline stages hold their
            tensors. The first pattern that matches applies.
        blocks: the blocks that it mounts; their rules are tried after its own.
        origin: where it comes from, for the report.
        gathered: why attention is not sharded by heads; "" where it is.
        numbered: units of blocks that are named by the order of blocks; only rules of blocks refer to them.
        empty: attributes that are empty in its file, and so are not inherited.
    """

    name: str
    model_types: tuple[str, ...] = ()
    inherits: str = ""
    prefix: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    config: Mapping[str, str | int | bool] = {}
    units: Mapping[str, UnitRule] = {}
    rules: tuple[Rule, ...] = ()
    modules: tuple[ModuleRule, ...] = ()
    submodels: Mapping[str, Submodel] = {}
    stages: Mapping[str, str] = {}
    blocks: tuple[Mount, ...] = ()
    origin: str = ""
    gathered: str = ""
    numbered: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for expression in self.config.values():
            check_expression(expression)
        for pattern, kind in self.stages.items():
            check_pattern(pattern)
            if kind not in (kinds := (LAYERS, *STAGES)):
                raise ValueError(f"stages {pattern!r}: {kind!r:.60} is unknown (expected one of {', '.join(kinds)})")

    def with_base(self, base: "Family") -> "Family":
        """Add the rules, units, defaults and submodels of ``base``, over which this family's take precedence.

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
            stages=merge_stages(self.stages, base.stages),
            gathered=self.gathered or base.gathered,
            numbered=self.numbered | base.numbered,
        )
        family.check_units()
        return family

    def fields_read(self) -> set[str]:
        """The names in all expressions and conditions of the family or block: config fields and units."""
        rules: tuple[Rule | ModuleRule, ...] = (*self.rules, *self.modules)
        expressions = {*self.config.values()}
        for named in (*self.units.values(), *rules):
            expressions |= {*named.sizes(), *named.expressions()}
        return set().union(*map(fields_in, expressions), *(rule.when for rule in rules))

    def units_named(self) -> set[str]:
        """The names that may be units, in rules and module overrides."""
        return set().union(*(rule.reads() for rule in (*self.rules, *self.modules)))

    def check_units(self) -> None:
        """Check that every named unit exists, and that rules with ``shard_if_divisible`` units have ``otherwise``.

        Raises:
            PlanError: if a rule or a module override names another unit, or ``otherwise`` is missing or not needed.
        """
        rules: tuple[Rule | ModuleRule, ...] = (*self.rules, *self.modules)
        for rule in rules:
            where = f"{rule.origin}: {rule.LABEL} {rule.pattern!r}"
            for unit in rule.units:
                if unit not in self.units:
                    raise PlanError(f"{where}: {_unknown_unit(unit, self.units.keys() - self.numbered)}")
            kinds = {self.units[unit].shard_if_divisible for unit in rule.units} or {False}
            if isinstance(rule, Rule) and kinds != {bool(rule.otherwise)}:
                raise PlanError(
                    f"{where}: set otherwise for the rule and shard_if_divisible = true for all of its units, or "
                    "neither"
                )


def merge_stages(first: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Add the entries of ``[stages]`` for other patterns after the first ones."""
    return {**first, **{pattern: kind for pattern, kind in others.items() if pattern not in first}}


def _unknown_unit(name: str, units: AbstractSet[str]) -> str:
    """The message for a unit that does not exist: the units, and the remedy with the most similar ones."""
    similar = get_close_matches(name, sorted(units), n=2, cutoff=0.5)
    remedy = f"write {' or '.join(similar)}, or add it to [units]" if similar else "add it to [units]"
    known = ", ".join(sorted(units)) or "a unit of [units], which is empty"
    return f"unit {name!r} is unknown (expected {known}): {remedy}"
