"""Lookup of ids in a shard of an embedding table, with all options of ``torch.nn.functional.embedding``."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardconv.distributed import Axis, GroupLike, as_axis, reduce_from_tp
from shardconv.layers.sharding import even_placement, gather_shards
from shardconv.layers.tags import check_tag
from shardconv.plan.placement import Interval, Placement, intervals

#: ``dim`` to the dim of the embedding table that is sharded.
_TABLE_DIM = {None: None, 0: 0, -1: 1, 1: 1}


def table_placement(num_embeddings: int, embedding_dim: int, dim: int | None, tp: int) -> Placement | None:
    """Return the placement of an embedding table that is sharded evenly; None if it is not sharded.

    Raises:
        ValueError: if ``dim`` is not None, 0, 1 or -1, or ``embedding_dim`` is sharded and not a multiple of ``tp``.
    """
    if dim not in _TABLE_DIM:
        raise ValueError(
            f"dim is not supported (got {dim!r}, expected None for unsharded, 0 for the vocabulary, 1 or -1 for the "
            f"embedding dim)"
        )
    if dim is None:
        return None
    size, what = ((num_embeddings, "num_embeddings"), (embedding_dim, "embedding_dim"))[_TABLE_DIM[dim] or 0]
    return even_placement(_TABLE_DIM[dim] or 0, (size,), tp, pad=dim == 0, what=what)


def parallel_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    num_embeddings: int | None = None,
    dim: int | None = None,
    *,
    gather_output: bool = True,
    group: GroupLike = None,
) -> Tensor:
    """Apply ``F.embedding`` to a shard of the embedding table.

    Args:
        input: ids, [*], the same on every rank.
        weight: this rank's shard: [ceil(num_embeddings / tp), embedding_dim] with dim=0, [num_embeddings,
            embedding_dim / tp] with dim=-1.
        padding_idx: row of the full table that gets no gradient; counted from the end if negative.
        max_norm: used rows with a larger norm are scaled down to it, in place; the norm is that of the full row.
        norm_type: p of that norm.
        scale_grad_by_freq: divide gradients by the number of times that their id is in the input.
        sparse: make the gradient of the shard a sparse tensor.
        num_embeddings: number of rows of the full table; by default the sum of the rows of all shards.
        dim: the dim of the table that is sharded: 0, 1 or -1; None for an unsharded table.
        gather_output: with dim=-1, all-gather the output.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [*, embedding_dim], the same on every rank; [*, embedding_dim / tp] with dim=-1 and without ``gather_output``.

    Raises:
        IndexError: if an id is out of range; on CUDA a device-side assertion, as torch's.
        ValueError: if the shape of the shard does not match, or the ids are tagged as sharded (see
            :class:`~shardconv.layers.RegisterParallelDim`).

    Example:
        >>> table = torch.arange(10.0).view(5, 2)
        >>> parallel_embedding(torch.tensor([4, 0]), table, num_embeddings=5, dim=0)
        tensor([[8., 9.],
                [0., 1.]])
    """
    axis = as_axis(group)
    rows = weight.shape[0] * (axis.size if dim == 0 else 1)
    num_embeddings = rows if num_embeddings is None else num_embeddings
    features = weight.shape[1] * (axis.size if dim in (1, -1) else 1)
    placement = table_placement(num_embeddings, features, dim, axis.size)
    if placement is not None and placement.shard_shape((num_embeddings, features), axis.rank) != tuple(weight.shape):
        raise ValueError(
            f"weight of shape {list(weight.shape)} is not the shard of a table of {num_embeddings} rows on rank "
            f"{axis.rank} of {axis.size}: pass this rank's shard"
        )
    if padding_idx is not None and padding_idx < 0:
        padding_idx += num_embeddings
    if placement is not None:
        check_tag(input, [None], axis, "parallel_embedding".__str__)
    options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return look_up(input, weight, options, placement, axis, gather_output=gather_output)


#: The options of ``F.embedding`` that follow the weight.
LookupOptions = tuple[int | None, float | None, float, bool, bool]


def look_up(
    input: Tensor,
    weight: Tensor,
    options: LookupOptions,
    placement: Placement | None,
    axis: Axis,
    *,
    gather_output: bool,
) -> Tensor:
    """Apply ``F.embedding`` to the shard that ``placement`` describes."""
    padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse = options
    if placement is None or (axis.size == 1 and not placement.is_padded):
        return functional.embedding(input, weight, *options)
    if placement.dim != 0:
        if max_norm is not None:
            _scale_rows_(weight, input, max_norm, norm_type, axis)
        output = functional.embedding(input, weight, padding_idx, None, 2.0, scale_grad_by_freq, sparse)
        return gather_shards(output, placement, axis, dim=-1) if gather_output else output
    num_embeddings = placement.size
    ((first, last),) = intervals(placement.ranks[axis.rank]) or [Interval(num_embeddings, num_embeddings)]
    local_padding_idx = padding_idx - first if padding_idx is not None and first <= padding_idx < last else None
    if max_norm is None and not scale_grad_by_freq and not sparse:
        output = _look_up_masked(input, weight, local_padding_idx, first, last, num_embeddings)
    else:
        local_options = (local_padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        output = _look_up_local(input, weight, local_options, first, last, num_embeddings)
    return reduce_from_tp(output, group=axis)


def _look_up_masked(
    input: Tensor, weight: Tensor, padding_idx: int | None, first: int, last: int, num_embeddings: int
) -> Tensor:
    """Look up the ids in [first, last), with zeros for the other ids; no shape depends on the values of ids."""
    is_local = (input >= first) & (input < last)
    # An id outside of the vocabulary stays out of range of the shard, too, so that the lookup raises as torch does.
    is_remote = ~is_local & (input >= 0) & (input < num_embeddings)
    index = torch.where(is_local, input - first, weight.shape[0]).masked_fill(is_remote, 0)
    return functional.embedding(index, weight, padding_idx).masked_fill(~is_local.unsqueeze(-1), 0)


def _look_up_local(
    input: Tensor, weight: Tensor, options: LookupOptions, first: int, last: int, num_embeddings: int
) -> Tensor:
    """Look up only the ids in [first, last): for options that depend on which rows are used."""
    _check_range(input, num_embeddings)
    ids = input.reshape(-1)
    is_local = (ids >= first) & (ids < last)
    output = weight.new_zeros((len(ids), weight.shape[1]))
    output = output.index_put((is_local,), functional.embedding(ids[is_local] - first, weight, *options))
    return output.view(*input.shape, weight.shape[1])


def _check_range(input: Tensor, num_embeddings: int) -> None:
    if ((input < 0) | (input >= num_embeddings)).any():
        raise IndexError("index out of range in self")


@torch.no_grad()
def _scale_rows_(weight: Tensor, input: Tensor, max_norm: float, norm_type: float, axis: Axis) -> None:
    """Scale down the used rows whose norm over all ranks is larger, as ``torch.embedding_renorm_`` does."""
    _check_range(input, len(weight))
    ids = input.unique()
    dtype = torch.promote_types(weight.dtype, torch.float32)  # as torch does, so that sums do not overflow
    rows = weight[ids].to(dtype).abs()
    if norm_type == float("inf"):
        norms = reduce_from_tp(rows.amax(1), op=dist.ReduceOp.MAX, group=axis)
    elif norm_type == 0:
        norms = reduce_from_tp(rows.count_nonzero(1).to(rows.dtype), group=axis)
    else:
        norms = reduce_from_tp(rows.pow(norm_type).sum(1), group=axis).pow(1 / norm_type)
    scales = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1)
    weight[ids] *= scales.unsqueeze(1).to(weight.dtype)
