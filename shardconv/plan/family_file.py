"""Family files and plan files on disk: which family serves a model type, and the text of a user's plan file.

Knows nothing of what is written in them: that is rule_format.py.
"""

import json
import tomllib
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from shardconv.errors import PlanError
from shardconv.plan.family import PLAN_FILE, Family
from shardconv.plan.rule_format import parse_family

_FOLDER = Path(__file__).parent / "families"


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
    family = parse_family(name, tomllib.loads(text), f"family {name}")
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
    return parse_family(name, data, f"{PLAN_FILE} {name}", by_user=True)
