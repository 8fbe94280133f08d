"""What modules have to be told that work on a rank's part: how many heads they have left, which inputs are theirs.

Owns the way from a family's module rules to the modules. All that rules say is worked out before anything is changed.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardconv.convert.heads import (
    FullWidth,
    FunctionalAttention,
    GatheredOutput,
    LocalNames,
    SlicedOutput,
    SlicedTensors,
    mixing_heads,
    part_of,
    with_values,
)
from shardconv.convert.modules import (
    CopiedInput,
    Gathering,
    ParallelExperts,
    SharedOutput,
    SummedOutput,
    Unfused,
    mixed,
)
from shardconv.convert.norms import NormsOfHeads
from shardconv.convert.products import multiplying
from shardconv.convert.substitution import OwnForward
from shardconv.convert.whole import RankConfig
from shardconv.distributed import Axis, copy_to_tp
from shardconv.errors import PlanError
from shardconv.layers.sharding import ParallelModule, take_shard
from shardconv.plan.module_override import InputRule, ModuleRule
from shardconv.plan.placement import Placement, cut
from shardconv.plan.scope import Scope


class Told(NamedTuple):
    """All that one module is told.

    Attributes:
        module: the module.
        attributes: name to value, of those that it has when its layers are converted.
        fields: fields of its config to their values.
        at_most: name of an attribute to a layer and to the attribute that divides its rows: it is no more than that.
        cuts: name of an argument to what makes of it the rank's.
        kinds: what it becomes besides, one after the other, and what that has to know.
        gathers: what the names of parameters match that it reads of other modules.
    """

    module: nn.Module
    attributes: dict[str, int]
    fields: dict[str, int]
    at_most: dict[str, tuple[str, ...]]
    cuts: dict[str, Callable[[Any], Any]]
    kinds: list[tuple[type[ParallelModule], dict[str, Any]]]
    gathers: list[re.Pattern[str]]


def told_of(model: nn.Module, scope: Scope, axis: Axis) -> Iterator[Told]:
    """What the modules of a model are told by the rules of a scope.

    Raises:
        PlanError: if a rule of a user's matches no module, or says what none of its modules has.
    """
    rules = list(scope.modules())
    named = list(model.named_modules())
    for regex, rule in rules:
        if rule.by_user:
            _check_meets(rule, [module for name, module in named if regex.fullmatch(name)])
            _check_gathers(rule, scope, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    for name, module in named:
        if found := [rule for regex, rule in rules if regex.fullmatch(name)]:
            yield _told(module, ModuleRule.joined(found), scope.at_stage(name), axis)


def _check_meets(rule: ModuleRule, modules: list[nn.Module]) -> None:
    where = f"{rule.origin}: modules {rule.pattern!r}"
    if not modules:
        raise PlanError(f"{where} match no module of the model: correct or remove it")
    names = [*rule.attributes, *rule.at_most, *rule.slices, *filter(None, [rule.norms and "norms", rule.unfused])]
    names += [*rule.unsharded, *rule.products]
    for name in names:
        if not (hasattr(ParallelExperts, name) or any(_has(module, name) for module in modules)):
            raise PlanError(f"{where}: a {type(modules[0]).__name__} has no {name!r}: correct or remove it")
    for name in rule.inputs:
        if not any(name in inspect.signature(module.forward).parameters for module in modules):
            raise PlanError(f"{where}: a {type(modules[0]).__name__} takes no {name!r}: correct or remove it")


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute, or with ``config.`` before its name its config."""
    *path, last = name.split(".", 1)
    return hasattr(getattr(module, path[0], None), last) if path else hasattr(module, last)


def _check_gathers(rule: ModuleRule, scope: Scope, names: list[str]) -> None:
    for pattern in rule.gathers:
        regex = re.compile(scope.regex(pattern))
        if not any(regex.fullmatch(name) for name in names):
            raise PlanError(f"{rule.origin}: modules {rule.pattern!r}: gathers {pattern!r}, which is no parameter")


