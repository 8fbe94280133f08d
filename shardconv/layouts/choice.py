"""Selection of the layout of a checkpoint: a general layout, or the layout of an engine for its model type."""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from shardconv.layouts import LAYOUTS, SOURCE_LAYOUTS
from shardconv.layouts.layout import DCP, NATIVE, REMEDY, FileLayout
from shardconv.layouts.layout_file import GroupTable, layout_file
from shardconv.layouts.quantized import Quantized, joined_by_grids, with_vectors
from shardconv.layouts.relation import file_tensors, parse_patterns
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.support.errors import PlanError, UsageError, option
from shardconv.support.formatting import parse_size

_FIXED = {layout.name: layout for layout in (NATIVE, DCP)}


def engine_of(layout: str) -> str | None:
    """The engine of a layout that can be written, or None.

    Raises:
        UsageError: if the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r} is unknown (expected one of {', '.join(LAYOUTS)})")
    return layout_file(layout).engine if layout in SOURCE_LAYOUTS else None


def versions_of(layout: str) -> str | None:
    """The engine versions that read the files of a layout; None for a layout without an engine."""
    return None if engine_of(layout) is None else layout_file(layout).versions


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
    file = layout_file(name)
    groups, rules, _, config = file.rules_for(config or {})
    _check_refused(name, groups, tensors)
    constants = [rule for group in groups for rule in group.constant_rules]
    quantized = None
    if config.get(SETTINGS_KEY) is not None or any(spec.grid is not None for spec in tensors.values()):
        quantized = Quantized.of_config(name, file.quantized, config)
        quantized.check(file.types[str(config["model_type"])], tensors)
        rules, constants = quantized.rules(rules), [*constants, *quantized.constants()]
    changed = file_tensors(rules, tensors, config)
    if quantized is not None:
        changed = quantized.with_dropped(joined_by_grids(changed, tensors), tensors)
        changed = with_vectors(changed, tensors, quantized.rules(file.all_rules.rules))
    layout = FileLayout(
        name=name,
        file_name=file.file_name,
        engine=file.engine,
        versions=file.versions,
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
        raise UsageError(f"{option('max_file_size')} {error}: correct it") from error


def _check_refused(name: str, groups: Iterable[GroupTable], tensors: Mapping[str, TensorSpec]) -> None:
    patterns = parse_patterns(text for group in groups for text in group.refuse)
    wrong = next((tensor for tensor in tensors if any(pattern.match(tensor) for pattern in patterns)), None)
    if wrong is not None:
        raise PlanError(f"{wrong}: layout {name} does not support this tensor: remove it from the source, or {REMEDY}")


def _check_needed(name: str, groups: Iterable[GroupTable], names: list[str]) -> None:
    missing = next((needed for group in groups for needed in group.needs if needed not in names), None)
    if missing is not None:
        raise PlanError(f"{missing}: is missing, but layout {name} requires it: {REMEDY}")
