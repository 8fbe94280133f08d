"""Family files and plan files: strict loading of the rules for the models of one shape.

Owns the file format (CONTRIBUTING.md has it on a page). A key that is not known is an error, never skipped.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.family import Family, InputRule, ModuleRule, Part, Rule, UnitRule
from shardconv.plan.fields import check_expression

_FOLDER = Path(__file__).parent / "families"

#: Rules for names that tell by themselves how a tensor is cut; used where no family fits.
NAMES_FAMILY = "by_name"


def family_names() -> list[str]:
    """The names of all families, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


@cache
def load_family(name: str) -> Family:
    """The family of that name, with what it inherits.

    Raises:
        PlanError: if there is no such family.
    """
    if name not in family_names():
        near = ", ".join(get_close_matches(name, family_names(), cutoff=0.5)) or "none; docs/models.md has all"
        raise PlanError(f"there is no family {name!r}; near it is {near}")
    text = (_FOLDER / f"{name}.toml").read_text("utf-8")
    family = _parse_family(name, tomllib.loads(text), f"family {name}")
    return family.over(load_family(family.inherits) if family.inherits else Family(name))


@cache
def family_for(model_type: str) -> Family | None:
    """The family that serves a ``model_type`` of config.json, or None."""
    mentioning = (name for name in family_names() if model_type in (_FOLDER / f"{name}.toml").read_text("utf-8"))
    return next((family for family in map(load_family, mentioning) if model_type in family.model_types), None)


def parse_plan_file(name: str, text: str) -> Family:
    """A user's plan file: the format of a family file, in TOML or, by its ending, JSON.

    It stands for itself: what it inherits, and the units of the family that it is laid over, are not in it yet.

    Raises:
        PlanError: if it holds what no plan file holds.
    """
    is_json = name.endswith(".json")
    try:
        data = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{name}: is not {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{name}: a plan file is a table")
    return _parse_family(name, data, f"plan file {name}")


_FAMILY_KEYS = {
    "model_types": list, "inherits": str, "prefix": (str, list), "config": dict, "units": dict, "rules": dict,
    "modules": dict, "parts": dict,
}  # fmt: skip


def _parse_family(name: str, data: dict[str, Any], origin: str) -> Family:
    try:
        _check_keys(data, _FAMILY_KEYS)
        family = Family(
            name=name,
            model_types=tuple(data.get("model_types", ())),
            inherits=data.get("inherits", ""),
            prefix=_parse_prefix(data.get("prefix", [])),
            config=data.get("config", {}),
            units={key: _parse_unit(key, unit) for key, unit in data.get("units", {}).items()},
            rules=tuple(_parse_rules(data.get("rules", {}), origin)),
            modules=tuple(_parse_modules(data.get("modules", {}), origin)),
            parts={start: _parse_part(start, part) for start, part in data.get("parts", {}).items()},
        )
        for expression in (family.config or {}).values():
            check_expression(expression)
    except ValueError as error:
        raise PlanError(f"{origin}: {error}") from error
    return family


def _parse_prefix(data: str | list[Any]) -> tuple[str, ...]:
    prefixes = tuple(data) if isinstance(data, list) else (data,) if data else ()
    if not all(isinstance(prefix, str) and prefix for prefix in prefixes):
        raise ValueError("prefix is what names begin with, or a list of that")
    return prefixes


def _parse_unit(name: str, data: Any) -> UnitRule:  # noqa: ANN401 - anything TOML holds
    try:
        _check_keys(data, {"count": (str, int), "size": (str, int), "copies": bool})
        unit = UnitRule(**data)
        for expression in (1 if unit.count is None else unit.count, unit.size):
            check_expression(expression)
    except ValueError as error:
        raise ValueError(f"unit {name}: {error}") from error
    return unit


_RULE_KEYS = {
    "style": str, "unit": str, "parts": list, "groups": (str, int), "repeats": (str, int), "pad": bool,
    "transposed": bool, "beside": str, "size": (str, int), "dims": int, "when": dict, "optional": bool,
}  # fmt: skip


def _parse_rules(rules: dict[str, Any], origin: str) -> Iterable[Rule]:
    for pattern, alternatives in rules.items():
        for data in alternatives if isinstance(alternatives, list) else [alternatives]:
            try:
                _check_keys(data, _RULE_KEYS)
                parts, when = tuple(data.get("parts", ())), tuple(data.get("when", {}).items())
                if "style" not in data:
                    raise ValueError("style is missing")
                if not all(isinstance(part, str) for part in parts):
                    raise ValueError("parts are names of units")
                if any(isinstance(value, dict | list) for _, value in when):
                    raise ValueError("when compares fields with single values")
                yield Rule(pattern, origin=origin, **{**data, "parts": parts, "when": when})
            except ValueError as error:
                raise ValueError(f"rule {pattern!r}: {error}") from error


_MODULE_KEYS = {
    "attributes": dict, "inputs": dict, "at_most": dict, "norms": str, "shared_output": (str, int),
    "unfused": str, "copied_input": bool, "summed_output": bool, "gathers": list, "when": dict,
}  # fmt: skip


def _parse_modules(modules: dict[str, Any], origin: str) -> Iterable[ModuleRule]:
    for pattern, alternatives in modules.items():
        for data in alternatives if isinstance(alternatives, list) else [alternatives]:
            try:
                _check_keys(data, _MODULE_KEYS)
                attributes, inputs, at_most = (data.get(key, {}) for key in ("attributes", "inputs", "at_most"))
                for expression in (*attributes.values(), data.get("shared_output", 0)):
                    check_expression(expression)
                for place in inputs.values():
                    _check_keys(place, {"dim": int, "unit": str, "size": (str, int)})
                    check_expression(place.get("size", 1))
                if not all(isinstance(two, list) and list(map(type, two)) == [str, str] for two in at_most.values()):
                    raise ValueError("at_most has a layer and an attribute for each name")
                gathers = tuple(data.get("gathers", ()))
                if not all(isinstance(name, str) for name in gathers):
                    raise ValueError("gathers are names of parameters")
                places = {
                    name: InputRule(place["dim"], place["unit"], place.get("size")) for name, place in inputs.items()
                }
                when = tuple(data.get("when", {}).items())
                told = {**data, "attributes": attributes, "inputs": places, "gathers": gathers, "when": when}
                yield ModuleRule(pattern, origin=origin, **told)
            except (ValueError, KeyError) as error:
                raise ValueError(f"modules {pattern!r}: {error}") from error


def _parse_part(start: str, data: Any) -> Part:  # noqa: ANN401 - anything TOML holds
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
