"""Module overrides: per-rank head counts, sliced inputs and other changes of modules beside their parameters.

Owns the one function that makes these changes, for families and policies alike, and the classes that extend a module's
own class by collectives and slices around its forward. Each computes the result of the unsharded module with
the module's own code.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardconv.convert.modules import ForwardWithShards, Substitutable, Substituted, Substitution, is_floating_point
from shardconv.distributed import Axis, copy_to_tp, gather_from_tp
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.runtime_classes import converted_class
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Placement
from shardconv.support.errors import PlanError


class RankConfig:
    """Local values of some fields of a config, in front of the model's config.

    Args:
        shared: the model's config.
        fields: the local values.
    """

    def __init__(self, shared: object, fields: Mapping[str, object]) -> None:
        self.__dict__.update(fields, _shared=shared)

    def __getattr__(self, name: str) -> Any:  # a field of any type
        """Read a field without a local value from the model's config."""
        if name.startswith("__") or "_shared" not in self.__dict__:  # a copy is empty at first
            raise AttributeError(name)
        return getattr(self._shared, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field of the model's config; a local value of it stays."""
        setattr(self._shared, name, value)


#: A class that extends a module's own class, and the attributes that it needs.
Extension = tuple[type[ParallelModule], Mapping[str, object]]

#: A function that slices an argument of a forward for this rank; values of other types are returned as they are.
InputSlice = Callable[[object], object]


@dataclass(frozen=True, slots=True)
class Overrides:
    """The changes to one module on this rank, in the order in which they are made.

    Attributes:
        module: the module.
        new_class: the class that replaces its own; None to keep its own.
        config_fields: fields of its config, with their values on this rank.
        attributes: attributes, with their values on this rank.
        limits: attributes, each with a layer and another attribute: the value is at most the local rows of the layer's
            weight over the other attribute.
        inputs: arguments of its forward, each with the function that slices it for this rank.
        extensions: the classes that extend its own, each on top of the previous ones.
        gathers: patterns of the parameters, of any module, that are gathered on use.
        is_checked: whether the rules state that the code of the module is correct on each rank.
    """

    module: nn.Module
    new_class: type[nn.Module] | None = None
    config_fields: Mapping[str, object] = field(default_factory=dict)
    attributes: Mapping[str, object] = field(default_factory=dict)
    limits: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    inputs: Mapping[str, InputSlice] = field(default_factory=dict)
    extensions: Sequence[Extension] = ()
    gathers: Sequence[re.Pattern[str]] = ()
    is_checked: bool = False

    def __post_init__(self) -> None:
        """Check that the attributes can be set.

        Raises:
            PlanError: if one is a property without a setter.
        """
        kind = self.new_class or type(self.module)
        if fixed := [name for name in (*self.attributes, *self.limits) if is_read_only(kind, name)]:
            raise PlanError(
                f"{kind.__name__}: {fixed[0]!r} is a property without a setter (expected an attribute that can be "
                f"set): override the attributes that it reads"
            )

    def changes_counts(self) -> bool:
        """Whether a number of the module is divided, or its inputs are sliced."""
        owned = ((self.module, self.attributes), (getattr(self.module, "config", None), self.config_fields))
        pairs = ((getattr(owner, name, None), value) for owner, own in owned for name, value in own.items())
        return bool(self.limits or self.inputs) or any(_is_part(value, full) for full, value in pairs)

    def changes_code(self) -> bool:
        """Whether the module computes by other code than its class."""
        return any((self.new_class is not None, self.extensions, self.gathers))


def is_read_only(kind: type, name: str) -> bool:
    """Whether an attribute of the objects of a class is a property without a setter."""
    found = inspect.getattr_static(kind, name, None)
    return isinstance(found, property) and found.fset is None


def _is_part(value: object, full: object) -> bool:
    return isinstance(value, int) and isinstance(full, int) and 0 < value < full and full % value == 0


def split_config_fields(values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Split values by name into config fields, whose names start with ``config.``, and attributes of the module."""
    fields = {name.removeprefix("config."): value for name, value in values.items() if name.startswith("config.")}
    return fields, {name: value for name, value in values.items() if not name.startswith("config.")}


def apply_overrides(model: nn.Module, overrides: Sequence[Overrides], axis: Axis) -> None:
    """Apply overrides to modules of a model whose layers are converted."""
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
        module.__dict__["config"] = RankConfig(module.config, overrides.config_fields)
    for name, value in overrides.attributes.items():
        setattr(module, name, value)
    for name, (layer, size) in overrides.limits.items():
        rows = module.get_parameter(f"{layer}.weight").shape[0]
        setattr(module, name, min(getattr(module, name), rows // getattr(module, size)))
    if overrides.inputs:
        names = list(inspect.signature(module.forward).parameters)
        module.register_forward_pre_hook(partial(_slice_inputs, overrides.inputs, names), with_kwargs=True)
    for kind, attributes in overrides.extensions:
        extend_class(module, kind, axis, **attributes)


def extend_class(module: nn.Module, kind: type[ParallelModule], axis: Axis, **attributes: object) -> None:
    """Set the class of a module to one derived from its own and from ``kind``; set the attributes of ``kind``."""
    module.__class__ = converted_class(kind, type(module))
    dim, placements = getattr(module, "dim", None), getattr(module, "placements", {})  # if it is parallel already
    module.__dict__.update(axis=axis, dim=dim, placements=placements, **attributes)


def gather_on_use(module: nn.Module, parameters: Sequence[tuple[ParallelModule, str]], axis: Axis) -> None:
    """Make a module gather parameters before its forward runs, which reads the full tensors.

    Args:
        module: the module.
        parameters: each shard, as the module that holds it and its name there.
        axis: the ranks.
    """
    for owner, _ in parameters:
        owner.__class__ = converted_class(ForwardWithShards, type(owner))
    extend_class(module, GatherOnUse, axis, read=tuple(parameters))


def _gathered_parameters(model: nn.Module, overrides: Overrides) -> list[tuple[ParallelModule, str]]:
    """Find the shards that match the patterns: in the module itself if it has any, else in all modules."""
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
    slices: Mapping[str, InputSlice],
    names: list[str],
    _: nn.Module,
    inputs: tuple[object, ...],
    options: dict[str, object],
) -> tuple[tuple[object, ...], dict[str, object]]:
    """A forward pre-hook that slices arguments with elements for each unit."""

    def local(name: str, value: object) -> object:
        return slices[name](value) if name in slices else value

    sliced = tuple(local(name, value) for name, value in zip(names, inputs, strict=False))
    return (*sliced, *inputs[len(sliced) :]), {name: local(name, value) for name, value in options.items()}


def local_slice(value: Tensor, placement: Placement, rank: int, name: str, *, dim: int | None = None) -> Tensor:
    """Take a rank's shard of a tensor along a dim that may be counted from the end; see :func:`take_shard`.

    Raises:
        PlanError: if the dim does not have the elements of the placement.
    """
    dim = placement.dim if dim is None else dim
    assert dim is not None
    if not -value.dim() <= dim < value.dim() or value.shape[dim] != placement.size:
        raise PlanError(
            f"{name} of shape {list(value.shape)} does not have {placement.size} elements along dim {dim}: correct the "
            f"dim or the unit of its module override"
        )
    return take_shard(value, placement, rank, dim=dim)


class SlicedOutput(ParallelModule):
    """A replicated module with an output for each unit, which is sliced to the local units.

    Attributes:
        item: the index of this output among several; None if there is one.
        output_dim: the dim that counts units.
        output_units: the placement of the units.
    """

    item: int | None
    output_dim: int
    output_units: Placement

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward, and slice its output."""
        outputs = super().forward(*inputs, **options)
        if self.item is None:
            return self._sliced(outputs)
        return (*outputs[: self.item], self._sliced(outputs[self.item]), *outputs[self.item + 1 :])

    def _sliced(self, value: Tensor) -> Tensor:
        full = copy_to_tp(value, group=self.axis)
        return local_slice(full, self.output_units, self.axis.rank, "an output", dim=self.output_dim)


class SlicedTensors(Substitutable, ParallelModule):
    """A module that computes with local slices of replicated tensors, which have elements for each unit."""

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward, with local slices of its tensors."""
        full = {name: copy_to_tp(self.own_tensor(name), group=self.axis) for name in self.slices}
        rank = self.axis.rank
        with Substituted({(self, name): local_slice(full[name], self.slices[name], rank, name) for name in full}):
            return super().forward(*inputs, **options)


class GatheredOutput(ParallelModule):
    """A module over local features whose output is all-gathered along the last dim; of several outputs, each one."""

    def forward(self, *inputs: object, **options: object) -> Tensor | tuple[Tensor, ...]:
        """Run the module's own forward, and all-gather its output."""
        output: Tensor | tuple[Tensor, ...] = super().forward(*inputs, **options)
        if isinstance(output, tuple):
            return tuple(gather_from_tp(one, group=self.axis) for one in output)
        return gather_from_tp(output, group=self.axis)


class Unfused(ParallelModule):
    """A module that always uses its code for eval mode, because its code for training reads weights of its layers."""

    @property
    def training(self) -> bool:
        """Always False; the modules in it have modes of their own."""
        return False

    @training.setter
    def training(self, mode: bool) -> None:
        pass


class SharedOutput(ParallelModule):
    """A replicated module; a computation over local heads reads the last elements of its output.

    The gradient of these elements is all-reduced.

    Attributes:
        num_shared: the number of these elements.
    """

    num_shared: int

    def forward(self, *inputs: object, **options: object) -> Tensor:
        """Run the module's own forward."""
        output: Tensor = super().forward(*inputs, **options)
        if not torch.is_grad_enabled():
            return output
        rest, shared = output.split([output.shape[-1] - self.num_shared, self.num_shared], -1)
        return torch.cat([rest, copy_to_tp(shared, group=self.axis)], -1)


class InputGradientAllReduce(ParallelModule):
    """A module with replicated inputs and a local output; the gradients of its inputs are all-reduced."""

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward; backward all-reduces the gradients of its inputs."""
        copied = [self._copied(value) for value in inputs]
        return super().forward(*copied, **{name: self._copied(value) for name, value in options.items()})

    def _copied(self, value: object) -> object:
        return copy_to_tp(value, group=self.axis) if is_floating_point(value) else value


class GatherOnUse(ParallelModule):
    """A module that gathers parameters on use, such as a language model head that reads the embedding table.

    Attributes:
        read: each parameter, as the module that holds it and its name there.
    """

    read: tuple[tuple[ParallelModule, str], ...]

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward, with gathered parameters."""
        gathered: Substitution = {(owner, name): owner.gather_parameter(name) for owner, name in self.read}
        with Substituted(gathered):
            return super().forward(*inputs, **options)
