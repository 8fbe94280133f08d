"""The format of rules: how family files, plan files and manifests write units, rules and module overrides.

Owns strict parsing, and its inverse. docs/plan-files.md has the format. An unknown key is an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.config_fields import check_expression
from shardconv.plan.family import Block, Family, Mount, Part, check_units
from shardconv.plan.module_override import PRODUCTS, InputRule, ModuleRule
from shardconv.plan.rule import Rule, UnitRule, check_pattern

_FAMILY_KEYS = {
    "model_types": list, "inherits": str, "prefix": (str, list), "config": dict, "units": dict, "rules": dict,
    "modules": dict, "parts": dict, "blocks": dict, "gathered": str,
}  # fmt: skip
#: What a plan file does not have: it serves what it is passed for, and reasons are for docs/models.md.
_NOT_BY_USER = ("model_types", "gathered")
_BLOCK_KEYS = {"config": dict, "units": dict, "rules": dict, "modules": dict, "blocks": dict}


def parse_family(name: str, data: dict[str, Any], origin: str, *, by_user: bool = False) -> Family:
    """The family that a table holds, as it stands: without what it inherits.

    Args:
        name: of the family.
        data: the table.
        origin: of its rules, for the report.
        by_user: whether a user wrote it.

    Raises:
        PlanError: if it holds anything that the format does not have.
    """
    try:
        _check_keys(data, {key: kind for key, kind in _FAMILY_KEYS.items() if not by_user or key not in _NOT_BY_USER})
        family = Family(
            name=name,
            model_types=tuple(data.get("model_types", ())),
            inherits=data.get("inherits", ""),
            prefix=_parse_prefix(data.get("prefix", [])),
            config=data.get("config", {}),
            units={key: parse_unit(key, unit) for key, unit in data.get("units", {}).items()},
            rules=tuple(
                parse_rule(pattern, rule, origin, by_user=by_user)
                for pattern, rule in _alternatives(data.get("rules", {}))
            ),
            modules=tuple(
                parse_module(pattern, rule, origin, by_user=by_user)
                for pattern, rule in _alternatives(data.get("modules", {}))
            ),
            gathered=data.get("gathered", ""),
            parts={
                start: _parse_part(start, part)._replace(by_user=by_user)
                for start, part in data.get("parts", {}).items()
            },
            blocks=_parse_blocks(data.get("blocks", {})),
            origin=origin,
            empty=frozenset(key for key in ("prefix", "parts", "gathered") if key in data and not data[key]),
        )
        for expression in (family.config or {}).values():
            check_expression(expression)
    except ValueError as error:
        raise PlanError(f"{origin}: {error}") from error
    return family


def parse_block(name: str, data: dict[str, Any]) -> Block:
    """The block that a table holds.

    Args:
        name: of the block.
        data: the table.

    Raises:
        PlanError: if it holds anything that the format does not have, or a rule names a unit that it does not have.
    """
    origin = f"block {name}"
    try:
        _check_keys(data, _BLOCK_KEYS)
        tables = {key: _alternatives(data.get(key, {})) for key in ("rules", "modules")}
        block = Block(
            name,
            config=data.get("config", {}),
            units={key: parse_unit(key, unit) for key, unit in data.get("units", {}).items()},
            rules=tuple(parse_rule(pattern, rule, origin) for pattern, rule in tables["rules"]),
            modules=tuple(parse_module(pattern, rule, origin) for pattern, rule in tables["modules"]),
            blocks=_parse_blocks(data.get("blocks", {})),
        )
        for expression in block.config.values():
            check_expression(expression)
        if overrides := [key for key, unit in block.units.items() if unit.override]:
            raise ValueError(f"unit {overrides[0]}: a block has no other unit to override")
    except ValueError as error:
        raise PlanError(f"{origin}: {error}") from error
    check_units(block.units, block.rules, block.modules)
    return block


def _parse_blocks(table: dict[str, Any]) -> tuple[Mount, ...]:
    return tuple(_parse_mount(pattern, mount) for pattern, mount in _alternatives(table))


def _parse_mount(pattern: str, data: Any) -> Mount:  # noqa: ANN401 - anything TOML holds
    """A mount: the name of a block, or a table with the name and the config fields that it reads otherwise."""
    table = data if isinstance(data, dict) else {"block": data}
    name, optional = table.get("block"), table.get("optional", False)
    fields = {key: value for key, value in table.items() if key not in ("block", "optional")}
    if not isinstance(name, str) or type(optional) is not bool:
        text = f"blocks {pattern!r}: {data!r:.60} is not a block's name, or a table with block = NAME"
        raise ValueError(text)
    try:
        check_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"blocks {pattern!r}: {error}") from error
    for value in fields.values():
        if type(value) not in (str, int):
            raise ValueError(f"blocks {pattern!r}: {value!r:.60} is not a config field or an expression of them")
        check_expression(value)
    return Mount(pattern, name, tuple(fields.items()), optional)


def _parse_prefix(data: str | list[Any]) -> tuple[str, ...]:
    prefixes = tuple(data) if isinstance(data, list) else (data,) if data else ()
    if not all(isinstance(prefix, str) and prefix for prefix in prefixes):
        raise ValueError("prefix is what names begin with, or a list of that")
    return prefixes


def parse_unit(name: str, data: Any) -> UnitRule:  # noqa: ANN401 - anything TOML holds
    """A unit.

    Raises:
        ValueError: if the table is not one.
    """
    try:
        keys = {"count": (str, int), "size": (str, int), "copies": bool, "whole": bool, "override": bool}
        _check_keys(data, keys)
        unit = UnitRule(**data)
        if unit.whole and unit.count is None:
            raise ValueError("whole = true is for units with a count")
        for expression in (1 if unit.count is None else unit.count, unit.size):
            check_expression(expression)
    except ValueError as error:
        raise ValueError(f"unit {name}: {error}") from error
    return unit


_RULE_KEYS = {
    "style": str, "unit": str, "parts": list, "part": int, "groups": (str, int), "repeats": (str, int), "pad": bool,
    "transposed": bool, "beside": str, "size": (str, int), "dims": int, "when": dict, "otherwise": str,
    "optional": bool,
}  # fmt: skip


def _alternatives(table: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Each pattern with each of its rules, in order: one pattern may have a list of them."""
    for pattern, found in table.items():
        yield from ((pattern, rule) for rule in (found if isinstance(found, list) else [found]))