def _told(module: nn.Module, rule: ModuleRule, scope: Scope, axis: Axis) -> Told:
    has_fields = any(name.startswith("config.") for name in rule.attributes)
    needed = {"config"} if has_fields else set()
    at_most = {name: tuple(limit) for name, limit in rule.at_most.items() if hasattr(module, name)}
    needed.update(*at_most.values())
    if missing := sorted(name for name in needed if not hasattr(module, name)):
        raise PlanError(f"a {type(module).__name__} is to be told something by {missing}, which it has not")
    outputs = _outputs(module)
    values = {name: scope.on_rank(expression, axis.size, **outputs) for name, expression in rule.attributes.items()}
    return Told(
        module,
        {name: value for name, value in values.items() if not name.startswith("config.")},
        {name.removeprefix("config."): value for name, value in values.items() if name.startswith("config.")},
        at_most,
        {name: _input_cut(one, scope, axis) for name, one in rule.inputs.items() if _is_sharded(one, scope, axis)},
        list(_kinds(module, rule, scope, axis)),
        [re.compile(scope.regex(pattern)) for pattern in rule.gathers],
    )


def _outputs(module: nn.Module) -> dict[str, int]:
    """How many features the linear layers of a module give, of all ranks."""
    return {name: one.out_features for name, one in module.named_children() if isinstance(one, nn.Linear)}


def _kinds(
    module: nn.Module, rule: ModuleRule, scope: Scope, axis: Axis
) -> Iterator[tuple[type[ParallelModule], dict[str, Any]]]:
    yield from _kinds_of_heads(module, rule, scope, axis)
    if rule.norms and hasattr(module, "norms"):
        yield NormsOfHeads, {"heads": scope.units(rule.norms, axis.size)}
    if rule.unfused and hasattr(module, rule.unfused):
        yield Unfused, {}
    if rule.shared_output is not None:
        weight = getattr(module, "weight", None)
        rows = {"rows": weight.shape[0]} if isinstance(weight, Tensor) else {}
        yield SharedOutput, {"num_shared": scope.on_rank(rule.shared_output, axis.size, **rows)}
    if rule.gathered_output:
        yield GatheredOutput, {}
    if rule.copied_input:
        yield CopiedInput, {}
    if rule.summed_output:
        yield SummedOutput, {"styles": getattr(module, "styles", {})}


def _kinds_of_heads(
    module: nn.Module, rule: ModuleRule, scope: Scope, axis: Axis
) -> Iterator[tuple[type[ParallelModule], dict[str, Any]]]:
    """Those of modules whose code, tensors or output are of all heads."""
    if rule.locals:
        with_values(type(module).forward, tuple(rule.locals))  # refuse before anything is changed
        yield (
            LocalNames,
            {"local_values": {name: scope.on_rank(value, axis.size) for name, value in rule.locals.items()}},
        )
    if rule.unsharded:
        places = {name: scope.units(one.unit, axis.size, dim=one.dim) for name, one in rule.unsharded.items()}
        full = {name: getattr(module, name) for name in rule.attributes if hasattr(module, name)}
        yield mixing_heads(tuple(places)), {"unsharded": places, "full_attributes": full}
    if rule.products:
        plain: Any = type(module)
        yield multiplying(plain, tuple(rule.products.items())), {}
    if rule.full_width is not None:
        yield FullWidth, {"full_width": scope.fields(**_outputs(module)).evaluate(rule.full_width)}
    if rule.functional:
        yield FunctionalAttention, {"heads": scope.units(rule.functional, axis.size)}
    if rule.output is not None and _is_sharded(rule.output, scope, axis):
        size = scope.fields().evaluate(1 if rule.output.size is None else rule.output.size)
        units = scope.units(rule.output.unit, axis.size, size=size)
        yield SlicedOutput, {"item": rule.output.item, "output_dim": rule.output.dim, "output_units": units}
    slices = {
        name: _slice(one, scope, axis.size)
        for name, one in rule.slices.items()
        if hasattr(module, name) and _is_sharded(one, scope, axis)
    }
    if slices:
        if unknown := sorted(slices.keys() - module._parameters.keys() - module._buffers.keys()):  # noqa: SLF001
            raise PlanError(f"slices {unknown} of a {type(module).__name__}: only parameters and buffers can be sliced")
        yield SlicedTensors, {"slices": slices}


def _is_sharded(place: InputRule, scope: Scope, axis: Axis) -> bool:
    """Whether a rank has a part of the units only."""
    return all(scope.is_sharded(unit, axis.size) for unit in place.units())


def _slice(place: InputRule, scope: Scope, tp: int) -> Placement:
    """What of a tensor is each rank's."""
    sizes = ((name, scope.fields().evaluate((scope.family.units or {})[name].size)) for name in place.units())
    return cut(place.dim, [scope.unit(name, tp, size=size) for name, size in sizes], tp)


