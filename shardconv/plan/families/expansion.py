"""Expand the blocks of a family: rules relative to a module become rules of the model.

Joins paths, replaces config fields, and renames units where a block is mounted several times with different fields. The
result consists of rules, units and module overrides without blocks.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, count
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from shardconv.plan.families.config_fields import NAME, fields_in, replaced
from shardconv.plan.families.family import PLAN_FILE, Family, Mount, merge_stages
from shardconv.plan.families.rule import SIZE_NAMES, ModuleRule, Rule, UnitRule
from shardconv.support.errors import PlanError

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
            when = _conditions(rule.when, fields)
            pattern = _join(path, rule.pattern)
            return replace(
                rule.mounted(fields, units), pattern=pattern, origin=origin, block=block_id, when=when, **changes
            )

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
