"""Differentiable operations between the tensor-parallel region of a model and the rest of it.

| operation | forward | backward |
|---|---|---|
| copy | identity | all-reduce (sum) |
| reduce | all-reduce (sum) | identity |
| scatter | local chunk | all-gather |
| gather | all-gather | local chunk |
| gather rows | all-gather over data groups | sum rows |
| sum rows | all-reduce over data groups and their ranks, own rows | gather rows |

The backward of each operation is another one of them, so gradients of any order work.

Requirement: after a ``reduce`` or a ``gather``, every rank computes the same values and the same loss. If ranks
computed different losses from a gathered tensor, the backward of gather would have to be a reduce-scatter. Rows are of
data groups, each with a loss of its own.

No operation modifies its input. All of them can be traced by ``torch.compile``, and are the identity on an axis of one
rank.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from shardconv.distributed.groups import Axis, GroupLike, as_axis

TensorT = TypeVar("TensorT", bound=Tensor)
_Map = Callable[[Tensor], Tensor]


class _Context(FunctionCtx):
    gradient: _Map


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, input: Tensor, run: _Map, gradient: _Map) -> Tensor:
        ctx.gradient = gradient
        return run(input)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad), None, None


def with_gradient(input: TensorT, run: Callable[[TensorT], TensorT], gradient: Callable[[TensorT], TensorT]) -> TensorT:
    """Apply a function to a tensor, with another function as its gradient.

    Args:
        input: the tensor.
        run: computes the output, which must not be ``input`` itself; autograd does not trace it.
        gradient: computes the gradient of the input from the gradient of the output. For gradients of higher
            order it must be differentiable.
    """
    return _Operation.apply(input, run, gradient)


def identity(input: Tensor) -> Tensor:
    """Return a view of the input."""
    return input.view_as(input)


#: torch's names of the collectives whose input and output are one tensor each. Since 2.13, the older names warn.
ALL_GATHER, REDUCE_SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)
_SUM = dist.ReduceOp.SUM
#: Local reductions over dim 0 of the gathered tensors, for the shared-memory channel.
_LOCAL_REDUCTIONS = {
    _SUM: partial(torch.sum, dim=0),
    dist.ReduceOp.MAX: partial(torch.amax, dim=0),
    dist.ReduceOp.MIN: partial(torch.amin, dim=0),
}


def copy_to_tp(input: Tensor, *, group: GroupLike = None) -> Tensor:
    """Return the input unchanged; all-reduce the input gradient.

    Use it on a replicated tensor that feeds sharded layers.

    Args:
        input: [*], the same on every rank.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [*], the same values.
    """
    axis = as_axis(group)
    return input if axis.size == 1 else with_gradient(input, identity, partial(reduce_from_tp, group=axis))


def reduce_from_tp(
    input: Tensor,
    *,
    op: dist.ReduceOp.RedOpType = _SUM,
    group: GroupLike = None,
) -> Tensor:
    """All-reduce a tensor.

    Args:
        input: [*], one summand per rank.
        op: reduction, such as ``torch.distributed.ReduceOp.MAX``. Only the sum has a gradient.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [*], the same on every rank.

    Raises:
        RuntimeError: in the backward pass, if ``op`` is not the sum.
    """
    axis = as_axis(group)
    if axis.size == 1:
        return input
    gradient = partial(copy_to_tp, group=axis) if op is _SUM else _no_gradient
    return with_gradient(input, partial(_all_reduce, axis=axis, op=op), gradient)


def scatter_to_tp(input: Tensor, dim: int = -1, *, group: GroupLike = None) -> Tensor:
    """Return the local chunk of a replicated tensor.

    Args:
        input: [..., n, ...], the same on every rank.
        dim: dim of size ``n``.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [..., n / tp, ...], contiguous.

    Raises:
        ValueError: if ``n`` is not a multiple of tp.
    """
    axis = as_axis(group)
    if input.shape[dim] % axis.size:
        raise ValueError(
            f"cannot scatter shape {list(input.shape)}: size {input.shape[dim]} of dim {dim} is not a multiple of "
            f"{axis.size} ranks"
        )
    if axis.size == 1:
        return input
    return with_gradient(input, partial(_chunk, axis=axis, dim=dim), partial(gather_from_tp, dim=dim, group=axis))


def gather_from_tp(input: Tensor, dim: int = -1, *, group: GroupLike = None) -> Tensor:
    """All-gather the chunks of all ranks and concatenate them.

    Args:
        input: [..., n, ...], of the same shape on every rank.
        dim: dim of size ``n``.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [..., n * tp, ...], the same on every rank, contiguous.
    """
    axis = as_axis(group)
    if axis.size == 1:
        return input
    return with_gradient(input, partial(_all_gather, axis=axis, dim=dim), partial(scatter_to_tp, dim=dim, group=axis))


class GroupRows(NamedTuple):
    """Rows of several data groups, each of which has the same rows on all its tensor parallel ranks.

    Attributes:
        stage: the ranks of all groups.
        data: the ranks with the same tensor parallel rank in each group.
        own: number of rows of this group.
        most: number of rows of the group that has most.
    """

    stage: Axis
    data: Axis
    own: int
    most: int

    @classmethod
    def of(cls, stage: Axis, data: Axis, rows: Tensor) -> "GroupRows":
        """The rows of a tensor of each group, [n, *]. All ranks must call it."""
        most = reduce_from_tp(torch.tensor([len(rows)], device=rows.device), op=dist.ReduceOp.MAX, group=data)
        return cls(stage, data, len(rows), int(most))


def gather_rows(input: Tensor, rows: GroupRows) -> Tensor:
    """All-gather the rows of all data groups, [groups * most, *], with zeros after the rows of a group with fewer."""
    return with_gradient(input, partial(_gather_rows, rows=rows), partial(sum_rows, rows=rows))


def sum_rows(input: Tensor, rows: GroupRows) -> Tensor:
    """Sum the rows of all groups, [groups * most, *], over all ranks, and return those of this group, [own, *]."""
    return with_gradient(input, partial(_sum_rows, rows=rows), partial(gather_rows, rows=rows))


def _gather_rows(input: Tensor, rows: GroupRows) -> Tensor:
    padding = input.new_zeros(rows.most - rows.own, *input.shape[1:])
    return _all_gather(torch.cat([input, padding]), rows.data, 0)


def _sum_rows(input: Tensor, rows: GroupRows) -> Tensor:
    total = _all_reduce(input, rows.stage, _SUM)
    return total.narrow(0, rows.data.rank * rows.most, rows.own).contiguous()


def _gather_in_memory(input: Tensor, axis: Axis, purpose: str) -> Tensor | None:
    """All-gather over the shared-memory channel: [tp, *], or None if the process group has to be used."""
    if axis.channel is None or torch.compiler.is_compiling() or not axis.channel.fits(input):
        return None
    return axis.channel.all_gather(input, purpose)


def _no_gradient(_: Tensor) -> Tensor:
    raise RuntimeError("only the sum over ranks has a gradient: detach the input of other reductions")


def _all_reduce(input: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType) -> Tensor:
    local = None if torch.compiler.is_compiling() else _LOCAL_REDUCTIONS.get(op)  # torch 2.12 cannot trace a hash of it
    if local is not None and (gathered := _gather_in_memory(input, axis, str(op))) is not None:
        return local(gathered).to(input.dtype)
    output = input.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, op=op, group=axis.group)
    return output


def _chunk(input: Tensor, axis: Axis, dim: int) -> Tensor:
    size = input.shape[dim] // axis.size
    return input.narrow(dim, axis.rank * size, size).contiguous()


def _all_gather(input: Tensor, axis: Axis, dim: int) -> Tensor:
    dim %= input.dim()
    if (gathered := _gather_in_memory(input, axis, "gather")) is not None:
        return torch.cat(gathered.unbind(), dim)
    chunks = input.new_empty(axis.size * input.numel())
    getattr(dist, ALL_GATHER)(chunks, input.contiguous().view(-1), group=axis.group)
    return chunks.view(axis.size, *input.shape).movedim(0, dim).flatten(dim, dim + 1).contiguous()
