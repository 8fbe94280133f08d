"""Differentiable operations between ranks: at the borders of a tensor-parallel region, and on blocks of a tensor.

| operation | forward | backward |
|---|---|---|
| copy | identity | all-reduce (sum) |
| reduce | all-reduce (sum) | identity |
| scatter | local chunk | all-gather |
| gather | all-gather | local chunk |
| gather rows | all-gather over data groups | sum rows |
| sum rows | all-reduce over data groups and their ranks, own rows | gather rows |

Blocks are parts of a tensor that is sharded along any dims in uneven sizes:

| operation | forward | backward |
|---|---|---|
| gather_blocks | all-gather the blocks | take the local block |
| take_block | take the local block | all-gather the blocks |
| exchange_blocks | all-to-all from blocks of one grid to blocks of another | the reverse |
| reduce_scatter_blocks | local block of the sum over ranks | all-gather the blocks |
| place_block | local block in a tensor of zeros; the sum over ranks is the full tensor | take the local block |
| place_full | full tensor on rank 0, zeros on the others; the sum over ranks is the full tensor | identity |

The backward of each operation is another one of them, so gradients of any order work.

Requirement: after a ``reduce`` or a ``gather``, every rank computes the same values and the same loss. If ranks
computed different losses from a gathered tensor, the backward of gather would have to be a reduce-scatter. Rows are of
data groups, each with a loss of its own.

No operation modifies its input. All except those of blocks can be traced by ``torch.compile``, and are the identity on
an axis of one rank. Results of operations on blocks are contiguous, and not views.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
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


# --- blocks of a tensor -----------------------------------------------------------------------------------------------

Box = tuple[slice, ...]


@dataclass(frozen=True)
class BlockGrid:
    """Division of a tensor into one block per rank: each axis in turn splits its dim like :func:`torch.chunk`.

    Attributes:
        shape: shape of the full tensor.
        sizes: sizes of the mesh axes; ranks are numbered with the last axis fastest.
        dims: tensor dim that each axis splits. Axes with the same dim split each other's chunks.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[int, ...]

    def box(self, rank: int) -> Box:
        """Slices of a rank's block in the full tensor. Rank 0 has the largest block."""
        bounds = [(0, size) for size in self.shape]
        stride = math.prod(self.sizes)
        for dim, size in zip(self.dims, self.sizes, strict=True):
            stride //= size
            start, stop = bounds[dim]
            step = -((start - stop) // size)
            first = min(start + rank // stride % size * step, stop)
            bounds[dim] = first, min(first + step, stop)
        return tuple(slice(*bound) for bound in bounds)

    def block_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's block."""
        return _shape(self.box(rank))


def gather_blocks(block: Tensor, axis: Axis, grid: BlockGrid) -> Tensor:
    """All-gather the blocks of all ranks into the full tensor of shape ``grid.shape``."""
    return with_gradient(block, partial(_gather, axis=axis, grid=grid), partial(take_block, axis=axis, grid=grid))


def take_block(full: Tensor, axis: Axis, grid: BlockGrid) -> Tensor:
    """Return the local block of a replicated tensor."""
    return with_gradient(full, partial(_take, box=grid.box(axis.rank)), partial(gather_blocks, axis=axis, grid=grid))


def exchange_blocks(block: Tensor, axis: Axis, source: BlockGrid, target: BlockGrid) -> Tensor:
    """Return the local block of ``target`` from the blocks of ``source``; both grids divide the same tensor."""
    run = partial(_exchange, axis=axis, source=source, target=target)
    return with_gradient(block, run, partial(exchange_blocks, axis=axis, source=target, target=source))


def reduce_scatter_blocks(summand: Tensor, axis: Axis, grid: BlockGrid) -> Tensor:
    """Return the local block of the sum over ranks."""
    run = partial(_reduce_scatter, axis=axis, grid=grid)
    return with_gradient(summand, run, partial(gather_blocks, axis=axis, grid=grid))


def place_block(block: Tensor, axis: Axis, grid: BlockGrid) -> Tensor:
    """Return a tensor of shape ``grid.shape`` that is zero outside the local block."""
    return with_gradient(block, partial(_place, axis=axis, grid=grid), partial(take_block, axis=axis, grid=grid))


def place_full(full: Tensor, axis: Axis) -> Tensor:
    """Return the tensor on rank 0, and zeros on the other ranks."""
    return with_gradient(full, _copied if axis.rank == 0 else torch.zeros_like, identity)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(bound.stop - bound.start for bound in box)


def _relative(box: Box, outer: Box) -> Box:
    """A box relative to the start of an outer box."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def _intersection(first: Box, second: Box) -> Box:
    """Intersection of two boxes; an empty box inside the first if they are disjoint."""
    starts = [min(max(a.start, b.start), a.stop) for a, b in zip(first, second, strict=True)]
    stops = [max(min(a.stop, b.stop), start) for a, b, start in zip(first, second, starts, strict=True)]
    return tuple(slice(*bounds) for bounds in zip(starts, stops, strict=True))


def _flat_padded(block: Tensor, length: int) -> Tensor:
    """Flatten a block and pad it with zeros to ``length``: these collectives need equal lengths on all ranks."""
    flat = block.reshape(-1)
    return flat if len(flat) == length else torch.cat([flat, flat.new_zeros(length - len(flat))])


def _gather(block: Tensor, axis: Axis, grid: BlockGrid) -> Tensor:
    boxes = [grid.box(rank) for rank in range(axis.size)]
    length = math.prod(grid.block_shape(0))
    chunks = block.new_empty(axis.size * length)
    getattr(dist, ALL_GATHER)(chunks, _flat_padded(block, length), group=axis.group)
    full = block.new_empty(grid.shape)
    for box, chunk in zip(boxes, chunks.view(axis.size, length), strict=True):
        shape = _shape(box)
        full[box] = chunk[: math.prod(shape)].view(shape)
    return full


def _reduce_scatter(summand: Tensor, axis: Axis, grid: BlockGrid) -> Tensor:
    boxes = [grid.box(rank) for rank in range(axis.size)]
    length, shape = math.prod(grid.block_shape(0)), grid.block_shape(axis.rank)
    total = summand.new_empty(length)
    blocks = torch.cat([_flat_padded(summand[box], length) for box in boxes])
    getattr(dist, REDUCE_SCATTER)(total, blocks, group=axis.group)
    return total[: math.prod(shape)].view(shape).clone()


def _exchange(block: Tensor, axis: Axis, source: BlockGrid, target: BlockGrid) -> Tensor:
    ranks = range(axis.size)
    source_box, target_box = source.box(axis.rank), target.box(axis.rank)
    sent = [block[_relative(_intersection(source_box, target.box(rank)), source_box)].reshape(-1) for rank in ranks]
    boxes = [_intersection(target_box, source.box(rank)) for rank in ranks]
    lengths = [math.prod(_shape(box)) for box in boxes]
    received = block.new_empty(sum(lengths))
    dist.all_to_all_single(received, torch.cat(sent), lengths, [len(chunk) for chunk in sent], group=axis.group)
    output = block.new_empty(_shape(target_box))
    for box, chunk in zip(boxes, received.split(lengths), strict=True):
        output[_relative(box, target_box)] = chunk.view(_shape(box))
    return output


def _take(full: Tensor, box: Box) -> Tensor:
    return _copied(full[box])


def _place(block: Tensor, axis: Axis, grid: BlockGrid) -> Tensor:
    full = block.new_zeros(grid.shape)
    full[grid.box(axis.rank)] = block
    return full


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
