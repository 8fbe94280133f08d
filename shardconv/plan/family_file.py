"""Family files, block files and plan files on disk: which family serves a model type, and what it is built from.

A family file holds one or more families, a table each. Knows nothing of what is written in them: that is
rule_format.py.
"""

import json
import re
import tomllib
from collections.abc import Set as AbstractSet
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from shardconv.errors import PlanError
from shardconv.plan.blocks import mounted
from shardconv.plan.family import PLAN_FILE, Block, Family, units_named
from shardconv.plan.rule_format import parse_block, parse_family

_FOLDER = Path(__file__).parent / "families"
_BLOCKS = Path(__file__).parent / "blocks"


def family_names() -> list[str]:
    """The names of all families, sorted."""
    return sorted(_index().tables)


@cache
def load_family(name: str) -> Family:
    """The family of that name, with its blocks and what it inherits.

    Raises:
        PlanError: if there is no such family.
    """
    table = _index().tables.get(name)
    if table is None:
        near = ", ".join(get_close_matches(name, family_names(), cutoff=0.5)) or "none; docs/models.md has all"
        raise PlanError(f"there is no family {name!r}; near it is {near}")
    family = parse_family(name, table, f"family {name}")
    return laid_over(family, load_family(family.inherits) if family.inherits else Family(name))


def laid_over(family: Family, base: Family) -> Family:
    """A family with its blocks expanded, and what it does not have taken from another.

    Raises:
        PlanError: if a block does not exist, or cannot be mounted as the family says; or if a unit would silently
            change the rules of the other family.
    """
    _check_units(family, base)
    units = {**(base.units or {}), **(family.units or {})}
    known, own = base.config or {}, family.config or {}
    found = mounted(family.blocks, load_block, family.origin, units=units, config=known, known=own)
    _check_numbered(family, found.numbered | base.numbered)
    by_user = family.origin.startswith(PLAN_FILE)
    rules = tuple(
        replace(rule, by_user=by_user, optional=by_user, mount=rule.mount if by_user else "") for rule in found.rules
    )
    whole = replace(
        family,
        config={**found.config, **own},
        units=found.units,
        rules=family.rules + rules,
        modules=found.modules + family.modules,
        blocks=(),
        numbered=found.numbered,
    )
    return whole.over(base)


def _check_units(family: Family, base: Family) -> None:
    for name, unit in (family.units or {}).items():
        if not unit.override and (base.units or {}).get(name, unit) != unit:
            raise PlanError(
                f"{family.origin}: unit {name!r} is another one in family {base.name}, whose rules name it, too: "
                f"rename it, or let it take the place of that with override = true"
            )


def _check_numbered(family: Family, numbered: AbstractSet[str]) -> None:
    own = set(family.units or {})
    if found := sorted((units_named(family.rules, family.modules) & numbered) - own):
        raise PlanError(
            f"{family.origin}: unit {found[0]!r} has its number from the order of [blocks], which may change: add a "
            f"unit with a name of its own to [units]"
        )


def block_names() -> list[str]:
    """The names of all blocks, sorted."""
    return sorted(path.stem for path in _BLOCKS.glob("*.toml"))


@cache
def load_block(name: str) -> Block:
    """The block of that name.

    Raises:
        PlanError: if there is no such block.
    """
    path = _BLOCKS / f"{name}.toml"
    if not re.fullmatch("[a-z0-9_]+", name) or not path.is_file():
        raise PlanError(f"there is no block {name!r} (blocks are {', '.join(block_names())})")
    return parse_block(name, tomllib.loads(path.read_text("utf-8")))


@cache
def family_for(model_type: str) -> Family | None:
    """The family that serves a ``model_type`` of config.json, or None."""
    name = _index().of_type.get(model_type)
    return None if name is None else load_family(name)


class _Index(NamedTuple):
    """All families of all files: name to table, and model type to the name of its family."""

    tables: dict[str, dict[str, Any]]
    of_type: dict[str, str]


@cache
def _index() -> _Index:
    """Read the families.

    Raises:
        PlanError: if two have one name, or serve one type.
    """
    found = _Index({}, {})
    for path in sorted(_FOLDER.glob("*.toml")):
        for name, table in tomllib.loads(path.read_text("utf-8")).items():
            if name in found.tables:
                raise PlanError(f"family {name} is defined twice, also in {path.name}: rename one of them")
            found.tables[name] = table
            for kind in table.get("model_types", ()):
                if kind in found.of_type:
                    raise PlanError(f"model type {kind!r} is in families {found.of_type[kind]} and {name}: remove one")
                found.of_type[kind] = name
    return found


def clear_cache() -> None:
    """Read the files again when they are asked for."""
    for cached in (load_family, load_block, family_for, _index):
        cached.cache_clear()


def parse_plan_file(name: str, text: str) -> Family:
    """A user's plan file: the format of a family, in TOML or, by its ending, JSON.

    It stands for itself: what it inherits, its blocks, and the units of the family that it is laid over, are not in it
    yet.

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
    return parse_family(name, data, f"{PLAN_FILE} {name}", by_user=True)
