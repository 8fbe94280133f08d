"""Parse the tables of families, plan files and blocks, and of the units, rules and module overrides in them.

docs/plan-files.md describes the format. Unknown keys are errors.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from shardconv.plan.families.config_fields import check_expression
from shardconv.plan.families.family import Family, Mount, Submodel, check_units
from shardconv.plan.families.rule import ModuleRule, Rule, UnitRule, check_pattern
from shardconv.support.errors import PlanError
from shardconv.support.structs import Data, parse_table


class _FamilyTable(Data, frozen=True):
    """The table of a family, a plan file or a block. Its rules and the like are parsed one by one: errors name them."""

    model_types: tuple[str, ...] = ()
    inherits: str = ""
    prefix: str | tuple[str, ...] = ()
    config: Mapping[str, str | int | bool] = {}
    units: Mapping[str, Any] = {}
    rules: Mapping[str, Any] = {}
    modules: Mapping[str, Any] = {}
    submodels: Mapping[str, Any] = {}
    blocks: Mapping[str, Any] = {}
    gathered: str = ""


class _SubmodelTable(Data, frozen=True):
    """An entry of ``[submodels]``: the config field of its config, and its family."""

    config: str
    family: str


#: Keys whose values a family inherits, unless its file has them empty.
_INHERITED = ("prefix", "submodels", "gathered")
#: Keys that a plan file does not have: it applies to the checkpoint it is passed for, and is not in docs/models.md.
_NOT_BY_USER = ("model_types", "gathered")
#: Keys that a block does not have.
_NOT_IN_BLOCKS = ("model_types", "inherits", "prefix", "submodels", "gathered")


def parse_family(name: str, data: Mapping[str, object], origin: str, *, by_user: bool = False) -> Family:
    """Parse the table of a family, without expanding blocks and what it inherits.

    Args:
        name: name of the family.
        data: the table.
        origin: the source of its rules, for reports.
        by_user: whether the table is a plan file.

    Raises:
        PlanError: if the table does not have the format.
    """
    return _parse(name, data, origin, by_user=by_user, without=_NOT_BY_USER if by_user else ())


def parse_block(name: str, data: Mapping[str, object]) -> Family:
    """Parse the table of a block.

    Args:
        name: name of the block.
        data: the table.

    Raises:
        PlanError: if the table does not have the format, or a rule names a unit that does not exist.
    """
    block = _parse(name, data, f"block {name}", without=_NOT_IN_BLOCKS)
    if overrides := [key for key, unit in block.units.items() if unit.override]:
        raise PlanError(
            f"{block.origin}: unit {overrides[0]}: override = true is not for blocks, as they inherit no units"
        )
    check_units(block.units, block.rules, block.modules)
    return block


def _parse(
    name: str, data: Mapping[str, object], origin: str, *, by_user: bool = False, without: tuple[str, ...] = ()
) -> Family:
    try:
        table = parse_table(data, _FamilyTable, without=without)
        for expression in table.config.values():
            check_expression(expression)
        return Family(
            name=name,
            model_types=table.model_types,
            inherits=table.inherits,
            prefix=_parse_prefix(table.prefix),
            config=table.config,
            units={key: parse_unit(key, unit) for key, unit in table.units.items()},
            rules=tuple(
                parse_rule(pattern, rule, origin, by_user=by_user) for pattern, rule in _alternatives(table.rules)
            ),
            modules=tuple(
                parse_module(pattern, rule, origin, by_user=by_user) for pattern, rule in _alternatives(table.modules)
            ),
            gathered=table.gathered,
            submodels={
                start: _parse_submodel(start, submodel)._replace(by_user=by_user)
                for start, submodel in table.submodels.items()
            },
            blocks=tuple(_parse_mount(pattern, mount) for pattern, mount in _alternatives(table.blocks)),
            origin=origin,
            empty=frozenset(key for key in _INHERITED if key in data and not getattr(table, key)),
        )
    except ValueError as error:
        raise PlanError(f"{origin}: {error}") from error


def _parse_mount(pattern: str, data: object) -> Mount:
    """Parse an entry of ``[blocks]``: a block's name, or a table with the name and replaced config fields."""
    table: dict[str, Any] = data if isinstance(data, dict) else {"block": data}
    name, optional = table.get("block"), table.get("optional", False)
    fields = {key: value for key, value in table.items() if key not in ("block", "optional")}
    if not isinstance(name, str) or type(optional) is not bool:
        raise ValueError(f"blocks {pattern!r}: {data!r:.60} is not a block's name, or a table with block = NAME")
    try:
        check_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"blocks {pattern!r}: {error}") from error
    for value in fields.values():
        if type(value) not in (str, int):
            raise ValueError(f"blocks {pattern!r}: {value!r:.60} is not an expression of config fields")
        check_expression(value)
    return Mount(pattern, name, tuple(fields.items()), optional)


def _parse_prefix(data: str | tuple[str, ...]) -> tuple[str, ...]:
    prefixes = (data,) if data and isinstance(data, str) else tuple(data)
    if not all(prefixes):
        raise ValueError(f"prefix = {data!r:.60} is not a string, or a list of non-empty strings")
    return prefixes


def _alternatives(table: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    """Each pattern with each of its rules, in order: a pattern has one rule or a list of them."""
    for pattern, rules in table.items():
        yield from ((pattern, rule) for rule in (rules if isinstance(rules, list) else [rules]))


def _parse_submodel(start: str, data: object) -> Submodel:
    try:
        check_pattern(start)
    except ValueError as error:
        raise ValueError(f"submodel {start!r}: {error}") from error
    if isinstance(data, str):
        return Submodel(data)
    try:
        table = parse_table(data, _SubmodelTable)
        return Submodel(table.config, table.family)
    except ValueError as error:
        raise ValueError(f"submodel {start!r}: {error}: expected a config field, or config and family") from error


#: Fields of rules and module overrides that follow from the file, or from the place of a table in it.
_GIVEN = ("pattern", "origin", "by_user", "mount", "block")


def parse_unit(name: str, data: object) -> UnitRule:
    """Parse the table of a unit.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        return parse_table(data, UnitRule)
    except ValueError as error:
        raise ValueError(f"unit {name}: {error}") from error


def parse_rule(pattern: str, data: object, origin: str, *, by_user: bool = False) -> Rule:
    """Parse the table of a rule.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        return parse_table(data, Rule, without=_GIVEN, pattern=pattern, origin=origin, by_user=by_user)
    except ValueError as error:
        raise ValueError(f"rule {pattern!r}: {error}") from error


def parse_module(pattern: str, data: object, origin: str, *, by_user: bool = False) -> ModuleRule:
    """Parse the table of a module override.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        return parse_table(data, ModuleRule, without=_GIVEN, pattern=pattern, origin=origin, by_user=by_user)
    except ValueError as error:
        raise ValueError(f"modules {pattern!r}: {error}") from error
