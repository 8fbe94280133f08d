"""Groups over given ranks, which only their members create, in the given order."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import shardconv
from shardconv import layers, tensor
from shardconv.distributed import (
    as_axis,
    copy_to_tp,
    destroy_parallel,
    gather_from_tp,
    init_parallel,
    reduce_from_tp,
    scatter_to_tp,
)
from shardconv.distributed.groups import group_over, new_members_group
from tests.support.forked import run_python
from tests.support.policies import MlpPolicy


@contextmanager
def parallel(**sizes):
    """Parallel groups in a context; torch's groups remain after it."""
    try:
        yield init_parallel(**sizes)
    finally:
        shardconv.distributed.groups._current.groups = None


def names_of(axis):
    """The global ranks of an axis, all-gathered in its order."""
    return gather_from_tp(torch.tensor([dist.get_rank()]), 0, group=axis).tolist()


def check_two_sets(_):
    """Check groups [1, 3] and [0, 2] at the same time; ``rank % tp`` would be 1 for both ranks of the first."""
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
    """Check that mesh and group have the given order; torch sorts ranks by default."""
    rank = dist.get_rank()
    ranks = [[2, 0], [3, 1]][rank % 2]
    with parallel(tensor=-1, ranks=ranks) as groups:
        assert groups.rank == groups.tensor.rank == groups.mesh["tensor"].get_local_rank() == ranks.index(rank)
        assert names_of(groups.tensor) == ranks
        full = torch.arange(5.0)
        shard = full.chunk(2)[groups.tensor.rank]
        mesh = groups.mesh["tensor"]
        dtensor = DTensor.from_local(shard, mesh, [Shard(0)], shape=full.shape, stride=full.stride())
        assert torch.equal(dtensor.full_tensor(), full)
    dist.barrier()


def check_part_of_the_world(_):
    """Check a group of three of four processes; the fourth gets an error, and no process waits for it."""
    rank = dist.get_rank()
    if rank == 2:
        with pytest.raises(ValueError, match=r"global rank 2 of this process is not in ranks=\[0, 1, 3"):
            init_parallel(tensor=3, ranks=[0, 1, 3])
        with pytest.raises(RuntimeError, match="parallel groups are not initialized"):
            shardconv.distributed.current_groups()
    else:
        with parallel(tensor=3, ranks=[0, 1, 3]) as groups:
            assert names_of(groups.tensor) == [0, 1, 3]
            assert (groups.rank, groups.size) == ([0, 1, None, 2][rank], 3)
    dist.barrier()


def check_different_earlier_groups(_):
    """Check processes that have created different numbers of groups before."""
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


