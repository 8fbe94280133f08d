"""Shard and gather tensors by their placements; the base class of parallel layers.

The placements are those of :mod:`shardconv.plan.placement`, which also describe rank files.
"""

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import wrap_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from shardconv.distributed import Axis, gather_from_tp, reduce_from_tp, scatter_to_tp
from shardconv.distributed.autograd import identity, with_gradient
from shardconv.plan.placement import Interval, Placement, intervals
from shardconv.plan.units import IndivisibleError, Unit, shard_dim

#: Placement and ranks of parameters that are shards. Not attributes, so that torch.save stores ordinary tensors.
_described: MutableMapping[Tensor, tuple[Placement, Axis]] = WeakTensorKeyDictionary()


def public_function(name: str) -> Callable[..., Any]:
    """Import a function that ``shardconv`` exports; at the call, as layers must not depend on its module."""
    return getattr(import_module("shardconv"), name)


def description(tensor: Tensor) -> tuple[Placement, Axis] | None:
    """Return the placement of a parallel layer's parameter, and its ranks; None for any other tensor."""
    return _described.get(tensor)


def even_placement(dim: int, sizes: tuple[int, ...], tp: int, *, pad: bool = False, what: str) -> Placement:
    """Return the placement of a dim whose segments are each sharded evenly.

    Args:
        dim: the dim that is sharded.
        sizes: sizes of the consecutive segments.
        tp: tensor parallel size.
        pad: pad segments whose size is not a multiple of ``tp``.
        what: name of the dim in the message.

    Raises:
        ValueError: if the size of a segment is not a multiple of ``tp``.
    """
    try:
        return shard_dim(dim, [Unit(size, pad=pad) for size in sizes], tp)
    except IndivisibleError as error:
        raise ValueError(f"{what}: {error} (tp)") from error


def take_shard(full: Tensor, placement: Placement, rank: int) -> Tensor:
    """Return a rank's shard of a full tensor: the rank's intervals and padding, concatenated along the placement's dim.

    The shard is contiguous, and a view of the full tensor where possible.
    """
    if placement.dim is None:
        return full
    dim = placement.dim
    pieces = placement.ranks[rank]
    # a shard of padding alone must depend on the full tensor, too: backward may be a collective
    slices = [] if intervals(pieces) else [full.narrow(dim, 0, 0)]
    for piece in pieces:
        if isinstance(piece, Interval):
            slices.append(full.narrow(dim, piece.start, piece.size))
        else:
            slices.append(full.new_zeros((*full.shape[:dim], piece.size, *full.shape[dim + 1 :])))
    return slices[0].contiguous() if len(slices) == 1 else torch.cat(slices, dim)


