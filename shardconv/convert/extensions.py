"""Classes that extend a module's own class by a module override: collectives and slices around its own forward.

Owns the classes behind the overrides ``slices``, ``output``, ``gathered_output``, ``gathers``, ``shared_output``,
``unfused`` and ``allreduce_input_grad``. Each computes what the unsharded module computes, with the module's own code.
"""

import torch
from msgspec.structs import replace
from torch import Tensor

from shardconv.convert.modules import Substitutable, Substituted, Substitution, is_floating_point
from shardconv.distributed import copy_to_tp, gather_from_tp
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Placement
from shardconv.support.errors import PlanError


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


class Unfused(ParallelModule):
    """A module that computes in training as in eval mode, as its code for training reads weights of its layers."""

    @property
    def training(self) -> bool:
        """Always False; the modules in it have modes of their own."""
        return False

    @training.setter
    def training(self, mode: bool) -> None:
        pass


class SharedOutput(ParallelModule):
    """A replicated module, the last elements of whose output enter a computation over local heads.

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
