"""Parse and write the tables of units, rules and module overrides, in family files, plan files and manifests.

docs/plan-files.md describes the format. Unknown keys are errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from shardconv.plan.config_fields import check_expression
from shardconv.plan.module_override import ModuleRule, SliceRule
from shardconv.plan.rule import Rule, UnitRule, check_pattern

#: Keys of a table to the types of their values.
Keys = Mapping[str, type | tuple[type, ...]]


_UNIT_KEYS: Keys = {
    "count": (str, int), "size": (str, int), "replicate": bool, "shard_if_divisible": bool, "override": bool,
}  # fmt: skip


def parse_unit(name: str, data: object) -> UnitRule:
    """Parse the table of a unit.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        unit = UnitRule(**check_table(data, _UNIT_KEYS))
        if unit.shard_if_divisible and unit.count is None:
            raise ValueError("shard_if_divisible = true needs a count")
        for expression in (1 if unit.count is None else unit.count, unit.size):
            check_expression(expression)
    except ValueError as error:
        raise ValueError(f"unit {name}: {error}") from error
    return unit


_RULE_KEYS: Keys = {
    "style": str, "unit": str, "segments": list, "segment": int, "groups": (str, int), "repeats": (str, int),
    "pad": bool, "transposed": bool, "beside": str, "size": (str, int), "rows": (str, int), "dims": int,
    "when": dict, "otherwise": str, "optional": bool,
}  # fmt: skip


def parse_rule(pattern: str, data: object, origin: str, *, by_user: bool = False) -> Rule:
    """Parse the table of a rule.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        table = check_table(data, _RULE_KEYS)
        segments, when = tuple(table.get("segments", ())), tuple(table.get("when", {}).items())
        if "style" not in table:
            raise ValueError("style is missing")
        if not all(isinstance(unit, str) for unit in segments):
            raise ValueError("segments is not a list of unit names")
        if any(isinstance(value, dict | list) for _, value in when):
            raise ValueError("when compares fields with numbers, strings, true or false (got a table or a list)")
        return Rule(pattern, origin=origin, by_user=by_user, **{**table, "segments": segments, "when": when})
    except ValueError as error:
        raise ValueError(f"rule {pattern!r}: {error}") from error


_MODULE_KEYS: Keys = {
    "attributes": dict, "inputs": dict, "at_most": dict, "slices": dict, "output": dict, "norms": str,
    "shared_output": (str, int), "unfused": str, "allreduce_input_grad": bool, "gathered_output": bool,
    "allreduce_output": bool, "gathers": list, "when": dict,
}  # fmt: skip


def parse_module(pattern: str, data: object, origin: str, *, by_user: bool = False) -> ModuleRule:
    """Parse the table of a module override.

    Raises:
        ValueError: if the table does not have the format.
    """
    try:
        table = check_table(data, _MODULE_KEYS)
        check_pattern(pattern)
        attributes, at_most = table.get("attributes", {}), table.get("at_most", {})
        for expression in (*attributes.values(), table.get("shared_output", 0)):
            check_expression(expression)
        if not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in at_most.values()):
            raise ValueError("at_most needs [LAYER, ATTRIBUTE] for each name")
        gathers = tuple(table.get("gathers", ()))
        if not all(isinstance(name, str) for name in gathers):
            raise ValueError("gathers is not a list of parameter names")
        for name in gathers:
            check_pattern(name)
        slices: dict[str, Any] = {
            key: {name: _parse_slice(one, known) for name, one in table.get(key, {}).items()}
            for key, known in (("inputs", _INPUT_KEYS), ("slices", _SLICE_KEYS))
        }
        slices |= {"output": _parse_slice(table["output"], _OUTPUT_KEYS)} if "output" in table else {}
        parsed = {**table, **slices, "attributes": attributes, "gathers": gathers}
        when = tuple(table.get("when", {}).items())
        return ModuleRule(pattern, origin=origin, by_user=by_user, **{**parsed, "when": when})
    except (ValueError, KeyError) as error:
        raise ValueError(f"modules {pattern!r}: {error}") from error


_INPUT_KEYS: Keys = {"dim": int, "unit": str, "size": (str, int), "items": list}
_OUTPUT_KEYS: Keys = {"dim": int, "unit": str, "size": (str, int), "item": int}
_SLICE_KEYS: Keys = {"dim": int, "unit": str, "segments": list}


def _parse_slice(data: object, known: Keys) -> SliceRule:
    """Parse how an argument, an output, a parameter or a buffer is sliced; ``known`` has the keys and their types."""
    table = check_table(data, known)
    check_expression(table.get("size", 1))
    if "dim" not in table:
        raise ValueError(f"{table!r:.60}: dim is missing")
    if known is _INPUT_KEYS and "size" not in table and table["dim"] < 0:
        raise ValueError(f"{table!r:.60}: dim is negative without size: count it from 0")
    segments = tuple(table.get("segments", ()))
    if ("unit" in table) == ("segments" in table) or not all(isinstance(unit, str) for unit in segments):
        raise ValueError(f"{table!r:.60} needs either a unit, or segments with the names of units")
    items = tuple(table.get("items", ()))
    if not all(type(item) is int and item >= 0 for item in items) or (items and "size" not in table):
        raise ValueError(f"{table!r:.60}: items are indices of a list, from 0, and need size")
    return SliceRule(**{**table, "segments": segments, "items": items})


def check_table(data: object, known: Keys) -> dict[str, Any]:
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
        case SliceRule():
            return {name: _to_plain(field) for name, field in value._asdict().items() if field not in (None, "", ())}
        case Mapping():
            return {name: _to_plain(item) for name, item in value.items()}
        case tuple() | list():
            return list(value)
    return value
