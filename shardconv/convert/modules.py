"""Parallel classes for other modules than linear layers and embeddings: convolutions, experts, modules around them.

Each extends the class of the module that is converted, so that the forward stays the model's own.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardconv.convert.classes import Recompiled
from shardconv.convert.substitution import Substitutable, Substituted, Substitution
from shardconv.distributed import Axis, copy_to_tp, reduce_from_tp
from shardconv.layers.row_linear import num_copies
from shardconv.layers.sharding import ParallelModule
from shardconv.plan.placement import Placement, intervals


class Sharded(Substitutable, ParallelModule):
    """A module that computes with shards of its own parameters, or uses replicated ones for its local heads alone.

    Attributes:
        styles: the style in the plan of each of its parameters.
    """

    styles: Mapping[str, str]

    def set_up(
        self,
        axis: Axis,
        *,
        placements: Mapping[str, Placement] | None = None,
        styles: Mapping[str, str] | None = None,
    ) -> None:
        """See :meth:`ParallelModule.set_up`.

        Args:
            axis: the ranks.
            placements: the placement of each parameter that is sharded.
            styles: see the attribute.
        """
        self.axis, self.placements, self.styles = axis, dict(placements or {}), dict(styles or {})

    @property
    def _always_used(self) -> bool:
        """Whether forward needs other tensors than the local ones even without gradients."""
        return "gathered" in self.styles.values()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        if not torch.is_grad_enabled() and not self._always_used:
            return super().forward(*inputs, **options)
        read = [child for child in self.children() if isinstance(child, ParallelDepthwise)]  # maybe without a call
        used: Substitution = {
            (module, name): module._used(name)  # noqa: SLF001 - of this kind, too
            for module in (self, *read)
            for name, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None and name not in module.slices
        }
        with Substituted(used):
            return super().forward(*inputs, **options)

    def _used(self, name: str) -> Tensor:
        """The tensor that forward uses for a parameter, with the gradient that all ranks together have."""
        match self.styles.get(name):
            case "gathered":
                return self.gather_parameter(name)
            case "replicated_with_grad_allreduce":
                return copy_to_tp(self.own_tensor(name), group=self.axis)
        return self.shard(name)


class ParallelDepthwise(Sharded):
    """A grouped convolution over the groups of a rank; the bias is sharded alike."""

    groups: int
    in_channels: int
    out_channels: int

    def set_up(self, axis: Axis, **options: Any) -> None:
        """See :class:`Sharded`; sets the local numbers of groups and channels.

        Raises:
            ValueError: if not whole groups are sharded, or the bias is sharded otherwise.
        """
        super().set_up(axis, **options)
        name = self.name_in_model
        ranks = {placement.ranks for placement in self.placements.values()}
        bias = self._parameters["bias"]
        if {placement.dim for placement in self.placements.values()} != {0} or len(ranks) > 1:
            raise ValueError(f"{name}: only the channels of a convolution can be sharded, and its bias as they are")
        pieces = ranks.pop()[self.axis.rank]
        rows, columns = self.out_channels // self.groups, self.in_channels // self.groups
        if any(edge % rows for piece in intervals(pieces) for edge in piece) or (
            bias is not None and "bias" not in self.placements
        ):
            raise ValueError(f"{name}: a convolution is split between its groups of {rows} channels, weight and bias")
        self.out_channels = self.placements["weight"].local_size(self.axis.rank)
        self.groups = self.out_channels // rows
        self.in_channels = self.groups * columns


class ParallelExpertLinear(Sharded):
    """A linear layer for each expert, with all weights in one tensor [experts, out_features, in_features]."""

    def forward(self, inputs: Tensor, *others: Any) -> Tensor:
        """[tokens of all experts, in_features] to the local (column parallel) or all (row parallel) out_features."""
        if self.placements["weight"].dim == 2:
            return reduce_from_tp(super().forward(inputs, *others), group=self.axis) / num_copies(
                self.placements["weight"]
            )
        output: Tensor = super().forward(copy_to_tp(inputs, group=self.axis), *others)
        return output


class Unfused(ParallelModule):
    """A module that computes in training as in eval mode: its fused path for training reads weights of its layers."""

    @property
    def training(self) -> bool:
        """False for the module itself; modules in it have modes of their own."""
        return False

    @training.setter
    def training(self, mode: bool) -> None:
        pass


class SummedOutput(Sharded):
    """A module whose output is all-reduced.

    Its replicated parameters are added to the output, as a bias is: only the first rank adds them.
    """

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own; of several outputs, floating-point tensors are all-reduced."""
        output = super().forward(*inputs, **options)
        return tuple(map(self._summed, output)) if isinstance(output, tuple) else self._summed(output)

    def _summed(self, value: Any) -> Any:
        return reduce_from_tp(value, group=self.axis) if _is_numbers(value) else value

    @property
    def _always_used(self) -> bool:
        return set(self._parameters) != set(self.placements)

    def _used(self, name: str) -> Tensor:
        if name in self.placements:
            return super()._used(name)
        full = copy_to_tp(self.own_tensor(name), group=self.axis)
        return full if self.axis.rank == 0 else full * 0


