"""The layout of a checkpoint: a general one, or an engine's for its model type, also of quantized layers.

A quantized weight is stored as several tensors, whose names have another end instead of ``weight``. The rules for a
weight also apply to these tensors, unless the layout refuses them.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from shardconv.layouts import ENGINE_LAYOUTS, FOREIGN, LAYOUTS
from shardconv.layouts.layout import DCP, NATIVE, REMEDY, FileLayout, FileTensor
from shardconv.layouts.layout_file import GroupTable, QuantizedTable, RefusedTable, layout_file, layout_head
from shardconv.layouts.relation import (
    WEIGHT,
    ConstantRule,
    LayoutRule,
    Pattern,
    file_tensors,
    parse_constants,
    parse_patterns,
)
from shardconv.plan.grid import Grid
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.support.errors import PlanError, UsageError, check_count, option
from shardconv.support.formatting import parse_size

_FIXED = {layout.name: layout for layout in (NATIVE, DCP)}


def refuse_adapters(layout: str, engine: str | None) -> None:
    """Refuse to split adapters for an engine, or in the layout of one.

    Raises:
        UsageError: if another library reads the files.
    """
    reader = engine or engine_of(layout) or (layout if layout in FOREIGN else None)
    if reader is not None:
        raise UsageError(
            f"adapters are split for shardconv run only (got {reader}): pass the adapter itself to {reader}, or "
            f"merge it into the model ({option(adapters=['ADAPTER'])} {option(merge_adapter=True)})"
        )


def engine_of(layout: str) -> str | None:
    """The engine of a layout that can be written, or None.

    Raises:
        UsageError: if the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r} is unknown (expected one of {', '.join(LAYOUTS)})")
    return layout_head(layout).engine if layout in ENGINE_LAYOUTS else None


def versions_of(layout: str) -> str | None:
    """The engine versions that read the files of a layout; None for a layout without an engine."""
    return None if engine_of(layout) is None else layout_head(layout).versions


