"""Dropout: masks that are equal or differ between ranks, are reproducible, and work with checkpointing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardconv.layers import ParallelDropout
from tests.support.operation_checks import from_all
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("layout", ["pairs", "strided", "four"])
@on_ranks()
def test_masks(axis):
    x = torch.ones(64, 64)
    for is_parallel in (False, True):
        dropout = ParallelDropout(0.25, input_is_parallel=is_parallel, group=axis)
        torch.manual_seed(5)
        first, second = dropout(x), dropout(x)
        parts = from_all(axis, first)
        assert all(torch.equal(part, parts[0]) for part in parts[1:]) != is_parallel
        assert not torch.equal(first, second)
        assert torch.equal(first.unique(), torch.tensor([0, 4 / 3]))
        assert abs((first == 0).double().mean() - 0.25) < 0.035  # five standard deviations of 4096 draws
        state = from_all(axis, torch.get_rng_state())
        assert all(torch.equal(part, state[0]) for part in state[1:])
        torch.manual_seed(5)
        assert torch.equal(dropout(x), first)
        assert dropout.eval()(x) is x
    torch.manual_seed(5)
    assert torch.equal(ParallelDropout(0.25, group=axis)(x), (torch.manual_seed(5), torch.dropout(x, 0.25, True))[1])
    inplace = torch.ones(4, 4)
    assert ParallelDropout(0.5, True, input_is_parallel=True, group=axis)(inplace) is inplace
    assert (ParallelDropout(1.0, input_is_parallel=True, group=axis)(x) == 0).all()


@on_ranks("pairs")
def test_activation_checkpointing(axis):
    for is_parallel in (False, True):
        dropout = ParallelDropout(0.5, input_is_parallel=is_parallel, group=axis)
        results = []
        for wrapped in (False, True):
            torch.manual_seed(6)
            x = torch.ones(16, 16, requires_grad=True)

            def block(x, dropout=dropout):
                return dropout(x * 2).square()

            y = checkpoint(block, x, use_reentrant=False) if wrapped else block(x)
            dropout(torch.ones(3))  # later samples do not change the recomputed mask
            y.sum().backward()
            results.append((y.detach(), x.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert torch.equal(results[0][1] == 0, results[0][0] == 0)


@on_ranks("four")
def test_different_seeds_are_an_error(axis):
    torch.manual_seed(axis.rank)
    with pytest.raises(RuntimeError, match="are seeded differently"):
        ParallelDropout(0.5, group=axis)(torch.ones(2))


@on_ranks("pairs")
def test_compiled_dropout(axis):
    dropout = ParallelDropout(0.5, input_is_parallel=True, group=axis)
    dropout(torch.ones(1))
    output = torch.compile(dropout, fullgraph=True, backend="aot_eager")(torch.ones(64, 64))
    assert set(output.unique().tolist()) == {0.0, 2.0}
    parts = from_all(axis, output)
    assert not torch.equal(parts[0], parts[1])
