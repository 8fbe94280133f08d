"""Groups over given ranks: made by their members alone, in the order that was asked for."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import shardconv
from shardconv.distributed import as_axis, destroy_parallel, gather_from_tp, init_parallel, reduce_from_tp
from shardconv.distributed.members import group_over, new_members_group


@contextmanager
def parallel(**sizes):
    """Groups for a while; torch's stay, the current ones go."""
    try:
        yield init_parallel(**sizes)
    finally:
        shardconv.distributed.groups._current = None


def names_of(axis):
    """The ranks of an axis, told by each of them in the axis's own order."""
    return gather_from_tp(torch.tensor([dist.get_rank()]), 0, group=axis).tolist()


def check_two_sets(_):
    """[1, 3] beside [0, 2], at once: torch's ``rank % tp`` would say 1 and 1 for the first."""
    rank = dist.get_rank()
    ranks = [rank % 2, rank % 2 + 2]
    with parallel(tensor=2, ranks=ranks) as groups:
        assert (groups.rank, groups.size, groups.ranks) == (rank // 2, 2, tuple(ranks))
        assert (groups.tensor.rank, groups.tensor.size, groups.tensor.ranks) == (rank // 2, 2, tuple(ranks))
        assert (groups.data.rank, groups.data.size, groups.data.ranks) == (0, 1, (rank,))
        assert groups.mesh.mesh.tolist() == [[ranks]]
        assert groups.mesh["tensor"].get_local_rank() == rank // 2
        assert names_of(groups.tensor) == ranks
        assert reduce_from_tp(torch.tensor([10.0**rank])).item() == sum(10.0**other for other in ranks)
    dist.barrier()


def check_order_is_kept(_):
    """The mesh and the group have the given order; torch sorts by default, and then they would differ."""
    rank = dist.get_rank()
    ranks = [[2, 0], [3, 1]][rank % 2]
    with parallel(tensor=-1, ranks=ranks) as groups:
        assert groups.rank == groups.tensor.rank == groups.mesh["tensor"].get_local_rank() == ranks.index(rank)
        assert names_of(groups.tensor) == ranks
        full = torch.arange(5.0)
        shard = full.chunk(2)[groups.tensor.rank]
        mesh = groups.mesh["tensor"]
        whole = DTensor.from_local(shard, mesh, [Shard(0)], shape=full.shape, stride=full.stride())
        assert torch.equal(whole.full_tensor(), full)
    dist.barrier()


def check_part_of_the_world(_):
    """Three processes out of four; the fourth is told, and not waited for."""
    rank = dist.get_rank()
    if rank == 2:
        with pytest.raises(ValueError, match=r"this process is rank 2 of the world, which is not in ranks = \[0, 1, 3"):
            init_parallel(tensor=3, ranks=[0, 1, 3])
        with pytest.raises(RuntimeError, match="there are no groups yet"):
            shardconv.current_groups()
    else:
        with parallel(tensor=3, ranks=[0, 1, 3]) as groups:
            assert names_of(groups.tensor) == [0, 1, 3]
            assert (groups.rank, groups.size) == ([0, 1, None, 2][rank], 3)
    dist.barrier()


def check_different_pasts(_):
    """Processes that have made other groups, and not as many, still meet."""
    rank = dist.get_rank()
    if rank == 3:
        for _ in range(3):
            new_members_group([3])
    if rank in (0, 3):
        with parallel(tensor=2, ranks=[3, 0]) as groups:
            assert names_of(groups.tensor) == [3, 0]
    with parallel(data=2, tensor=2, ranks=[3, 2, 1, 0]) as groups:
        assert groups.mesh.mesh.tolist() == [[[3, 2], [1, 0]]]
        assert names_of(groups.tensor) == ([1, 0] if rank < 2 else [3, 2])
        assert names_of(groups.data) == [[2, 0], [3, 1]][rank % 2]
        assert groups.rank == 3 - rank


def check_refusals(_):
    rank = dist.get_rank()
    for ranks, message in (
        ([rank, rank], "one of them is there twice"),
        ([rank, 4], r"give at least one, out of 0 to 3"),
        ([-1, rank], r"give at least one, out of 0 to 3"),
        ([], r"give at least one, out of 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            init_parallel(tensor=len(ranks), ranks=ranks)
    with pytest.raises(ValueError, match=rf"data 1 \* pipeline 1 = 2 processes, and ranks = \[{rank}\] are 1"):
        init_parallel(tensor=2, ranks=[rank])
    for sizes in ({"tensor": 3, "data": -1}, {"tensor": -1, "data": -1}, {"tensor": -2}, {"tensor": 0, "data": -1}):
        with pytest.raises(ValueError, match=r"and the world has 4: they have to be equal; one of the sizes can be -1"):
            init_parallel(**sizes)


def check_what_is_left(_):
    for sizes in ({"tensor": 2, "data": -1}, {"tensor": -1, "data": 2}, {"tensor": -1, "pipeline": 2}):
        with parallel(**sizes) as groups:
            found = {"tensor": groups.tensor.size, "data": groups.data.size, "pipeline": groups.pipeline.size}
            assert found == {"tensor": 2, "data": 1, "pipeline": 1} | dict.fromkeys(sizes, 2)
            assert (groups.rank, groups.size, groups.ranks) == (dist.get_rank(), 4, (0, 1, 2, 3))


def check_cpu_groups(axis):
    assert axis.has_cpu_group
    assert axis.cpu_group is axis.group
    assert axis.with_cpu_group() is axis
    both = as_axis(dist.new_group(list(range(4)), backend="cpu:gloo,cuda:gloo"))
    assert both.cpu_group is both.group
    device_only = as_axis(new_members_group(axis.ranks, "cuda:gloo"))
    assert not device_only.has_cpu_group
    with pytest.raises(RuntimeError, match=r"has no group for CPU tensors: have all its ranks call with_cpu_group\(\)"):
        _ = device_only.cpu_group
    found = device_only.with_cpu_group()
    assert found.has_cpu_group
    assert found.group is device_only.group
    message = torch.tensor([dist.get_rank()])
    dist.all_reduce(message, group=found.cpu_group)
    assert message.item() == sum(axis.ranks)


def check_made_once(_):
    order = [1, 0, 3, 2]
    assert group_over(range(4)) is dist.group.WORLD
    assert group_over(order) is group_over(order)
    assert dist.get_process_group_ranks(group_over(order)) == order


@pytest.mark.parametrize(
    "check",
    [
        check_two_sets, check_order_is_kept, check_part_of_the_world, check_different_pasts, check_refusals,
        check_what_is_left, check_made_once,
    ],
)  # fmt: skip
def test_groups(ranks, check):
    ranks("four", check)


@pytest.mark.parametrize("layout", ["pairs", "strided", "four"])
def test_cpu_groups(ranks, layout):
    ranks(layout, check_cpu_groups)


def test_one_process_alone():
    try:
        groups = init_parallel(data=-1, ranks=[0])
        assert (groups.rank, groups.size, groups.ranks, groups.mesh) == (0, 1, (0,), None)
        assert groups.tensor.has_cpu_group
        assert groups.tensor.cpu_group is None
        assert groups.tensor.with_cpu_group() is groups.tensor
        with pytest.raises(ValueError, match="out of 0 to 0"):
            init_parallel(ranks=[1])
    finally:
        destroy_parallel()
