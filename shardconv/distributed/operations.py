"""The four operations between a tensor axis and the rest of a model, each with its gradient.

| operation | forward | backward |
|---|---|---|
| copy | as it is | sum over the ranks |
| reduce | sum over the ranks | as it is |
| scatter | the rank's own chunk | all chunks |
| gather | all chunks | the rank's own chunk |

Copy and reduce are each other's gradient, and so are scatter and gather; so gradients have gradients.

They rest on one contract: behind a ``reduce`` or a ``gather`` every rank computes the same, up to the same loss. Ranks
that compute different losses from a gathered tensor would need a reduce-scatter backward instead.

No operation changes its argument. All of them can be traced by ``torch.compile``. On an axis of one process they are
the identity.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardconv.distributed.groups import Axis, GroupLike, as_axis

_SUM = dist.ReduceOp.SUM
#: Reductions of what all ranks have, over dim 0.
_OF_ALL = {
    _SUM: partial(torch.sum, dim=0),
    dist.ReduceOp.MAX: partial(torch.amax, dim=0),
    dist.ReduceOp.MIN: partial(torch.amin, dim=0),
}


def copy_to_tp(input: Tensor, *, group: GroupLike = None) -> Tensor:
    """Hand a replicated tensor to layers that are split: the gradients that come back are summed.

    Args:
        input: [*], the same on every rank.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [*], the same values.
    """
    axis = as_axis(group)
    return input if axis.size == 1 else _Copy.apply(input, axis)


def reduce_from_tp(
    input: Tensor,
    *,
    op: Any = _SUM,
    group: GroupLike = None,
) -> Tensor:
    """Sum what the ranks have.

    Args:
        input: [*], a different part of the sum on every rank.
        op: another reduction, as ``torch.distributed.ReduceOp.MAX``; it has no gradient.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [*], the same on every rank.

    Raises:
        RuntimeError: in the backward pass, if ``op`` is not the sum.
    """
    axis = as_axis(group)
    return input if axis.size == 1 else _Reduce.apply(input, axis, op)


def scatter_to_tp(input: Tensor, dim: int = -1, *, group: GroupLike = None) -> Tensor:
    """Keep the rank's own chunk of a replicated tensor.

    Args:
        input: [..., n, ...], the same on every rank.
        dim: where ``n`` stands.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [..., n / tp, ...], contiguous.

    Raises:
        ValueError: if ``n`` is no multiple of tp.
    """
    axis = as_axis(group)
    if input.shape[dim] % axis.size:
        raise ValueError(f"dim {dim} of shape {list(input.shape)} is not a multiple of the {axis.size} ranks")
    return input if axis.size == 1 else _Scatter.apply(input, axis, dim)


def gather_from_tp(input: Tensor, dim: int = -1, *, group: GroupLike = None) -> Tensor:
    """Put the chunks of all ranks behind each other.

    Args:
        input: [..., n, ...], of the same shape on every rank.
        dim: where ``n`` stands.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [..., n * tp, ...], the same on every rank, contiguous.
    """
    axis = as_axis(group)
    return input if axis.size == 1 else _Gather.apply(input, axis, dim)


def _given(input: Tensor, axis: Axis, purpose: str) -> Tensor | None:
    """What all ranks have, [tp, *], through memory that they share; None where it has to go through their group."""
    if axis.exchange is None or torch.compiler.is_compiling() or not axis.exchange.fits(input):
        return None
    return axis.exchange.give(input, purpose)


def _all_reduce(input: Tensor, axis: Axis, op: Any = _SUM) -> Tensor:
    if op in _OF_ALL and (given := _given(input, axis, str(op))) is not None:
        return _OF_ALL[op](given).to(input.dtype)
    output = input.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, op=op, group=axis.group)
    return output


def _chunk(input: Tensor, axis: Axis, dim: int) -> Tensor:
    size = input.shape[dim] // axis.size
    return input.narrow(dim, axis.rank * size, size).contiguous()


def _all_gather(input: Tensor, axis: Axis, dim: int) -> Tensor:
    dim %= input.dim()
    if (given := _given(input, axis, "gather")) is not None:
        return torch.cat(given.unbind(), dim)
    chunks = input.new_empty(axis.size * input.numel())
    dist.all_gather_single(chunks, input.contiguous().view(-1), group=axis.group)
    return chunks.view(axis.size, *input.shape).movedim(0, dim).flatten(dim, dim + 1).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Reduce.apply(grad, ctx.axis, _SUM), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, axis: Axis, op: Any) -> Tensor:
        ctx.axis, ctx.is_sum = axis, op == _SUM
        return _all_reduce(input, axis, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.is_sum:
            raise RuntimeError("only the sum over ranks has a gradient; detach the input of another reduction")
        return _Copy.apply(grad, ctx.axis), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _chunk(input, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grad, ctx.axis, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all_gather(input, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Scatter.apply(grad, ctx.axis, ctx.dim), None, None