def parse_rule(pattern: str, data: Any, origin: str, *, by_user: bool = False) -> Rule:  # noqa: ANN401 - as above
    """A rule.

    Raises:
        ValueError: if the table is not one.
    """
    try:
        _check_keys(data, _RULE_KEYS)
        parts, when = tuple(data.get("parts", ())), tuple(data.get("when", {}).items())
        if "style" not in data:
            raise ValueError("style is missing")
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("parts are names of units")
        if any(isinstance(value, dict | list) for _, value in when):
            raise ValueError("when compares fields with single values")
        return Rule(pattern, origin=origin, by_user=by_user, **{**data, "parts": parts, "when": when})
    except ValueError as error:
        raise ValueError(f"rule {pattern!r}: {error}") from error


_MODULE_KEYS = {
    "attributes": dict, "inputs": dict, "at_most": dict, "full_width": (str, int), "locals": dict,
    "slices": dict, "output": dict, "unsharded": dict, "products": dict, "functional": str,
    "norms": str, "shared_output": (str, int),
    "unfused": str, "copied_input": bool, "gathered_output": bool, "summed_output": bool, "gathers": list, "when": dict,
}  # fmt: skip


def parse_module(pattern: str, data: Any, origin: str, *, by_user: bool = False) -> ModuleRule:  # noqa: ANN401 - as above
    """A module override.

    Raises:
        ValueError: if the table is not one.
    """
    try:
        _check_keys(data, _MODULE_KEYS)
        check_pattern(pattern)
        attributes, at_most = data.get("attributes", {}), data.get("at_most", {})
        numbers = (data.get("shared_output", 0), data.get("full_width", 0))
        for expression in (*attributes.values(), *data.get("locals", {}).values(), *numbers):
            check_expression(expression)
        if not all(isinstance(two, list) and list(map(type, two)) == [str, str] for two in at_most.values()):
            raise ValueError("at_most has a layer and an attribute for each name")
        if strange := set(data.get("products", {}).values()) - set(PRODUCTS):
            raise ValueError(f"products are {', '.join(PRODUCTS)} (got {strange.pop()!r:.60})")
        gathers = tuple(data.get("gathers", ()))
        if not all(isinstance(name, str) for name in gathers):
            raise ValueError("gathers are names of parameters")
        for name in gathers:
            check_pattern(name)
        places: dict[str, Any] = {
            key: {name: _parse_place(place, known) for name, place in data.get(key, {}).items()}
            for key, known in (("inputs", _INPUT_KEYS), ("slices", _SLICE_KEYS), ("unsharded", _UNSHARDED_KEYS))
        }
        places |= {"output": _parse_place(data["output"], _OUTPUT_KEYS)} if "output" in data else {}
        parsed = {**data, **places, "attributes": attributes, "gathers": gathers}
        when = tuple(data.get("when", {}).items())
        return ModuleRule(pattern, origin=origin, by_user=by_user, **{**parsed, "when": when})
    except (ValueError, KeyError) as error:
        raise ValueError(f"modules {pattern!r}: {error}") from error


