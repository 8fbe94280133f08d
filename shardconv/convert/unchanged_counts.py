"""Warning about modules of the user whose code reads the number of units of the full model.

Owns how such reads are found. An attention that reshapes its local features to the heads of the full model computes
wrong numbers, and no shape shows it. Models of transformers are not examined: proofs compare their outputs.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CodeType

from torch import nn

from shardconv.errors import PlanError, PlanWarning
from shardconv.plan.matcher import pattern_for
from shardconv.plan.model_rules import ModelRules
from shardconv.plan.plan import Plan
from shardconv.plan.units import IndivisibleError


def warn_of_unchanged_counts(model: nn.Module, model_rules: ModelRules, plan: Plan) -> None:
    """Warn of modules that read a number of units which differs per rank, where no module override changes it.

    Warns:
        PlanWarning: with the module override to add, once for all layers with the same pattern.
    """
    found: dict[tuple[str, str], tuple[str, str, tuple[int, int]]] = {}
    units_of, overrides = _units_by_module(plan, model_rules), list(model_rules.modules())
    for path, module in model.named_modules():
        if path not in units_of or type(module).__module__.startswith("torch."):  # converted with its numbers
            continue
        matching = [rule for regex, rule in overrides if regex.fullmatch(path)]
        changed = {attribute for rule in matching for attribute in (*rule.attributes, *rule.at_most)}
        counts = _sharded_counts(units_of[path], model_rules.at_stage(path), plan.tp)
        found.update({
            (pattern_for(path), attribute): (type(module).__name__, unit, counts[unit])
            for attribute, unit in _read_counts(module, counts)
            if attribute not in changed
        })  # fmt: skip
    for (pattern, attribute), (kind, unit, (full, local)) in found.items():
        warnings.warn(
            f"modules {pattern!r}: the forward of {kind} reads {attribute} = {full}, which equals the number of {unit} "
            f"units without sharding ({local} per rank). If it is that number, outputs are wrong: add "
            f'"{pattern}" = {{ attributes = {{ {attribute} = "{unit}" }} }} to [modules] of the plan file; if not, '
            f"{attribute} = {full}",
            PlanWarning,
            stacklevel=2,
        )


def _units_by_module(plan: Plan, model_rules: ModelRules) -> dict[str, set[str]]:
    """For each layer, and the module that contains it, the units that shard it; without those counted per group."""
    per_group = {unit for rule in model_rules.used_rules() if rule.groups != 1 for unit in rule.units}
    found: dict[str, set[str]] = {}
    for name, planned in plan.tensors.items():
        layer = name.rpartition(".")[0]
        for path in (layer, layer.rpartition(".")[0]):
            found.setdefault(path, set()).update(set(planned.units) - per_group)
    return found


def _sharded_counts(units: Iterable[str], model_rules: ModelRules, tp: int) -> dict[str, tuple[int, int]]:
    """Name to number of units without sharding and on a rank, where these differ."""
    counts, rules = {}, model_rules.family.units or {}
    for unit in sorted(units):
        if unit in rules and rules[unit].count is not None:
            with suppress(IndivisibleError, PlanError):  # a rule pads
                placement = model_rules.units(unit, tp)
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
