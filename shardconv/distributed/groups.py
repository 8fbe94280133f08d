"""Process groups by axis: which processes hold the shards of one tensor, and which hold replicas.

Owns the one piece of global state, the current groups, and how a ``group=`` argument is read. Stands on torch's
DeviceMesh; knows nothing of layers or placements.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardconv.distributed.exchange import Exchange
from shardconv.distributed.new_groups import (
    checked_ranks,
    fitted_sizes,
    mesh_over,
    message_device,
    new_members_group,
    serves_cpu,
)

_NAMES = ("pipeline", "data", "tensor")


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the processes, as this process sees it.

    Attributes:
        name: ``tensor``, ``data``, ``pipeline``, or what a mesh calls it.
        rank: of this process in the group, from 0.
        size: number of processes in the group.
        ranks: their ranks in the world.
        group: torch's process group; None where it would be of this process alone and none was made.
        exchange: for small messages on a CPU, memory that the ranks share; None for torch's group alone.
        beside: a group that serves CPU tensors, where ``group`` does not and :meth:`with_cpu_group` made one.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    exchange: Exchange | None = None
    beside: dist.ProcessGroup | None = None

    @property
    def has_cpu_group(self) -> bool:
        """Whether CPU tensors can go over the axis; over one process they always can."""
        return self.size == 1 or self.beside is not None or (self.group is not None and serves_cpu(self.group))

    @property
    def cpu_group(self) -> dist.ProcessGroup | None:
        """Torch's group over which CPU tensors go: ``group`` itself where its backend is "gloo" or has a "cpu:" part.

        Raises:
            RuntimeError: if there is none.
        """
        if not self.has_cpu_group:
            raise RuntimeError(
                f"{self} has no group for CPU tensors: have all its ranks call with_cpu_group(), or start "
                f'torch.distributed with backend="cpu:gloo,cuda:nccl"'
            )
        return self.beside or self.group

    def with_cpu_group(self) -> Self:
        """This axis, with a group for CPU tensors; all its ranks call it. Itself, where it has one."""
        return self if self.has_cpu_group else replace(self, beside=new_members_group(self.ranks, "gloo"))

    def with_exchange(self) -> Self:
        """This axis, with memory that the ranks share where they are on one machine; all ranks call it.

        What goes through it is no collective of torch's, and a count of those does not see it.
        """
        return replace(self, exchange=None if self.size == 1 else Exchange.open(self.size, self.rank, self.group))

    @property
    def message_device(self) -> torch.device:
        """Where the tensors of a collective have to be that are on no device by themselves."""
        return message_device(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: a copy of a layer belongs to the same processes."""
        return self

    def __reduce__(self) -> Any:
        """A group cannot be stored: where the axis is read, one of the same processes has to be there."""
        return _stored_axis, (self.name, self.rank, self.ranks)

    def __repr__(self) -> str:
        """Without the group, whose address says nothing."""
        return f"Axis({self.name}, rank {self.rank} of {self.size}, ranks {list(self.ranks)})"


#: What every ``group=`` takes: a process group, a one-dimensional mesh, an axis, or None for the current tensor axis.
GroupLike = dist.ProcessGroup | DeviceMesh | Axis | None


@dataclass(frozen=True, eq=False)
class ParallelGroups:
    """The axes of the current processes.

    Attributes:
        tensor: the processes that hold the shards of the same tensors; they stand side by side in ``ranks``.
        data: the processes that hold the same shards and see other data.
        pipeline: the processes that hold other layers.
        mesh: torch's mesh over all of them, of shape (pipeline, data, tensor); None for a single process without
            ``torch.distributed``.
        ranks: of all of them, in the world, in the order of the mesh.
    """

    tensor: Axis
    data: Axis
    pipeline: Axis
    mesh: DeviceMesh | None
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """This process's position in ``ranks``."""
        return 0 if self.mesh is None else self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        """Number of processes of all axes together."""
        return len(self.ranks)


_current: ParallelGroups | None = None


