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

_FAMILY_KEYS = {
    "model_types": list, "inherits": str, "prefix": (str, list), "config": dict, "units": dict, "rules": dict,
    "modules": dict, "parts": dict, "blocks": dict, "gathered": str,
}  # fmt: skip
#: Keys of attributes that a family inherits, unless its file has them empty.
_INHERITED = {"prefix": "prefix", "parts": "submodels", "gathered": "gathered"}
#: Keys that a plan file does not have: it applies to the checkpoint it is passed for, and is not in docs/models.md.
_NOT_BY_USER = ("model_types", "gathered")
_BLOCK_KEYS = {"config": dict, "units": dict, "rules": dict, "modules": dict, "blocks": dict}


def parse_family(name: str, data: dict[str, Any], origin: str, *, by_user: bool = False) -> Family:
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
            submodels={
                start: _parse_submodel(start, part)._replace(by_user=by_user)
                for start, part in data.get("parts", {}).items()
            },
            blocks=_parse_blocks(data.get("blocks", {})),
            origin=origin,
            empty=frozenset(_INHERITED[key] for key in _INHERITED if key in data and not data[key]),
        )
        for expression in (family.config or {}).values():
            check_expression(expression)
    except ValueError as error:
        raise PlanError(f"{origin}: {error}") from error
    return family


def parse_block(name: str, data: dict[str, Any]) -> Block:
    """Parse the table of a block.

    Args:
        name: name of the block.
        data: the table.

    Raises:
        PlanError: if the table does not have the format, or a rule names a unit that does not exist.
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
            raise ValueError(f"unit {overrides[0]}: override = true is not for blocks, as they inherit no units")
    except ValueError as error:
        raise PlanError(f"{origin}: {error}") from error
    check_units(block.units, block.rules, block.modules)
    return block


def _parse_blocks(table: dict[str, Any]) -> tuple[Mount, ...]:
    return tuple(_parse_mount(pattern, mount) for pattern, mount in _alternatives(table))


def _parse_mount(pattern: str, data: Any) -> Mount:  # noqa: ANN401 - anything TOML holds
    """Parse an entry of ``[blocks]``: a block's name, or a table with the name and replaced config fields."""
    table = data if isinstance(data, dict) else {"block": data}
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


def _parse_prefix(data: str | list[Any]) -> tuple[str, ...]:
    prefixes = tuple(data) if isinstance(data, list) else (data,) if data else ()
    if not all(isinstance(prefix, str) and prefix for prefix in prefixes):
        raise ValueError(f"prefix = {data!r:.60} is not a string, or a list of non-empty strings")
    return prefixes


