"""Quantized layers in the layout of an engine.

A quantized weight is stored as several tensors, whose names have another end in place of ``weight``. The rules for a
weight are also those for these tensors, unless the layout refuses them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

from msgspec.structs import replace

from shardconv.layouts.layout import REMEDY, FileTensor
from shardconv.layouts.layout_file import QuantizedTable, RefusedTable
from shardconv.layouts.relation import WEIGHT, ConstantRule, Pattern, Rule, parse_constants, parse_patterns
from shardconv.plan.grid import Grid
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import SETTINGS_KEY
from shardconv.support.errors import PlanError


@dataclass(frozen=True, slots=True)
class Quantized:
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

    def rules(self, rules: Sequence[Rule]) -> tuple[Rule, ...]:
        """The rules, with those for the tensors of quantized layers."""
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

    def with_dropped(self, changed: Iterable[FileTensor], tensors: Mapping[str, TensorSpec]) -> tuple[FileTensor, ...]:
        """The file tensors that differ from a source tensor; those of values imply the dropped tensors of the layer."""
        dropped: dict[str, list[str]] = {}
        for name, spec in tensors.items():
            layer, _, end = name.rpartition(".")
            if spec.grid is not None and end in self.table.dropped:
                values = next(value for end in self.table.values if (value := f"{layer}.{end}") in tensors)
                dropped.setdefault(values, []).append(name)
        changed = list(changed)
        held = {member for tensor in changed for member in tensor.members}
        return tuple(
            replace(
                tensor, implied=(*tensor.implied, *(name for one in tensor.members for name in dropped.get(one, ())))
            )
            for tensor in (*changed, *(FileTensor(name, (name,)) for name in dropped if name not in held))
        )


def joined_by_grids(changed: Iterable[FileTensor], tensors: Mapping[str, TensorSpec]) -> tuple[FileTensor, ...]:
    """The file tensors, their members concatenated along the dim of the output features of quantized layers."""
    return tuple(
        replace(tensor, dim=_output_dim(tensors[tensor.members[0]].grid))
        if len(tensor.members) > max(tensor.stack, 1)
        else tensor
        for tensor in changed
    )


def _output_dim(grid: Grid | None) -> int:
    """The dim of a stored tensor that covers the output features; 0 if none does."""
    if grid is None or "output" not in grid.axes:
        return 0
    of_output = grid.axes.index("output")
    return next((at for at, dim in enumerate(grid.dims) if dim.dim == of_output), 0)


def with_vectors(
    changed: Iterable[FileTensor], tensors: Mapping[str, TensorSpec], rules: Sequence[Rule]
) -> tuple[FileTensor, ...]:
    """The file tensors that differ from a source tensor, with those of numbers as vectors.

    Args:
        changed: the file tensors by the rules.
        tensors: name to dtype, shape and grid of the source tensors.
        rules: of all model types, for quantized layers.

    Raises:
        PlanError: if a source tensor is one number for a layer that is several layers in other models: the engine has a
            number for each of them.
    """
    numbers = {name for name, spec in tensors.items() if spec.grid and prod(spec.shape) == 1 and len(spec.shape) <= 1}
    result = [replace(tensor, is_vector=True) if numbers >= set(tensor.members) else tensor for tensor in changed]
    for name in sorted(numbers.difference(*(tensor.members for tensor in result))):
        if any(len(rule.sources) > 1 and not rule.is_last and rule.target.match(name) for rule in rules):
            raise PlanError(f"{name}: is one number, of which the engine has one for each part of its layer: {REMEDY}")
        if not tensors[name].shape:
            result.append(FileTensor(name, (name,), is_vector=True))
    return tuple(result)
