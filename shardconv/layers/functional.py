"""Functional forms of the parallel layers, which take the rank's shards, like ``torch.nn.functional``."""

from torch import Tensor
from torch.nn import functional

from shardconv.distributed import GroupLike, as_axis, copy_to_tp, reduce_from_tp
from shardconv.layers.embedding import parallel_embedding
from shardconv.layers.features import check_features, check_tag
from shardconv.layers.linear import shard_input, weight_dim
from shardconv.layers.loss import parallel_cross_entropy
from shardconv.layers.sharding import even_placement, gather_shards

__all__ = ["parallel_cross_entropy", "parallel_embedding", "parallel_linear"]


def parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dim: int | None = None,
    *,
    gather_output: bool = False,
    input_is_parallel: bool | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Apply ``F.linear`` to shards of weight and bias.

    Args:
        input: [*, in_features], the same on every rank; with dim=0 also [*, in_features / tp].
        weight: [out_features / tp, in_features] with dim=-1, [out_features, in_features / tp] with dim=0.
        bias: [out_features / tp] with dim=-1, [out_features] with dim=0.
        dim: the dim of [in_features, out_features] that is sharded: 0, 1 or -1; None if the weight is unsharded.
        gather_output: with dim=-1, all-gather the output.
        input_is_parallel: with dim=0, whether the input is sharded; by default determined from its last dim.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [*, out_features / tp] with dim=-1 and ``gather_output`` False, else [*, out_features].

    Raises:
        ValueError: if ``dim`` or the shapes are not supported, or the tag of the input contradicts them (see
            :class:`~shardconv.layers.RegisterParallelDim`).

    Example:
        >>> weight = torch.eye(3)
        >>> parallel_linear(torch.ones(2, 3), weight, dim=-1).shape
        torch.Size([2, 3])
    """
    sharded_dim = weight_dim(dim)
    if sharded_dim is None:
        return functional.linear(input, weight, bias)
    axis = as_axis(group)
    sizes = (weight.shape[sharded_dim] * axis.size,)
    placement = even_placement(sharded_dim, sizes, axis.size, what="weight")
    if sharded_dim == 0:
        check_features(input, weight.shape[1], axis.size, _describe)
        check_tag(input, [None], axis, _describe)
        output = functional.linear(copy_to_tp(input, group=axis), weight, bias)
        return gather_shards(output, placement, axis, dim=-1) if gather_output else output
    shard = shard_input(input, placement, axis, input_is_parallel, _describe)
    output = reduce_from_tp(functional.linear(shard, weight), group=axis)
    return output if bias is None else output + bias.to(output.dtype)


def _describe() -> str:
    return "parallel_linear"
