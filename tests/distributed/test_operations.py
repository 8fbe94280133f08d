"""The four operations over groups, compared with sums and chunks by torch."""

import pytest
import torch

from shardconv.distributed import (
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
    scatter_to_tp,
)
from tests.support.operation_checks import check_copy, check_reduce, check_scatter_and_gather

LAYOUTS = ["pairs", "strided", "four"]


@pytest.mark.parametrize("check", [check_copy, check_reduce])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_and_reduce(ranks, layout, check):
    ranks(layout, check)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scatter_and_gather(ranks, layout, dim):
    ranks(layout, check_scatter_and_gather, dim)


@pytest.mark.parametrize("operation", [copy_to_tp, reduce_from_tp, scatter_to_tp, gather_from_tp])
def test_operations_of_one_process_are_the_identity(operation):
    x = torch.randn(3, 4, requires_grad=True)
    assert operation(x) is x
