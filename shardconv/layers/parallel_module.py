"""The base class of parallel layers, the placements of their parameters, and the norm of their gradients."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial, reduce
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardconv.distributed import Axis, gather_from_tp
from shardconv.layers.sharding import gather_shards, sum_replica_gradients, take_shard, zero_padding_gradient
from shardconv.plan.placement import Placement, own_intervals

#: Placement and ranks of parameters that are shards. Not attributes, so that torch.save stores ordinary tensors.
_described: MutableMapping[Tensor, tuple[Placement, Axis]] = WeakTensorKeyDictionary()


def public_function(name: str) -> Callable[..., Any]:
    """Import a function that ``shardconv`` exports; at the call, as layers must not depend on its module."""
    return getattr(import_module("shardconv"), name)


def description(tensor: Tensor) -> tuple[Placement, Axis] | None:
    """Return the placement of a parallel layer's parameter, and its ranks; None for any other tensor."""
    return _described.get(tensor)


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
        """Record the placement of each shard, for code that has the parameter only: see :func:`description`."""
        for name, placement in self.own_shards():
            _described[self.own_tensor(name)] = placement, self.axis

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


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip gradients by the norm that the unsharded model's gradients have.

    ``torch.nn.utils.clip_grad_norm_`` computes the norm of one rank's shards, so ranks would scale replicated
    parameters differently. All ranks of the tensor axis call this function with the same parameters; with data
    parallelism, after gradients were averaged.

    Args:
        parameters: shards, replicated parameters, or both.
        max_norm: the largest norm of all gradients together.
        norm_type: p of the p-norm; ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or infinite.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is true.
        TypeError: if a parameter is a DTensor.

    Example:
        >>> layer = ParallelLinear(4, 2, bias=False)
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> clip_grad_norm_(layer.parameters(), max_norm=1.0)
        tensor(2.8284)
        >>> bool(layer.weight.grad.norm() <= 1.0001)
        True
    """
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(isinstance(parameter, DTensor) for parameter in found):
        raise TypeError("a parameter is a DTensor: clip DTensors with torch.nn.utils.clip_grad_norm_")
    replicated: list[Tensor] = []
    sharded: dict[tuple[int, ...], tuple[Axis, list[Tensor]]] = {}
    for parameter in found:
        if (described := description(parameter)) is None:
            replicated += [] if parameter.grad is None else [parameter.grad]
        else:
            placement, axis = described
            _, own = sharded.setdefault(axis.ranks, (axis, []))
            own += [] if parameter.grad is None else _own_elements(parameter.grad, placement, axis.rank)
    # the same on all ranks, also on those without elements of their own
    dtype = reduce(torch.promote_types, (parameter.dtype for parameter in found), torch.float32)
    norm = partial(_norm, norm_type=norm_type, dtype=dtype, device=next((one.device for one in found), None))
    norms = [norm(replicated), *(gather_from_tp(norm(own), 0, group=axis) for axis, own in sharded.values())]
    total = torch.linalg.vector_norm(torch.cat(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradients is not finite (got {total.item()}), so they cannot be clipped")
    torch.nn.utils.clip_grads_with_norm_(found, max_norm, total)
    return total


def _norm(gradients: list[Tensor], *, norm_type: float, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """The norm of some tensors, [1], in a dtype."""
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype).to(device) for gradient in gradients]
    if not norms:
        return torch.zeros(1, dtype=dtype, device=device)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).view(1)


def _own_elements(gradient: Tensor, placement: Placement, rank: int) -> Iterator[Tensor]:
    """The elements of a shard, without padding and elements that a lower rank also holds."""
    if placement.dim is None:
        return iter([gradient] if rank == 0 else [])
    dim = placement.dim
    return (gradient.narrow(dim, start, own.size) for own, start in own_intervals(placement, rank))