def choose_layout(name: str, tensors: Mapping[str, TensorSpec], config: Mapping[str, object] | None) -> FileLayout:
    """The layout of a checkpoint.

    Args:
        name: of the layout.
        tensors: name to dtype and shape of the source tensors; tensors of quantized layers have their grids.
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
        quantized = _Quantized.of_config(name, file.quantized, config)
        quantized.check(file.types[str(config["model_type"])], tensors)
        rules, constants = quantized.rules(rules), [*constants, *quantized.constants()]
    changed = file_tensors(rules, tensors, config)
    if quantized is not None:
        changed = quantized.file_tensors(changed, tensors, quantized.rules(file.all_rules.rules))
    layout = FileLayout(
        name=name,
        file_name=file.file_name,
        file_name_in_stage=file.file_name_in_stage,
        engine=file.engine,
        versions=file.versions,
        changed=changed,
        padded_to={target: multiple for group in groups for target, multiple in group.padded_to.items()},
    )
    names = [tensor.name for tensor in layout.file_tensors(tensors)]
    _check_needed(name, groups, names)
    weights = names if quantized is None else quantized.as_weights(names)
    pairs = [*zip(names, weights, strict=True)]
    return replace(layout, constants=tuple(constant for rule in constants for constant in rule.constants(pairs)))


def check_stages(layout: FileLayout, pp: int) -> None:
    """Refuse several pipeline stages in the layout of an engine whose stages would read the same files.

    Raises:
        UsageError: if there are several.
    """
    if pp > 1 and layout.engine is not None and not layout.file_name_in_stage:
        raise UsageError(f"layout {layout.name} does not have pipeline stages (got {pp}): pass {option(pp=1)}")


def with_max_file_size(layout: FileLayout, max_size: int | str | None) -> FileLayout:
    """The layout with a maximum file size, in bytes or such as "5GB"; None for the size of the layout.

    Raises:
        UsageError: if the size is not valid.
    """
    if max_size is None:
        return layout
    if not isinstance(max_size, str):
        return replace(layout, max_file_bytes=check_count(max_size, "max_file_size"))
    try:
        return replace(layout, max_file_bytes=parse_size(max_size))
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


# --- quantized layers ------------------------------------------------------------------------------------------------


class _Quantized(Struct, frozen=True):
    """The quantized layers of a checkpoint in a layout.

    Attributes:
        layout: name of the layout.
        table: its section ``quantized``.
        method: the quantization method of the checkpoint; "" if config.json has none.
        refused: the patterns of unsupported tensors.
    """

    layout: str
    table: QuantizedTable
    method: str
    refused: Sequence[tuple[Pattern, RefusedTable]]

    @classmethod
    def of_config(cls, layout: str, table: QuantizedTable, config: Mapping[str, object]) -> Self:
        """The quantized layers of a checkpoint with this config."""
        found = config.get(SETTINGS_KEY)
        settings: Mapping[str, object] = found if isinstance(found, Mapping) else {}
        method = str(settings.get("quant_method") or "compressed-tensors") if isinstance(found, Mapping) else ""
        refused = [
            (pattern, one)
            for text, one in table.refuse.items()
            if (one.methods is None or method in one.methods) and not settings.get(one.setting)
            for pattern in parse_patterns([text])
        ]
        return cls(layout, table, method, refused)

    def check(self, groups: Iterable[str], tensors: Mapping[str, TensorSpec]) -> None:
        """Check that the layout supports the quantized layers.

        Args:
            groups: names of the groups of the model type.
            tensors: name to dtype, shape and grid.

        Raises:
            PlanError: if it does not.
        """
        self._check_tensors(tensors)
        if not any(spec.grid is not None for spec in tensors.values()):
            raise PlanError(
                "quantization_config describes quantized layers, but no tensor is quantized: remove it from config.json"
            )
        if self.method not in self.table.methods:
            raise PlanError(
                f"layout {self.layout} does not support this quantization method (got "
                f"{repr(self.method)[:60] if self.method else 'none in config.json'}, expected "
                f"{', '.join(self.table.methods)}): {REMEDY}"
            )
        if others := [group for group in groups if group not in self.table.groups]:
            raise PlanError(
                f"layout {self.layout} does not support quantized checkpoints of this model type (it has rules for "
                f"{', '.join(others)}): {REMEDY}"
            )

    def _check_tensors(self, tensors: Mapping[str, TensorSpec]) -> None:
        for name, spec in tensors.items():
            if spec.grid is None:
                continue
            layer, _, end = name.rpartition(".")
            reasons = [
                f" ({one.reason})"
                for pattern, one in self.refused
                if pattern.match(name) and (one.unless is None or f"{layer}.{one.unless}" not in tensors)
            ]
            if reasons or end not in (WEIGHT, *self.table.ends, *self.table.dropped):
                raise PlanError(
                    f"{name}: layout {self.layout} does not support this tensor of a quantized layer"
                    f"{''.join(reasons[:1])}: {REMEDY}"
                )

    def rules(self, rules: Sequence[LayoutRule]) -> tuple[LayoutRule, ...]:
        """The rules, and further rules for the tensors of quantized layers."""
        table = self.table
        added = [rule.with_end(end, is_last=end in table.last) for rule in rules for end in table.ends]
        return (*rules, *(rule for rule in added if rule is not None))

    def constants(self) -> list[ConstantRule]:
        """The rules of the constants of the quantization method."""
        tables = self.table.methods[self.method]
        return [rule for target, table in tables.items() for rule in parse_constants(target, table)]

    def as_weights(self, names: Iterable[str]) -> list[str]:
        """The names of file tensors, with ``weight`` for tensors in its place."""
        values = tuple(f".{end}" for end in self.table.values)
        return [f"{name.rpartition('.')[0]}.{WEIGHT}" if name.endswith(values) else name for name in names]

    def file_tensors(
        self, changed: Iterable[FileTensor], tensors: Mapping[str, TensorSpec], rules: Sequence[LayoutRule]
    ) -> tuple[FileTensor, ...]:
        """The file tensors that differ from a source tensor.

        Members are concatenated along the dim of the output features, tensors with values imply the dropped tensors of
        their layer, and numbers are vectors.

        Args:
            changed: the file tensors by the rules.
            tensors: name to dtype, shape and grid of the source tensors.
            rules: of all model types, for quantized layers.

        Raises:
            PlanError: if a source tensor is one number for a layer that is several layers in other models: the engine
                has a number for each of them.
        """
        dropped: dict[str, list[str]] = {}
        for name, spec in tensors.items():
            layer, _, end = name.rpartition(".")
            if spec.grid is not None and end in self.table.dropped:
                values = next(value for end in self.table.values if (value := f"{layer}.{end}") in tensors)
                dropped.setdefault(values, []).append(name)
        numbers = {one for one, spec in tensors.items() if spec.grid and prod(spec.shape) == 1 and len(spec.shape) <= 1}
        changed = list(changed)
        held = {member for tensor in changed for member in tensor.members}
        for name in sorted(numbers - held):
            if any(len(rule.sources) > 1 and not rule.is_last and rule.target.match(name) for rule in rules):
                raise PlanError(
                    f"{name}: is one number, but the engine has one for each segment of its layer: {REMEDY}"
                )
        alone = (*dropped, *(name for name in sorted(numbers) if not tensors[name].shape))
        return tuple(
            replace(
                tensor,
                dim=_output_dim(tensors[tensor.members[0]].grid)
                if len(tensor.members) > max(tensor.stack, 1)
                else tensor.dim,
                implied=(*tensor.implied, *(name for one in tensor.members for name in dropped.get(one, ()))),
                is_vector=tensor.is_vector or numbers >= {*tensor.members},
            )
            for tensor in (*changed, *(FileTensor(name, (name,)) for name in alone if name not in held))
        )


def _output_dim(grid: Grid | None) -> int:
    """The dim of a stored tensor that covers the output features; 0 if none does."""
    if grid is None or "output" not in grid.axes:
        return 0
    of_output = grid.axes.index("output")
    return next((at for at, dim in enumerate(grid.dims) if dim.dim == of_output), 0)
