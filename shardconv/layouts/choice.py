"""Selection of the layout of a checkpoint: a general layout, or the layout of an engine for its model type.

The layouts of engines are defined in the TOML files of this package.
"""

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

from msgspec.structs import replace

from shardconv.layouts.external import META
from shardconv.layouts.layout import DCP, NATIVE, REMEDY, FileLayout
from shardconv.layouts.quantized import Quantized, QuantizedTable, joined_by_grids, with_vectors
from shardconv.layouts.rules import Group, GroupTable, Rule, file_tensors
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.support.errors import PlanError, UsageError
from shardconv.support.formatting import parse_size

FOLDER = Path(__file__).parent
_FIXED = {layout.name: layout for layout in (NATIVE, DCP)}
#: The layouts of engines, each with a TOML file.
_ENGINES = ("vllm",)
#: All layouts.
LAYOUTS = (*_FIXED, *_ENGINES, META)


class LayoutTable(TypedDict):
    """The TOML file of an engine's layout.

    Attributes:
        engine: name of the engine.
        versions: the engine versions that read the files.
        file_name: see :class:`~shardconv.layouts.layout.FileLayout`.
        types: model type to names of groups.
        groups: by name.
        quantized: the tensors of quantized layers.
    """

    engine: str
    versions: str
    file_name: str
    types: dict[str, list[str]]
    groups: dict[str, GroupTable]
    quantized: QuantizedTable


class ChosenRules(NamedTuple):
    """The groups of a model type, their rules that apply to its config, all other rules, and the completed config."""

    groups: list[Group]
    rules: list[Rule]
    others: list[Rule]
    config: Mapping[str, object]


def engine_of(layout: str) -> str | None:
    """The engine of a layout, or None.

    Raises:
        UsageError: if the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r} is unknown (expected one of {', '.join(LAYOUTS)})")
    return _file(layout)["engine"] if layout in _ENGINES else None


def versions_of(layout: str) -> str | None:
    """The engine versions that read the files of a layout; None for a layout without an engine."""
    return None if engine_of(layout) is None else _file(layout)["versions"]


def choose_layout(name: str, tensors: Mapping[str, TensorSpec], config: Mapping[str, object] | None) -> FileLayout:
    """The layout of a checkpoint.

    Args:
        name: of the layout.
        tensors: name to dtype and shape of the source tensors, those of quantized layers with their grids.
        config: contents of config.json, with the quantization settings; None without a config.

    Raises:
        UsageError: if the layout is unknown.
        PlanError: if the layout does not support this checkpoint.
    """
    if engine_of(name) is None:
        return _FIXED[name]
    data, config = _file(name), config or {}
    groups, rules, _, config = rules_for(name, config)
    _check_refused(name, groups, tensors)
    constants = [rule for group in groups for rule in group.constants]
    quantized = None
    if config.get(SETTINGS_KEY) is not None or any(spec.grid is not None for spec in tensors.values()):
        quantized = Quantized.of_config(name, data["quantized"], config)
        quantized.check(data["types"][str(config["model_type"])], tensors)
        rules, constants = quantized.rules(rules), [*constants, *quantized.constants()]
    changed = file_tensors(rules, tensors, config)
    if quantized is not None:
        all_rules = [rule for table in data["groups"].values() for rule in Group.of_table(table).rules]
        changed = quantized.with_dropped(joined_by_grids(changed, tensors), tensors)
        changed = with_vectors(changed, tensors, quantized.rules(all_rules))
    layout = FileLayout(
        name=name,
        file_name=data["file_name"],
        engine=data["engine"],
        versions=data["versions"],
        changed=changed,
        padded_to={target: multiple for group in groups for target, multiple in group.padded_to.items()},
    )
    names = [tensor.name for tensor in layout.file_tensors(tensors)]
    _check_needed(name, groups, names)
    weights = names if quantized is None else quantized.as_weights(names)
    return replace(layout, constants=tuple(constant for rule in constants for constant in rule.constants(weights)))


def with_max_file_size(layout: FileLayout, max_size: int | str | None) -> FileLayout:
    """The layout with a maximum file size, in bytes or such as "5GB"; None for that of the layout.

    Raises:
        UsageError: if the size is not valid.
    """
    if max_size is None:
        return layout
    try:
        return replace(layout, max_file_bytes=parse_size(str(max_size)))
    except ValueError as error:
        raise UsageError(f"--max-file-size {error}: correct it") from error


def rules_for(name: str, config: Mapping[str, object]) -> ChosenRules:
    """The rules of an engine's layout for the model of a config.

    Raises:
        PlanError: if the layout does not support this model.
    """
    groups = _groups(name, config.get("model_type"))
    config = {field: value for group in groups for field, value in group.defaults.items()} | dict(config)
    all_rules = [rule for group in groups for rule in group.rules]
    rules = [rule for rule in all_rules if rule.applies(config)]
    return ChosenRules(groups, rules, [rule for rule in all_rules if rule not in rules], config)


@cache
def _file(name: str) -> LayoutTable:
    return cast("LayoutTable", tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8")))


def _groups(name: str, model_type: object) -> list[Group]:
    types = _file(name)["types"]
    if model_type is None:
        raise PlanError(f"layout {name} needs a config.json with a model_type: add one (--config), or {REMEDY}")
    if not isinstance(model_type, str) or model_type not in types:
        similar = ", ".join(get_close_matches(str(model_type), types, cutoff=0))
        raise PlanError(
            f"layout {name} does not support model type {model_type!r:.60} (expected one of {len(types)} types, such "
            f"as {similar}): {REMEDY}"
        )
    return [Group.of_table(_file(name)["groups"][group]) for group in types[model_type]]


def _check_refused(name: str, groups: list[Group], tensors: Mapping[str, TensorSpec]) -> None:
    patterns = [pattern for group in groups for pattern in group.refuse]
    wrong = next((tensor for tensor in tensors if any(pattern.match(tensor) for pattern in patterns)), None)
    if wrong is not None:
        raise PlanError(f"{wrong}: layout {name} does not support this tensor: remove it from the source, or {REMEDY}")


def _check_needed(name: str, groups: list[Group], names: list[str]) -> None:
    missing = next((needed for group in groups for needed in group.needs if needed not in names), None)
    if missing is not None:
        raise PlanError(f"{missing}: is missing, but layout {name} requires it: {REMEDY}")