def tell(told: Told, axis: Axis) -> None:
    """Change a module of a model, whose layers are converted, so that it knows what it was told."""
    module = told.module
    if told.fields:
        module.__dict__["config"] = RankConfig(module.config, told.fields)
    for name, value in told.attributes.items():
        if hasattr(module, name):  # now: some have it only since they are converted
            setattr(module, name, value)
    for name, (layer, size) in told.at_most.items():
        rows = getattr(module, layer).weight.shape[0]
        setattr(module, name, min(getattr(module, name), rows // getattr(module, size)))
    if told.cuts:
        names = list(inspect.signature(module.forward).parameters)
        module.register_forward_pre_hook(partial(_cut_inputs, told.cuts, names), with_kwargs=True)
    for kind, attributes in told.kinds:
        _become(module, kind, axis, **attributes)


def let_read(told: Told, model: nn.Module, axis: Axis) -> None:
    """Let a module read full parameters of others, when all modules are what they become."""
    if told.gathers:
        _gather(told.module, _read(model, told), axis)


def _gather(module: nn.Module, read: tuple[tuple[ParallelModule, str], ...], axis: Axis) -> None:
    for owner, _ in read:
        owner.__class__ = mixed(OwnForward, type(owner))
    _become(module, Gathering, axis, read=read)


def _read(model: nn.Module, told: Told) -> tuple[tuple[ParallelModule, str], ...]:
    """The shards that a module reads of others: of those in it, if patterns name any of them."""
    found = [
        (module, own)
        for name, module in model.named_modules()
        if isinstance(module, ParallelModule)
        for own in module.placements
        if any(regex.fullmatch(f"{name}.{own}") for regex in told.gathers)
    ]
    inside = set(told.module.modules())
    return tuple(one for one in found if one[0] in inside) or tuple(found)


def _become(module: Any, kind: type[ParallelModule], axis: Axis, **attributes: Any) -> None:
    if kind is LocalNames:
        attributes["local_forward"] = with_values(type(module).forward, tuple(attributes["local_values"]))
    module.__class__ = mixed(kind, type(module))
    dim, placements = getattr(module, "dim", None), getattr(module, "placements", {})  # if it was one already
    module.__dict__.update(axis=axis, dim=dim, placements=placements, **attributes)


def _cut_inputs(
    cuts: Mapping[str, Callable[[Any], Any]],
    names: list[str],
    module: nn.Module,  # noqa: ARG001 - as hooks are called
    inputs: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of arguments that hold something for each unit, keep the rank's."""

    def keep(name: str, value: Any) -> Any:
        return cuts[name](value) if name in cuts else value

    kept = tuple(keep(name, value) for name, value in zip(names, inputs, strict=False))
    return (*kept, *inputs[len(kept) :]), {name: keep(name, value) for name, value in options.items()}


def _input_cut(rule: InputRule, scope: Scope, axis: Axis) -> Callable[[Any], Any]:
    """What makes of an argument the rank's."""
    if rule.size is None:
        return partial(_cut_matrices, rule.dim, scope.units(rule.unit, axis.size, dim=rule.dim + 1), axis.rank)
    size = scope.fields().evaluate(rule.size)
    features = scope.units(rule.unit, axis.size, size=size)
    if rule.items:
        return partial(_cut_items, rule.items, replace(features, dim=rule.dim), axis)
    return partial(_cut_features, rule.dim, features, axis)


def _cut_matrices(dim: int, units: Placement, rank: int, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() < dim + 3 or value.shape[dim] == 1:
        return value  # not given, of tokens only, or the same for all units
    return take_shard(value.unflatten(dim, (-1, units.size)), units, rank).flatten(dim, dim + 1)


def _cut_items(items: tuple[int, ...], features: Placement, axis: Axis, value: Any) -> Any:
    """A list of states with the rank's features in some of them, unless an earlier module or pass left only these."""
    if not isinstance(value, list | tuple):
        return value
    assert features.dim is not None
    dim, local = features.dim, features.local_size(axis.rank)
    cut_ones = {place: value[place] for place in items if value[place].shape[dim] != local}
    # copies: a view would keep the full states alive
    taken = {place: _cut_features(dim, features, axis, one).clone() for place, one in cut_ones.items()}
    return [taken.get(place, one) for place, one in enumerate(value)]


def _cut_features(dim: int, features: Placement, axis: Axis, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return part_of(copy_to_tp(value, group=axis), replace(features, dim=dim), axis.rank, "an argument")
