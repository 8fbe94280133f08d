"""Expand the blocks of a family: rules relative to a module become rules of the model.

Joins paths, replaces config fields, and renames units where a block is mounted several times with different fields. The
result consists of rules, units and module overrides without blocks.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

from msgspec.structs import replace

from shardconv.plan.families.config_fields import fields_in
from shardconv.plan.families.family import Family, Mount, fields_read
from shardconv.plan.families.rule import SIZE_NAMES, ModuleRule, Rule, SliceRule, UnitRule
from shardconv.support.errors import PlanError

#: The deepest nesting of blocks.
_MAX_DEPTH = 6

_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9.]*")

Expression = str | int


class ExpandedBlocks(NamedTuple):
    """The expanded blocks of a family.

    Attributes:
        config: defaults of config fields.
        units: name to unit.
        rules: in the order in which they are tried.
        modules: module overrides.
        numbered: the units whose names have a number from the order of blocks.
    """

    config: dict[str, Expression]
    units: dict[str, UnitRule]
    rules: tuple[Rule, ...]
    modules: tuple[ModuleRule, ...]
    numbered: frozenset[str]


def expand_blocks(
    mounts: Iterable[Mount],
    find: Callable[[str], Family],
    origin: str,
    *,
    units: Mapping[str, UnitRule],
    config: Mapping[str, Expression] | None = None,
    known: Container[str] = (),
) -> ExpandedBlocks:
    """Expand blocks into the rules, units and module overrides of a model.

    Args:
        mounts: the blocks, in the order in which their rules are tried.
        find: returns the block of a name.
        origin: the source of the family, for reports.
        units: the units of the family, which keep their names.
        config: defaults of config fields that the family has or inherits.
        known: the config fields for which the family itself has a default.

    Raises:
        PlanError: if blocks contain each other or have different defaults for a field, or an entry replaces a field
            that its block does not read.
    """
    builder = _Builder(find, origin, config=dict(config or {}), units=dict(units), known=known)
    for mount in mounts:
        builder.mount = "" if mount.optional else mount.describe()
        builder.add(mount, "", {}, ())
    # The first rule that matches applies; of module overrides the last has precedence.
    rules, modules = tuple(builder.rules), tuple(reversed(builder.modules))
    return ExpandedBlocks(builder.config, builder.units, rules, modules, frozenset(builder.numbered))


@dataclass(slots=True)
class _Builder:
    find: Callable[[str], Family]
    origin: str
    config: dict[str, Expression] = field(default_factory=dict)
    units: dict[str, UnitRule] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    modules: list[ModuleRule] = field(default_factory=list)
    numbered: set[str] = field(default_factory=set)
    known: Container[str] = ()
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
            raise PlanError(f"{self.origin}: block {mount.block!r} contains itself, or blocks are nested too deep")
        block = self.find(mount.block)
        self._check_fields(mount, block)
        fields = {**outer, **{name: replaced(value, outer) for name, value in mount.fields}}
        path, origin = _join(at, mount.pattern), f"{self.origin}, block {block.name}"
        block_id = f"{origin} at {path!r}, {len(self.rules)}"
        for name, default in block.config.items():
            if name in fields:
                continue
            if _reads(default).isdisjoint(fields):
                self._add_default(name, default, block)
            else:  # a field of that name in the config is for the modules whose fields are not replaced
                fields[name] = replaced(default, fields)
        label = _label(mount.pattern) if mount.fields else label
        names = {name: self._unit(name, unit, fields, label) for name, unit in block.units.items()}
        for rule in block.rules:
            mounted_rule = replace(_rule(rule, fields, names), pattern=_join(path, rule.pattern), origin=origin)
            self.rules.append(replace(mounted_rule, mount=self.mount, block=block_id))
        for module in block.modules:
            override = replace(_module(module, fields, names), pattern=_join(path, module.pattern), origin=origin)
            self.modules.append(replace(override, block=block_id))
        for inner in block.blocks:
            self.add(inner, path, fields, (*inside, mount.block), label)

    def _add_default(self, name: str, default: Expression, block: Family) -> None:
        """Add the default of a config field, which has to be the same in all blocks."""
        existing = self.config.setdefault(name, default)
        if existing != default and name not in self.known:
            raise PlanError(
                f"{self.origin}: config field {name} has two defaults, {existing}, and {default} in block "
                f"{block.name!r}: add the right one to [config]"
            )

    def _check_fields(self, mount: Mount, block: Family) -> None:
        """Check that a block reads every field that its entry replaces."""
        names = [name for name, _ in mount.fields]
        read = self._fields_read(block) if names else set()
        if unread := [name for name in names if name not in read]:
            raise PlanError(
                f"{self.origin}: {mount.describe()}: block {block.name!r} does not read {unread[0]!r} "
                f"(it reads {', '.join(sorted(read)) or 'no field'}): correct or remove it"
            )

    def _fields_read(self, block: Family, depth: int = 0) -> set[str]:
        """The config fields that a block and the blocks in it read, without those that it replaces."""
        read = fields_read(block) - set(block.units) - SIZE_NAMES
        for inner in block.blocks if depth < _MAX_DEPTH else ():
            names = {name for name, _ in inner.fields}
            read |= self._fields_read(self.find(inner.block), depth + 1) - names
            read |= {name for _, value in inner.fields for name in fields_in(value)}
        return read

    def _unit(self, name: str, unit: UnitRule, fields: Mapping[str, Expression], label: str) -> str:
        """Add a unit of a block, and return its name in the family; with ``label`` as prefix if its fields change."""
        unit_count = None if unit.count is None else replaced(unit.count, fields)
        mounted_unit = replace(unit, count=unit_count, size=replaced(unit.size, fields))
        first = name if mounted_unit == unit else f"{label}_{name}"
        for candidate in chain([first], (f"{first}_{number}" for number in count(2))):
            if candidate != first and candidate not in self.units:
                self.numbered.add(candidate)
            if self.units.setdefault(candidate, mounted_unit) == mounted_unit:
                return candidate
        raise AssertionError("there is always another candidate")


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


def _reads(default: Expression) -> frozenset[str]:
    """The config fields that a default reads."""
    return frozenset() if isinstance(default, bool) else fields_in(default)


def replaced(expression: Expression, names: Mapping[str, Expression]) -> Expression:
    """Replace names in an expression by other names or expressions."""
    if isinstance(expression, int) or fields_in(expression).isdisjoint(names):
        return expression

    def replacement(match: re.Match[str]) -> str:
        value = names.get(match[0], match[0])
        is_atom = isinstance(value, int) or _NAME.fullmatch(value)
        return str(value) if is_atom or match[0] == expression else f"({value})"

    text = _NAME.sub(replacement, expression)
    return int(text) if text.isdigit() else text


def _rule(rule: Rule, fields: Mapping[str, Expression], units: Mapping[str, str]) -> Rule:
    return replace(
        rule,
        unit=None if rule.unit is None else units[rule.unit],
        segments=tuple(units[unit] for unit in rule.segments),
        groups=replaced(rule.groups, fields),
        repeats=replaced(rule.repeats, fields),
        size=None if rule.size is None else replaced(rule.size, fields),
        rows=None if rule.rows is None else replaced(rule.rows, fields),
        when=_conditions(rule.when, fields),
    )


def _module(rule: ModuleRule, fields: Mapping[str, Expression], units: Mapping[str, str]) -> ModuleRule:
    names = {**fields, **units}
    shared, output = rule.shared_output, rule.output
    return replace(
        rule,
        attributes={name: replaced(value, names) for name, value in rule.attributes.items()},
        inputs={name: _slice(input_rule, fields, units) for name, input_rule in rule.inputs.items()},
        slices={name: _slice(input_rule, fields, units) for name, input_rule in rule.slices.items()},
        output=None if output is None else _slice(output, fields, units),
        shared_output=None if shared is None else replaced(shared, fields),
        norms=units.get(rule.norms, ""),
        when=_conditions(rule.when, fields),
    )


def _slice(rule: SliceRule, fields: Mapping[str, Expression], units: Mapping[str, str]) -> SliceRule:
    size = None if rule.size is None else replaced(rule.size, fields)
    return replace(
        rule, unit=units.get(rule.unit, ""), segments=tuple(units[unit] for unit in rule.segments), size=size
    )


def _conditions(
    when: Mapping[str, str | int | float | bool], fields: Mapping[str, Expression]
) -> dict[str, str | int | float | bool]:
    conditions = {str(fields.get(name, name)): value for name, value in when.items()}
    if (expression := next((name for name in conditions if not _NAME.fullmatch(name)), None)) is not None:
        raise PlanError(
            f"when compares a config field, and an entry of [blocks] replaces it by {expression}: replace it by a field"
        )
    return conditions
