"""What modules have to be told that work on a rank's part: how many heads they have left, which inputs are theirs.

Owns the way from a family's module rules to the modules. All of it is worked out before anything is changed.
"""

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardconv.convert.modules import NormsOfHeads, SharedOutput, Unfused, mixed
from shardconv.convert.whole import RankConfig
from shardconv.distributed import Axis
from shardconv.errors import PlanError
from shardconv.layers.sharding import ParallelModule
from shardconv.plan.family import ModuleRule
from shardconv.plan.scope import Scope


class Told(NamedTuple):
    """All that one module is told.

    Attributes:
        module: the module.
        attributes: name to value.
        fields: fields of its config to their values.
        at_most: name of an attribute to a layer and to the attribute that divides its rows: it is no more than that.
        cuts: name of an argument to the dim of it that is cut, and to the rank's first unit, how many it has, and how
            many there are.
        first_norm: the first of its ``norms`` that is the rank's; None if it has none.
        num_shared: see :class:`~shardconv.convert.modules.SharedOutput`; None if it is not told.
        is_unfused: see :class:`~shardconv.convert.modules.Unfused`.
    """

    module: nn.Module
    attributes: dict[str, int]
    fields: dict[str, int]
    at_most: dict[str, tuple[str, ...]]
    cuts: dict[str, tuple[int, tuple[int, int, int]]]
    first_norm: int | None
    num_shared: int | None
    is_unfused: bool


def told_of(model: nn.Module, scope: Scope, axis: Axis) -> Iterator[Told]:
    """What the modules of a model are told by the rules of a scope.

    Raises:
        PlanError: if a rule of a user's matches no module, or says what none of its modules has.
    """
    rules = list(scope.modules())
    named = list(model.named_modules())
    for regex, rule in rules:
        if rule.is_required:
            _check_meets(rule, [module for name, module in named if regex.fullmatch(name)])
    for name, module in named:
        if found := [rule for regex, rule in rules if regex.fullmatch(name)]:
            yield _told(module, ModuleRule.joined(found), scope, axis)


def _check_meets(rule: ModuleRule, modules: list[nn.Module]) -> None:
    where = f"{rule.origin}: modules {rule.pattern!r}"
    if not modules:
        raise PlanError(f"{where} match no module of the model: correct or remove it")
    names = [name for name in rule.attributes if not name.startswith("config.")] + ["norms"] * bool(rule.norms)
    for name in names:
        if not any(hasattr(module, name) for module in modules):
            raise PlanError(f"{where}: a {type(modules[0]).__name__} has no {name!r}: correct or remove it")


def _told(module: nn.Module, rule: ModuleRule, scope: Scope, axis: Axis) -> Told:
    values = {name: scope.on_rank(expression, axis.size) for name, expression in rule.attributes.items()}
    units = partial(scope.local_units, tp=axis.size, rank=axis.rank)
    return Told(
        module,
        {name: value for name, value in values.items() if hasattr(module, name)},
        {name.removeprefix("config."): value for name, value in values.items() if name.startswith("config.")},
        {name: tuple(limit) for name, limit in rule.at_most.items()},
        {name: (dim, units(unit)) for name, (dim, unit) in rule.inputs.items()},
        units(rule.norms)[0] if rule.norms and hasattr(module, "norms") else None,
        None if rule.shared_output is None else scope.on_rank(rule.shared_output, axis.size),
        rule.unfused,
    )


def tell(told: Told, axis: Axis) -> None:
    """Change a module so that it knows what it was told."""
    module = told.module
    if told.fields:
        module.__dict__["config"] = RankConfig(module.config, told.fields)
    for name, value in told.attributes.items():
        setattr(module, name, value)
    for name, (layer, size) in told.at_most.items():
        rows = getattr(module, layer).weight.shape[0]
        setattr(module, name, min(getattr(module, name), rows // getattr(module, size)))
    if told.cuts:
        names = list(inspect.signature(module.forward).parameters)
        module.register_forward_pre_hook(partial(_cut_inputs, told.cuts, names), with_kwargs=True)
    if told.first_norm is not None:
        _become(module, NormsOfHeads, axis, first=told.first_norm)
    if told.is_unfused:
        _become(module, Unfused, axis)
    if told.num_shared is not None:
        _become(module, SharedOutput, axis, num_shared=told.num_shared)


def _become(module: Any, kind: type[ParallelModule], axis: Axis, **attributes: int) -> None:
    module.__class__ = mixed(kind, type(module))
    dim, placements = getattr(module, "dim", None), getattr(module, "placements", {})  # if it was one already
    module.__dict__.update(axis=axis, dim=dim, placements=placements, **attributes)


def _cut_inputs(
    cuts: Mapping[str, tuple[int, tuple[int, int, int]]],
    names: list[str],
    module: nn.Module,  # noqa: ARG001 - as hooks are called
    inputs: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of arguments that hold something for each unit, keep the rank's."""

    def keep(name: str, value: Any) -> Any:
        return _cut_input(value, *cuts[name]) if name in cuts else value

    kept = tuple(keep(name, value) for name, value in zip(names, inputs, strict=False))
    return (*kept, *inputs[len(kept) :]), {name: keep(name, value) for name, value in options.items()}


def _cut_input(value: Any, dim: int, units: tuple[int, int, int]) -> Any:
    first, size, count = units
    if not isinstance(value, Tensor) or value.dim() < dim + 3 or value.shape[dim] == 1:
        return value  # not given, of tokens only, or the same for all units
    return value.unflatten(dim, (-1, count)).narrow(dim + 1, first, size).flatten(dim, dim + 1)
