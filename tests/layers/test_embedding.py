"""Parallel embeddings, compared with nn.Embedding.

A row of the output is from one rank, and the others add zeros, so outputs are exactly equal. So are gradients of the
table, except if norms are summed over ranks, and if rows of a vocabulary-parallel table are looked up several times,
which torch adds in the order of the local ids.
"""

import pytest
import torch
from torch import nn

from shardconv.layers import ParallelEmbedding, VocabParallelEmbedding
from shardconv.layers.embedding import parallel_embedding
from tests.support.ranks import on_ranks

LAYOUTS = ["pairs", "strided", "four"]
VOCAB, WIDTH = 22, 8
IDS = [[0, 21, 5, 5, 13], [11, 3, 5, 20, 13]]

OPTIONS = [
    {},
    {"padding_idx": 5},
    {"padding_idx": -1},
    {"padding_idx": 0},
    {"max_norm": 2.0},
    {"max_norm": 2.0, "norm_type": 1.0, "padding_idx": 13},
    {"max_norm": 1.0, "norm_type": float("inf")},
    {"max_norm": 3.0, "norm_type": 0.0},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "padding_idx": 13, "max_norm": 2.0},
    {"sparse": True},
    {"sparse": True, "padding_idx": 5},
]


def table_of(dtype=torch.float64, vocab=VOCAB):
    return torch.randn(vocab, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(2))


def mine_of(axis, full, dim):
    """The rank's shard of a table, padded with zeros."""
    if dim is None:
        return full
    if dim != 0:
        return full.chunk(axis.size, 1)[axis.rank]
    rows = -(-len(full) // axis.size)
    padded = torch.cat([full, full.new_zeros(rows * axis.size - len(full), full.shape[1])])
    return padded[axis.rank * rows : (axis.rank + 1) * rows]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "none")
@pytest.mark.parametrize("dim", [0, -1, 1, None])
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks()
def test_every_option(axis, dim, options):
    ids, grad = torch.tensor(IDS), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    if ids.is_cuda and options.get("norm_type") in (0.0, float("inf")):
        pytest.skip("torch's kernel for GPUs computes powers of sums of powers, which are not these norms")
    unsharded = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64, _weight=table_of(), **options)
    layer = ParallelEmbedding(VOCAB, WIDTH, dim=dim, _weight=table_of(), group=axis, **options)
    assert torch.equal(layer.weight, mine_of(axis, table_of(), dim))
    expected, found = unsharded(ids), layer(ids)
    expected.backward(grad)
    found.backward(grad)
    is_summed = dim != 0 and "max_norm" in options  # a sum over ranks rounds differently
    torch.testing.assert_close(found, expected, rtol=1e-14 if is_summed else 0, atol=0)
    torch.testing.assert_close(
        layer.weight, mine_of(axis, unsharded.weight, dim), rtol=1e-14 if is_summed else 0, atol=0
    )
    assert layer.weight.grad.is_sparse == unsharded.weight.grad.is_sparse
    if unsharded.weight.grad.is_sparse and dim == 0:
        first = axis.rank * -(-VOCAB // axis.size)
        rows = unsharded.weight.grad.coalesce().indices()[0] - first
        own = rows[(rows >= 0) & (rows < len(layer.weight))]
        assert torch.equal(layer.weight.grad.coalesce().indices()[0], own)  # only rows that were looked up
    torch.testing.assert_close(
        layer.weight.grad.to_dense(), mine_of(axis, unsharded.weight.grad.to_dense(), dim), rtol=1e-14, atol=0
    )
    torch.testing.assert_close(layer.master_weight, unsharded.weight, rtol=1e-14 if is_summed else 0, atol=0)


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"max_norm": 1.0}])
@pytest.mark.parametrize("dim", [0, -1])
@on_ranks("four")
def test_ids_out_of_range(axis, dim, options):
    layer = ParallelEmbedding(VOCAB, WIDTH, dim=dim, group=axis, **options)
    for wrong in (-1, VOCAB, VOCAB + 1, 10**6):
        with pytest.raises(IndexError, match="out of range"):
            layer(torch.tensor([0, wrong]))
    assert layer(torch.zeros((0, 3), dtype=torch.int64)).shape == (0, 3, WIDTH)
    assert layer(torch.tensor(VOCAB - 1)).shape == (WIDTH,)
    assert layer(torch.tensor([1, 2], dtype=torch.int32)).shape == (2, WIDTH)


