"""Parse and write units, rules and module overrides, as in family files, plan files and manifests.

docs/plan-files.md describes the format. Unknown keys are errors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.config_fields import check_expression
from shardconv.plan.family import Block, Family, Mount, Submodel, check_units
from shardconv.plan.module_override import PRODUCTS, InputRule, ModuleRule
from shardconv.plan.rule import Rule, UnitRule, check_pattern

#: Keys of a table to the types of their values.
_Keys = Mapping[str, type | tuple[type, ...]]

_FAMILY_KEYS: _Keys = {
    "model_types": list, "inherits": str, "prefix": (str, list), "config": dict, "units": dict, "rules": dict,
    "modules": dict, "parts": dict, "blocks": dict, "gathered": str,
}  # fmt: skip
#: Keys of attributes that a family inherits, unless its file has them empty.
_INHERITED = {"prefix": "prefix", "parts": "submodels", "gathered": "gathered"}
#: Keys that a plan file does not have: it applies to the checkpoint it is passed for, and is not in docs/models.md.
_NOT_BY_USER = ("model_types", "gathered")
_BLOCK_KEYS: _Keys = {"config": dict, "units": dict, "rules": dict, "modules": dict, "blocks": dict}


def parse_family(name: str, data: object, origin: str, *, by_user: bool = False) -> Family:
    """Parse the table of a family, without expanding blocks and what it inherits.

    Args:
        name: name of the family.
        data: the table.
        origin: the source of its rules, for reports.
        by_user: whether the table is a plan file.

    Raises:
        PlanError: if the table does not have the format.
    """
    try:
        known = {key: kind for key, kind in _FAMILY_KEYS.items() if not by_user or key not in _NOT_BY_USER}
        table = _checked(data, known)
        family = Family(
            name=name,
            model_types=tuple(table.get("model_types", ())),
            inherits=table.get("inherits", ""),
            prefix=_parse_prefix(table.get("prefix", [])),
            config=table.get("config", {}),
            units={key: parse_unit(key, unit) for key, unit in table.get("units", {}).items()},
            rules=tuple(
                parse_rule(pattern, rule, origin, by_user=by_user)
                for pattern, rule in _alternatives(table.get("rules", {}))
            ),
            modules=tuple(
                parse_module(pattern, rule, origin, by_user=by_user)
                for pattern, rule in _alternatives(table.get("modules", {}))
            ),
            gathered=table.get("gathered", ""),
            submodels={
                start: _parse_submodel(start, part)._replace(by_user=by_user)
                for start, part in table.get("parts", {}).items()
            },
            blocks=_parse_blocks(table.get("blocks", {})),
            origin=origin,
            empty=frozenset(_INHERITED[key] for key in _INHERITED if key in table and not table[key]),
        )
        for expression in (family.config or {}).values():
            check_expression(expression)
    except ValueError as error:
        raise PlanError(f"{origin}: {error}") from error
    return family


def parse_block(name: str, data: object) -> Block:
    """Parse the table of a block.

    Args:
        name: name of the block.
        data: the table.

    Raises:
        PlanError: if the table does not have the format, or a rule names a unit that does not exist.
    """
    origin = f"block {name}"
    try:
        table = _checked(data, _BLOCK_KEYS)
        alternatives = {key: _alternatives(table.get(key, {})) for key in ("rules", "modules")}
        block = Block(
            name,
            config=table.get("config", {}),
            units={key: parse_unit(key, unit) for key, unit in table.get("units", {}).items()},
            rules=tuple(parse_rule(pattern, rule, origin) for pattern, rule in alternatives["rules"]),
            modules=tuple(parse_module(pattern, rule, origin) for pattern, rule in alternatives["modules"]),
            blocks=_parse_blocks(table.get("blocks", {})),
        )
        for expression in block.config.values():
            check_expression(expression)
        if overrides := [key for key, unit in block.units.items() if unit.override]:
            raise ValueError(f"unit {overrides[0]}: override = true is not for blocks, as they inherit no units")
    except ValueError as error:
        raise PlanError(f"{origin}: {error}") from error
    check_units(block.units, block.rules, block.modules)
    return block


def _parse_blocks(table: Mapping[str, object]) -> tuple[Mount, ...]:
    return tuple(_parse_mount(pattern, mount) for pattern, mount in _alternatives(table))


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


def _parse_prefix(data: str | list[str]) -> tuple[str, ...]:
    prefixes = tuple(data) if isinstance(data, list) else (data,) if data else ()
    if not all(isinstance(prefix, str) and prefix for prefix in prefixes):
        raise ValueError(f"prefix = {data!r:.60} is not a string, or a list of non-empty strings")
    return prefixes


def parse_unit(name: str, data: object) -> UnitRule:
    """Parse the table of a unit.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        keys: _Keys = {"count": (str, int), "size": (str, int), "copies": bool, "whole": bool, "override": bool}
        unit = UnitRule(**_checked(data, keys))
        if unit.whole and unit.count is None:
            raise ValueError("whole = true needs a count")
        for expression in (1 if unit.count is None else unit.count, unit.size):
            check_expression(expression)
    except ValueError as error:
        raise ValueError(f"unit {name}: {error}") from error
    return unit


