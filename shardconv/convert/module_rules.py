"""Per-rank overrides of the modules of a model, from the module rules of a family.

Owns the evaluation of units and expressions to numbers, slices and classes. ``overrides`` changes the modules.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial

from torch import Tensor, nn

from shardconv.convert.ip_adapters import GatheredProcessor
from shardconv.convert.modules import AllReducedOutput, HeadNorms, ParallelExperts
from shardconv.convert.overrides import (
    Extension,
    GatheredOutput,
    InputGradientAllReduce,
    InputSlice,
    Overrides,
    SharedOutput,
    SlicedOutput,
    SlicedTensors,
    Unfused,
    local_slice,
    split_config_fields,
)
from shardconv.distributed import Axis, copy_to_tp
from shardconv.layers.parallel_module import ParallelModule, own_parameters
from shardconv.layers.sharding import take_shard
from shardconv.plan.families.config_fields import fields_in, lookup
from shardconv.plan.families.rule import ModuleRule, SliceRule
from shardconv.plan.placement import Placement, shard_dim
from shardconv.plan.rule_set import ModelRules
from shardconv.support.errors import PlanError


def module_overrides(
    model: nn.Module, model_rules: ModelRules, axis: Axis, replacements: Mapping[nn.Module, ParallelModule]
) -> Iterator[Overrides]:
    """Yield the overrides of a model's modules by the rules of the model or of a submodel.

    Args:
        model: the model.
        model_rules: the rules.
        axis: the ranks.
        replacements: the parallel modules that modules of the model become.

    Raises:
        PlanError: if a rule of a user's plan file matches no module, or sets an attribute that none of them has.
    """
    rules = list(model_rules.modules())
    named = list(model.named_modules())
    for regex, rule in rules:
        matched = [module for name, module in named if regex.fullmatch(name)]
        if rule.by_user and (matched or not rule.optional):
            _check_matches(rule, matched)
            _check_names(rule, model_rules, matched)
            _check_gathers(rule, model_rules, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    for name, module in named:
        if found := [rule for regex, rule in rules if regex.fullmatch(name)]:
            replacement = replacements.get(module, module)
            overrides = _overrides(module, replacement, ModuleRule.joined(found), model_rules.at_stage(name), axis)
            yield replace(overrides, is_checked=any(rule.is_empty() for rule in found))


def _check_matches(rule: ModuleRule, modules: list[nn.Module]) -> None:
    where = f"{rule.origin}: modules {rule.pattern!r}"
    if not modules:
        raise PlanError(f"{where} match no module of the model: correct or remove it")
    names = [*rule.attributes, *rule.at_most, *rule.slices, *filter(None, [rule.norms and "norms", rule.unfused])]
    for name in names:
        if not (hasattr(ParallelExperts, name) or any(_has_attribute(module, name) for module in modules)):
            raise PlanError(f"{where}: a {type(modules[0]).__name__} does not have {name!r}: correct or remove it")
    for name in rule.inputs:
        if not any(_takes(module, name) for module in modules):
            raise PlanError(f"{where}: a {type(modules[0]).__name__} takes no {name!r}: correct or remove it")


def _takes(module: nn.Module, name: str) -> bool:
    """Whether the forward of a module takes an argument of this name, also in its ``**options``."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _check_names(rule: ModuleRule, model_rules: ModelRules, modules: list[nn.Module]) -> None:
    """Refuse expressions with names that are neither units nor config fields."""
    family = model_rules.family
    units = {*family.units}
    known = {*units, *family.config, "rows"}.union(*map(_output_sizes, modules))
    for name in sorted(set().union(*map(fields_in, rule.expressions()))):
        if name not in known and lookup(model_rules.config or {}, name) is None:
            shown = sorted(units - set(family.numbered))
            remedy = " or ".join(get_close_matches(name, shown, n=2, cutoff=0.5)) or "one of these"
            raise PlanError(
                f"{rule.origin}: modules {rule.pattern!r}: unit {name!r} is unknown (expected "
                f"{', '.join([*shown, 'or a field of the config'])}): write {remedy}, or set it in [config]"
            )