def parse_unit(name: str, data: Any) -> UnitRule:  # noqa: ANN401 - anything TOML holds
    """Parse the table of a unit.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        keys = {"count": (str, int), "size": (str, int), "copies": bool, "whole": bool, "override": bool}
        _check_keys(data, keys)
        unit = UnitRule(**data)
        if unit.whole and unit.count is None:
            raise ValueError("whole = true needs a count")
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
    """Each pattern with each of its rules, in order: a pattern has one rule or a list of them."""
    for pattern, rules in table.items():
        yield from ((pattern, rule) for rule in (rules if isinstance(rules, list) else [rules]))


def parse_rule(pattern: str, data: Any, origin: str, *, by_user: bool = False) -> Rule:  # noqa: ANN401 - as above
    """Parse the table of a rule.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        _check_keys(data, _RULE_KEYS)
        parts, when = tuple(data.get("parts", ())), tuple(data.get("when", {}).items())
        if "style" not in data:
            raise ValueError("style is missing")
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("parts is not a list of unit names")
        if any(isinstance(value, dict | list) for _, value in when):
            raise ValueError("when compares fields with numbers, strings, true or false (got a table or a list)")
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
    """Parse the table of a module override.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        _check_keys(data, _MODULE_KEYS)
        check_pattern(pattern)
        attributes, at_most = data.get("attributes", {}), data.get("at_most", {})
        numbers = (data.get("shared_output", 0), data.get("full_width", 0))
        for expression in (*attributes.values(), *data.get("locals", {}).values(), *numbers):
            check_expression(expression)
        if not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in at_most.values()):
            raise ValueError("at_most needs [LAYER, ATTRIBUTE] for each name")
        if unknown := set(data.get("products", {}).values()) - set(PRODUCTS):
            raise ValueError(f"products has {unknown.pop()!r:.60} (expected {', '.join(PRODUCTS)})")
        gathers = tuple(data.get("gathers", ()))
        if not all(isinstance(name, str) for name in gathers):
            raise ValueError("gathers is not a list of parameter names")
        for name in gathers:
            check_pattern(name)
        slices: dict[str, Any] = {
            key: {name: _parse_slice(table, known) for name, table in data.get(key, {}).items()}
            for key, known in (("inputs", _INPUT_KEYS), ("slices", _SLICE_KEYS), ("unsharded", _UNSHARDED_KEYS))
        }
        slices |= {"output": _parse_slice(data["output"], _OUTPUT_KEYS)} if "output" in data else {}
        parsed = {**data, **slices, "attributes": attributes, "gathers": gathers}
        when = tuple(data.get("when", {}).items())
        return ModuleRule(pattern, origin=origin, by_user=by_user, **{**parsed, "when": when})
    except (ValueError, KeyError) as error:
        raise ValueError(f"modules {pattern!r}: {error}") from error


_INPUT_KEYS = {"dim": int, "unit": str, "size": (str, int), "items": list}
_OUTPUT_KEYS = {"dim": int, "unit": str, "size": (str, int), "item": int}
_SLICE_KEYS = {"dim": int, "unit": str, "parts": list}
_UNSHARDED_KEYS = {"dim": int, "unit": str}


def _parse_slice(table: Any, known: Mapping[str, Any]) -> InputRule:  # noqa: ANN401 - anything TOML holds
    """Parse how an argument, an output, a parameter or a buffer is sliced; ``known`` has the keys and their types."""
    _check_keys(table, known)
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


def _parse_submodel(start: str, data: Any) -> Submodel:  # noqa: ANN401 - anything TOML holds
    try:
        check_pattern(start)
    except ValueError as error:
        raise ValueError(f"part {start!r}: {error}") from error
    if isinstance(data, str):
        return Submodel(data)
    try:
        _check_keys(data, {"config": str, "family": str})
        return Submodel(data["config"], data["family"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"part {start!r}: {error}: expected a config field, or config and family") from error


def _check_keys(data: Any, known: Mapping[str, Any]) -> None:  # noqa: ANN401 - anything TOML holds
    if not isinstance(data, dict):
        raise ValueError(f"{data!r:.60} is not a table")  # noqa: TRY004 - all of them become one PlanError
    for key, value in data.items():
        if key not in known:
            raise ValueError(f"key {key!r} is unknown (expected {', '.join(known)})")
        types = known[key] if isinstance(known[key], tuple) else (known[key],)
        if type(value) not in types:  # not isinstance: true would be an integer
            raise ValueError(f"{key} = {value!r:.60} has the wrong type (expected {_type_names(types)})")


def _type_names(types: Sequence[type]) -> str:
    names = {str: "a string", int: "an integer", bool: "true or false", list: "a list", dict: "a table"}
    return " or ".join(names[kind] for kind in types)


def to_table(rule: UnitRule | Rule | ModuleRule, *, without: Sequence[str] = ()) -> dict[str, Any]:
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


def _to_plain(value: Any) -> Any:  # noqa: ANN401 - a field of any rule
    match value:
        case InputRule():
            return {name: _to_plain(field) for name, field in value._asdict().items() if field not in (None, "", ())}
        case Mapping():
            return {name: _to_plain(item) for name, item in value.items()}
        case tuple() | list():
            return list(value)
    return value