def check_invalid_ranks(_):
    rank = dist.get_rank()
    for ranks, message in (
        ([rank, rank], "contains a duplicate"),
        ([rank, 4], r"pass at least one rank, each from 0 to 3"),
        ([-1, rank], r"pass at least one rank, each from 0 to 3"),
        ([], r"pass at least one rank, each from 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            init_parallel(tensor=len(ranks), ranks=ranks)


def check_sizes_that_do_not_match(_):
    rank, world = dist.get_rank(), r"of processes \(expected 4\): change the sizes, or set one"
    for sizes, message in (
        ({"tensor": 3}, r"tensor 3 \* data 1 \* pipeline 1 = 3 does not match .* \(expected 4\)"),
        ({"tensor": 3, "data": -1}, world),
        ({"tensor": -1, "data": -1}, world),
        ({"tensor": -2}, world),
        ({"tensor": 0, "data": -1}, world),
        ({"tensor": 2, "ranks": [rank]}, rf"pipeline 1 = 2 does not match .* in ranks=\[{rank}\] \(expected 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            init_parallel(**sizes)


def check_groups_of_all_axes(_):
    rank = dist.get_rank()
    for sizes in ({"tensor": 2, "data": -1}, {"tensor": -1, "data": 2}, {"tensor": -1, "pipeline": 2}):
        with parallel(**sizes) as groups:
            assert groups is shardconv.distributed.current_groups()
            assert groups.mesh.mesh_dim_names == ("pipeline", "data", "tensor")
            assert (groups.rank, groups.size, groups.ranks) == (rank, 4, (0, 1, 2, 3))
            assert (groups.tensor.rank, groups.tensor.ranks) == (rank % 2, ((0, 1), (2, 3))[rank // 2])
            outer, alone = (groups.data, groups.pipeline) if "data" in sizes else (groups.pipeline, groups.data)
            assert (outer.rank, outer.ranks) == (rank // 2, ((0, 2), (1, 3))[rank % 2])
            assert (alone.rank, alone.size) == (0, 1)


def check_as_axis(_):
    rank, other = dist.get_rank(), dist.new_group([0, 1])
    with parallel(tensor=2, data=2) as groups:
        assert as_axis() is groups.tensor
        assert as_axis(groups.mesh["data"]).ranks == groups.data.ranks
        assert as_axis(groups.data.group).rank == groups.data.rank
        with pytest.raises(ValueError, match="mesh has 3 dimensions, expected 1"):
            as_axis(groups.mesh)
    if rank > 1:
        with pytest.raises(ValueError, match=f"global rank {rank} is not in the group"):
            as_axis(other)


def check_groups_are_cached(_):
    order = [1, 0, 3, 2]
    assert group_over(range(4)) is dist.group.WORLD
    assert group_over(order) is group_over(order)
    assert dist.get_process_group_ranks(group_over(order)) == order


@pytest.mark.parametrize(
    "check",
    [
        check_two_sets, check_order_is_kept, check_part_of_the_world, check_different_earlier_groups,
        check_invalid_ranks, check_sizes_that_do_not_match, check_groups_of_all_axes, check_as_axis,
        check_groups_are_cached,
    ],
)  # fmt: skip
def test_groups(ranks, check):
    ranks("four", check)


@pytest.fixture
def one_process():
    """Groups of this process alone, without torch.distributed."""
    yield init_parallel(data=-1, ranks=[0])
    destroy_parallel()


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"tensor": -1, "data": 2}])
def test_sizes_without_torchrun_are_refused_with_its_command(sizes):
    with pytest.raises(ValueError, match=r"\(expected 1\): start the script with torchrun --nproc-per-node 2$"):
        init_parallel(**sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": -1, "data": -1, "pipeline": 2},
        {"tensor": -2, "data": -2},
        {"tensor": 2, "ranks": [0]},
    ],
)
def test_sizes_that_more_processes_do_not_match_have_another_remedy(sizes):
    with pytest.raises(ValueError, match=r"\(expected 1\): change the sizes, or set one of them to -1 to compute it$"):
        init_parallel(**sizes)


def test_groups_of_one_process_have_one_rank(one_process):
    groups, axis = one_process, one_process.tensor
    assert (groups.rank, groups.size, groups.ranks, groups.mesh) == (0, 1, (0,), None)
    assert (axis.size, axis.group) == (1, None)
    for wrong, message in (({"ranks": [1]}, "each from 0 to 0"), ({"tensor": 2}, r"of processes \(expected 1\)")):
        with pytest.raises(ValueError, match=message):
            init_parallel(**wrong)


X, WEIGHT, IDS = torch.ones(4, 8), torch.ones(8, 8), torch.arange(4)
#: Calls that use the current tensor axis without ``group=``.
WAYS = {
    "ParallelLinear": lambda: layers.ParallelLinear(8, 8, dim=-1),
    "ParallelLinear that is not parallel": lambda: layers.ParallelLinear(8, 8),
    "VocabParallelClassifier": lambda: layers.VocabParallelClassifier(8, 7),
    "ParallelEmbedding": lambda: layers.ParallelEmbedding(8, 8, dim=0),
    "ParallelCrossEntropyLoss": layers.ParallelCrossEntropyLoss,
    "ParallelDropout": layers.ParallelDropout,
    "parallel_linear": lambda: layers.functional.parallel_linear(X, WEIGHT, dim=-1),
    "parallel_embedding": lambda: layers.functional.parallel_embedding(IDS, WEIGHT, dim=0),
    "parallel_cross_entropy": lambda: layers.functional.parallel_cross_entropy(X, IDS),
    "shard_init_": lambda: layers.init.shard_init_(nn.init.zeros_, X.clone()),
    "init_affine_weight_": lambda: layers.init.init_affine_weight_(WEIGHT.clone(), 8, 8, 8, 0),
    "convert_parallel_linear": lambda: shardconv.convert_parallel_linear(nn.Linear(8, 8), -1),
    "convert_parallel_embedding": lambda: shardconv.convert_parallel_embedding(nn.Embedding(8, 8), 0),
    "convert_model": lambda: shardconv.convert_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), MlpPolicy),
    "copy_to_tp": lambda: copy_to_tp(X),
    "reduce_from_tp": lambda: reduce_from_tp(X),
    "scatter_to_tp": lambda: scatter_to_tp(X),
    "gather_from_tp": lambda: gather_from_tp(X),
    "measure_link": tensor.measure_link,
    "as_dtensor": lambda: tensor.as_dtensor(nn.Linear(8, 8)),
}
NO_GROUPS = r"WORLD_SIZE is 2.*call shardconv\.init_parallel\(tensor=N\) first, or pass group="


@pytest.mark.parametrize("way", WAYS)
def test_missing_groups_under_a_launcher_are_an_error(way, monkeypatch):
    """The environment does not have the tensor parallel size; 1 would be silently wrong."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=NO_GROUPS):
        WAYS[way]()


@pytest.mark.parametrize("size", [None, "", "1"])
def test_one_process_runs_without_groups(size, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert layers.ParallelLinear(8, 8, dim=-1).axis.size == 1
    assert torch.compile(reduce_from_tp, backend="eager", fullgraph=True)(X) is X


SCRIPT = """
import torch, shardconv
from torch import nn

def check(tp):
    layer = shardconv.convert_parallel_linear(nn.Linear(8, 16), -1)
    assert (layer.axis.size, tuple(layer(torch.ones(1, 8)).shape)) == (tp, (1, 16 // tp)), layer

torch.manual_seed(0)
try:
    check(1)
except RuntimeError as error:
    print(f"refused: {error}", flush=True)
torch.distributed.init_process_group("gloo")
check(2)  # all processes, as in torch
shardconv.init_parallel(tensor=1, data=2)
check(1)
shardconv.destroy_parallel()
"""


def test_under_torchrun(tmp_path):
    """An error without groups; all processes with torch's group; the given sizes with init_parallel."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("refused: WORLD_SIZE is 2") == 2


KEPT = """
import atexit
from pathlib import Path

def report():
    print(any("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm")), flush=True)

atexit.register(report)  # runs after the functions that are registered later
import torch.distributed as dist
import shardconv
from shardconv.layers import ColumnParallelLinear
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layer = ColumnParallelLinear(8, 16)
report()
shardconv.destroy_parallel()
report()
"""


def test_threads_of_groups_end_before_the_interpreter():
    """A layer that is in use to the end holds its group, whose threads could abort the interpreter while it exits."""
    result = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=200, check=False)
    assert (result.returncode, result.stdout.split()) == (0, ["True", "True", "False"]), result.stderr