_RULE_KEYS: _Keys = {
    "style": str, "unit": str, "parts": list, "part": int, "groups": (str, int), "repeats": (str, int), "pad": bool,
    "transposed": bool, "beside": str, "size": (str, int), "dims": int, "when": dict, "otherwise": str,
    "optional": bool,
}  # fmt: skip


def _alternatives(table: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    """Each pattern with each of its rules, in order: a pattern has one rule or a list of them."""
    for pattern, rules in table.items():
        yield from ((pattern, rule) for rule in (rules if isinstance(rules, list) else [rules]))


def parse_rule(pattern: str, data: object, origin: str, *, by_user: bool = False) -> Rule:
    """Parse the table of a rule.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        table = _checked(data, _RULE_KEYS)
        parts, when = tuple(table.get("parts", ())), tuple(table.get("when", {}).items())
        if "style" not in table:
            raise ValueError("style is missing")
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("parts is not a list of unit names")
        if any(isinstance(value, dict | list) for _, value in when):
            raise ValueError("when compares fields with numbers, strings, true or false (got a table or a list)")
        return Rule(pattern, origin=origin, by_user=by_user, **{**table, "parts": parts, "when": when})
    except ValueError as error:
        raise ValueError(f"rule {pattern!r}: {error}") from error


_MODULE_KEYS: _Keys = {
    "attributes": dict, "inputs": dict, "at_most": dict, "full_width": (str, int), "locals": dict,
    "slices": dict, "output": dict, "unsharded": dict, "products": dict, "functional": str,
    "norms": str, "shared_output": (str, int),
    "unfused": str, "copied_input": bool, "gathered_output": bool, "summed_output": bool, "gathers": list, "when": dict,
}  # fmt: skip


def parse_module(pattern: str, data: object, origin: str, *, by_user: bool = False) -> ModuleRule:
    """Parse the table of a module override.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        table = _checked(data, _MODULE_KEYS)
        check_pattern(pattern)
        attributes, at_most = table.get("attributes", {}), table.get("at_most", {})
        numbers = (table.get("shared_output", 0), table.get("full_width", 0))
        for expression in (*attributes.values(), *table.get("locals", {}).values(), *numbers):
            check_expression(expression)
        if not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in at_most.values()):
            raise ValueError("at_most needs [LAYER, ATTRIBUTE] for each name")
        if unknown := set(table.get("products", {}).values()) - set(PRODUCTS):
            raise ValueError(f"products has {unknown.pop()!r:.60} (expected {', '.join(PRODUCTS)})")
        gathers = tuple(table.get("gathers", ()))
        if not all(isinstance(name, str) for name in gathers):
            raise ValueError("gathers is not a list of parameter names")
        for name in gathers:
            check_pattern(name)
        slices: dict[str, Any] = {
            key: {name: _parse_slice(one, known) for name, one in table.get(key, {}).items()}
            for key, known in (("inputs", _INPUT_KEYS), ("slices", _SLICE_KEYS), ("unsharded", _UNSHARDED_KEYS))
        }
        slices |= {"output": _parse_slice(table["output"], _OUTPUT_KEYS)} if "output" in table else {}
        parsed = {**table, **slices, "attributes": attributes, "gathers": gathers}
        when = tuple(table.get("when", {}).items())
        return ModuleRule(pattern, origin=origin, by_user=by_user, **{**parsed, "when": when})
    except (ValueError, KeyError) as error:
        raise ValueError(f"modules {pattern!r}: {error}") from error


