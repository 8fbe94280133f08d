"""Create DTensors, and redistribute them to other placements or another mesh.

A layout is torch's placements, one per mesh axis. A redistribution is planned as the sequence of collectives between
two layouts that takes the least time. Torch's own planner is private and does not have a cost for an all-to-all, so it
is not used. Planning does not communicate and needs no process groups; :class:`~shardconv.tensor.comm.CommSpec` runs
the collectives. Gradients have the placements of their tensors; the gradient of a partial sum is replicated, as in
torch.

A collective changes the placements of one axis, or of several axes at once. If several axes shard the same dim, the
first axis splits it first, so only the last of them can be added or removed by itself.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations, count, product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardconv.distributed.operations import with_gradient
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.sharding import description
from shardconv.tensor.comm import CommSpec, Cost, Links, links_by_axis
from shardconv.tensor.cost import Link
from shardconv.tensor.spec import (
    MeshAxis,
    MeshLike,
    Placements,
    check_placements,
    coordinate_in,
    describe_mesh,
    local_shape,
    mesh_sizes,
)


def from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, shape: Sequence[int] | None = None
) -> DTensor:
    """Create a DTensor from the local tensors of the ranks. Differentiable; uses :meth:`DTensor.from_local`.

    Args:
        local: shard, replica or summand of this rank. It is not compared with other ranks.
        mesh: torch's mesh.
        placements: torch's placements, one per mesh axis.
        shape: shape of the full tensor, if shards differ in size as of :func:`torch.chunk`; by default all shards have
            the shape of ``local``.

    Raises:
        ValueError: if the placements are invalid, or ``local`` does not have this rank's local shape of ``shape``.
    """
    full = list(local.shape)
    if shape is None:
        checked = check_placements(full, mesh, placements, uneven=True)
        for placement, size in zip(checked, mesh_sizes(mesh), strict=True):
            if isinstance(placement, Shard):
                full[placement.dim] *= size
    else:
        full = list(shape)
    checked = check_placements(full, mesh, placements, uneven=shape is not None)
    expected = local_shape(full, mesh_sizes(mesh), checked, coordinate_in(mesh))
    if expected != tuple(local.shape):
        raise ValueError(
            f"shape {full} over {describe_mesh(mesh)}, {list(checked)}: local tensor of global rank {dist.get_rank()} "
            f"has shape {list(local.shape)}, expected {list(expected)}"
        )
    return _wrap_local(local.contiguous(), mesh, checked, torch.Size(full))


def from_global(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Create a DTensor from a replicated tensor, without communication.

    Like :func:`torch.distributed.tensor.distribute_tensor` with ``src_data_rank=None``, but differentiable with respect
    to non-leaf tensors: the backward pass gathers the gradient, so it is the full one on every rank.

    Args:
        tensor: full tensor, the same on every rank. Sizes need not be divisible: it is sharded as by
            :func:`torch.chunk`.
        mesh: torch's mesh.
        placements: torch's placements, one per mesh axis. For ``Partial``, the first rank keeps the tensor and the
            others get zeros.

    Raises:
        ValueError: if the placements are invalid.
    """
    return redistribute(from_local(tensor, mesh, [Replicate()] * mesh.ndim), placements)


