"""A family: the rules, units and module overrides for the models of one architecture; and the blocks of families.

Plain data, which loading.py parses. tensor_groups.py applies the rules to tensors. :func:`expand_blocks` makes rules of
the model from rules relative to a module: it joins paths, replaces config fields, and renames units where a block is
mounted several times with different fields.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from itertools import chain, count
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from shardconv.plan.families.config_fields import NAME, check_expression, fields_in, replaced
from shardconv.plan.families.rule import SIZE_NAMES, ModuleRule, Rule, UnitRule, check_pattern
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
            names may have instead. Each ends with a dot.
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
    prefix: tuple[str, ...] = ()
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
        if (wrong := next((one for one in self.prefix if not one.endswith(".")), None)) is not None:
            raise ValueError(f"prefix {wrong!r} does not end with a dot: add it")
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


# --- blocks as rules of the model -------------------------------------------------------------------------------------

#: The deepest nesting of blocks.
_MAX_DEPTH = 6

Expression = str | int
R = TypeVar("R", Rule, ModuleRule)


def expand_blocks(family: Family, base: Family, find: Callable[[str], Family]) -> Family:
    """Expand the blocks of a family into rules, units and module overrides after its own.

    Args:
        family: the family, whose units keep their names.
        base: the family that it inherits, whose units and defaults of config fields it has, too.
        find: returns the block of a name.

    Raises:
        PlanError: if blocks contain each other or have different defaults for a field, or an entry replaces a field
            that its block does not read.
    """
    own = {name: replace(unit, override=False) for name, unit in family.units.items()}
    expanded = _Expansion(family, find, dict(base.config), {**base.units, **own})
    for mount in family.blocks:
        expanded.mount = "" if mount.optional else mount.describe()
        expanded.add(mount, "", {}, ())
    return replace(
        family,
        config={**expanded.config, **family.config},
        units=expanded.units,
        rules=family.rules + tuple(expanded.rules),
        # The first rule that matches applies; of module overrides the last has precedence.
        modules=tuple(reversed(expanded.modules)) + family.modules,
        stages=merge_stages(family.stages, expanded.stages),
        blocks=(),
        numbered=frozenset(expanded.numbered),
    )


class _Expansion(Struct):
    """The expanded blocks of a family.

    Attributes:
        family: the family.
        find: returns the block of a name.
        config: defaults of config fields.
        units: name to unit.
        rules: the rules, in the order in which they are tried.
        modules: module overrides.
        stages: pattern of modules to their kind.
        numbered: the units whose names have a number from the order of blocks.
        mount: the entry that is being expanded; "" if it is optional.
    """

    family: Family
    find: Callable[[str], Family]
    config: dict[str, Expression]
    units: dict[str, UnitRule]
    rules: list[Rule] = []
    modules: list[ModuleRule] = []
    stages: dict[str, str] = {}
    numbered: set[str] = set()
    mount: str = ""

    def add(
        self, mount: Mount, at: str, outer: Mapping[str, Expression], inside: tuple[str, ...], label: str = ""
    ) -> None:
        """Mount a block at a path.

        Args:
            mount: the entry.
            at: the path.
            outer: the fields that enclosing blocks replace.
            inside: the names of enclosing blocks.
            label: the module at which fields were last replaced, for the names of units.
        """
        if mount.block in inside or len(inside) >= _MAX_DEPTH:
            raise PlanError(
                f"{self.family.origin}: block {mount.block!r} contains itself, or blocks are nested too deep"
            )
        block = self.find(mount.block)
        self._check_fields(mount, block)
        fields = {**outer, **{name: replaced(value, outer) for name, value in mount.fields.items()}}
        for name, default in block.config.items():
            if name in fields:
                continue
            if fields_in(default).isdisjoint(fields):
                self._add_default(name, default, block)
            else:  # a field of that name in the config is for the modules whose fields are not replaced
                fields[name] = replaced(default, fields)
        label = _label(mount.pattern) if mount.fields else label
        units = {name: self._unit(name, unit.mounted(fields, {}), unit, label) for name, unit in block.units.items()}
        path = _join(at, mount.pattern)
        self._add_rules(block, path, fields, units)
        for pattern, kind in block.stages.items():
            self.stages.setdefault(_join(path, pattern), kind)
        for inner in block.blocks:
            self.add(inner, path, fields, (*inside, mount.block), label)

    def _add_rules(self, block: Family, path: str, fields: Mapping[str, Expression], units: Mapping[str, str]) -> None:
        """Add the rules and module overrides of a block at a path."""
        origin = f"{self.family.origin}, block {block.name}"
        block_id = f"{origin} at {path!r}, {len(self.rules)}"
        of_user: dict[str, Any] = {}
        if origin.startswith(PLAN_FILE):
            of_user = {"by_user": True, "optional": True, "mount": self.mount}

        def mounted(rule: R, **changes: object) -> R:
            when, pattern = _conditions(rule.when, fields), _join(path, rule.pattern)
            return rule.mounted(fields, units, pattern=pattern, origin=origin, block=block_id, when=when, **changes)

        self.rules += (mounted(rule, **of_user) for rule in block.rules)
        self.modules += map(mounted, block.modules)

    def _add_default(self, name: str, default: Expression, block: Family) -> None:
        """Add the default of a config field, which has to be the same in all blocks."""
        existing = self.config.setdefault(name, default)
        if existing != default and name not in self.family.config:
            raise PlanError(
                f"{self.family.origin}: config field {name} has two defaults, {existing}, and {default} in block "
                f"{block.name!r}: add the right one to [config]"
            )

    def _check_fields(self, mount: Mount, block: Family) -> None:
        """Check that a block reads every field that its entry replaces."""
        read = self._fields_read(block) if mount.fields else set()
        if unread := [name for name in mount.fields if name not in read]:
            raise PlanError(
                f"{self.family.origin}: {mount.describe()}: block {block.name!r} does not read {unread[0]!r} "
                f"(it reads {', '.join(sorted(read)) or 'no field'}): correct or remove it"
            )

    def _fields_read(self, block: Family, depth: int = 0) -> set[str]:
        """The config fields that a block and the blocks in it read, without the replaced ones."""
        read = block.fields_read() - set(block.units) - SIZE_NAMES
        for inner in block.blocks if depth < _MAX_DEPTH else ():
            read |= self._fields_read(self.find(inner.block), depth + 1) - inner.fields.keys()
            read = read.union(*map(fields_in, inner.fields.values()))
        return read

    def _unit(self, name: str, mounted: UnitRule, unit: UnitRule, label: str) -> str:
        """Add a unit of a block, and return its name in the family; with ``label`` as prefix if its fields change."""
        first = name if mounted == unit else f"{label}_{name}"
        candidates: Iterator[str] = chain([first], (f"{first}_{number}" for number in count(2)))
        found = next(one for one in candidates if self.units.get(one, mounted) == mounted)
        if found != first and found not in self.units:
            self.numbered.add(found)
        self.units[found] = mounted
        return found


def _label(pattern: str) -> str:
    """The last module of a pattern as part of a name; of a choice, the first alternative."""
    modules = [module for module in re.split(r"\.(?![^{]*\})", pattern) if module.strip("*")]
    last = modules[-1].strip("{}").partition(",")[0] if modules else "model"
    return re.sub(r"\W+", "_", last).strip("_")


def _join(path: str, pattern: str) -> str:
    """Join a path and a relative pattern; the path ``**`` is any number of modules."""
    if path == "**" and pattern.startswith("**."):
        return pattern
    return ".".join(filter(None, (path, pattern)))


def _conditions(
    when: Mapping[str, str | int | float | bool], fields: Mapping[str, Expression]
) -> dict[str, str | int | float | bool]:
    """The conditions on the fields that replace others."""
    conditions = {str(fields.get(name, name)): value for name, value in when.items()}
    if (expression := next((name for name in conditions if not NAME.fullmatch(name)), None)) is not None:
        raise PlanError(
            f"when compares a config field, and an entry of [blocks] replaces it by {expression}: replace it by a field"
        )
    return conditions
