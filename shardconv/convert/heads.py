"""Attention modules over local heads, where it is not enough to set the number of heads of the module.

Owns the classes behind the module overrides ``full_width``, ``locals``, ``unsharded``, ``slices``, ``output`` and
``gathered_output``. Each computes what the unsharded module computes, with the module's own code.
"""

import ast
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardconv.convert.classes import Recompiled, class_factory, new_class
from shardconv.convert.recompile import recompiled
from shardconv.convert.substitution import Substitutable, Substituted, substitutable_attribute
from shardconv.distributed import copy_to_tp, gather_from_tp
from shardconv.layers import ColumnParallelLinear, ParallelLinear
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.sharding import gather_shards, take_shard
from shardconv.plan.placement import Placement
from shardconv.support.errors import PlanError

_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape)


class FullWidth(ParallelModule):
    """Attention whose code assumes the width of all heads when it reshapes local ones.

    Attributes:
        full_width: the features of all heads.
    """

    full_width: int

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward."""
        with _LocalWidth(self.full_width, self._local_width()):
            return super().forward(*inputs, **options)

    def _local_width(self) -> int:
        """Count the features of the local heads, with the padding of the projections."""
        layers = (one for one in self.children() if isinstance(one, ParallelLinear))
        found = (one.placements["weight"] for one in layers if "weight" in one.placements)
        widths = (one.local_size(self.axis.rank) for one in found if one.size == self.full_width and one.is_padded)
        return next(widths, self.full_width // self.axis.size)


class _LocalWidth(TorchFunctionMode):
    """Replace the last dim of a reshape by its local size, if the tensor has elements for local heads only.

    Only last dims that divide the full width are replaced.
    """

    def __init__(self, full: int, local: int) -> None:
        super().__init__()
        self.full, self.local = full, local

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),  # those of any function
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _RESHAPES and len(args) > 1:
            shape = tuple(args[1]) if isinstance(args[1], tuple | list) else args[1:]
            is_width = len(shape) > 1 and shape[-1] > 0 and self.full % shape[-1] == 0
            if is_width and math.prod(shape) * self.local == args[0].numel() * self.full:
                width, rest = divmod(shape[-1] * self.local, self.full)
                args = args if rest else (args[0], (*shape[:-1], width))
        return func(*args, **(kwargs or {}))


class LocalValues(Recompiled, ParallelModule):
    """A module whose code assigns numbers to local variables that differ per rank: see :func:`with_local_values`.

    Attributes:
        local_values: the value of each variable on this rank.
    """

    local_values: Mapping[str, int]


class _LocalValueRewriter(ast.NodeTransformer):
    """Replace the values that are assigned to local variables by those of ``local_values``."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.found = names, set[str]()

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in self.names:
            node.value = ast.parse(f"self.local_values[{target.id!r}]", mode="eval").body
            self.found.add(target.id)
        return node


@class_factory
def with_local_values(original: type[nn.Module], names: tuple[str, ...]) -> type[LocalValues]:
    """Derive a class from a module's: its forward, recompiled, reads local variables from ``local_values``.

    Args:
        original: the class of the module.
        names: the variables.

    Raises:
        PlanError: if its forward does not assign each of them.
    """
    values = _LocalValueRewriter(names)
    forward = recompiled(original.forward, values)
    if missing := sorted(set(names) - values.found):
        raise PlanError(
            f"{original.forward.__qualname__} assigns no {', '.join(missing)}: its rules are for other code"
        )
    made: type[LocalValues] = new_class(original, (LocalValues, original), {"forward": forward})
    return made


def local_slice(value: Tensor, placement: Placement, rank: int, name: str) -> Tensor:
    """Take a rank's shard of a tensor along a dim that may be counted from the end.

    Raises:
        PlanError: if the dim does not have the elements of the placement.
    """
    assert placement.dim is not None
    if not -value.dim() <= placement.dim < value.dim() or value.shape[placement.dim] != placement.size:
        raise PlanError(
            f"{name} of shape {list(value.shape)} does not have {placement.size} elements along dim {placement.dim}: "
            f"correct the dim or the unit of its module override"
        )
    return take_shard(value, replace(placement, dim=placement.dim % value.dim()), rank)


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
        placement = replace(self.output_units, dim=self.output_dim)
        return local_slice(copy_to_tp(value, group=self.axis), placement, self.axis.rank, "an output")


class UnshardedMethods(Substitutable, ParallelModule):
    """A module with methods that mix heads: they compute over all heads, and their output is sliced to local heads.

    Attributes:
        unsharded: the placement of the heads in the output of each of these methods.
        full_attributes: the values of overridden attributes in the unsharded module.
    """

    unsharded: Mapping[str, Placement]
    full_attributes: Mapping[str, object]

    def run_unsharded(self, name: str, method: Callable[[], Tensor]) -> Tensor:
        """Run a method with full attributes and gathered outputs of layers, and slice its output to local heads."""
        substitution: dict[tuple[nn.Module, str], object] = {}
        substitution.update(((self, attribute), value) for attribute, value in self.full_attributes.items())
        for child, layer in self.named_children():
            if isinstance(layer, ColumnParallelLinear) and not layer.gather_output:
                substitution[self, child] = partial(_gathered_output, layer)
        with Substituted(substitution):
            full = copy_to_tp(method(), group=self.axis)
        return take_shard(full, self.unsharded[name], self.axis.rank)


def _gathered_output(layer: ParallelLinear, input: Tensor) -> Tensor:
    return gather_shards(layer(input), layer.placements["weight"], layer.axis, dim=-1)


@class_factory
def with_unsharded_methods(methods: tuple[str, ...], attributes: tuple[str, ...]) -> type[UnshardedMethods]:
    """Make a class of modules in which some methods compute over all heads.

    Args:
        methods: the names of the methods.
        attributes: the names of the attributes that have other values in these methods.
    """

    def unsharded(name: str) -> Callable[..., Tensor]:
        def method(self: UnshardedMethods, *inputs: object, **options: object) -> Tensor:
            return self.run_unsharded(name, partial(getattr(super(kind, self), name), *inputs, **options))

        return method

    members = {name: unsharded(name) for name in methods}
    properties = {name: substitutable_attribute(name) for name in attributes}
    kind: type[UnshardedMethods] = new_class(UnshardedMethods, (UnshardedMethods,), {**members, **properties})
    return kind


class SlicedTensors(Substitutable, ParallelModule):
    """A module that computes with local slices of replicated tensors, which have elements for each unit."""

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward, with local slices of its tensors."""
        full = {name: copy_to_tp(self.own_tensor(name), group=self.axis) for name in self.slices}
        rank = self.axis.rank
        with Substituted({(self, name): local_slice(full[name], self.slices[name], rank, name) for name in full}):
            return super().forward(*inputs, **options)


class GatheredOutput(ParallelModule):
    """A module over local features whose output is all-gathered along the last dim."""

    def forward(self, *inputs: object, **options: object) -> Tensor:
        """Run the module's own forward, and all-gather its output."""
        return gather_from_tp(super().forward(*inputs, **options), group=self.axis)
