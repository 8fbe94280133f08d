"""Tags of tensors: how they are set, and errors of layers and losses for unexpected tags."""

import pytest
import torch

from shardconv.layers import (
    ColumnParallelLinear,
    ParallelCrossEntropyLoss,
    ParallelDropout,
    ParallelEmbedding,
    ParallelLinear,
    RegisterParallelDim,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_parallel_dim,
)
from shardconv.layers.embedding import parallel_embedding
from shardconv.layers.functional import parallel_linear
from shardconv.layers.loss import parallel_cross_entropy
from tests.support.ranks import on_ranks

BATCH, FEATURES, CLASSES = 3, 8, 10
TAGS = (None, 0, 1, -1)


def tagged(dim, *shape, dtype=torch.float32):
    return RegisterParallelDim(dim)(torch.zeros(shape, dtype=dtype))


def test_tags_are_set_in_place_and_replaced():
    x, pair = torch.zeros(3), (torch.zeros(3), torch.zeros(2))
    assert get_parallel_dim(x) is None
    for module, dim in ((RegisterParallelDim(dim=0), 0), (RegisterParallelDim(-1), -1), (RegisterParallelDim(), None)):
        assert module(x) is x
        assert get_parallel_dim(x) == dim
        assert get_parallel_dim(x + 1) is None
        assert module(pair) is pair
        assert [get_parallel_dim(tensor) for tensor in pair] == [dim, dim]
        assert repr(module) == f"RegisterParallelDim(dim={dim})"


@pytest.mark.parametrize(
    ("dim", "tensors", "message"),
    [
        *((0, wrong, "expected a tensor, or a list or tuple of tensors") for wrong in ("text", {"a": 1}, [1])),
        (3, torch.zeros(3), r"dim is not supported \(got 3, expected None, 0, 1 or -1\)"),
        (1, [torch.zeros(2, 2), torch.zeros(3)], r"input of shape \[3\] does not have dim 1"),
    ],
)
def test_invalid_dims_and_inputs_are_refused(dim, tensors, message):
    with pytest.raises(ValueError, match=message):
        RegisterParallelDim(dim)(tensors)


def check_allowed(axis, call, shape, dims, *, name="input", dtype=torch.float32):
    """Check that a call accepts an untagged tensor and the tags of ``dims``, and refuses other tags."""
    call(torch.zeros(shape, dtype=dtype))
    for dim in TAGS:
        if dim in dims:
            call(tagged(dim, *shape, dtype=dtype))
        elif dim is None or -len(shape) <= dim < len(shape):
            tag = "replicated" if dim is None else f"sharded along dim {dim}"
            with pytest.raises(ValueError, match=rf": {name} of shape .* is tagged as {tag} \(expected "):
                call(tagged(dim, *shape, dtype=dtype))


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_linear(axis):
    local = FEATURES // axis.size
    column = ColumnParallelLinear(FEATURES, FEATURES, group=axis)
    check_allowed(axis, column, (BATCH, FEATURES), {None})
    check_allowed(axis, ColumnParallelLinear(FEATURES, FEATURES, gather_output=True, group=axis), (FEATURES,), {None})
    check_allowed(axis, ParallelLinear(FEATURES, 4, dim=None, group=axis), (BATCH, FEATURES), {None, 0})
    for is_parallel in (None, True):
        row = RowParallelLinear(FEATURES, FEATURES, input_is_parallel=is_parallel, group=axis)
        check_allowed(axis, row, (BATCH, local), {1, -1})
        check_allowed(axis, row, (BATCH, 2, local), {-1})
        row(RegisterParallelDim(-1)(column(torch.zeros(BATCH, FEATURES))))
    for is_parallel in (None, False):
        row = RowParallelLinear(FEATURES, FEATURES, input_is_parallel=is_parallel, group=axis)
        check_allowed(axis, row, (BATCH, FEATURES), {None})
    weight = torch.zeros(local, FEATURES)
    check_allowed(axis, lambda x: parallel_linear(x, weight, dim=-1, group=axis), (BATCH, FEATURES), {None})
    check_allowed(axis, lambda x: parallel_linear(x, weight.t(), dim=0, group=axis), (BATCH, local), {1, -1})


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_embedding(axis):
    ids = {"shape": (BATCH, 2), "dtype": torch.int64}
    check_allowed(axis, VocabParallelEmbedding(CLASSES, FEATURES, group=axis), dims={None}, **ids)
    check_allowed(axis, ParallelEmbedding(CLASSES, FEATURES, dim=-1, group=axis), dims={None}, **ids)
    check_allowed(axis, ParallelEmbedding(CLASSES, FEATURES, group=axis), dims=set(TAGS), **ids)
    table = torch.zeros(CLASSES, FEATURES // axis.size)
    check_allowed(axis, lambda x: parallel_embedding(x, table, dim=-1, group=axis), dims={None}, **ids)


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_dropout(axis):
    for training in (True, False):
        dropout = ParallelDropout(group=axis).train(training)
        check_allowed(axis, dropout, (BATCH, FEATURES), {None})
        dropout = ParallelDropout(input_is_parallel=True, group=axis).train(training)
        check_allowed(axis, dropout, (BATCH, FEATURES), {0, 1, -1})


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_loss(axis):
    local = -(-CLASSES // axis.size)
    target = torch.zeros(BATCH, dtype=torch.int64)
    loss = ParallelCrossEntropyLoss(num_classes=CLASSES, group=axis)
    check_allowed(axis, lambda x: loss(x, target), (BATCH, CLASSES), {None})
    check_allowed(axis, lambda x: loss(x, target), (BATCH, local), {1, -1})
    images = torch.zeros(BATCH, 2, dtype=torch.int64)
    check_allowed(axis, lambda x: loss(x, images), (BATCH, local, 2), {1})
    check_allowed(axis, lambda x: loss(x, target[0]), (local,), {0, -1})
    logits = torch.zeros(BATCH, local)
    check_allowed(axis, lambda t: loss(logits, t), (BATCH,), {None}, name="target", dtype=torch.int64)
    check_allowed(axis, lambda t: loss(logits, t), (BATCH, CLASSES), {None}, name="target")
    check_allowed(axis, lambda t: loss(logits, t), (BATCH, local), {1, -1}, name="target")

    def weighted(weight):
        return parallel_cross_entropy(logits, target, weight, group=axis)

    check_allowed(axis, weighted, (CLASSES,), {None}, name="weight")


@pytest.mark.parametrize("dim", TAGS)
def test_one_rank_accepts_every_tag(dim):
    """A tensor sharded over one rank is replicated."""
    ColumnParallelLinear(FEATURES, 4)(tagged(dim, BATCH, FEATURES))
    RowParallelLinear(FEATURES, 4)(tagged(dim, BATCH, FEATURES))
