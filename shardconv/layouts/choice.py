"""Which layout a checkpoint gets: one that every checkpoint has, or that of an engine for its model type.

Owns the files with layouts. Pure, apart from reading these.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from shardconv.errors import PlanError, UsageError
from shardconv.layouts.layout import DCP, NATIVE, REMEDY, FileLayout
from shardconv.layouts.rules import Group, Rule, file_tensors
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import SETTINGS_KEY

_FOLDER = Path(__file__).parent
_FIXED = {layout.name: layout for layout in (NATIVE, DCP)}
#: The layouts with a file, each that of an engine.
_ENGINES = ("vllm",)
#: All layouts.
LAYOUTS = (*_FIXED, *_ENGINES)


class ChosenRules(NamedTuple):
    """The groups of a model type, their rules that apply with its config, the others, and the completed config."""

    groups: list[Group]
    rules: list[Rule]
    others: list[Rule]
    config: Mapping[str, Any]


def engine_of(layout: str) -> str | None:
    """The engine whose layout it is, or None.

    Raises:
        UsageError: if there is no such layout.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r} is unknown (expected one of {', '.join(LAYOUTS)})")
    return None if layout in _FIXED else str(_file(layout)["engine"])


def versions_of(layout: str) -> str | None:
    """The versions of the engine that read the files of a layout; None where no engine is named."""
    return None if engine_of(layout) is None else str(_file(layout)["versions"])


def choose_layout(name: str, tensors: Mapping[str, TensorSpec], config: Mapping[str, Any] | None) -> FileLayout:
    """The layout of that name for a checkpoint.

    Args:
        name: of the layout.
        tensors: name to dtype and shape of the source tensors.
        config: what config.json holds, or None.

    Raises:
        UsageError: if there is no such layout.
        PlanError: if the engine's layout of this checkpoint is not known.
    """
    if engine_of(name) is None:
        return _FIXED[name]
    data, config = _file(name), config or {}
    groups, rules, _, config = rules_for(name, config)
    _check_refused(name, groups, tensors)
    layout = FileLayout(
        name=name,
        file_name=data["file_name"],
        engine=data["engine"],
        versions=data["versions"],
        changed=file_tensors(rules, tensors, config),
        padded_to={target: multiple for group in groups for target, multiple in group.padded_to.items()},
    )
    names = [tensor.name for tensor in layout.file_tensors(tensors)]
    _check_needed(name, groups, names)
    return replace(
        layout, constants=tuple(one for group in groups for rule in group.constants for one in rule.constants(names))
    )


def rules_for(name: str, config: Mapping[str, Any]) -> ChosenRules:
    """The rules of an engine's layout for the model of a config.

    Raises:
        PlanError: if the engine's layout of this model is not known.
    """
    if config.get(SETTINGS_KEY) is not None:
        raise PlanError(f"layout {name} does not support quantized checkpoints: {REMEDY}")
    groups = _groups(name, config.get("model_type"))
    config = {field: value for group in groups for field, value in group.defaults.items()} | dict(config)
    every = [rule for group in groups for rule in group.rules]
    rules = [rule for rule in every if rule.applies(config)]
    return ChosenRules(groups, rules, [rule for rule in every if rule not in rules], config)


@cache
def _file(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))


def _groups(name: str, model_type: Any) -> list[Group]:  # noqa: ANN401 - anything JSON holds
    types = _file(name)["types"]
    if model_type is None:
        raise PlanError(f"layout {name} needs a config.json with a model_type: add one (--config), or {REMEDY}")
    if not isinstance(model_type, str) or model_type not in types:
        raise PlanError(
            f"layout {name} does not support model type {model_type!r:.60} (expected one of the {len(types)} types in "
            f"docs/{name}.md): {REMEDY}"
        )
    return [Group.of_table(_file(name)["groups"][group]) for group in types[model_type]]


def _check_refused(name: str, groups: list[Group], tensors: Mapping[str, TensorSpec]) -> None:
    patterns = [pattern for group in groups for pattern in group.refuse]
    wrong = next((tensor for tensor in tensors if any(pattern.match(tensor) for pattern in patterns)), None)
    if wrong is not None:
        raise PlanError(f"{wrong}: layout {name} does not have a place for it: remove it from the source, or {REMEDY}")


def _check_needed(name: str, groups: list[Group], names: list[str]) -> None:
    missing = next((needed for group in groups for needed in group.needs if needed not in names), None)
    if missing is not None:
        raise PlanError(f"{missing}: is missing, and layout {name} needs it: {REMEDY}")