_INPUT_KEYS = {"dim": int, "unit": str, "size": (str, int), "items": list}
_OUTPUT_KEYS = {"dim": int, "unit": str, "size": (str, int), "item": int}
_SLICE_KEYS = {"dim": int, "unit": str, "parts": list}
_UNSHARDED_KEYS = {"dim": int, "unit": str}


def _parse_place(place: Any, known: Mapping[str, Any]) -> InputRule:  # noqa: ANN401 - anything TOML holds
    _check_keys(place, known)
    check_expression(place.get("size", 1))
    if "dim" not in place:
        raise ValueError(f"{place!r:.60}: dim is missing")
    if known is _INPUT_KEYS and "size" not in place and place["dim"] < 0:
        raise ValueError(f"{place!r:.60}: without size, dim is counted from 0, as matrices follow it")
    if ("unit" in place) == ("parts" in place) or not all(isinstance(part, str) for part in place.get("parts", ())):
        raise ValueError(f"{place!r:.60} has neither a unit nor parts, which are names of units, or both")
    items = tuple(place.get("items", ()))
    if not all(type(item) is int and item >= 0 for item in items) or (items and "size" not in place):
        raise ValueError(f"{place!r:.60}: items are places in a list, from 0, and need size")
    return InputRule(**{**place, "parts": tuple(place.get("parts", ())), "items": items})


def _parse_part(start: str, data: Any) -> Part:  # noqa: ANN401 - anything TOML holds
    try:
        check_pattern(start)
    except ValueError as error:
        raise ValueError(f"part {start!r}: {error}") from error
    if isinstance(data, str):
        return Part(data)
    try:
        _check_keys(data, {"config": str, "family": str})
        return Part(data["config"], data["family"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"part {start!r}: {error}: it is a config field, or has config and family") from error


def _check_keys(data: Any, known: Mapping[str, Any]) -> None:  # noqa: ANN401 - anything TOML holds
    if not isinstance(data, dict):
        raise ValueError(f"{data!r:.60} is no table")  # noqa: TRY004 - all of them become one PlanError
    for key, value in data.items():
        if key not in known:
            raise ValueError(f"key {key!r} is not known; known are {', '.join(known)}")
        kinds = known[key] if isinstance(known[key], tuple) else (known[key],)
        if type(value) not in kinds:  # exactly: true is no number
            raise ValueError(f"{key} = {value!r:.60} has the wrong type")


def to_table(rule: UnitRule | Rule | ModuleRule, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """The table that a unit, a rule or a module override is parsed from: every field that is not as by default.

    Args:
        rule: what to write.
        without: fields that are written elsewhere, or not at all.
    """
    table = {}
    for own in fields(rule):
        value = getattr(rule, own.name)
        default = own.default_factory() if own.default_factory is not MISSING else own.default
        if own.name not in without and value != default:
            table[own.name] = _plain(value)
    return table


def _plain(value: Any) -> Any:  # noqa: ANN401 - a field of any rule
    match value:
        case InputRule():
            return {name: _plain(field) for name, field in value._asdict().items() if field not in (None, "", ())}
        case Mapping():
            return {name: _plain(one) for name, one in value.items()}
        case tuple() | list():
            return list(value)
    return value