_INPUT_KEYS: _Keys = {"dim": int, "unit": str, "size": (str, int), "items": list}
_OUTPUT_KEYS: _Keys = {"dim": int, "unit": str, "size": (str, int), "item": int}
_SLICE_KEYS: _Keys = {"dim": int, "unit": str, "parts": list}
_UNSHARDED_KEYS: _Keys = {"dim": int, "unit": str}


def _parse_slice(data: object, known: _Keys) -> InputRule:
    """Parse how an argument, an output, a parameter or a buffer is sliced; ``known`` has the keys and their types."""
    table = _checked(data, known)
    check_expression(table.get("size", 1))
    if "dim" not in table:
        raise ValueError(f"{table!r:.60}: dim is missing")
    if known is _INPUT_KEYS and "size" not in table and table["dim"] < 0:
        raise ValueError(f"{table!r:.60}: dim is negative without size: count it from 0")
    parts = tuple(table.get("parts", ()))
    if ("unit" in table) == ("parts" in table) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{table!r:.60} needs either a unit, or parts with the names of units")
    items = tuple(table.get("items", ()))
    if not all(type(item) is int and item >= 0 for item in items) or (items and "size" not in table):
        raise ValueError(f"{table!r:.60}: items are indices of a list, from 0, and need size")
    return InputRule(**{**table, "parts": parts, "items": items})


def _parse_submodel(start: str, data: object) -> Submodel:
    try:
        check_pattern(start)
    except ValueError as error:
        raise ValueError(f"part {start!r}: {error}") from error
    if isinstance(data, str):
        return Submodel(data)
    try:
        table = _checked(data, {"config": str, "family": str})
        return Submodel(table["config"], table["family"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"part {start!r}: {error}: expected a config field, or config and family") from error


def _checked(data: object, known: _Keys) -> dict[str, Any]:
    """Check that ``data`` is a table with known keys, and values of the type of each key."""
    if not isinstance(data, dict):
        raise ValueError(f"{data!r:.60} is not a table")  # noqa: TRY004 - all of them become one PlanError
    for key, value in data.items():
        if key not in known:
            raise ValueError(f"key {key!r} is unknown (expected {', '.join(known)})")
        expected = known[key]
        types = expected if isinstance(expected, tuple) else (expected,)
        if type(value) not in types:  # not isinstance: true would be an integer
            raise ValueError(f"{key} = {value!r:.60} has the wrong type (expected {_type_names(types)})")
    return data


def _type_names(types: Sequence[type]) -> str:
    names = {str: "a string", int: "an integer", bool: "true or false", list: "a list", dict: "a table"}
    return " or ".join(names[kind] for kind in types)


def to_table(rule: UnitRule | Rule | ModuleRule, *, without: Sequence[str] = ()) -> dict[str, object]:
    """The table from which a unit, a rule or a module override is parsed: all fields that differ from their default.

    Args:
        rule: the unit, rule or module override.
        without: fields to leave out.
    """
    table = {}
    for field in fields(rule):
        value = getattr(rule, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in without and value != default:
            table[field.name] = _to_plain(value)
    return table


def _to_plain(value: object) -> object:
    match value:
        case InputRule():
            return {name: _to_plain(field) for name, field in value._asdict().items() if field not in (None, "", ())}
        case Mapping():
            return {name: _to_plain(item) for name, item in value.items()}
        case tuple() | list():
            return list(value)
    return value
