"""Plan a redistribution: the sequence of collectives between two layouts that takes the least time.

A layout is torch's placements, one per mesh axis. Torch's own planner is private and does not have a cost for an
all-to-all, so it is not used. Planning does not communicate and needs no process groups.

A collective changes the placements of one axis, or of several axes at once. If several axes shard the same dim, the
first axis splits it first, so only the last of them can be added or removed by itself.
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
from shardconv.tensor.spec import MeshAxis, MeshLike, Placements, check_placements, local_shape, mesh_sizes

#: Fixed overhead of a collective in seconds: the call into torch and the kernel launch. Without it, the alpha-beta
#: model prefers two collectives to one that sends slightly more messages.
START_SECONDS = 25e-6

#: Placement type to the collectives that turn it into Replicate, Shard and Partial.
_COLLECTIVES: dict[type[Placement], tuple[str | None, str, str | None]] = {
    Partial: ("all_reduce", "reduce_scatter", None),
    Shard: ("all_gather", "all_to_all", "shard_to_partial"),
    Replicate: (None, "chunk", "to_partial"),
}

#: Collectives whose larger side is one block per rank, each padded to the largest.
_PADDED = ("all_gather", "reduce_scatter", "chunk")


def plan_redistribution(
    shape: Sequence[int],
    dtype: torch.dtype | int,
    mesh: MeshLike,
    source: Sequence[Placement],
    target: Sequence[Placement],
    links: Links = None,
) -> tuple[CommSpec, ...]:
    """Return the collectives that redistribute a tensor in the least time.

    Minimizes the forward time of the alpha-beta model plus :data:`START_SECONDS` per collective, then the number of
    collectives, with Dijkstra's algorithm over all layouts of the tensor.

    Args:
        shape: shape of the full tensor. Sizes need not be divisible.
        dtype: torch's dtype, or bytes per element.
        mesh: torch's mesh, or its sizes.
        source: current placements.
        target: placements after redistribution.
        links: link between the ranks, or one link per axis.

    Returns:
        Collectives in execution order, with axes as numbers; empty if the layouts are equal.

    Raises:
        ValueError: if the placements are invalid for the shape, or an axis does not have a link.

    Example:
        >>> [step.collective for step in plan_redistribution((8, 8), 4, (2, 2), [Shard(0), Shard(1)], [Shard(0)] * 2)]
        ['all_to_all']
    """
    return _plan(_problem(shape, dtype, mesh, source, target, links))


def redistribution_cost(
    shape: Sequence[int],
    dtype: torch.dtype | int,
    mesh: MeshLike,
    source: Sequence[Placement],
    target: Sequence[Placement],
    links: Links = None,
) -> Cost:
    """Return the cost of the plans for a tensor and its gradient; arguments as in :func:`plan_redistribution`.

    The sum of :meth:`CommSpec.cost` over the collectives. :data:`START_SECONDS` only affects the choice of a plan.

    Example:
        >>> redistribution_cost((8, 8), 4, (2,), [Replicate()], [Shard(0)]).forward
        0.0
    """
    directions = ((source, target), (gradient_placements(target), gradient_placements(source)))
    problems = [_problem(shape, dtype, mesh, before, after, links) for before, after in directions]
    forward, backward = (
        math.fsum(step.cost(problem.sizes, dict(problem.links)).forward for step in _plan(problem))
        for problem in problems
    )
    return Cost(forward, backward, forward + backward)


def gradient_placements(placements: Sequence[Placement]) -> Placements:
    """Return the placements of the gradient: the tensor's, with ``Partial`` replaced by ``Replicate``."""
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


