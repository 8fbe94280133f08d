"""Torch's process groups and meshes that only their members make, in the order of ranks that is asked for.

Owns how they come to be. Knows nothing of axes, and of what is current.
"""

import math
import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

#: Of messages between two processes about their groups, so that they are not taken for a user's.
_TAG = 0x5C0C

#: Of each world the groups that :func:`group_over` made; a world that was ended takes its groups with it.
_made: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def new_members_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """A new group; its members call this, and no others.

    Stands on :func:`torch.distributed.new_group` with ``use_local_synchronization``, and ``sort_ranks=False``: a
    process's rank in the group is its position.

    Args:
        ranks: of the members in the world, in the order that they have in the group.
        backend: torch's name of it; None for that of the world.
    """
    _level(ranks)
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), backend=backend, use_local_synchronization=True, sort_ranks=False
    )
    return group


def group_over(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of these ranks in this order: the world where it is that, else one that is made once."""
    world = dist.group.WORLD
    assert world is not None
    if list(ranks) == list(range(dist.get_world_size())):
        return world
    made = _made.setdefault(world, {})
    key = tuple(ranks)
    if key not in made:
        made[key] = new_members_group(key)
    return made[key]


def serves_cpu(group: dist.ProcessGroup) -> bool:
    """Whether CPU tensors can go over a group: of backend gloo or "cpu:gloo,cuda:nccl" yes, of nccl no."""
    return "cpu:" in dist.get_backend_config(group)


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the tensors of a collective have to be that are on no device by themselves."""
    is_on_device = group is not None and dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_on_device else torch.device("cpu")


def _level(ranks: Sequence[int]) -> None:
    """Bring the members to the same number of groups.

    Torch names a group that only its members make after its ranks and the number of groups that the process is in
    already. Processes with different pasts would wait for each other under different names, until the timeout. That
    number is in no public place.
    """
    rank, first = dist.get_rank(), ranks[0]
    count = torch.tensor(len(_world.pg_names), device=message_device(dist.group.WORLD))
    most = count.clone()
    if rank == first:
        for other in ranks[1:]:
            theirs = torch.empty_like(count)
            dist.recv(theirs, other, tag=_TAG)
            most = torch.maximum(most, theirs)
        for other in ranks[1:]:
            dist.send(most, other, tag=_TAG)
    else:
        dist.send(count, first, tag=_TAG)
        dist.recv(most, first, tag=_TAG)
    for _ in range(int(most) - int(count)):
        dist.new_group([rank], use_local_synchronization=True)


def mesh_over(ranks: Sequence[int], sizes: Sequence[int], names: tuple[str, ...], device_type: str) -> DeviceMesh:
    """Torch's mesh over some of the processes; these call it, and no others.

    Stands on :meth:`torch.distributed.device_mesh.DeviceMesh.from_group`.

    Args:
        ranks: of the processes in the world, in the order of the mesh.
        sizes: of the mesh.
        names: of its dims.
        device_type: of its tensors.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    if device_type == "cuda" and not torch.cuda.is_initialized() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # as init_device_mesh does, and from_group does not
    mesh = torch.tensor(list(ranks)).view(*sizes)
    place = (mesh == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for dim in range(mesh.ndim):  # all processes in this order, so that none waits for one that waits for it
        line = mesh[tuple(slice(None) if other == dim else at for other, at in enumerate(place))]
        groups.append(new_members_group(line.tolist()))
    return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=names)


def checked_ranks(ranks: Sequence[int], world: int) -> tuple[int, ...]:
    """The ranks.

    Raises:
        ValueError: if there are none, one is there twice or not in the world, or this process's is not there.
    """
    chosen = tuple(ranks)
    if not chosen or not all(0 <= rank < world for rank in chosen):
        raise ValueError(f"ranks = {list(chosen)}: give at least one, out of 0 to {world - 1}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"ranks = {list(chosen)}: one of them is there twice")
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank not in chosen:
        raise ValueError(
            f"this process is rank {rank} of the world, which is not in ranks = {list(chosen)}: only those call this"
        )
    return chosen


def fitted_sizes(sizes: dict[str, int], count: int, whole: str) -> dict[str, int]:
    """The sizes, a -1 among them filled in with what the others leave.

    Args:
        sizes: name to size.
        count: what their product has to be.
        whole: whose number that is, for the message.

    Raises:
        ValueError: if it is not.
    """
    product = math.prod(size for size in sizes.values() if size != -1)
    is_open = list(sizes.values()).count(-1) == 1 and product > 0 and count % product == 0
    fitted = {name: count // product if is_open and size == -1 else size for name, size in sizes.items()}
    if min(fitted.values()) < 1 or math.prod(fitted.values()) != count:
        asked = " * ".join(f"{name} {size}" for name, size in sizes.items())
        found = "" if -1 in sizes.values() else f" = {product} processes"
        raise ValueError(
            f"{asked}{found}, and {whole}: they have to be equal; one of the sizes can be -1, what the others leave"
        )
    return fitted
