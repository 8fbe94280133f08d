"""Process groups per parallel axis: tensor, data and pipeline.

Holds the current groups, the only global state, and resolves ``group=`` arguments. Built on torch's DeviceMesh. Groups
over a subset of the processes, in a given order, are created by their members only; torch's default functions involve
all processes.
"""

import atexit
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _world

from shardconv.distributed.devices import device_module, device_types, local_device, message_device
from shardconv.distributed.shared_memory import SharedMemoryChannel
from shardconv.support.arguments import checked

_NAMES = ("pipeline", "data", "tensor")


@dataclass(frozen=True, eq=False)
class Axis:
    """The process group along one parallel axis, seen from this process.

    Attributes:
        name: ``tensor``, ``data``, ``pipeline``, or the dim name of a mesh.
        rank: rank of this process in the group.
        size: number of ranks in the group.
        ranks: global ranks of the group, in its order.
        group: torch's process group; None for a single process without one.
        channel: shared-memory channel for small CPU tensors; None to use ``group`` only.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    channel: SharedMemoryChannel | None = None

    def __post_init__(self) -> None:
        if self.group is not None:
            _group_axes.add(self)

    def with_shared_memory(self) -> Self:
        """Return this axis with a shared-memory channel, if its ranks are on one machine. All its ranks call it.

        Messages on the channel are not collectives of torch, so counters of those do not see them.
        """
        if self.size == 1 or self.group is None:
            return self
        return replace(self, channel=SharedMemoryChannel.open(self.size, self.rank, self.group))

    @property
    def message_device(self) -> torch.device:
        """Device for tensors that exist only to be sent, such as flags and counts."""
        return message_device(self.group)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return this axis: a copy of a layer uses the same processes."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without the process group; unpickling looks up an existing axis of the same ranks."""
        return _restore_axis, (self.name, self.rank, self.ranks)

    def __repr__(self) -> str:
        """Omit the process group, whose repr is a memory address."""
        return f"Axis({self.name}, rank {self.rank} of {self.size}, ranks {list(self.ranks)})"


#: The axes with a process group.
_group_axes: WeakSet[Axis] = WeakSet()


@atexit.register
def _release_groups() -> None:
    """Release destroyed process groups, which axes and so models hold, so that their threads end.

    Threads of gloo take the GIL to free tensors of earlier operations, which aborts an interpreter that is exiting.
    """
    for axis in () if dist.is_initialized() else _group_axes:
        object.__setattr__(axis, "group", None)


#: Type of ``group=`` arguments: process group, one-dimensional mesh, axis, or None for the current tensor axis.
GroupLike = dist.ProcessGroup | DeviceMesh | Axis | None


