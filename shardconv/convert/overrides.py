"""Module overrides: local head counts, sliced inputs and other changes to modules that compute with a rank's shards.

Owns the one function that changes modules beside their parameters, for families and policies alike.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from shardconv.convert.classes import converted_class
from shardconv.convert.converted_model import RankConfig
from shardconv.convert.modules import GatherOnUse
from shardconv.convert.substitution import ForwardWithShards
from shardconv.distributed import Axis
from shardconv.layers.sharding import ParallelModule

#: A class that a module's own is extended by, and the attributes that the class needs.
Extension = tuple[type[ParallelModule], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Overrides:
    """The changes to one module on this rank, in the order in which they are made.

    Attributes:
        module: the module.
        new_class: the class that takes the place of its own; None to keep that.
        config_fields: fields of its config, with their values on this rank.
        attributes: attributes, with their values on this rank.
        limits: attributes, each with a layer and another attribute: the value is at most the local rows of the layer's
            weight over the other attribute.
        inputs: arguments of its forward, each with the function that slices it for this rank.
        extensions: the classes that extend its own, each on top of those before.
        gathers: patterns of the parameters, of any module, that are gathered on use.
    """

    module: nn.Module
    new_class: type[nn.Module] | None = None
    config_fields: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    inputs: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    extensions: Sequence[Extension] = ()
    gathers: Sequence[re.Pattern[str]] = ()


def apply_overrides(model: nn.Module, overrides: Sequence[Overrides], axis: Axis) -> None:
    """Change modules of a model whose layers are converted."""
    for one in overrides:
        _apply(one, axis)
    for one in overrides:  # when all modules have their final classes
        if one.gathers:
            gather_on_use(one.module, _gathered_parameters(model, one), axis)


def _apply(overrides: Overrides, axis: Axis) -> None:
    module = overrides.module
    if overrides.new_class is not None:
        module.__class__ = overrides.new_class
    if overrides.config_fields:
        module.__dict__["config"] = RankConfig(module.config, dict(overrides.config_fields))
    for name, value in overrides.attributes.items():
        setattr(module, name, value)
    for name, (layer, size) in overrides.limits.items():
        rows = getattr(module, layer).weight.shape[0]
        setattr(module, name, min(getattr(module, name), rows // getattr(module, size)))
    if overrides.inputs:
        names = list(inspect.signature(module.forward).parameters)
        module.register_forward_pre_hook(partial(_slice_inputs, overrides.inputs, names), with_kwargs=True)
    for kind, attributes in overrides.extensions:
        extend_class(module, kind, axis, **attributes)


def extend_class(module: Any, kind: type[ParallelModule], axis: Axis, **attributes: Any) -> None:
    """Give a module a class derived from its own and from ``kind``, and the attributes that ``kind`` needs."""
    module.__class__ = converted_class(kind, type(module))
    dim, placements = getattr(module, "dim", None), getattr(module, "placements", {})  # if it is parallel already
    module.__dict__.update(axis=axis, dim=dim, placements=placements, **attributes)


def gather_on_use(module: nn.Module, parameters: Sequence[tuple[ParallelModule, str]], axis: Axis) -> None:
    """Let a module find full tensors in place of shards while its forward runs.

    Args:
        module: the module.
        parameters: each shard, as the module that holds it and its name there.
        axis: the ranks.
    """
    for owner, _ in parameters:
        owner.__class__ = converted_class(ForwardWithShards, type(owner))
    extend_class(module, GatherOnUse, axis, read=tuple(parameters))


def _gathered_parameters(model: nn.Module, overrides: Overrides) -> list[tuple[ParallelModule, str]]:
    """The shards that match the patterns: those in the module itself, if there are any, else those of all modules."""
    found = [
        (module, own)
        for name, module in model.named_modules()
        if isinstance(module, ParallelModule)
        for own in module.placements
        if any(regex.fullmatch(f"{name}.{own}") for regex in overrides.gathers)
    ]
    inside = set(overrides.module.modules())
    return [one for one in found if one[0] in inside] or found


def _slice_inputs(
    slices: Mapping[str, Callable[[Any], Any]],
    names: list[str],
    module: nn.Module,  # noqa: ARG001 - as hooks are called
    inputs: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook: the local slices of arguments that have elements for each unit."""

    def local(name: str, value: Any) -> Any:
        return slices[name](value) if name in slices else value

    sliced = tuple(local(name, value) for name, value in zip(names, inputs, strict=False))
    return (*sliced, *inputs[len(sliced) :]), {name: local(name, value) for name, value in options.items()}
