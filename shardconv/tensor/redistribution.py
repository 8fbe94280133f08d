"""From one layout of a tensor to another: which communications, in which order, take the least time.

Owns the search. A layout is torch's placements, one for each axis of the mesh. Torch's own planner is private, does not
price an all-to-all, and is not asked. Nothing here communicates, and no ranks are needed.

A communication changes the placements of one axis, or those of several at once. A dim that several axes shard is cut by
the first of them first, so only the last of them can be taken away, or put there, by itself.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, count, product

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardconv.tensor.comm import CommSpec, Cost, Links, links_by_axis
from shardconv.tensor.cost import Link
from shardconv.tensor.spec import MeshLike, Placements, check_placements, local_shape, mesh_sizes

#: What a collective takes before its first message, in seconds: a call into torch, a kernel's launch. The alpha-beta
#: model counts messages only, and would rather send many small ones in two collectives than a few more in one.
START_SECONDS = 25e-6

#: Placement to what makes of it a replicated one, a shard, and a partial sum.
_ENDS: dict[type[Placement], tuple[str | None, str, str | None]] = {
    Partial: ("all_reduce", "reduce_scatter", None),
    Shard: ("all_gather", "all_to_all", "shard_to_partial"),
    Replicate: (None, "chunk", "to_partial"),
}

#: What sends, or gives away, as many blocks as there are ranks, each with the room of the largest.
_OF_BLOCKS = ("all_gather", "reduce_scatter", "chunk")


def plan_redistribution(
    shape: Sequence[int],
    dtype: torch.dtype | int,
    mesh: MeshLike,
    source: Sequence[Placement],
    target: Sequence[Placement],
    links: Links = None,
) -> tuple[CommSpec, ...]:
    """The communications that take a tensor from one layout to another in the least time.

    The time is that of the alpha-beta model, forward, and :data:`START_SECONDS` for each collective; of equal ones the
    plan with the fewest steps is taken. Found by Dijkstra's algorithm over all layouts of the tensor.

    Args:
        shape: of the whole tensor. Sizes need not divide.
        dtype: torch's, or bytes of an element.
        mesh: torch's mesh, or its sizes.
        source: placements that there are.
        target: placements that there are to be.
        links: what connects the ranks: a link, or one for each axis.

    Returns:
        Communications, their axes by number, in the order in which they run; none where nothing is to be done.

    Raises:
        ValueError: if a tensor of the shape cannot lie so, or an axis has no link.

    Example:
        >>> [step.collective for step in plan_redistribution((8, 8), 4, (2, 2), [Shard(0), Shard(1)], [Shard(0)] * 2)]
        ['all_to_all']
    """
    return _planned(_problem(shape, dtype, mesh, source, target, links))


def redistribution_cost(
    shape: Sequence[int],
    dtype: torch.dtype | int,
    mesh: MeshLike,
    source: Sequence[Placement],
    target: Sequence[Placement],
    links: Links = None,
) -> Cost:
    """Seconds that :func:`plan_redistribution`'s plan takes, and that of its gradient; the arguments are the same.

    The sum of what :meth:`CommSpec.cost` says of its communications: :data:`START_SECONDS` only decides between plans.

    Example:
        >>> redistribution_cost((8, 8), 4, (2,), [Replicate()], [Shard(0)]).forward
        0.0
    """
    ways = ((source, target), (of_gradient(target), of_gradient(source)))
    problems = [_problem(shape, dtype, mesh, before, after, links) for before, after in ways]
    forward, backward = (
        math.fsum(step.cost(one.sizes, dict(one.links)).forward for step in _planned(one)) for one in problems
    )
    return Cost(forward, backward, forward + backward)


def of_gradient(placements: Sequence[Placement]) -> Placements:
    """How the gradient of a tensor lies: as the tensor does, and of partial sums whole on every rank."""
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


def layout_after(layout: Sequence[Placement], step: CommSpec) -> Placements:
    """The placements after a communication, whose axes are numbers."""
    return _layout_after(layout, step.collective, [int(axis) for axis in step.axes], step.shard_dims)


@dataclass(frozen=True)
class _Problem:
    shape: tuple[int, ...]
    itemsize: int
    sizes: tuple[int, ...]
    source: Placements
    target: Placements
    links: tuple[tuple[int, Link], ...]

    @property
    def has_sums(self) -> bool:
        """Whether partial sums are of use: only where there are some, so that no others are added up on the way."""
        return any(isinstance(placement, Partial) for placement in (*self.source, *self.target))

    def elements(self, layout: Placements) -> int:
        """What the rank that has most has."""
        return math.prod(local_shape(self.shape, self.sizes, layout, [0] * len(self.sizes)))


def _problem(
    shape: Sequence[int],
    dtype: torch.dtype | int,
    mesh: MeshLike,
    source: Sequence[Placement],
    target: Sequence[Placement],
    links: Links,
) -> _Problem:
    itemsize = dtype if isinstance(dtype, int) else dtype.itemsize
    by_axis = links_by_axis(mesh, links)
    return _Problem(
        tuple(shape),
        itemsize,
        mesh_sizes(mesh),
        check_placements(shape, mesh, source, uneven=True),
        check_placements(shape, mesh, target, uneven=True),
        tuple((axis, by_axis[axis]) for axis in sorted(by_axis)),
    )


@lru_cache(maxsize=4096)
def _planned(problem: _Problem) -> tuple[CommSpec, ...]:
    order = count()  # layouts have none
    heap: list[tuple[float, int, int, Placements, tuple[CommSpec, ...]]] = [(0.0, 0, next(order), problem.source, ())]
    done: set[Placements] = set()
    while True:  # every layout can be reached
        seconds, _, _, layout, steps = heapq.heappop(heap)
        if layout == problem.target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for step, after in _steps(layout, problem):
            if after not in done:
                path = (*steps, step)
                heapq.heappush(heap, (seconds + _cost(step, problem).forward, len(path), next(order), after, path))


def _cost(step: CommSpec, problem: _Problem) -> Cost:
    cost = step.cost(problem.sizes, dict(problem.links))
    starts = [START_SECONDS if is_sent else 0.0 for is_sent in step.communicates(problem.sizes)]
    return Cost(cost.forward + starts[0], cost.backward + starts[1], cost.total + sum(starts))


def _steps(layout: Placements, problem: _Problem) -> Iterator[tuple[CommSpec, Placements]]:
    """Each communication that leads from a layout to another one, and that."""
    numbers = range(len(layout))
    for axes in (subset for size in range(1, len(layout) + 1) for subset in combinations(numbers, size)):
        if len({type(layout[axis]) for axis in axes}) > 1 or not _are_innermost(axes, layout):
            continue
        had = _dims(layout, axes)
        for collective, shard_dims in _ways(layout, axes, problem):
            after = _layout_after(layout, collective, axes, shard_dims)
            if after != layout and _are_innermost(axes, after):
                num_bytes = _num_bytes(collective, axes, layout, after, problem)
                step = CommSpec(collective, axes, gather_dims=had, shard_dims=shard_dims, num_bytes=num_bytes)
                yield step, after


def _ways(layout: Placements, axes: tuple[int, ...], problem: _Problem) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Collectives over axes of one kind of placement, with the dims that they cut.

    What is free goes one axis at a time. Three axes and more at once come to cut only what they are to cut in the end:
    all that they could, nobody waits for.
    """
    whole, cut, partial = _ENDS[type(layout[axes[0]])]
    is_one = len(axes) == 1
    cuts: Iterable[tuple[int, ...]] = product(range(len(problem.shape)), repeat=len(axes))
    if len(axes) > 2:
        wanted = _dims(problem.target, axes)
        cuts = [wanted] if len(wanted) == len(axes) else []
    if whole:
        yield whole, ()
    if is_one or cut != "chunk":
        yield from ((cut, dims) for dims in cuts)
    if is_one and partial and problem.has_sums:
        yield partial, ()