@dataclass(frozen=True, eq=False)
class ParallelGroups:
    """The parallel axes of this process.

    Attributes:
        tensor: ranks that hold the shards of the same tensors; adjacent in ``ranks``.
        data: ranks that hold the same shards and process different data, one in each data group.
        pipeline: ranks that hold different layers.
        stage: ranks of all data groups of a pipeline stage; ``tensor`` if there is one.
        mesh: torch's mesh of shape (pipeline, data, tensor); None for a single process without ``torch.distributed``.
        ranks: global ranks of all processes, in the order of the mesh.
    """

    tensor: Axis
    data: Axis
    pipeline: Axis
    stage: Axis
    mesh: DeviceMesh | None
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Position of this process in ``ranks``."""
        return 0 if self.mesh is None else self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        """Number of processes in the mesh."""
        return len(self.ranks)


class _State:
    """The only global state."""

    groups: ParallelGroups | None = None


_current = _State()


@checked
def init_parallel(
    *,
    tensor: int = 1,
    data: int = 1,
    pipeline: int = 1,
    device_type: str | None = None,
    ranks: Sequence[int] | None = None,
) -> ParallelGroups:
    """Create the parallel groups and make them current.

    Initializes ``torch.distributed`` from the environment that torchrun sets, unless it is initialized already; all
    processes have to take part in that. Uses :func:`torch.distributed.device_mesh.init_device_mesh`, or
    :meth:`DeviceMesh.from_group` if ``ranks`` is passed. The mesh has the shape (pipeline, data, tensor).

    Args:
        tensor: tensor parallel size. One of the three sizes can be -1; it is then computed from the other two.
        data: data parallel size.
        pipeline: pipeline parallel size.
        device_type: ``cpu``, ``cuda``, ``xpu``; by default an accelerator's if there is one.
        ranks: global ranks in the order of the mesh; by default all. Only these ranks call this function. The others
            can create other groups at the same time.

    Raises:
        ValueError: if the product of the sizes is not the number of processes, or ``ranks`` contains a duplicate or a
            rank outside the world, or does not contain the rank of this process.

    Example:
        >>> groups = init_parallel(tensor=1, data=-1)
        >>> groups.tensor.size, groups.size, current_groups() is groups
        (1, 1, True)
    """
    world = dist.get_world_size() if dist.is_initialized() else launched_size()
    members = tuple(range(world)) if ranks is None else check_ranks(ranks, world)
    by_name = resolve_sizes({"tensor": tensor, "data": data, "pipeline": pipeline}, world, ranks)
    sizes = tuple(by_name[name] for name in _NAMES)
    if world == 1 and not dist.is_initialized():
        axes = {name: Axis(name, 0, 1, (0,), None) for name in _NAMES}
        _current.groups = ParallelGroups(**axes, stage=axes["tensor"], mesh=None, ranks=members)
        return _current.groups
    device_type = device_type or next(iter(device_types()))
    if ranks is None:
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=_NAMES)
    else:
        mesh = mesh_over(members, sizes, _NAMES, device_type)
    _current.groups = _groups_of(mesh, members)
    return _current.groups


def other_groups(*, tensor: int, data: int, pipeline: int, device_type: str) -> ParallelGroups:
    """Groups of all processes, in order: the current ones, or new ones that do not become current."""
    found, ranks = _current.groups, tuple(range(dist.get_world_size()))
    sizes = (pipeline, data, tensor)
    if found is not None and ((found.pipeline.size, found.data.size, found.tensor.size), found.ranks) == (sizes, ranks):
        return found
    return _groups_of(init_device_mesh(device_type, sizes, mesh_dim_names=_NAMES), ranks)


def _groups_of(mesh: DeviceMesh, ranks: tuple[int, ...]) -> ParallelGroups:
    axes = {name: _mesh_axis(mesh[name]) for name in _NAMES}
    stage = axes["tensor"]
    if axes["data"].size > 1:
        stage = _group_axis("stage", group_over(mesh["data", "tensor"].mesh.flatten().tolist()))
    return ParallelGroups(**axes, stage=stage, mesh=mesh, ranks=ranks)


def current_groups() -> ParallelGroups:
    """Return the groups that the last call of :func:`init_parallel` created.

    Raises:
        RuntimeError: if :func:`init_parallel` was not called.
    """
    if _current.groups is None:
        raise RuntimeError("parallel groups are not initialized: call shardconv.init_parallel(tensor=...) first")
    return _current.groups


def has_groups() -> bool:
    """Whether :func:`init_parallel` was called."""
    return _current.groups is not None


def destroy_parallel() -> None:
    """Clear the current groups, and destroy the process groups of ``torch.distributed`` if it is initialized."""
    _current.groups = None
    if dist.is_initialized():
        dist.destroy_process_group()


def as_axis(group: GroupLike = None) -> Axis:
    """Resolve a ``group=`` argument to an axis.

    Args:
        group: process group, one-dimensional mesh, or axis. None means the current tensor axis or, before
            :func:`init_parallel`, all processes, as in torch.

    Raises:
        ValueError: if this process is not in the group, or the mesh does not have exactly one dimension.
        RuntimeError: if ``group`` is None, a launcher such as torchrun started several processes, and
            ``torch.distributed`` is not initialized.
    """
    if isinstance(group, Axis):
        return group
    if group is None:
        if _current.groups is not None:
            return _current.groups.tensor
        if not dist.is_initialized():
            return _single_axis()
        group = dist.group.WORLD
        assert group is not None
    if isinstance(group, DeviceMesh):
        return _mesh_axis(group)
    return _group_axis("tensor", group)


def launched_size() -> int:
    """Number of processes that a launcher such as torchrun started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def _single_axis() -> Axis:
    if (size := launched_size()) > 1:
        raise RuntimeError(
            f"WORLD_SIZE is {size} but no process group is initialized, so the tensor parallel size is unknown: call "
            f"shardconv.init_parallel(tensor=N) first, or pass group= (without tensor parallelism, call "
            f"init_parallel(data=-1); for a single process, unset WORLD_SIZE)"
        )
    return Axis("tensor", 0, 1, (0,), None)


def _restore_axis(name: str, rank: int, ranks: tuple[int, ...]) -> Axis:
    if len(ranks) == 1:
        return Axis(name, 0, 1, ranks, None)
    groups = _current.groups
    axes = [as_axis()] if groups is None else [groups.tensor, groups.data, groups.pipeline, groups.stage]
    for axis in axes:
        if (axis.rank, axis.ranks) == (rank, ranks):
            return axis
    raise RuntimeError(
        f"the {name} axis was pickled as rank {rank} of ranks {list(ranks)}, and this process does not have this axis: "
        f"call shardconv.init_parallel as in the process that saved it; to load on other ranks, save "
        f"gather_state_dict(module)"
    )


def _mesh_axis(mesh: DeviceMesh) -> Axis:
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions, expected 1: select one, as in mesh['tensor']")
    name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "tensor"
    return _group_axis(name, mesh.get_group())


def _group_axis(name: str, group: dist.ProcessGroup) -> Axis:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not in the group: call this only on ranks of the group")
    return Axis(name, rank, dist.get_world_size(group), tuple(dist.get_process_group_ranks(group)), group)


#: Tag of the messages that set up a group, so that they do not match the receives of a user.
_TAG = 0x5C0C

