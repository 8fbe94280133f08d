"""Initialization of shards: gathered values equal the values of the unsharded layer, at any tensor parallel size.

Every rank initializes the full tensor, by any function of ``torch.nn.init``, and keeps its shard. So fans are computed
from the full tensor, values do not depend on tp, and the default generator ends in the same state as for the unsharded
layer. One full tensor is in memory at a time; construct layers on the meta device where that is too much.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardconv.distributed import Axis, GroupLike, as_axis
from shardconv.layers.sharding import description, take_shard
from shardconv.plan.placement import Placement, Unit, shard_dim

#: Fills a tensor in place.
Initializer = Callable[[Tensor], object]

#: Initializers by name. Those without arguments here have torch's defaults.
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
    """Look up an initializer by name; a function is returned unchanged.

    Raises:
        ValueError: if the name is unknown.
    """
    if not isinstance(init, str):
        return init
    if init not in INITIALIZERS:
        raise ValueError(
            f"the initializer is unknown (got {init!r}): pass a function, or one of {', '.join(INITIALIZERS)}"
        )
    return INITIALIZERS[init]


def linear_weight_(weight: Tensor) -> None:
    """Fill a weight, [*, in_features], as nn.Linear does: U(-1 / sqrt(in_features), 1 / sqrt(in_features))."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def linear_bias_(bias: Tensor, in_features: int) -> None:
    """Fill a bias as nn.Linear does: U(-1 / sqrt(in_features), 1 / sqrt(in_features))."""
    bound = 1 / math.sqrt(in_features) if in_features > 0 else 0
    nn.init.uniform_(bias, -bound, bound)


def shard_init_(
    init_method: Callable[..., object],
    tensor: Tensor,
    *,
    placement: Placement | None = None,
    group: GroupLike = None,
    **kwargs: object,
) -> Tensor:
    """Fill a shard as a function of ``torch.nn.init`` would fill the full tensor.

    Args:
        init_method: a function of ``torch.nn.init``, or one with the same interface.
        tensor: this rank's shard: a parameter of a parallel layer, or any tensor if ``placement`` is passed.
        placement: how the full tensor is sharded; by default the parameter's placement. A tensor that is not a
            shard gets the same values on every rank.
        group: the ranks; by default the layer's ranks, else see :func:`~shardconv.distributed.as_axis`.
        kwargs: passed to ``init_method``.

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
    """Fill a shard with its elements of the full tensor as ``init`` fills it on the first rank."""
    if shard.is_meta:
        return
    if axis.size == 1 and (placement is None or not placement.is_padded):
        init(shard)
        return
    shape = shard.shape if placement is None else placement.full_shape(shard.shape)
    full = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    _draw_like_first_rank(full, axis, init)
    shard.copy_(full if placement is None else take_shard(full, placement, axis.rank))


def _draw_like_first_rank(full: Tensor, axis: Axis, init: Initializer) -> None:
    """Draw the first rank's values; the local generator advances as if it had drawn them itself."""
    device = torch.get_device_module(full.device) if full.device.type != "cpu" else torch.random
    local = device.get_rng_state()
    init(full)
    first = state_of_first_rank(local, axis)
    if not torch.equal(first, local.cpu()):  # the ranks were seeded differently
        after = device.get_rng_state()
        device.set_rng_state(first)
        init(full)
        device.set_rng_state(after)


def state_of_first_rank(state: Tensor, axis: Axis) -> Tensor:
    """The state of a generator on the first rank, on the CPU. All ranks must call it."""
    first = state.to(axis.message_device, copy=True)
    dist.broadcast(first, axis.ranks[0], group=axis.group)
    return first.cpu()


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
    """Fill the shard of a linear layer's weight, which may be a fused tensor of ``stride`` segments.

    Args:
        weight: this rank's shard, [out_features, in_features] with ``partition_size`` as the size of the sharded dim;
            on the meta device it is left unchanged.
        out_features: number of rows of the full weight.
        in_features: number of columns of the full weight.
        partition_size: size of the sharded dim in a shard.
        partition_dim: the dim that is sharded, 0 or 1.
        init: an initializer, or its name.
        stride: number of equal segments of the sharded dim, 3 for [q; k; v]; each is sharded over all ranks.
        group: see :func:`~shardconv.distributed.as_axis`.

    Raises:
        ValueError: if the sizes contradict each other.
    """
    axis = as_axis(group)
    shape = [out_features, in_features]
    size = shape[partition_dim]
    shape[partition_dim] = partition_size
    if partition_size * axis.size != size or partition_size % stride or tuple(weight.shape) != tuple(shape):
        raise ValueError(
            f"weight of shape {list(weight.shape)} does not match partition_size {partition_size}, stride {stride} and "
            f"{size} features on {axis.size} ranks (expected shape {shape}, partition_size * tp = {size}, and a "
            f"multiple of stride)"
        )
    placement = shard_dim(partition_dim, [Unit(size // stride)] * stride, axis.size)
    fill_shard_(weight, placement, axis, get_initializer(init))
    return weight
