"""Create process groups and meshes over a subset of the processes, in a given order.

Only the members take part; torch's default functions involve all processes.
"""

import math
import os
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

from shardconv.distributed.devices import device_module, local_device, message_device

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


def resolve_sizes(sizes: dict[str, int], count: int, source: str) -> dict[str, int]:
    """Replace a size of -1 by the quotient of ``count`` and the other sizes.

    Args:
        sizes: axis name to size.
        count: number of processes, the required product of the sizes.
        source: origin of ``count``, for the error message.

    Raises:
        ValueError: if the product of the sizes is not ``count``.
    """
    product = math.prod(size for size in sizes.values() if size != -1)
    can_infer = list(sizes.values()).count(-1) == 1 and product > 0 and count % product == 0
    resolved = {name: count // product if can_infer and size == -1 else size for name, size in sizes.items()}
    if min(resolved.values()) < 1 or math.prod(resolved.values()) != count:
        requested = " * ".join(f"{name} {size}" for name, size in sizes.items())
        total = "" if -1 in sizes.values() else f" = {product}"
        raise ValueError(
            f"{requested}{total} does not match the number of processes {source} (expected {count}): change the "
            f"sizes, or set one of them to -1 to compute it"
        )
    return resolved
