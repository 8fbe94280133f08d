"""Warning about modules of the user whose code reads the number of units of the full model.

Owns how such reads are found. An attention that reshapes its local features to the heads of the full model computes
wrong numbers, and no shape shows it. Models of transformers are not examined: proofs compare their outputs.
"""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType

from torch import nn

from shardconv.errors import PlanWarning
from shardconv.plan.matcher import pattern_for
from shardconv.plan.model_rules import ModelRules
from shardconv.plan.plan import Plan
from shardconv.plan.units import IndivisibleError


def warn_of_unchanged_counts(model: nn.Module, model_rules: ModelRules, plan: Plan) -> None:
    """Warn of modules that read a number of units which differs per rank, where no module override matches them.

    Warns:
        PlanWarning: with the module override to add, once for all layers with the same pattern.
    """
    found: dict[tuple[str, str], tuple[str, str, tuple[int, int]]] = {}
    overridden = [regex for regex, _ in model_rules.modules()]
    for path, module in model.named_modules():
        is_layer = type(module).__module__.startswith("torch.")  # converted with its numbers
        if not is_layer and not any(regex.fullmatch(path) for regex in overridden):
            counts = _sharded_counts(path, model_rules, plan)
            found.update({
                (pattern_for(path), attribute): (type(module).__name__, unit, counts[unit])
                for attribute, unit in _read_counts(module, counts)
            })  # fmt: skip
    for (pattern, attribute), (kind, unit, (full, local)) in found.items():
        warnings.warn(
            f"modules {pattern!r}: the forward of {kind} reads {attribute} = {full}, the number of {unit} units "
            f"without sharding (expected {local} per rank), so outputs may be wrong: add to [modules] of the plan file "
            f'"{pattern}" = {{ attributes = {{ {attribute} = "{unit}" }} }}, or {attribute} = {full} to keep it',
            PlanWarning,
            stacklevel=2,
        )


def _sharded_counts(path: str, model_rules: ModelRules, plan: Plan) -> dict[str, tuple[int, int]]:
    """The units by which the layers of a module are sharded: name to their number without sharding and on a rank."""
    layers = {name: name.rpartition(".")[0] for name in plan.tensors}
    own = (name for name, layer in layers.items() if path in (layer, layer.rpartition(".")[0]))
    counts, units = {}, model_rules.family.units or {}
    for unit in dict.fromkeys(unit for name in own for unit in plan.tensors[name].units if unit in units):
        with suppress(IndivisibleError):  # the rule pads
            if units[unit].count is not None:
                placement = model_rules.units(unit, plan.tp)
                counts[unit] = placement.size, placement.local_size(0)
    return {unit: (full, local) for unit, (full, local) in counts.items() if local != full}


def _read_counts(module: nn.Module, counts: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """The attributes of a module with the number of a unit that its forward reads, each with the name of the unit."""
    numbers = {name: value for name, value in vars(module).items() if type(value) is int}
    read = _names_read(type(module)) if numbers and counts else set()
    for attribute, value in numbers.items():
        unit = next((unit for unit, (full, _) in counts.items() if full == value), None)
        if unit is not None and attribute in read:
            yield attribute, unit


def _names_read(kind: type[nn.Module]) -> set[str]:
    """The names of attributes that the forward of a class reads, also in methods that it calls."""
    read, pending = set[str](), {"forward"}
    while pending:
        function = inspect.unwrap(getattr(kind, pending.pop()))
        new = set(_names_in(getattr(function, "__code__", None))) - read
        read |= new
        pending |= {name for name in new if inspect.isfunction(getattr(kind, name, None))}
    return read


def _names_in(code: object) -> Iterator[str]:
    """The names of attributes and globals in code, and in the functions inside it."""
    if isinstance(code, CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names_in(constant)
