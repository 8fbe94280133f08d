"""The shard of one rank, and the selection of its elements by views of the full tensor.

A view of a contiguous tensor is a list of dims with sizes and strides. This module converts such a view to indices of
the sharded dim, and gathers the selected elements from the shard. Knows no operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardconv.plan.placement import Placement

#: The device of indices and shards. Given explicitly, as engines change the default device.
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class HeldShard:
    """One rank's shard of a full tensor, read on first use.

    Attributes:
        name: name of the tensor, for messages.
        shape: shape of the full tensor.
        dim: the dim that is sharded.
        positions: [shape[dim]], the index in the shard of each index of that dim, -1 if this rank does not hold it.
        read: returns the shard, [*shape[:dim], held, *shape[dim + 1:]], contiguous; called at most once.
        remedy: the remedy if an element is used that this rank does not hold, for the message.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    positions: Tensor
    read: Callable[[], Tensor]
    remedy: str

    @cached_property
    def rows(self) -> Tensor:
        """The shard as [elements before the dim, held, elements after it]."""
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return self.read().view(prod(before), -1, prod(after))

    def range_of(self, view: Tensor) -> Tensor | None:
        """The elements of a view that is a range of the sharded dim, with all of the others.

        Args:
            view: a view of a contiguous tensor of the full shape.

        Returns:
            [elements before the dim, size of the range, elements after it], a view of the shard; None for other views,
            or if the range is not one in the shard.
        """
        size = view.shape[self.dim] if view.dim() == len(self.shape) else 0
        after = prod(self.shape[self.dim + 1 :])
        start, within = divmod(int(view.storage_offset()), max(after, 1))
        if within or view.shape != (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :]):
            return None
        if view.stride() != _contiguous_strides(self.shape):
            return None
        positions = self.positions[start : start + size]
        return self.rows.narrow(1, int(positions[0]), size) if _is_range(positions) else None


@lru_cache(maxsize=256)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(max(prod(shape[at + 1 :]), 1) for at in range(len(shape)))


@lru_cache(maxsize=16)
def positions_of(placement: Placement, rank: int) -> Tensor:
    """The :attr:`HeldShard.positions` of a rank's shard."""
    positions = torch.full((placement.size,), -1, device=CPU)
    for interval, local in placement.local_intervals(rank):
        positions[interval.start : interval.stop] = torch.arange(local, local + interval.size, device=CPU)
    return positions


def _is_range(positions: Tensor) -> bool:
    """Whether positions, of which there is at least one, are held and consecutive."""
    first = int(positions[0])
    return first >= 0 and torch.equal(positions, torch.arange(first, first + len(positions), device=CPU))


class ViewDim(NamedTuple):
    """A dim of a view.

    Attributes:
        size: its size.
        level: 0 for dims before the sharded dim of the full tensor, 1 for the sharded dim, 2 for dims after it.
        step: distance of consecutive indices, counted in indices of the level.
    """

    size: int
    level: int
    step: int


class Selection(NamedTuple):
    """The elements of a full tensor that a view selects; the tensor has three levels, [before, sharded dim, after].

    Attributes:
        dims: dims of the view; a dim that covers two levels is split into two.
        start: the first index of each level.
        indices: selected indices of the sharded dim, with one dim for each of ``dims`` of level 1.
    """

    dims: tuple[ViewDim, ...]
    start: tuple[int, int, int]
    indices: Tensor


def select(view: Tensor, shard: HeldShard) -> Selection | None:
    """Determine the elements that a view selects; None if they are not ranges in each of the three levels.

    Args:
        view: a view of a contiguous tensor of the full shape.
        shard: the shard of that tensor.
    """
    size, after = shard.shape[shard.dim], prod(shard.shape[shard.dim + 1 :])
    level_strides = (size * after, after, 1)
    sized = list(zip(view.shape, view.stride(), strict=True))
    for level_stride in level_strides[:2]:
        sized = [split for dim in sized for split in _split_at_level(*dim, level_stride)]
    dims = tuple(_view_dim(dim_size, stride, level_strides) for dim_size, stride in sized)
    offset = int(view.storage_offset())
    start = (offset // level_strides[0], offset % level_strides[0] // after, offset % after)
    last = list(start)
    for dim in dims:
        last[dim.level] += (dim.size - 1) * dim.step
    if last[1] >= size or last[2] >= after:
        return None
    indices = torch.tensor(start[1], device=CPU)
    for dim in dims:
        if dim.level == 1:
            indices = indices.unsqueeze(-1) + torch.arange(dim.size, device=CPU) * dim.step
    return Selection(dims, start, indices)


def _view_dim(size: int, stride: int, level_strides: Sequence[int]) -> ViewDim:
    """The dim of a view, in the outermost level whose stride divides the stride of the dim."""
    level = next(level for level, level_stride in enumerate(level_strides) if stride % level_stride == 0)
    return ViewDim(size, level, stride // level_strides[level])


def _split_at_level(size: int, stride: int, level_stride: int) -> Sequence[tuple[int, int]]:
    """Split a dim that covers several steps of a level in two (size, stride): over those steps, and within one."""
    within = level_stride // stride if stride else 0
    if within <= 1 or level_stride % stride or size <= within or size % within:
        return ((size, stride),)
    return (size // within, level_stride), (within, stride)


def span_of(dims: Sequence[ViewDim]) -> tuple[int, int] | None:
    """Return the range [first, end) of the dims of level 1; None if dims of another level are between them."""
    sharded = [n for n, dim in enumerate(dims) if dim.level == 1]
    sharded = [n for n in sharded if dims[n].size > 1] or sharded[:1]  # dims of size 1 may be anywhere
    if not sharded or any(dim.level != 1 and dim.size > 1 for dim in dims[sharded[0] : sharded[-1]]):
        return None
    return sharded[0], sharded[-1] + 1


def gather(shard: HeldShard, selection: Selection, positions: Tensor) -> Tensor:
    """Return the elements of a selection, whose indices of the sharded dim are at ``positions`` in the shard."""
    flat, rows = positions.flatten(), shard.rows
    is_range = _is_range(flat)
    rows = rows.narrow(1, int(flat[0]), len(flat)) if is_range else rows.index_select(1, flat.to(rows.device))
    strides, inner = [], len(flat)
    for dim in selection.dims:
        inner = inner // dim.size if dim.level == 1 else inner
        strides.append(rows.stride(dim.level) * (inner if dim.level == 1 else dim.step))
    offset = rows.storage_offset() + selection.start[0] * rows.stride(0) + selection.start[2] * rows.stride(2)
    return rows.as_strided([dim.size for dim in selection.dims], strides, offset)
