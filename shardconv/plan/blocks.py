"""Blocks of modules mounted in a family: rules relative to a module become rules of the model.

Owns the arithmetic of mounting: paths are joined, config fields replaced, and units told apart where the same block is
mounted with different fields. What comes out is plain rules; nothing after this knows blocks.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import NamedTuple

from shardconv.errors import PlanError
from shardconv.plan.config_fields import fields_in
from shardconv.plan.family import Block, Mount, fields_read
from shardconv.plan.module_override import InputRule, ModuleRule
from shardconv.plan.rule import SIZE_NAMES, Rule, UnitRule

#: How deep blocks are nested.
_MAX_DEPTH = 6

_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9.]*")

Expression = str | int


class Mounted(NamedTuple):
    """What the blocks of a family come to.

    Attributes:
        config: defaults of config fields.
        units: name to unit.
        rules: in the order in which they are tried.
        modules: module overrides.
        numbered: the units whose names are numbered by the order of blocks.
    """

    config: dict[str, Expression]
    units: dict[str, UnitRule]
    rules: tuple[Rule, ...]
    modules: tuple[ModuleRule, ...]
    numbered: frozenset[str]


def mounted(
    mounts: Iterable[Mount],
    find: Callable[[str], Block],
    origin: str,
    *,
    units: Mapping[str, UnitRule],
    config: Mapping[str, Expression] | None = None,
    known: Container[str] = (),
) -> Mounted:
    """Expand blocks into the rules, units and module overrides of a model.

    Args:
        mounts: the blocks, in the order in which their rules are tried.
        find: gives a block by its name.
        origin: of the family, for the report.
        units: the family's own units, which keep their names.
        config: defaults of config fields that the family inherits.
        known: the config fields that have a default of the family's own.

    Raises:
        PlanError: if blocks contain each other or have different defaults for one field, or an entry replaces a field
            that its block does not read.
    """
    builder = _Builder(find, origin, config=dict(config or {}), units=dict(units), known=known)
    for mount in mounts:
        builder.mount = "" if mount.optional else mount.describe()
        builder.add(mount, "", {}, ())
    # Of rules the first that matches counts, of module overrides the last.
    rules, modules = tuple(builder.rules), tuple(reversed(builder.modules))
    return Mounted(builder.config, builder.units, rules, modules, frozenset(builder.numbered))


@dataclass(slots=True)
class _Builder:
    find: Callable[[str], Block]
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
        """Mount a block at a path, with the fields that the blocks around it replace; ``label`` names where they do."""
        if mount.block in inside or len(inside) >= _MAX_DEPTH:
            raise PlanError(f"{self.origin}: block {mount.block!r} contains itself, or blocks are nested too deep")
        block = self.find(mount.block)
        self._check_fields(mount, block)
        fields = {**outer, **{name: replaced(value, outer) for name, value in mount.fields}}
        path, origin = _joined(at, mount.pattern), f"{self.origin}, block {block.name}"
        place = f"{origin} at {path!r}, {len(self.rules)}"
        for name, default in block.config.items():
            if name in fields:
                continue
            if _reads(default).isdisjoint(fields):
                self._add_default(name, default, block)
            else:  # the config's own field is of the modules for which no field is replaced
                fields[name] = replaced(default, fields)
        label = _label(mount.pattern) if mount.fields else label
        names = {name: self._unit(name, unit, fields, label) for name, unit in block.units.items()}
        for rule in block.rules:
            pattern = _joined(path, rule.pattern)
            made = replace(_rule(rule, fields, names), pattern=pattern, origin=origin)
            self.rules.append(replace(made, mount=self.mount, block=place))
        for module in block.modules:
            pattern = _joined(path, module.pattern)
            self.modules.append(replace(_module(module, fields, names), pattern=pattern, origin=origin, block=place))
        for inner in block.blocks:
            self.add(inner, path, fields, (*inside, mount.block), label)

    def _add_default(self, name: str, default: Expression, block: Block) -> None:
        """Give a config field a default, which has to be the same in all blocks."""
        known = self.config.setdefault(name, default)
        if known != default and name not in self.known:
            raise PlanError(
                f"{self.origin}: block {block.name!r} has the default {default} for config field {name}, which has the "
                f"default {known} already: add the right one to [config]"
            )

    def _check_fields(self, mount: Mount, block: Block) -> None:
        """Check that a block reads every field that its entry replaces."""
        names = [name for name, _ in mount.fields]
        read = self._fields_read(block) if names else set()
        if unread := [name for name in names if name not in read]:
            raise PlanError(
                f"{self.origin}: {mount.describe()}: block {block.name!r} does not read {unread[0]!r} "
                f"(it reads {', '.join(sorted(read)) or 'no field'}): correct or remove it"
            )

    def _fields_read(self, block: Block, depth: int = 0) -> set[str]:
        """The config fields that a block and the blocks in it read from around it."""
        found = fields_read(block) - set(block.units) - SIZE_NAMES
        for inner in block.blocks if depth < _MAX_DEPTH else ():
            names = {name for name, _ in inner.fields}
            found |= self._fields_read(self.find(inner.block), depth + 1) - names
            found |= {name for _, value in inner.fields for name in fields_in(value)}
        return found

    def _unit(self, name: str, unit: UnitRule, fields: Mapping[str, Expression], label: str) -> str:
        """The name of a unit of a block in the family: its own, or where fields are replaced with the module before."""
        number = None if unit.count is None else replaced(unit.count, fields)
        own = replace(unit, count=number, size=replaced(unit.size, fields))
        first = name if own == unit else f"{label}_{name}"
        for candidate in chain([first], (f"{first}_{number}" for number in count(2))):
            if candidate != first and candidate not in self.units:
                self.numbered.add(candidate)
            if self.units.setdefault(candidate, own) == own:
                return candidate
        raise AssertionError("candidates do not end")


def _label(pattern: str) -> str:
    """The last module that a pattern names, of a choice the first, as part of a name."""
    modules = [module for module in re.split(r"\.(?![^{]*\})", pattern) if module.strip("*")]
    last = modules[-1].strip("{}").partition(",")[0] if modules else "model"
    return re.sub(r"\W+", "_", last).strip("_")


def _joined(path: str, pattern: str) -> str:
    """A relative pattern below a path; ``**`` is a path of any modules or none."""
    if path == "**" and pattern.startswith("**."):
        return pattern
    return ".".join(filter(None, (path, pattern)))


def _reads(default: Expression) -> set[str]:
    """The fields that the default of a field reads."""
    return set() if isinstance(default, bool) else fields_in(default)


def replaced(expression: Expression, names: Mapping[str, Expression]) -> Expression:
    """An expression with other names, or expressions, in place of some names."""
    if isinstance(expression, int) or fields_in(expression).isdisjoint(names):
        return expression

    def other(match: re.Match[str]) -> str:
        found = names.get(match[0], match[0])
        is_name = isinstance(found, int) or _NAME.fullmatch(found)
        return str(found) if is_name or match[0] == expression else f"({found})"

    text = _NAME.sub(other, expression)
    return int(text) if text.isdigit() else text


def _rule(rule: Rule, fields: Mapping[str, Expression], units: Mapping[str, str]) -> Rule:
    return replace(
        rule,
        unit=None if rule.unit is None else units[rule.unit],
        parts=tuple(units[part] for part in rule.parts),
        groups=replaced(rule.groups, fields),
        repeats=replaced(rule.repeats, fields),
        size=None if rule.size is None else replaced(rule.size, fields),
        when=_conditions(rule.when, fields),
    )


def _module(rule: ModuleRule, fields: Mapping[str, Expression], units: Mapping[str, str]) -> ModuleRule:
    names = {**fields, **units}
    full, shared, output = rule.full_width, rule.shared_output, rule.output
    return replace(
        rule,
        attributes={name: replaced(value, names) for name, value in rule.attributes.items()},
        locals={name: replaced(value, names) for name, value in rule.locals.items()},
        inputs={name: _place(place, fields, units) for name, place in rule.inputs.items()},
        slices={name: _place(place, fields, units) for name, place in rule.slices.items()},
        unsharded={name: _place(place, fields, units) for name, place in rule.unsharded.items()},
        output=None if output is None else _place(output, fields, units),
        full_width=None if full is None else replaced(full, names),
        shared_output=None if shared is None else replaced(shared, fields),
        norms=units.get(rule.norms, ""),
        functional=units.get(rule.functional, ""),
        when=_conditions(rule.when, fields),
    )


def _place(place: InputRule, fields: Mapping[str, Expression], units: Mapping[str, str]) -> InputRule:
    size = None if place.size is None else replaced(place.size, fields)
    return place._replace(unit=units.get(place.unit, ""), parts=tuple(units[one] for one in place.parts), size=size)


def _conditions(
    when: tuple[tuple[str, object], ...], fields: Mapping[str, Expression]
) -> tuple[tuple[str, object], ...]:
    found = tuple((str(fields.get(name, name)), value) for name, value in when)
    if (wrong := next((name for name, _ in found if not _NAME.fullmatch(name)), None)) is not None:
        raise PlanError(f"when compares a config field, and an entry of [blocks] replaces it by {wrong}: name a field")
    return found