def _layout_after(
    layout: Sequence[Placement], collective: str, axes: Sequence[int], shard_dims: Sequence[int]
) -> Placements:
    found = list(layout)
    end = Partial() if collective in ("to_partial", "shard_to_partial") else Replicate()
    for position, axis in enumerate(axes):
        found[axis] = Shard(shard_dims[position]) if shard_dims else end
    return tuple(found)


def _are_innermost(axes: tuple[int, ...], layout: Placements) -> bool:
    """Whether no other axis cuts what these have cut."""
    return not any(
        isinstance(layout[axis], Shard) and layout[other] == layout[axis]
        for axis in axes
        for other in range(axis + 1, len(layout))
        if other not in axes
    )


def _num_bytes(collective: str, axes: tuple[int, ...], before: Placements, after: Placements, problem: _Problem) -> int:
    """Of the largest tensor that a rank has before or after; with the room that blocks of unequal sizes take."""
    sizes = problem.elements(before), problem.elements(after)
    if collective not in _OF_BLOCKS:
        return max(sizes) * problem.itemsize
    return min(sizes) * math.prod(problem.sizes[axis] for axis in axes) * problem.itemsize


def _dims(layout: Placements, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The dims that axes cut; none where they cut none."""
    placements = (layout[axis] for axis in axes)
    return tuple(placement.dim for placement in placements if isinstance(placement, Shard))
