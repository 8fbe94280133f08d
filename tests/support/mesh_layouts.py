"""Layouts of tensors over meshes, computed with torch.chunk, and a record of collectives."""

from contextlib import contextmanager
from functools import cache
from itertools import product
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardconv.distributed.operations import ALL_GATHER, REDUCE_SCATTER

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
ALL = (R, P, S0, S1)
#: torch's name of a collective to shardconv's; :func:`spied` forbids all others.
COLLECTIVES = {
    ALL_GATHER: "all_gather",
    "all_reduce": "all_reduce",
    REDUCE_SCATTER: "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
OTHERS = ("all_gather", "all_gather_object", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter")


@cache
def mesh_2d():
    """A mesh of all four ranks, two by two."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


@cache
def mesh_1d(ranks, group):
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tensor",))


def mesh_of(axis, ndim):
    return mesh_2d() if ndim == 2 else mesh_1d(axis.ranks, axis.group)


def layouts(ndim):
    return list(product(ALL, repeat=ndim))


def gradient_of(layout):
    """The layout of a tensor's gradient."""
    return tuple(R if each == P else each for each in layout)


def local_shard(full, mesh, layout):
    """This rank's shard of a tensor, without partial sums."""
    for index, size, each in zip(mesh.get_coordinate(), mesh.shape, layout, strict=True):
        if isinstance(each, Shard):
            chunks = full.chunk(size, each.dim)
            full = chunks[index] if index < len(chunks) else full.narrow(each.dim, 0, 0)
    return full.clone()


def lying(full, mesh, layout):
    """This rank's shard of a tensor; for partial sums, numbers that add up to it."""
    count, mine = 1, 0
    for index, size, each in zip(mesh.get_coordinate(), mesh.shape, layout, strict=True):
        if each == P:
            count, mine = count * size, mine * size + index
    generator = torch.Generator().manual_seed(7)
    summands = [torch.randint(-9, 9, full.shape, generator=generator).to(full.dtype) for _ in range(count - 1)]
    return local_shard([*summands, full - sum(summands)][mine], mesh, layout)


def numbers(shape, seed):
    """Integers, whose sums are exact in any order."""
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(seed)).double()


def added_up(local, mesh, layout):
    """The shard with its partial sums added; a collective call."""
    total = local.clone()
    for number, each in enumerate(layout):
        if each == P:
            dist.all_reduce(total, group=mesh.get_group(number))
    return total


@contextmanager
def spied():
    """A list with the kind of each collective and the bytes of its larger tensor."""
    seen = []

    def spy(name):
        real = getattr(dist, name)

        def collective(*tensors, **options):
            seen.append((COLLECTIVES[name], max(each.nbytes for each in tensors if isinstance(each, torch.Tensor))))
            return real(*tensors, **options)

        return collective

    def forbidden(*_, **__):
        raise AssertionError("this collective is not counted")

    names = {name: spy(name) for name in COLLECTIVES} | dict.fromkeys(OTHERS, forbidden)
    with patch.multiple(dist, **names):
        yield seen