class ParallelExperts(SummedOutput):
    """Packed experts, each sharded over the ranks, or whole experts on each rank (expert parallel).

    Inputs and outputs are replicated. Expert parallel, a rank computes the tokens of other ranks' experts by its first
    expert with weight 0: that saves memory, not arithmetic.

    Attributes:
        num_cut_experts: experts from this number on return their input, which only the first rank adds. None where all
            experts have weights.
    """

    num_cut_experts: int | None = None
    num_experts: int

    def set_up(self, axis: Axis, **options: Any) -> None:
        """See :class:`Sharded`; expert parallel, sets the local number of experts.

        Raises:
            ValueError: if experts are not chosen by number, or not all tensors have as many experts.
        """
        super().set_up(axis, **options)
        sizes = {placement.size for placement in self.placements.values() if placement.dim == 0}
        if not sizes:
            return
        names = inspect.signature(super(ParallelModule, self).forward).parameters  # of the module's own class
        if len(sizes) > 1 or len(self.placements) != len(self._parameters) or len(names) < 3:
            raise ValueError(f'{self.name_in_model}: cannot keep whole experts on each rank: use experts="tensor"')
        self.num_experts = sizes.pop() // self.axis.size

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own: hidden states, indices of experts and their weights."""
        indices = next((one for one in (*inputs, *options.values()) if _is_indices(one)), None)
        entered = [self._enter(value, indices) for value in inputs]
        return super().forward(*entered, **{name: self._enter(value, indices) for name, value in options.items()})

    def _enter(self, value: Any, indices: Tensor | None) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        entered = copy_to_tp(value, group=self.axis) if is_number else value
        if indices is None or not isinstance(value, Tensor) or value.shape != indices.shape:
            return entered
        if any(placement.dim == 0 for placement in self.placements.values()):
            first = self.axis.rank * self.num_experts
            is_elsewhere = (indices < first) | (indices >= first + self.num_experts)
            # not by the number past the last, which is transformers' mark for it: its kernels then leave rows undefined
            return (entered if is_number else entered - first).masked_fill(is_elsewhere, 0)
        if is_number and self.num_cut_experts is not None and self.axis.rank:
            return entered.masked_fill(indices >= self.num_cut_experts, 0)
        return entered


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_indices(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


class SharedOutput(ParallelModule):
    """A replicated module, the end of whose output enters a computation over local heads: its gradient is all-reduced.

    Attributes:
        num_shared: the number of these elements.
    """

    num_shared: int

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        output: Tensor = super().forward(*inputs, **options)
        if not torch.is_grad_enabled():
            return output
        rest, shared = output.split([output.shape[-1] - self.num_shared, self.num_shared], -1)
        return torch.cat([rest, copy_to_tp(shared, group=self.axis)], -1)


class CopiedInput(ParallelModule):
    """A module with a replicated input and a local output: all-reduces the gradient of the input."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        copied = [self._copied(value) for value in inputs]
        return super().forward(*copied, **{name: self._copied(value) for name, value in options.items()})

    def _copied(self, value: Any) -> Any:
        return copy_to_tp(value, group=self.axis) if _is_numbers(value) else value


class Gathering(ParallelModule):
    """A module that gathers parameters on use, as a head that reads the embedding table.

    Attributes:
        read: each parameter, as the module that holds it and its name there.
    """

    read: tuple[tuple[ParallelModule, str], ...]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        gathered: Substitution = {(owner, name): owner.gather_parameter(name) for owner, name in self.read}
        with Substituted(gathered):
            return super().forward(*inputs, **options)


class Multiplying(Recompiled, ParallelModule):
    """A module whose methods multiply with parameters that are shards."""

    def product_input(self, value: Any) -> Any:
        """The other factor of a column parallel product; an equation for einsum is returned as it is."""
        return copy_to_tp(value, group=self.axis) if isinstance(value, Tensor) else value

    def product_output(self, name: str, value: Tensor) -> Tensor:
        """The row parallel product, all-reduced."""
        return reduce_from_tp(value, group=self.axis) / num_copies(self.placements[name])

    def shared_product(self, name: str, value: Tensor) -> Tensor:
        """The row parallel product, all-reduced, for a computation over local heads."""
        return copy_to_tp(self.product_output(name, value), group=self.axis)
