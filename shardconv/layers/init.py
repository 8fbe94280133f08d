"""Initial values: every layer, at any tp, begins with the values that the layer it replaces would have drawn.

The full tensor is drawn, by any function of ``torch.nn.init``, on every rank, and the rank keeps its shard. So fans are
those of the full tensor, values do not depend on tp, and the default generator is left as the plain layer leaves it. It
takes the memory of one full tensor for a moment; build on the meta device where that is too much.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardconv.distributed import Axis, GroupLike, as_axis
from shardconv.layers.sharding import description, take_shard
from shardconv.plan.placement import Placement, Unit, cut

#: Fills a tensor in place.
Initializer = Callable[[Tensor], Any]

#: Initialisers by name. Those without a figure here have torch's defaults.
INITIALIZERS: Mapping[str, Initializer] = {
    "orthogonal": nn.init.orthogonal_,
    "normal": partial(nn.init.normal_, std=0.01),
    "biased_normal": partial(nn.init.normal_, mean=0.01, std=0.01),
    "uniform": partial(nn.init.uniform_, a=-0.02, b=0.02),
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "trunc_normal": partial(nn.init.trunc_normal_, std=0.02),
    "dirac": nn.init.dirac_,
    "constant": partial(nn.init.constant_, val=0.02),
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
}


def get_initializer(init: Initializer | str) -> Initializer:
    """An initialiser by name; a function is returned as it is.

    Raises:
        ValueError: if there is none of that name.
    """
    if not isinstance(init, str):
        return init
    if init not in INITIALIZERS:
        raise ValueError(f"there is no initialiser {init!r}: use a function, or one of {', '.join(INITIALIZERS)}")
    return INITIALIZERS[init]


def linear_weight_(weight: Tensor) -> None:
    """What nn.Linear does to its weight: U(-1 / sqrt(in_features), 1 / sqrt(in_features))."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def linear_bias_(bias: Tensor, in_features: int) -> None:
    """What nn.Linear does to its bias: U(-1 / sqrt(in_features), 1 / sqrt(in_features))."""
    bound = 1 / math.sqrt(in_features) if in_features > 0 else 0
    nn.init.uniform_(bias, -bound, bound)


def shard_init_(
    init_method: Callable[..., Any],
    tensor: Tensor,
    *,
    placement: Placement | None = None,
    group: GroupLike = None,
    **kwargs: Any,
) -> Tensor:
    """Fill a shard as a function of ``torch.nn.init`` would fill the full tensor.

    Args:
        init_method: a function of ``torch.nn.init``, or one like it.
        tensor: the shard; a parameter of a parallel layer, or any tensor with ``placement`` given.
        placement: how the full tensor is cut; by default as the layer of the parameter says. A tensor that is no shard
            is filled as it is, with the same values on every rank.
        group: the ranks; by default those of the layer, else see :func:`~shardconv.distributed.as_axis`.
        kwargs: of ``init_method``.

    Returns:
        ``tensor``.

    Example:
        >>> layer = ParallelLinear(20, 30, dim=-1)
        >>> _ = shard_init_(torch.nn.init.kaiming_normal_, layer.weight, a=0, mode="fan_in")
    """
    described = description(tensor)
    if described is not None:
        placement = placement or described[0]
        group = described[1] if group is None else group
    fill_shard_(tensor, placement, as_axis(group), lambda full: init_method(full, **kwargs))
    return tensor


@torch.no_grad()
def fill_shard_(shard: Tensor, placement: Placement | None, axis: Axis, init: Initializer) -> None:
    """Fill a shard with its part of what ``init`` makes of the full tensor on the first rank."""
    if shard.is_meta:
        return
    if axis.size == 1 and (placement is None or not placement.is_padded):
        init(shard)
        return
    shape = list(shard.shape)
    if placement is not None and placement.dim is not None:
        shape[placement.dim] = placement.size
    full = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    _draw_alike(full, axis, init)
    shard.copy_(full if placement is None else take_shard(full, placement, axis.rank))


def _draw_alike(full: Tensor, axis: Axis, init: Initializer) -> None:
    """Draw what the first rank draws, and leave the own generator where its own draw leaves it."""
    device = torch.get_device_module(full.device) if full.device.type != "cpu" else torch.random
    mine = device.get_rng_state()
    init(full)
    first = mine.to(axis.message_device, copy=True)
    dist.broadcast(first, axis.ranks[0], group=axis.group)
    if not torch.equal(first.cpu(), mine.cpu()):  # the ranks were seeded differently
        after = device.get_rng_state()
        device.set_rng_state(first.cpu())
        init(full)
        device.set_rng_state(after)


def init_affine_weight_(
    weight: Tensor,
    out_features: int,
    in_features: int,
    partition_size: int,
    partition_dim: int,
    *,
    init: Initializer | str = "xavier_normal",
    stride: int = 1,
    group: GroupLike = None,
) -> Tensor:
    """Fill the shard of a linear layer's weight, also of ``stride`` layers fused in one.

    Args:
        weight: the shard, [out_features, in_features] with ``partition_size`` in place of the cut dim; a tensor on
            the meta device is left as it is.
        out_features: of the full weight.
        in_features: of the full weight.
        partition_size: elements of the cut dim in a shard.
        partition_dim: the dim that is cut, 0 or 1.
        init: an initialiser, or the name of one.
        stride: how many equal parts the cut dim consists of, as 3 for [q; k; v]; each is shared by all ranks.
        group: see :func:`~shardconv.distributed.as_axis`.

    Raises:
        ValueError: if the sizes do not fit together.
    """
    axis = as_axis(group)
    shape = [out_features, in_features]
    size = shape[partition_dim]
    shape[partition_dim] = partition_size
    if partition_size * axis.size != size or partition_size % stride or tuple(weight.shape) != tuple(shape):
        raise ValueError(
            f"{size} features over {axis.size} ranks, in {stride} parts, are not the {partition_size} of the partition "
            f"or not those of a weight of shape {list(weight.shape)}"
        )
    placement = cut(partition_dim, [Unit(size // stride)] * stride, axis.size)
    fill_shard_(weight, placement, axis, get_initializer(init))
    return weight
