"""Differentiable collectives over blocks of a tensor, sharded along any dims in uneven sizes.

| operation | forward | backward |
|---|---|---|
| gather_blocks | all-gather the blocks | take the local block |
| take_block | take the local block | all-gather the blocks |
| exchange_blocks | all-to-all from blocks of one grid to blocks of another | the reverse |
| reduce_scatter_blocks | local block of the sum over ranks | all-gather the blocks |
| place_block | local block in a tensor of zeros; the sum over ranks is the full tensor | take the local block |
| place_full | full tensor on rank 0, zeros on the others; the sum over ranks is the full tensor | identity |

The requirement of :mod:`shardconv.distributed.operations` applies: every rank computes the same values from a gathered
tensor. No operation modifies its input; all results are contiguous, and not views.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardconv.distributed.groups import Axis
from shardconv.distributed.operations import ALL_GATHER, REDUCE_SCATTER, identity, with_gradient

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
