"""Groups and the four operations over them, compared with sums and chunks by torch."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import shardconv
from shardconv.distributed import (
    as_axis,
    copy_to_tp,
    gather_from_tp,
    init_parallel,
    reduce_from_tp,
    scatter_to_tp,
)
from tests.support.matrix import MATRIX
from tests.support.operation_checks import check_copy, check_reduce, check_scatter_and_gather

LAYOUTS = ["pairs", "strided", "four"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy(ranks, layout):
    ranks(layout, check_copy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reduce(ranks, layout):
    ranks(layout, check_reduce)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scatter_and_gather(ranks, layout, dim):
    ranks(layout, check_scatter_and_gather, dim)


@contextmanager
def parallel(**sizes):
    """Parallel groups in a context; torch's groups remain after it."""
    try:
        yield init_parallel(**sizes)
    finally:
        shardconv.distributed.groups._current.groups = None


def check_groups(_):
    rank = dist.get_rank()
    with parallel(tensor=2, data=2) as groups:
        tensor_ranks = ((0, 1), (2, 3))[rank // 2]
        assert groups is shardconv.distributed.current_groups()
        assert (groups.tensor.rank, groups.tensor.size, groups.tensor.ranks) == (rank % 2, 2, tensor_ranks)
        assert (groups.data.rank, groups.data.ranks) == (rank // 2, ((0, 2), (1, 3))[rank % 2])
        assert (groups.pipeline.rank, groups.pipeline.size) == (0, 1)
        assert groups.mesh.mesh_dim_names == ("pipeline", "data", "tensor")


def check_pipeline(_):
    with parallel(tensor=2, pipeline=2) as groups:
        assert groups.pipeline.ranks == ((0, 2), (1, 3))[dist.get_rank() % 2]


def check_as_axis(_):
    with parallel(tensor=2, data=2) as groups:
        assert as_axis() is groups.tensor
        assert as_axis(groups.mesh["data"]).ranks == groups.data.ranks
        assert as_axis(groups.data.group).rank == groups.data.rank


def check_mesh_of_several_dims(_):
    with parallel(tensor=2, data=2) as groups, pytest.raises(ValueError, match="mesh has 3 dimensions, expected 1"):
        as_axis(groups.mesh)


def check_group_of_other_ranks(_):
    rank, other = dist.get_rank(), dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match=f"global rank {rank} is not in the group"):
            as_axis(other)


def check_size_that_does_not_divide_the_world(_):
    with pytest.raises(ValueError, match=r"tensor 3 \* data 1 \* pipeline 1 = 3 does not match .* \(expected 4\)"):
        init_parallel(tensor=3)


@pytest.mark.parametrize(
    "check",
    [
        check_groups, check_pipeline, check_as_axis, check_mesh_of_several_dims, check_group_of_other_ranks,
        check_size_that_does_not_divide_the_world,
    ],
)  # fmt: skip
def test_groups(ranks, check):
    ranks("four", check)


def test_current_groups_without_init_are_an_error():
    with pytest.raises(RuntimeError, match=r"call shardconv\.init_parallel"):
        shardconv.distributed.current_groups()


@pytest.mark.parametrize("operation", [copy_to_tp, reduce_from_tp, scatter_to_tp, gather_from_tp])
def test_operations_of_one_process_are_the_identity(operation):
    x = torch.randn(3, 4, requires_grad=True)
    assert operation(x) is x


@pytest.fixture
def one_process():
    """Groups of this process alone, without torch.distributed."""
    yield init_parallel()
    shardconv.distributed.destroy_parallel()


def test_tensor_parallel_size_of_one_process_is_1(one_process):
    assert one_process.tensor.size == 1


@pytest.mark.usefixtures("one_process")
def test_tensor_parallel_size_larger_than_the_world_is_refused():
    with pytest.raises(ValueError, match=r"of the world \(expected 1\)"):
        init_parallel(tensor=2)


def check_compiled(axis):
    def block(x):
        y = reduce_from_tp(torch.relu(copy_to_tp(x, group=axis) * (axis.rank + 1)), group=axis)
        return gather_from_tp(scatter_to_tp(y, group=axis).sin(), group=axis)

    x = torch.randn(3, 8, dtype=torch.float64)
    eager, compiled = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = block(eager), torch.compile(block, fullgraph=True, backend="aot_eager")(compiled)
    expected.sum().backward()
    found.sum().backward()
    assert torch.equal(expected, found)  # the same kernels in the same order
    assert torch.equal(eager.grad, compiled.grad)


@MATRIX
def test_operations_are_compiled(ranks):
    ranks("strided", check_compiled)
