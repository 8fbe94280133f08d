"""Operations between ranks that hold blocks of a tensor, cut along any dims to any sizes, each with its gradient.

| operation | forward | backward |
|---|---|---|
| gather_blocks | all blocks | the rank's own block |
| take_block | the rank's own block | all blocks |
| exchange_blocks | of all ranks' blocks, the parts of the block that the rank is to have | the reverse |
| reduce_scatter_blocks | the rank's own block of the sum over the ranks | all blocks |
| place_block | the rank's block among zeros: the ranks' sum is the tensor | the rank's own block |
| place_whole | the tensor on the first rank, zeros on the others: likewise | as it is |

The contract is that of :mod:`shardconv.distributed.operations`: with what every rank has, every rank computes the same.
No operation changes its argument; all results are contiguous and no views. Knows nothing of placements and meshes.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardconv.distributed.groups import Axis

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Grid:
    """How the ranks of a group share a tensor: as :func:`torch.chunk` lays out, for each axis in its turn.

    Attributes:
        shape: of the whole tensor.
        sizes: of the axes over which the ranks of the group are counted, the last one fastest.
        dims: for each axis the dim of the tensor that it cuts; the same dim again cuts what is left of it.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[int, ...]

    def box(self, rank: int) -> Box:
        """Where a rank's block lies in the tensor; that of rank 0 is the largest."""
        bounds = [(0, size) for size in self.shape]
        left = math.prod(self.sizes)
        for dim, size in zip(self.dims, self.sizes, strict=True):
            left //= size
            start, stop = bounds[dim]
            step = -((start - stop) // size)
            first = min(start + rank // left % size * step, stop)
            bounds[dim] = first, min(first + step, stop)
        return tuple(slice(*each) for each in bounds)

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's block."""
        return _shape(self.box(rank))


def gather_blocks(block: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """The tensor of shape ``grid.shape``, on every rank, from each rank's block of it."""
    return _Gather.apply(block, axis, grid)


def take_block(whole: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """The rank's block of a tensor that every rank has."""
    return _Take.apply(whole, axis, grid)


def exchange_blocks(block: Tensor, axis: Axis, before: Grid, after: Grid) -> Tensor:
    """The rank's block by ``after``, from each rank's block by ``before``; both are of the same tensor."""
    return _Exchange.apply(block, axis, before, after)


def reduce_scatter_blocks(part: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """The rank's block of the sum of what the ranks have."""
    return _ReduceScatter.apply(part, axis, grid)


def place_block(block: Tensor, axis: Axis, grid: Grid) -> Tensor:
    """The rank's block in a tensor of zeros of shape ``grid.shape``."""
    return _Place.apply(block, axis, grid)


def place_whole(whole: Tensor, axis: Axis) -> Tensor:
    """The tensor on the first rank, zeros on the others."""
    return _PlaceWhole.apply(whole, axis)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in box)


def _inside(box: Box, outer: Box) -> Box:
    """A box as it lies in an outer one."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def _common(first: Box, second: Box) -> Box:
    """What two boxes have in common; empty within the first where that is nothing."""
    starts = [min(max(a.start, b.start), a.stop) for a, b in zip(first, second, strict=True)]
    stops = [max(min(a.stop, b.stop), start) for a, b, start in zip(first, second, starts, strict=True)]
    return tuple(slice(*bounds) for bounds in zip(starts, stops, strict=True))


def _padded(block: Tensor, room: int) -> Tensor:
    """A block's elements behind each other, and zeros up to what the largest has: collectives need equal lengths."""
    flat = block.reshape(-1)
    return flat if len(flat) == room else torch.cat([flat, flat.new_zeros(room - len(flat))])


def _gathered(block: Tensor, axis: Axis, grid: Grid) -> Tensor:
    boxes = [grid.box(rank) for rank in range(axis.size)]
    room = math.prod(grid.shape_of(0))
    chunks = block.new_empty(axis.size * room)
    dist.all_gather_single(chunks, _padded(block, room), group=axis.group)
    whole = block.new_empty(grid.shape)
    for box, chunk in zip(boxes, chunks.view(axis.size, room), strict=True):
        shape = _shape(box)
        whole[box] = chunk[: math.prod(shape)].view(shape)
    return whole


def _reduce_scattered(part: Tensor, axis: Axis, grid: Grid) -> Tensor:
    boxes = [grid.box(rank) for rank in range(axis.size)]
    room, own = math.prod(grid.shape_of(0)), grid.shape_of(axis.rank)
    total = part.new_empty(room)
    dist.reduce_scatter_single(total, torch.cat([_padded(part[box], room) for box in boxes]), group=axis.group)
    return total[: math.prod(own)].view(own).clone()


def _exchanged(block: Tensor, axis: Axis, before: Grid, after: Grid) -> Tensor:
    ranks = range(axis.size)
    had, gets = before.box(axis.rank), after.box(axis.rank)
    sent = [block[_inside(_common(had, after.box(rank)), had)].reshape(-1) for rank in ranks]
    boxes = [_common(gets, before.box(rank)) for rank in ranks]
    lengths = [math.prod(_shape(box)) for box in boxes]
    received = block.new_empty(sum(lengths))
    dist.all_to_all_single(received, torch.cat(sent), lengths, [len(each) for each in sent], group=axis.group)
    output = block.new_empty(_shape(gets))
    for box, chunk in zip(boxes, received.split(lengths), strict=True):
        output[_inside(box, gets)] = chunk.view(_shape(box))
    return output


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, axis: Axis, grid: Grid) -> Tensor:
        ctx.axis, ctx.grid = axis, grid
        return _gathered(block, axis, grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Take.apply(grad, ctx.axis, ctx.grid), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis, grid: Grid) -> Tensor:
        ctx.axis, ctx.grid = axis, grid
        return whole[grid.box(axis.rank)].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grad, ctx.axis, ctx.grid), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, axis: Axis, before: Grid, after: Grid) -> Tensor:
        ctx.axis, ctx.before, ctx.after = axis, before, after
        return _exchanged(block, axis, before, after)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, ctx.axis, ctx.after, ctx.before), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Axis, grid: Grid) -> Tensor:
        ctx.axis, ctx.grid = axis, grid
        return _reduce_scattered(part, axis, grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grad, ctx.axis, ctx.grid), None, None


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, axis: Axis, grid: Grid) -> Tensor:
        ctx.axis, ctx.grid = axis, grid
        whole = block.new_zeros(grid.shape)
        whole[grid.box(axis.rank)] = block
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Take.apply(grad, ctx.axis, ctx.grid), None, None


class _PlaceWhole(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, whole: Tensor, axis: Axis) -> Tensor:
        return whole.clone(memory_format=torch.contiguous_format) if axis.rank == 0 else torch.zeros_like(whole)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.view_as(grad), None
