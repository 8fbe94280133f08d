"""Operations on shards by their placements: shard and gather tensors, with gradients.

The same placements (:mod:`shardconv.plan.placement`) describe rank files.
"""

from collections.abc import MutableMapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from shardconv.distributed import Axis, gather_from_tp, reduce_from_tp, scatter_to_tp
from shardconv.distributed.operations import identity, with_gradient
from shardconv.plan.placement import IndivisibleError, Interval, Placement, Unit, intervals, own_intervals, shard_dim

#: Placement and ranks of parameters that are shards. Not attributes, so that torch.save stores ordinary tensors.
_described: MutableMapping[Tensor, tuple[Placement, Axis]] = WeakTensorKeyDictionary()


def describe(shard: Tensor, placement: Placement, axis: Axis) -> None:
    """Record the placement of a parameter that is a shard, and its ranks, for code that has the parameter only."""
    _described[shard] = placement, axis


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


def bytes_of(tensor: Tensor) -> Tensor:
    """View the bytes of a tensor, or of a contiguous copy, in one dim."""
    values = tensor.detach().contiguous()
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)  # view(-1) of one element keeps its stride


def take_shard(full: Tensor, placement: Placement, rank: int, *, dim: int | None = None) -> Tensor:
    """Return a rank's shard of a full tensor: the rank's intervals and padding, concatenated along the sharded dim.

    The shard is contiguous, and a view of the full tensor where possible.

    Args:
        full: the full tensor.
        placement: how it is sharded.
        rank: the rank.
        dim: the dim that is sharded, if not the placement's; may be counted from the end.
    """
    if placement.dim is None:
        return full
    dim = (placement.dim if dim is None else dim) % full.dim()
    entries = placement.ranks[rank]
    # a shard of padding alone must depend on the full tensor, too: backward may be a collective
    slices = [] if intervals(entries) else [full.narrow(dim, 0, 0)]
    for entry in entries:
        if isinstance(entry, Interval):
            slices.append(full.narrow(dim, entry.start, entry.size))
        else:
            slices.append(full.new_zeros((*full.shape[:dim], entry.size, *full.shape[dim + 1 :])))
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
    if missing := placement.max_local_size - placement.local_size(axis.rank):
        shard = torch.cat([shard, shard.new_zeros((*shard.shape[:dim], missing, *shard.shape[dim:][1:]))], dim)
    gathered = gather_from_tp(shard, dim, group=axis)
    runs = _runs(placement)
    if len(runs) == 1:
        return gathered.narrow(dim, *runs[0]) if runs[0][1] != gathered.shape[dim] else gathered
    return torch.cat([gathered.narrow(dim, start, size) for start, size in runs], dim)


def scatter_shards(full: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """Return this rank's shard of the last dim of a replicated tensor; backward all-gathers the gradient.

    Args:
        full: the full tensor, the same on every rank.
        placement: how it is sharded.
        axis: the ranks.
    """
    if placement.is_padded or len(_runs(placement)) > 1:
        full = torch.cat([take_shard(full, placement, rank, dim=-1) for rank in range(axis.size)], -1)
    return scatter_to_tp(full, group=axis)


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
    copied = torch.zeros_like(shard)
    for interval, position in placement.local_intervals(rank):
        values = shard.narrow(placement.dim, position, interval.size)
        copied.narrow(placement.dim, position, interval.size).copy_(values)
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
    full = shard.new_zeros(placement.full_shape(shard.shape))
    for interval, position in placement.local_intervals(rank):
        values = shard.narrow(placement.dim, position, interval.size)
        full.narrow(placement.dim, interval.start, interval.size).copy_(values)
    return full


@lru_cache
def _runs(placement: Placement) -> tuple[tuple[int, int], ...]:
    """Return the slices (start, size) of the concatenated shards that form the full dim in its original order.

    All shards have as many elements as the largest.
    """
    size = placement.max_local_size
    located = (
        (own.start, rank * size + position, own.size)
        for rank in range(placement.num_ranks)
        for own, position in own_intervals(placement, rank)
    )
    runs: list[tuple[int, int]] = []
    for _, start, length in sorted(located):
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((start, length))
    return tuple(runs)