#: World group to the groups that :func:`group_over` created in it, by ranks. Weak, so destroyed worlds are dropped.
_group_cache: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def new_members_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Create a process group. Its members call this; other processes must not.

    Uses :func:`torch.distributed.new_group` with ``use_local_synchronization=True`` and ``sort_ranks=False``: the rank
    of a process in the group is its position in ``ranks``.

    Args:
        ranks: global ranks of the members, in the order of the group.
        backend: torch's name of the backend; None for the backend of the world.
    """
    _align_group_counts(ranks)
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), backend=backend, use_local_synchronization=True, sort_ranks=False
    )
    return group


def group_over(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of these global ranks in this order: the world group if it matches, else a cached new one."""
    world = dist.group.WORLD
    assert world is not None
    if list(ranks) == list(range(dist.get_world_size())):
        return world
    groups = _group_cache.setdefault(world, {})
    key = tuple(ranks)
    if key not in groups:
        groups[key] = new_members_group(key)
    return groups[key]


def _align_group_counts(ranks: Sequence[int]) -> None:
    """Create dummy groups until all members belong to the same number of groups.

    With ``use_local_synchronization``, torch derives the name of a group from its ranks and the number of groups of
    the process. Members with different numbers would use different names and wait for each other until the timeout.
    Torch does not expose that number publicly.
    """
    rank, first = dist.get_rank(), ranks[0]
    count = torch.tensor(len(_world.pg_names), device=message_device(dist.group.WORLD))
    largest = count.clone()
    if rank == first:
        for peer in ranks[1:]:
            received = torch.empty_like(count)
            dist.recv(received, peer, tag=_TAG)
            largest = torch.maximum(largest, received)
        for peer in ranks[1:]:
            dist.send(largest, peer, tag=_TAG)
    else:
        dist.send(count, first, tag=_TAG)
        dist.recv(largest, first, tag=_TAG)
    for _ in range(int(largest) - int(count)):
        dist.new_group([rank], use_local_synchronization=True)


def mesh_over(ranks: Sequence[int], sizes: Sequence[int], names: tuple[str, ...], device_type: str) -> DeviceMesh:
    """Create a mesh over some of the processes. These call this; other processes must not.

    Uses :meth:`torch.distributed.device_mesh.DeviceMesh.from_group`.

    Args:
        ranks: global ranks in the order of the mesh.
        sizes: shape of the mesh.
        names: names of its dims.
        device_type: device type of its tensors.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    if (module := device_module(torch.device(device_type))) is not None and not module.is_initialized():
        torch.accelerator.set_device_index(local_device(device_type).index)  # from_group does not set it
    mesh = torch.tensor(list(ranks)).view(*sizes)
    coordinate = (mesh == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for dim in range(mesh.ndim):  # the same order on all processes avoids a deadlock
        index = tuple(slice(None) if other == dim else position for other, position in enumerate(coordinate))
        groups.append(new_members_group(mesh[index].tolist()))
    return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=names)


def check_ranks(ranks: Sequence[int], world: int) -> tuple[int, ...]:
    """Check that ranks are distinct global ranks that include this process, and return them as a tuple.

    Raises:
        ValueError: if ``ranks`` is empty, contains a duplicate or a rank outside the world, or does not contain the
            rank of this process.
    """
    members = tuple(ranks)
    if not members or not all(0 <= rank < world for rank in members):
        raise ValueError(f"ranks={list(members)} is invalid: pass at least one rank, each from 0 to {world - 1}")
    if len(set(members)) < len(members):
        raise ValueError(f"ranks={list(members)} contains a duplicate: pass each rank once")
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank not in members:
        raise ValueError(
            f"global rank {rank} of this process is not in ranks={list(members)}: call this only on those ranks"
        )
    return members


def resolve_sizes(sizes: dict[str, int], world: int, ranks: Sequence[int] | None) -> dict[str, int]:
    """Replace a size of -1 by the number of processes, divided by the other sizes.

    Args:
        sizes: axis name to size.
        world: number of processes.
        ranks: global ranks of the processes that take part; None for all.

    Raises:
        ValueError: if the product of the sizes is not the number of processes.
    """
    count, source = (world, "") if ranks is None else (len(ranks), f" in ranks={list(ranks)}")
    product = math.prod(size for size in sizes.values() if size != -1)
    can_infer = list(sizes.values()).count(-1) == 1 and product > 0 and count % product == 0
    resolved = {name: count // product if can_infer and size == -1 else size for name, size in sizes.items()}
    if min(resolved.values()) < 1 or math.prod(resolved.values()) != count:
        requested = " * ".join(f"{name} {size}" for name, size in sizes.items())
        total = "" if -1 in sizes.values() else f" = {product}"
        remedy = "change the sizes, or set one of them to -1 to compute it"
        is_valid = all(size > 0 or size == -1 for size in sizes.values()) and list(sizes.values()).count(-1) < 2
        if world == 1 and ranks is None and is_valid and product > 1:
            remedy = f"start the script with torchrun --nproc-per-node {product}"
        raise ValueError(
            f"{requested}{total} does not match the number of processes{source} (expected {count}): {remedy}"
        )
    return resolved
