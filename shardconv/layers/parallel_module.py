"""The base class of parallel layers, some of whose parameters are shards."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardconv.distributed import Axis
from shardconv.layers.sharding import describe, gather_shards, sum_replica_gradients, take_shard, zero_padding_gradient
from shardconv.plan.placement import Placement


def public_function(name: str) -> Callable[..., Any]:
    """Import a function that ``shardconv`` exports; at the call, as layers must not depend on its module."""
    return getattr(import_module("shardconv"), name)


class ParallelModule(nn.Module):
    """A module some of whose parameters are shards.

    Attributes:
        axis: the ranks that hold the shards.
        dim: the dim that is sharded, as defined by the layer's class; None if it is unsharded.
        placements: names of the layer's parameters that are shards to their placements.
        name_in_model: name of a converted layer in the model, for messages.
    """

    name_in_model: str = ""
    axis: Axis
    dim: int | None = None
    placements: dict[str, Placement]

    def set_up(self, axis: Axis) -> None:
        """Set all attributes except parameters; constructors and conversions both call it.

        Classes add keyword arguments for their options.
        """
        raise NotImplementedError

    def register_shard(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a parameter with uninitialized values: the shard, or the full tensor if it does not have a placement.

        Args:
            name: name of the parameter.
            shape: shape of the full tensor.
            device: device of the parameter.
            dtype: dtype of the parameter.
        """
        placement = self.placements.get(name)
        local = shape if placement is None else placement.shard_shape(shape, self.axis.rank)
        self.register_parameter(name, nn.Parameter(torch.empty(local, device=device, dtype=dtype)))

    def describe_layer(self) -> str:
        """Describe the layer in a message: its name, if it was converted, and its sizes."""
        return f"{self.name_in_model} ({self})" if self.name_in_model else str(self)

    def own_tensor(self, name: str) -> Tensor:
        """Return the stored parameter or buffer, also while forward uses another tensor in its place."""
        stored: Tensor | None = self._parameters.get(name)
        stored = self._buffers.get(name) if stored is None else stored
        tensor: Tensor = getattr(self, name) if stored is None else stored  # torch's pruning sets a plain attribute
        return tensor

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor of a parameter."""
        shape, placement = tuple(self.own_tensor(name).shape), self.placements.get(name)
        return shape if placement is None else placement.full_shape(shape)

    def gather_parameter(self, name: str) -> Tensor:
        """Gather the full tensor of a parameter, in its original order; differentiable. All ranks must call it."""
        placement = self.placements.get(name)
        return self.own_tensor(name) if placement is None else gather_shards(self.shard(name), placement, self.axis)

    def shard(self, name: str) -> Tensor:
        """Return a parameter for use in forward; gradients of replicas are summed, gradients of padding are zero."""
        parameter, placement = self.own_tensor(name), self.placements.get(name)
        if placement is None:
            return parameter
        if placement.is_padded:
            parameter = zero_padding_gradient(parameter, placement, self.axis)
        return sum_replica_gradients(parameter, placement, self.axis) if placement.has_replicas else parameter

    @property
    def master_weight(self) -> Tensor:
        """The full weight, in its original order; differentiable. All ranks must access it."""
        return self.gather_parameter("weight")

    @property
    def master_bias(self) -> Tensor | None:
        """The full bias, or None; differentiable. All ranks must access it."""
        return None if self.bias is None else self.gather_parameter("bias")

    def describe_parameters(self) -> None:
        """Record the placement of each shard."""
        for name, placement in self.own_shards():
            describe(self.own_tensor(name), placement, self.axis)

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore a copy, whose parameters are new tensors."""
        super().__setstate__(state)
        self.describe_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert parameters, which may replace them."""
        super()._apply(fn, recurse)
        self.describe_parameters()
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, bool],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, placement in self.own_shards() if local_metadata.get("is_full") else ():
            key = prefix + name
            if (full := state_dict.get(key)) is None:
                continue
            if tuple(full.shape) == (expected := self.full_shape(name)):
                shard = take_shard(full, placement, self.axis.rank)
                is_kept = local_metadata.get("assign_to_params_buffers", False)
                state_dict[key] = shard.clone() if is_kept else shard  # a view would keep the full tensor alive
                continue
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {full.shape} from checkpoint, the shape in "
                f"current model is {torch.Size(expected)}."
            )
            state_dict[key] = self.own_tensor(name)  # the error is already in the list
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self.describe_parameters()  # assign=True replaces parameters

    def own_shards(self) -> Iterator[tuple[str, Placement]]:
        """Yield name and placement of each parameter that exists and is a shard."""
        return (item for item in self.placements.items() if self._parameters.get(item[0]) is not None)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module itself, by name."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))