@pytest.mark.parametrize("seeds_differ", [False, True])
@pytest.mark.parametrize("layout", ["strided", "four"])
@on_ranks()
def test_initial_values(axis, seeds_differ):
    for dim in (0, -1):
        for options in ({}, {"padding_idx": 3}):
            torch.manual_seed(10)
            unsharded = nn.Embedding(VOCAB, WIDTH, **options)
            seed = 10 + (axis.rank if seeds_differ else 0)
            torch.manual_seed(seed)
            nn.Embedding(VOCAB, WIDTH)
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            layer = ParallelEmbedding(VOCAB, WIDTH, dim=dim, group=axis, **options)
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.equal(layer.master_weight, unsharded.weight)


@on_ranks("four")
def test_vocabulary_smaller_than_the_number_of_ranks(axis):
    """Check a vocabulary smaller than the number of ranks; some ranks hold only padding."""
    layer = VocabParallelEmbedding(3, WIDTH, 1, group=axis, dtype=torch.float64)
    full = layer.master_weight
    assert full.shape == (3, WIDTH)
    output = layer(torch.tensor([0, 1, 2]))
    assert torch.equal(output, full)
    output.sum().backward()
    assert torch.equal(layer.weight.grad, mine_of(axis, torch.tensor([[1.0], [0], [1]]).expand(3, WIDTH).double(), 0))


@on_ranks("pairs")
def test_half_norms(axis):
    """Check norms of large float16 values, whose squares overflow float16."""
    table = (torch.arange(1.0, 13 * WIDTH + 1).view(13, WIDTH)).half()
    for dim in (0, -1):
        unsharded = nn.Embedding(13, WIDTH, max_norm=1.0, _weight=table.clone())
        layer = ParallelEmbedding(13, WIDTH, max_norm=1.0, _weight=table.clone(), dim=dim, group=axis)
        unsharded(torch.arange(13)), layer(torch.arange(13))
        torch.testing.assert_close(layer.master_weight, unsharded.weight)


#: Message to a call that is refused on two ranks.
REFUSED = {
    r"embedding_dim: 7 is not a multiple of 2": lambda axis: ParallelEmbedding(4, 7, dim=1, group=axis),
    r"dim is not supported \(got 2": lambda axis: ParallelEmbedding(4, 8, dim=2, group=axis),
    "got 4, expected an id of 4 embeddings": lambda axis: ParallelEmbedding(4, 8, 4, dim=0, group=axis),
    r"weight has shape \[2, 2\] \(expected \[4, 8\]\)": lambda axis: ParallelEmbedding(
        4, 8, _weight=torch.zeros(2, 2), dim=0, group=axis
    ),
    r"weight of shape \[3, 8\] is not the shard of a table of 4 rows": lambda axis: parallel_embedding(
        torch.tensor([0]), torch.zeros(3, 8), num_embeddings=4, dim=0, group=axis
    ),
}


@pytest.mark.parametrize("message", REFUSED)
@on_ranks("pairs")
def test_invalid_arguments_are_refused(axis, message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](axis)


@on_ranks("pairs")
def test_device_dtype_and_repr(axis):
    meta = ParallelEmbedding(VOCAB, WIDTH, dim=0, device="meta", dtype=torch.bfloat16, group=axis)
    assert (meta.weight.is_meta, meta.weight.dtype) == (True, torch.bfloat16)
    assert f"dim=0, tp={axis.size}" in repr(meta)