@dataclass(frozen=True)
class _Problem:
    shape: tuple[int, ...]
    itemsize: int
    sizes: tuple[int, ...]
    source: Placements
    target: Placements
    links: tuple[tuple[int, Link], ...]

    @property
    def allows_partial(self) -> bool:
        """Whether intermediate layouts may be partial: only if the source or target is, so no extra sums are made."""
        return any(isinstance(placement, Partial) for placement in (*self.source, *self.target))

    def max_elements(self, layout: Placements) -> int:
        """Number of elements of the largest local tensor."""
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
def _plan(problem: _Problem) -> tuple[CommSpec, ...]:
    order = count()  # breaks ties: layouts are not comparable
    heap: list[tuple[float, int, int, Placements, tuple[CommSpec, ...]]] = [(0.0, 0, next(order), problem.source, ())]
    done: set[Placements] = set()
    while True:  # every layout is reachable
        seconds, _, _, layout, steps = heapq.heappop(heap)
        if layout == problem.target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for step, after in _steps(layout, problem):
            if after not in done:
                path = (*steps, step)
                heapq.heappush(heap, (seconds + _seconds(step, problem), len(path), next(order), after, path))


def _seconds(step: CommSpec, problem: _Problem) -> float:
    start = START_SECONDS if step.communicates(problem.sizes)[0] else 0.0
    return step.cost(problem.sizes, dict(problem.links)).forward + start


def _steps(layout: Placements, problem: _Problem) -> Iterator[tuple[CommSpec, Placements]]:
    """Collectives applicable to a layout, with the resulting layouts."""
    numbers = range(len(layout))
    for axes in (subset for size in range(1, len(layout) + 1) for subset in combinations(numbers, size)):
        if len({type(layout[axis]) for axis in axes}) > 1 or not _are_innermost(axes, layout):
            continue
        gather_dims = _dims(layout, axes)
        for collective, shard_dims in _collectives(layout, axes, problem):
            after = layout_after(layout, collective, axes, shard_dims)
            if after != layout and _are_innermost(axes, after):
                num_bytes = _num_bytes(collective, axes, layout, after, problem)
                step = CommSpec(collective, axes, gather_dims=gather_dims, shard_dims=shard_dims, num_bytes=num_bytes)
                yield step, after


def _collectives(layout: Placements, axes: tuple[int, ...], problem: _Problem) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Collectives over axes of one placement type, with the dims that they shard.

    Collectives without messages run on one axis at a time. Collectives over three or more axes only shard the dims of
    the target: trying all combinations would make planning slow.
    """
    to_replicate, to_shard, to_partial = _COLLECTIVES[type(layout[axes[0]])]
    is_single = len(axes) == 1
    choices: Iterable[tuple[int, ...]] = product(range(len(problem.shape)), repeat=len(axes))
    if len(axes) > 2:
        target_dims = _dims(problem.target, axes)
        choices = [target_dims] if len(target_dims) == len(axes) else []
    if to_replicate:
        yield to_replicate, ()
    if is_single or to_shard != "chunk":
        yield from ((to_shard, dims) for dims in choices)
    if is_single and to_partial and problem.allows_partial:
        yield to_partial, ()


def layout_after(
    layout: Sequence[Placement], collective: str, axes: Sequence[MeshAxis], shard_dims: Sequence[int]
) -> Placements:
    """Return the placements after a collective over axes that are numbers."""
    placements = list(layout)
    unsharded = Partial() if collective in ("to_partial", "shard_to_partial") else Replicate()
    for position, axis in enumerate(axes):
        placements[int(axis)] = Shard(shard_dims[position]) if shard_dims else unsharded
    return tuple(placements)


def _are_innermost(axes: tuple[int, ...], layout: Placements) -> bool:
    """Whether no later axis shards the same dim as one of these axes."""
    return not any(
        isinstance(layout[axis], Shard) and layout[other] == layout[axis]
        for axis in axes
        for other in range(axis + 1, len(layout))
        if other not in axes
    )


def _num_bytes(collective: str, axes: tuple[int, ...], before: Placements, after: Placements, problem: _Problem) -> int:
    """Bytes of the larger of a rank's input and output, including the padding of uneven blocks."""
    sizes = problem.max_elements(before), problem.max_elements(after)
    if collective not in _PADDED:
        return max(sizes) * problem.itemsize
    return min(sizes) * math.prod(problem.sizes[axis] for axis in axes) * problem.itemsize


def _dims(layout: Placements, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Dims that the axes shard; empty if they do not shard any."""
    placements = (layout[axis] for axis in axes)
    return tuple(placement.dim for placement in placements if isinstance(placement, Shard))