def _first_argument(shard: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
    return (shard,)


# Makes a function that applies an autograd.Function visible to __torch_function__ modes as a single operation. Modes do
# not see the autograd.Function itself, only the operations inside it.
_overridable = wrap_torch_function(_first_argument)


@_overridable
def gather_shards(shard: Tensor, placement: Placement, axis: Axis, *, dim: int | None = None) -> Tensor:
    """Gather the full tensor, in its original order and without padding; differentiable. All ranks must call it.

    Args:
        shard: this rank's shard.
        placement: how the full tensor is sharded.
        axis: the ranks that hold the shards.
        dim: the dim that is sharded, if not the placement's: outputs are sharded along their last dim as the weight is
            along its first.
    """
    if placement.dim is None:
        return shard
    dim = placement.dim if dim is None else dim
    gathered = gather_from_tp(shard, dim, group=axis)
    runs = _runs(placement)
    if len(runs) == 1:
        return gathered.narrow(dim, *runs[0]) if runs[0][1] != gathered.shape[dim] else gathered
    return torch.cat([gathered.narrow(dim, start, size) for start, size in runs], dim)


def scatter_shards(full: Tensor, placement: Placement, axis: Axis, *, dim: int) -> Tensor:
    """Return this rank's shard of a replicated tensor; differentiable: backward is an all-gather.

    Args:
        full: the full tensor, the same on every rank.
        placement: how it is sharded.
        axis: the ranks.
        dim: the dim of ``full`` that is sharded.
    """
    if placement.is_padded or len(_runs(placement)) > 1:
        along = replace(placement, dim=dim % full.dim())
        full = torch.cat([take_shard(full, along, rank) for rank in range(axis.size)], dim)
    return scatter_to_tp(full, dim, group=axis)


@_overridable
def sum_replica_gradients(shard: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """Return the shard; backward sums its gradient over all ranks that hold the same elements.

    Args:
        shard: this rank's shard.
        placement: how the full tensor is sharded, with elements on several ranks.
        axis: the ranks.
    """
    if axis.size == 1:
        return shard
    return with_gradient(shard, identity, partial(_sum_replicas, placement=placement, axis=axis))


@_overridable
def zero_padding_gradient(shard: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """Return the shard; backward zeroes its gradient in the padding, so that the padding stays zero in training.

    Args:
        shard: this rank's shard.
        placement: how the full tensor is sharded, with padding.
        axis: the ranks.
    """
    return with_gradient(shard, identity, partial(_without_padding, placement=placement, rank=axis.rank))


def _without_padding(shard: Tensor, placement: Placement, rank: int) -> Tensor:
    """Copy a rank's shard, with zeros in the padding."""
    assert placement.dim is not None
    copied, position = shard.clone(), 0
    for piece in placement.ranks[rank]:
        if not isinstance(piece, Interval):
            copied.narrow(placement.dim, position, piece.size).zero_()
        position += piece.size
    return copied


def _sum_replicas(shard: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """Sum a shard over all ranks that hold the same elements; differentiable."""
    run = partial(_add_replicas, placement=placement, axis=axis)
    return with_gradient(shard, run, partial(sum_replica_gradients, placement=placement, axis=axis))


def _add_replicas(shard: Tensor, placement: Placement, axis: Axis) -> Tensor:
    full = reduce_from_tp(_put_shard(shard, placement, axis.rank), group=axis)
    return take_shard(full, placement, axis.rank)


def _put_shard(shard: Tensor, placement: Placement, rank: int) -> Tensor:
    """Return a full tensor that has the rank's shard at its intervals, and zeros elsewhere."""
    assert placement.dim is not None
    dim, position = placement.dim, 0
    full = shard.new_zeros((*shard.shape[:dim], placement.size, *shard.shape[dim + 1 :]))
    for piece in placement.ranks[rank]:
        if isinstance(piece, Interval):
            full.narrow(dim, piece.start, piece.size).copy_(shard.narrow(dim, position, piece.size))
        position += piece.size
    return full


@lru_cache
def _runs(placement: Placement) -> tuple[tuple[int, int], ...]:
    """Return the slices (start, size) of the concatenated shards that form the full dim in its original order."""
    located = []
    position = 0
    for pieces in placement.ranks:
        for piece in pieces:
            if isinstance(piece, Interval):
                located.append((piece.start, position, piece.size))
            position += piece.size
    runs: list[tuple[int, int]] = []
    end = 0
    for start, at, size in sorted(located):
        if (skip := end - start) >= size:
            continue  # already taken from another rank
        begin, length = at + skip, size - skip
        if runs and sum(runs[-1]) == begin:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((begin, length))
        end = start + size
    return tuple(runs)


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
        shape, placement = list(self.own_tensor(name).shape), self.placements.get(name)
        if placement is not None and placement.dim is not None:
            shape[placement.dim] = placement.size
        return tuple(shape)

    def gather_parameter(self, name: str) -> Tensor:
        """Gather the full tensor of a parameter, in its original order; differentiable. All ranks must call it."""
        placement = self.placements.get(name)
        return self.own_tensor(name) if placement is None else gather_shards(self.shard(name), placement, self.axis)

    def shard(self, name: str) -> Tensor:
        """Return a parameter for use in forward: gradients of replicas are summed, and those of padding are zero."""
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