def _has_attribute(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute; after ``config.``, whether its config has."""
    field = name.removeprefix("config.")
    return hasattr(module, name) if field == name else hasattr(getattr(module, "config", None), field)


def _check_gathers(rule: ModuleRule, model_rules: ModelRules, names: list[str]) -> None:
    for pattern in rule.gathers:
        regex = re.compile(model_rules.regex(pattern))
        if not any(regex.fullmatch(name) for name in names):
            raise PlanError(f"{rule.origin}: modules {rule.pattern!r}: gathers {pattern!r}, which is not a parameter")


def _overrides(
    module: nn.Module, replacement: nn.Module, rule: ModuleRule, model_rules: ModelRules, axis: Axis
) -> Overrides:
    limits = {name: (layer, size) for name, (layer, size) in rule.at_most.items() if hasattr(module, name)}
    outputs = _output_sizes(module)
    expressions = {name: value for name, value in rule.attributes.items() if _has_attribute(replacement, name)}
    fields, attributes = split_config_fields(
        {name: model_rules.on_rank(expression, axis.size, **outputs) for name, expression in expressions.items()}
    )
    if missing := sorted({name for pair in limits.values() for name in pair if not hasattr(module, name)}):
        raise PlanError(f"module overrides need attributes that a {type(module).__name__} does not have: {missing}")
    return Overrides(
        module,
        config_fields=fields,
        attributes=attributes,
        limits=limits,
        inputs={
            name: _input_slice(one, model_rules, axis)
            for name, one in rule.inputs.items()
            if _is_sharded(one, model_rules, axis)
        },
        extensions=list(_extensions(module, rule, model_rules, axis)),
        gathers=[re.compile(model_rules.regex(pattern)) for pattern in rule.gathers],
    )


def _output_sizes(module: nn.Module) -> dict[str, int]:
    """The output features of a module's linear layers, before sharding."""
    return {name: one.out_features for name, one in module.named_children() if isinstance(one, nn.Linear)}


def _extensions(module: nn.Module, rule: ModuleRule, model_rules: ModelRules, axis: Axis) -> Iterator[Extension]:
    if rule.output is not None and _is_sharded(rule.output, model_rules, axis):
        size = model_rules.fields().evaluate(1 if rule.output.size is None else rule.output.size)
        units = model_rules.units(rule.output.unit, axis.size, size=size)
        yield SlicedOutput, {"item": rule.output.item, "output_dim": rule.output.dim, "output_units": units}
    if slices := _tensor_slices(module, rule, model_rules, axis):
        yield SlicedTensors, {"slices": slices}
    if rule.norms and hasattr(module, "norms"):
        yield HeadNorms, {"heads": model_rules.units(rule.norms, axis.size)}
    if rule.unfused and hasattr(module, rule.unfused):
        yield Unfused, {}
    if rule.shared_output is not None:
        weight = getattr(module, "weight", None)
        rows = {"rows": weight.shape[0]} if isinstance(weight, Tensor) else {}
        yield SharedOutput, {"num_shared": model_rules.on_rank(rule.shared_output, axis.size, **rows)}
    if rule.gathered_output:
        is_processor = "__call__" in vars(type(module))
        yield GatheredProcessor if is_processor else GatheredOutput, {}
    if rule.allreduce_input_grad:
        yield InputGradientAllReduce, {}
    if rule.allreduce_output:
        yield AllReducedOutput, {"styles": getattr(module, "styles", {})}


def _tensor_slices(module: nn.Module, rule: ModuleRule, model_rules: ModelRules, axis: Axis) -> dict[str, Placement]:
    """The placements of the parameters and buffers whose local slice a module reads."""
    slices = {
        name: _slice(one, model_rules, axis.size)
        for name, one in rule.slices.items()
        if getattr(module, name, None) is not None and _is_sharded(one, model_rules, axis)
    }
    tensors = {*own_parameters(module), *(name for name, _ in module.named_buffers(recurse=False))}
    if unknown := sorted(slices.keys() - tensors):
        raise PlanError(f"slices {unknown} of a {type(module).__name__}: only parameters and buffers can be sliced")
    return slices


def _is_sharded(place: SliceRule, model_rules: ModelRules, axis: Axis) -> bool:
    """Whether the units are sharded, and not replicated."""
    return all(model_rules.is_sharded(unit, axis.size) for unit in place.units)


def _slice(place: SliceRule, model_rules: ModelRules, tp: int) -> Placement:
    """The placement of a tensor that each rank reads a slice of."""
    sizes = ((name, model_rules.fields().evaluate(model_rules.family.units[name].size)) for name in place.units)
    return shard_dim(place.dim, [model_rules.unit(name, tp, size=size) for name, size in sizes], tp)


def _input_slice(rule: SliceRule, model_rules: ModelRules, axis: Axis) -> InputSlice:
    """Choose the function that slices an argument for this rank."""
    if rule.size is None:
        return partial(slice_matrices, rule.dim, model_rules.units(rule.unit, axis.size, dim=rule.dim + 1), axis.rank)
    size = model_rules.fields().evaluate(rule.size)
    features = model_rules.units(rule.unit, axis.size, size=size)
    if rule.items:
        return partial(slice_items, rule.items, rule.dim, features, axis)
    return partial(slice_features, rule.dim, features, axis)


def slice_matrices(dim: int, units: Placement, rank: int, value: object) -> object:
    """Slice an argument with one matrix for each unit to the local matrices.

    Args:
        dim: the dim that counts examples and units, or units alone.
        units: the placement of the units, along ``dim + 1``.
        rank: this rank.
        value: the argument; returned as it is if it is not a tensor, does not have matrices after ``dim``, or has one
            for all units.
    """
    if not isinstance(value, Tensor) or value.dim() < dim + 3 or value.shape[dim] == 1:
        return value
    return take_shard(value.unflatten(dim, (-1, units.size)), units, rank).flatten(dim, dim + 1)


def slice_items(items: tuple[int, ...], dim: int, features: Placement, axis: Axis, value: object) -> object:
    """Slice some of a list of states to the local features, unless an earlier module or pass already has."""
    if not isinstance(value, list | tuple):
        return value
    local = features.local_size(axis.rank)
    full = {place: value[place] for place in items if value[place].shape[dim] != local}
    # copies: a view would keep the full states alive
    sliced = {place: _local_features(dim, features, axis, one).clone() for place, one in full.items()}
    return [sliced.get(place, one) for place, one in enumerate(value)]


def slice_features(dim: int, features: Placement, axis: Axis, value: object) -> object:
    """Slice a tensor to the local features; its gradient is all-reduced. Other values are returned as they are."""
    return _local_features(dim, features, axis, value) if isinstance(value, Tensor) else value


def _local_features(dim: int, features: Placement, axis: Axis, value: Tensor) -> Tensor:
    return local_slice(copy_to_tp(value, group=axis), features, axis.rank, "an argument", dim=dim)
