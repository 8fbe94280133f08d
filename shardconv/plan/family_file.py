"""Family files, block files and plan files on disk: which family serves a model type, and what it is built from.

A family file holds one or more families, a table each. Knows nothing of what is written in them: that is
rule_format.py.
"""

import json
import re
import tomllib
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.blocks import mounted
from shardconv.plan.family import PLAN_FILE, Block, Family
from shardconv.plan.rule_format import parse_block, parse_family

_FOLDER = Path(__file__).parent / "families"
_BLOCKS = Path(__file__).parent / "blocks"

_HEADING = re.compile(r"^\[([A-Za-z0-9_-]+)\]$", re.MULTILINE)


def family_names() -> list[str]:
    """The names of all families, sorted."""
    return sorted(_files())


@cache
def load_family(name: str) -> Family:
    """The family of that name, with its blocks and what it inherits.

    Raises:
        PlanError: if there is no such family.
    """
    if name not in _files():
        near = ", ".join(get_close_matches(name, family_names(), cutoff=0.5)) or "none; docs/models.md has all"
        raise PlanError(f"there is no family {name!r}; near it is {near}")
    family = parse_family(name, _tables(_files()[name])[name], f"family {name}")
    return laid_over(family, load_family(family.inherits) if family.inherits else Family(name))


def laid_over(family: Family, base: Family) -> Family:
    """A family with its blocks expanded, and what it does not have taken from another.

    Raises:
        PlanError: if a block does not exist, or cannot be mounted as the family says.
    """
    units = {**(base.units or {}), **(family.units or {})}
    found = mounted(family.blocks, load_block, family.origin, units=units)
    by_user = family.origin.startswith(PLAN_FILE)
    rules = tuple(
        replace(rule, by_user=by_user, optional=by_user, mount=rule.mount if by_user else "") for rule in found.rules
    )
    whole = replace(
        family,
        config={**found.config, **(base.config or {}), **(family.config or {})},
        units=found.units,
        rules=family.rules + rules,
        modules=found.modules + family.modules,
        blocks=(),
    )
    return whole.over(base)


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
    for path, text in _texts().items():
        if f'"{model_type}"' not in text:
            continue
        for name, table in _tables(path).items():
            if model_type in table.get("model_types", ()):
                return load_family(name)
    return None


@cache
def _texts() -> dict[Path, str]:
    return {path: path.read_text("utf-8") for path in sorted(_FOLDER.glob("*.toml"))}


@cache
def _files() -> dict[str, Path]:
    """The file of each family."""
    return {name: path for path, text in _texts().items() for name in _HEADING.findall(text)}


@cache
def _tables(path: Path) -> dict[str, Any]:
    """The families in a file, by name."""
    return tomllib.loads(_texts()[path])


def clear_cache() -> None:
    """Read the files again when they are asked for."""
    for cached in (load_family, load_block, family_for, _texts, _files, _tables):
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