def init_parallel(
    *,
    tensor: int = 1,
    data: int = 1,
    pipeline: int = 1,
    device_type: str | None = None,
    ranks: Sequence[int] | None = None,
) -> ParallelGroups:
    """Make the groups, and make them current.

    ``torch.distributed`` is started if it is not, from the environment that torchrun sets; that takes all processes.
    Stands on :func:`torch.distributed.device_mesh.init_device_mesh`, and on :meth:`DeviceMesh.from_group` for given
    ranks; the mesh has the shape (pipeline, data, tensor).

    Args:
        tensor: processes that share the tensors of a layer. One of the three sizes may be -1: what the others leave.
        data: processes that hold the same.
        pipeline: processes that follow each other.
        device_type: ``cpu`` or ``cuda``; by default cuda where there is one.
        ranks: of the processes in the world, in their order in the mesh; by default all. These call the function, and
            no others; processes in none of them can make groups of their own at the same time.

    Raises:
        ValueError: if the sizes do not multiply to the number of processes, if ``ranks`` has one twice, one that is
            not in the world, or not this process's.

    Example:
        >>> groups = init_parallel(tensor=1, data=-1)
        >>> groups.tensor.size, groups.size, current_groups() is groups
        (1, 1, True)
    """
    global _current  # noqa: PLW0603 - the one piece of global state
    world = dist.get_world_size() if dist.is_initialized() else launched_size()
    chosen = tuple(range(world)) if ranks is None else checked_ranks(ranks, world)
    whole = f"the world has {world}" if ranks is None else f"ranks = {list(ranks)} are {len(chosen)}"
    by_name = fitted_sizes({"tensor": tensor, "data": data, "pipeline": pipeline}, len(chosen), whole)
    sizes = tuple(by_name[name] for name in _NAMES)
    if world == 1 and not dist.is_initialized():
        alone = {name: Axis(name, 0, 1, (0,), None) for name in _NAMES}
        _current = ParallelGroups(**alone, mesh=None, ranks=chosen)
        return _current
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if ranks is None:
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=_NAMES)
    else:
        mesh = mesh_over(chosen, sizes, _NAMES, device_type)
    _current = ParallelGroups(**{name: _of_mesh(mesh[name]) for name in _NAMES}, mesh=mesh, ranks=chosen)
    return _current


def current_groups() -> ParallelGroups:
    """The groups that :func:`init_parallel` made last.

    Raises:
        RuntimeError: if it was not called.
    """
    if _current is None:
        raise RuntimeError("there are no groups yet: call shardconv.init_parallel(tensor=...) first")
    return _current


def has_groups() -> bool:
    """Whether :func:`init_parallel` was called."""
    return _current is not None


def destroy_parallel() -> None:
    """Forget the current groups, and end ``torch.distributed`` if it runs."""
    global _current  # noqa: PLW0603 - the one piece of global state
    _current = None
    if dist.is_initialized():
        dist.destroy_process_group()


def as_axis(group: GroupLike = None) -> Axis:
    """What a ``group=`` argument means.

    Args:
        group: a process group, a one-dimensional mesh, or an axis. None for the current tensor axis; before
            :func:`init_parallel`, for all processes, as in torch.

    Raises:
        ValueError: if this process is not in the group, or a mesh has several dimensions.
        RuntimeError: if ``group`` is None, a launcher such as torchrun started several processes, and neither
            ``torch.distributed`` nor :func:`init_parallel` connected them.
    """
    if isinstance(group, Axis):
        return group
    if group is None:
        if _current is not None:
            return _current.tensor
        if not dist.is_initialized():
            return _single_process()
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        return _of_mesh(group)
    return _of_group("tensor", group)


def launched_size() -> int:
    """Number of processes that a launcher such as torchrun started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def _single_process() -> Axis:
    if (size := launched_size()) > 1:
        raise RuntimeError(
            f"WORLD_SIZE is {size} but there are no process groups, so the tensor parallel size is unknown: call "
            f"shardconv.init_parallel(tensor=N) first, or pass group= (without tensor parallelism, "
            f"init_parallel(data=-1); for a single process, unset WORLD_SIZE)"
        )
    return Axis("tensor", 0, 1, (0,), None)


def _stored_axis(name: str, rank: int, ranks: tuple[int, ...]) -> Axis:
    if len(ranks) == 1:
        return Axis(name, 0, 1, ranks, None)
    known = [as_axis()] if _current is None else [_current.tensor, _current.data, _current.pipeline]
    for axis in known:
        if (axis.rank, axis.ranks) == (rank, ranks):
            return axis
    raise RuntimeError(
        f"this was saved by rank {rank} of the processes {list(ranks)}, and has to be loaded by it: call "
        f"shardconv.init_parallel first, as there; for another number of processes store gather_state_dict(module)"
    )


def _of_mesh(mesh: DeviceMesh) -> Axis:
    if mesh.ndim != 1:
        raise ValueError(f"a mesh of {mesh.ndim} dimensions is no group: take one of them, as in mesh['tensor']")
    name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "tensor"
    return _of_group(name, mesh.get_group())


def _of_group(name: str, group: Any) -> Axis:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"this process, rank {dist.get_rank()} of the world, is not in the group")
    return Axis(name, rank, dist.get_world_size(group), tuple(dist.get_process_group_ranks(group)), group)