def to_mesh(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """Move a replicated DTensor to another mesh. Differentiable; no communication.

    Args:
        tensor: DTensor that is replicated over its mesh.
        mesh: mesh that contains this process; all its ranks hold the same tensor.

    Raises:
        ValueError: if the tensor is not replicated, or this process is not in the mesh.
    """
    if any(not isinstance(placement, Replicate) for placement in tensor.placements):
        raise ValueError(
            f"tensor of shape {list(tensor.shape)} over {describe_mesh(tensor.device_mesh)} has placements "
            f"{list(tensor.placements)}, expected Replicate to move it to {describe_mesh(mesh)}: use "
            f"redistribute(tensor, placements, mesh), which gathers it first"
        )
    coordinate_in(mesh)
    local = tensor.to_local(grad_placements=tensor.placements)
    return _wrap_local(local, mesh, (Replicate(),) * mesh.ndim, tensor.shape)


def redistribute(
    tensor: DTensor, placements: Sequence[Placement], mesh: DeviceMesh | None = None, *, links: Links = None
) -> DTensor:
    """Redistribute a DTensor to other placements. Differentiable; all ranks of the mesh call it.

    Like :meth:`DTensor.redistribute`, but runs the cheapest collectives found by :func:`plan_redistribution`, uses a
    real all-to-all on CPU, and also redistributes to ``Partial``. Values and gradients are the same.

    Args:
        tensor: torch's DTensor.
        placements: torch's placements, one per mesh axis. Sizes need not be divisible.
        mesh: another mesh. The tensor is replicated, moved by :func:`to_mesh`, and then redistributed.
        links: link between the ranks of the mesh; see :func:`plan_redistribution`.

    Returns:
        A new, contiguous DTensor; ``tensor`` itself if it has these placements already.

    Raises:
        ValueError: if the old or new placements are invalid, or this process is not in the mesh.
    """
    if mesh is not None and mesh != tensor.device_mesh:
        replicated = redistribute(tensor, [Replicate()] * tensor.device_mesh.ndim)
        return redistribute(to_mesh(replicated, mesh), placements, links=links)
    mesh = tensor.device_mesh
    layout = check_placements(tensor.shape, mesh, tensor.placements, uneven=True)
    target = check_placements(tensor.shape, mesh, placements, uneven=True)
    if layout == target:
        return tensor
    coordinate_in(mesh)
    run = partial(_redistributed, layout=layout, target=target, links=links)
    return with_gradient(tensor, run, partial(redistribute, placements=gradient_placements(layout), links=links))


def _redistributed(tensor: DTensor, layout: Placements, target: Placements, links: Links) -> DTensor:
    """Redistribute without autograd."""
    local, mesh, shape = tensor.to_local(), tensor.device_mesh, tensor.shape
    for step in plan_redistribution(shape, local.dtype, mesh, layout, target, links):
        gathered = [Replicate() if axis in step.axes else placement for axis, placement in enumerate(layout)]
        local = step.apply(local, mesh, shape=local_shape(shape, mesh_sizes(mesh), gathered, coordinate_in(mesh)))
        layout = layout_after(layout, step.collective, step.axes, step.shard_dims)
    return _wrap_local(local.contiguous(), mesh, target, shape)


def _wrap_local(local: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    dtensor: DTensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return dtensor


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """Replace a parameter by an ``nn.Parameter`` that is a DTensor.

    Replaces it wherever ``module`` and its submodules hold it, so tied parameters stay tied. The gradient of the new
    parameter is None; create the optimizer afterwards.

    Args:
        module: module that contains the parameter, at any depth.
        name: name of the parameter as in ``module.named_parameters``, such as ``mlp.up.weight``. Its values are the
            same on every rank.
        mesh: torch's mesh.
        placements: torch's placements, one per mesh axis. Sizes need not be divisible.

    Returns:
        The new parameter.

    Raises:
        ValueError: if the parameter does not exist or is sharded already, or the placements are invalid for it.
    """
    old = dict(module.named_parameters(remove_duplicate=False)).get(name)
    if old is None:
        raise ValueError(
            f"{type(module).__name__} does not have a parameter {name!r}: pass a name of named_parameters()"
        )
    if isinstance(old, DTensor) or description(old) is not None:
        raise ValueError(f"{name} is sharded already: redistribute it, or shard the parameter of the unsharded module")
    new = nn.Parameter(from_global(old.detach(), mesh, placements), requires_grad=old.requires_grad)
    for child in module.modules():
        for local_name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(child, local_name, new)
    return new


def named_sharded_parameters(
    module: nn.Module,
    prefix: str = "",
    recurse: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the sharded parameters of ``module.named_parameters``, each once, under its first name.

    Sharded parameters are DTensors that are not ``Replicate`` on every axis, and the shards of shardconv's layers.

    Args:
        module: module to search.
        prefix: prefix of all names.
        recurse: include the parameters of submodules.
    """
    seen: set[int] = set()
    for path, child in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        shards = dict(child.own_shards()) if isinstance(child, ParallelModule) else {}
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in seen and (name in shards or is_sharded(parameter)):
                seen.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a DTensor that is not fully replicated, or a shard of a shardconv layer."""
    if isinstance(parameter, DTensor):
        return any(not isinstance(placement, Replicate) for placement in parameter.placements)
    shard = description(parameter)
    return shard is not None and shard[0].dim is not None


# --- the sequence of collectives of a redistribution ------------------------------------------------------------------

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
