"""Cross entropy of sharded logits, compared with F.cross_entropy of full logits.

Exponentials are summed per rank, so the limit is 1e-13 of the largest value in float64, and 1e-6 in float32.
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere

from shardconv.convert import convert_parallel_linear
from shardconv.distributed import reduce_from_tp
from shardconv.layers import (
    ColumnParallelLinear,
    ParallelCrossEntropyLoss,
    ParallelLinear,
    RowParallelLinear,
    VocabParallelClassifier,
)
from shardconv.layers.loss import parallel_cross_entropy
from tests.support.matrix import cases
from tests.support.mesh_layouts import spied
from tests.support.ranks import on_ranks

BATCH = 6
SHAPES = [(BATCH,), (BATCH, 2, 2), None]


def split(axis, full, num_classes, fill=7.0):
    """The rank's shard of full logits, with classes in dim 1 or the only dim; padding has arbitrary values."""
    dim = 0 if full.dim() == 1 else 1
    width = -(-num_classes // axis.size)
    missing = list(full.shape)
    missing[dim] = width * axis.size - num_classes
    return torch.cat([full, full.new_full(missing, fill)], dim).narrow(dim, axis.rank * width, width)


def case(shape, num_classes, dtype):
    logits = torch.randn((num_classes,) if shape is None else (shape[0], num_classes, *shape[1:]), dtype=dtype) * 5
    target = torch.randint(num_classes, () if shape is None else shape)
    return logits, target


def reference(logits, target, weight=None, **options):
    """The loss of torch's kernel for CPUs: that for GPUs returns 0 as the mean of no values, instead of NaN."""
    loss = F.cross_entropy(logits.cpu(), target.cpu(), None if weight is None else weight.cpu(), **options)
    return loss.to(logits.device)


def compare(axis, logits, target, expected_target, num_classes, **options):
    unsharded, mine = logits.clone().requires_grad_(), split(axis, logits, num_classes).clone().requires_grad_()
    expected = reference(unsharded, expected_target, **options)
    found = parallel_cross_entropy(mine, target, num_classes=num_classes, group=axis, **options)
    assert found.dtype == logits.dtype
    tolerance = 1e-13 if logits.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 10, equal_nan=True)
    weights = torch.rand_like(expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    expected_grad = split(axis, unsharded.grad, num_classes, fill=0.0)
    scale = expected_grad.abs().max().nan_to_num().clamp_min(1).item()
    torch.testing.assert_close(mine.grad, expected_grad, rtol=0, atol=tolerance * scale, equal_nan=True)


def check_indices(axis, dtype, num_classes, shape):
    for smoothing, reduction, weighted, ignored in itertools.product(
        (0.0, 0.1, 1.0), ("mean", "sum", "none"), (False, True), ("none", "some", "all")
    ):
        torch.manual_seed(3)
        logits, target = case(shape, num_classes, dtype)
        weight = torch.rand(num_classes, dtype=dtype) if weighted else None
        ignore_index = -100 if ignored != "some" else int(target.reshape(-1)[0])
        if ignored == "all":
            target = torch.full_like(target, -100)
        options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
        compare(axis, logits, target, target, num_classes, **options)


@pytest.mark.parametrize(
    ("layout", "num_classes", "shape"),
    cases(
        [(*one, shape) for one in [("pairs", 12), ("strided", 5), ("four", 10), ("four", 3)] for shape in SHAPES],
        lambda layout, num_classes, shape: (
            (layout, num_classes) == (("four", 10) if shape == SHAPES[1] else ("strided", 5))
        ),
    ),
    ids=str,
)
def test_class_indices(ranks, layout, num_classes, shape):
    ranks(layout, check_indices, torch.float64, num_classes, shape)


def test_class_indices_in_float32(ranks):
    ranks("four", check_indices, torch.float32, 10, (BATCH,))


@pytest.mark.parametrize(
    ("num_classes", "shape"),
    cases(itertools.product([12, 5], SHAPES), lambda num_classes, shape: (num_classes == 12) == (shape == SHAPES[1])),
    ids=str,
)
@on_ranks("four")
def test_probabilities(axis, num_classes, shape):
    for smoothing, reduction, weighted in itertools.product((0.0, 0.1), ("mean", "sum", "none"), (False, True)):
        torch.manual_seed(4)
        logits, _ = case(shape, num_classes, torch.float64)
        target = torch.rand_like(logits)
        weight = torch.rand(num_classes, dtype=torch.float64) if weighted else None
        options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
        compare(axis, logits, split(axis, target, num_classes), target, num_classes, **options)
        compare(axis, logits, target, target, num_classes, **options)


@on_ranks("four")
def test_collectives(axis):
    logits = torch.randn(BATCH, 8, requires_grad=True)
    with spied() as seen:
        loss = parallel_cross_entropy(
            logits, torch.arange(BATCH), label_smoothing=0.1, num_classes=8 * axis.size, group=axis
        )
    assert len(seen) <= 3
    assert max(num_bytes for _, num_bytes in seen) <= 3 * BATCH * 4  # much less than the logits
    with spied() as seen:
        loss.backward()
    assert seen == []


@on_ranks("pairs")
def test_large_logits(axis):
    """Check values that could overflow: large logits, and -inf for masked classes."""
    logits = torch.tensor([[1e4, -1e4, 0, 1], [float("-inf"), 3, 2, 1]], dtype=torch.float64)
    compare(axis, logits, torch.tensor([0, 1]), torch.tensor([0, 1]), 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks("pairs")
def test_half_precision(axis, dtype):
    logits, target = case((BATCH,), 12, torch.float32)
    logits = logits.to(dtype)
    mine = split(axis, logits, 12).clone().requires_grad_()
    found = parallel_cross_entropy(mine, target, num_classes=12, group=axis)
    found.backward()
    assert (found.dtype, mine.grad.dtype) == (dtype, dtype)
    expected = F.cross_entropy(logits.double(), target)
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)  # one rounding


@on_ranks("pairs")
def test_autocast(axis):
    """Check autocast, under which torch returns the loss in float32."""
    logits, target = case((BATCH,), 12, torch.float32)
    logits = logits.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(logits, target)
        found = parallel_cross_entropy(split(axis, logits, 12), target, num_classes=12, group=axis)
    torch.testing.assert_close(found, expected)  # also compares dtypes


@on_ranks("pairs")
def test_no_rows(axis):
    """Check that the mean over no rows is nan, as in torch."""
    for target in (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4)):
        for reduction in ("mean", "sum", "none"):
            expected = F.cross_entropy(torch.zeros(0, 4), target, reduction=reduction)
            mine = split(axis, torch.zeros(0, 4), 4)
            found = parallel_cross_entropy(mine, target, reduction=reduction, num_classes=4, group=axis)
            torch.testing.assert_close(found, expected, equal_nan=True)


@on_ranks("four")
def test_second_gradient(axis):
    """Check the gradient of a gradient penalty against torch's."""
    logits, target = case((BATCH,), 12, torch.float64)
    weight = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for options in ({}, {"weight": weight, "label_smoothing": 0.2}):
        full = logits.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(full, target, **options), full, create_graph=True)
        grad.pow(2).sum().backward()
        mine = split(axis, logits, 12).clone().requires_grad_()
        (grad,) = torch.autograd.grad(
            parallel_cross_entropy(mine, target, num_classes=12, group=axis, **options), mine, create_graph=True
        )
        reduce_from_tp(grad.pow(2).sum(), group=axis).backward()
        torch.testing.assert_close(mine.grad, split(axis, full.grad, 12))


@on_ranks("four")
def test_module(axis):
    logits, target = case((BATCH,), 10, torch.float64)
    weight = torch.rand(10, dtype=torch.float64)
    loss = ParallelCrossEntropyLoss(weight, label_smoothing=0.2, num_classes=10, group=axis)
    expected = F.cross_entropy(logits, target, weight, label_smoothing=0.2)
    torch.testing.assert_close(loss(split(axis, logits, 10), target), expected)
    torch.testing.assert_close(loss(logits, target), expected)  # full logits: recognized by their width
    assert list(loss.state_dict()) == ["weight"]
    for old in ({"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}):
        with pytest.warns(UserWarning, match="deprecated"):
            expected = F.cross_entropy(logits, target, **old)
        with pytest.warns(UserWarning, match="deprecated"):
            module = ParallelCrossEntropyLoss(**old, num_classes=10, group=axis)
        torch.testing.assert_close(module(split(axis, logits, 10), target), expected)
        with pytest.warns(UserWarning, match="deprecated"):
            found = parallel_cross_entropy(split(axis, logits, 10), target, num_classes=10, group=axis, **old)
        torch.testing.assert_close(found, expected)


TARGET = torch.zeros(BATCH, dtype=torch.int64)
#: Arguments that are refused for logits of 4 classes on each of two ranks, and the error.
REFUSED = {
    **{
        f"target {wrong}": ({"target": TARGET + wrong}, IndexError, f"Target {wrong} is out of bounds")
        for wrong in (-1, 8, 10**6)
    },
    "shape of the target": ({"target": TARGET[:2]}, ValueError, r"target has shape \[2\]"),
    "gradient of the target": ({"target": torch.ones(BATCH, 4).requires_grad_()}, ValueError, "get no gradient"),
    "number of classes": ({"num_classes": 5}, ValueError, r"has 4 classes \(expected 5 in full logits, or 3 per rank"),
    "classes of the weight": (
        {"weight": torch.ones(3), "num_classes": None},
        ValueError,
        r"has 4 classes \(expected 3 in full logits, or 2 per rank",
    ),
    "shape of the weight": ({"weight": torch.ones(3)}, ValueError, r"weight has shape \[3\]"),
    "reduction": ({"reduction": "typo"}, ValueError, "got .* reduction 'typo'"),
    "label smoothing": ({"label_smoothing": 2}, ValueError, "got label_smoothing 2"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks("pairs")
def test_invalid_arguments_are_refused(axis, name):
    arguments, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        parallel_cross_entropy(torch.zeros(BATCH, 4), **{"target": TARGET, "num_classes": 8, "group": axis} | arguments)


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_full_or_sharded(axis):
    """Check that logits are full or sharded by argument or tag, never by a guess."""
    logits, target = case((BATCH,), 4 * axis.size, torch.float64)
    unknown = rf"shape \[{BATCH}, \d+\] .* pass num_classes"
    shard, weight = split(axis, logits, 4 * axis.size), torch.rand(4 * axis.size, dtype=torch.float64)
    for given in (logits, shard):
        with pytest.raises(ValueError, match=unknown):
            parallel_cross_entropy(given, target, group=axis)
        with pytest.raises(ValueError, match=unknown):
            ParallelCrossEntropyLoss(group=axis)(given, target)
        with pytest.raises(ValueError, match=unknown):
            parallel_cross_entropy(given, torch.softmax(given, -1), group=axis)
        found = ParallelCrossEntropyLoss(num_classes=4 * axis.size, group=axis)(given, target)
        torch.testing.assert_close(found, F.cross_entropy(logits, target))
        found = ParallelCrossEntropyLoss(weight, group=axis)(given, target)  # the weight has all classes
        torch.testing.assert_close(found, F.cross_entropy(logits, target, weight))
    full = logits.clone().requires_grad_()
    parallel_cross_entropy(full, target, num_classes=4 * axis.size, group=axis).backward()
    torch.testing.assert_close(full.grad, (torch.softmax(logits, -1) - F.one_hot(target, 4 * axis.size)) / BATCH)


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_outputs_under_autocast(axis):
    """Check that the tag of logits survives the cast of autocast."""
    torch.manual_seed(0)
    unsharded = torch.nn.Linear(8, 16)
    layer = convert_parallel_linear(copy.deepcopy(unsharded), -1, group=axis)
    x, target = torch.randn(4, 8), torch.tensor([1, 2, 7, 15])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ParallelCrossEntropyLoss(group=axis)(layer(x), target)
        expected = torch.nn.functional.cross_entropy(unsharded(x), target)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)  # bfloat16 has 8 bits


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_outputs_of_layers(axis):
    """Check that outputs of column parallel layers are tagged as sharded, but values computed from them are not."""
    x, target = torch.randn(BATCH, 8), torch.arange(BATCH)
    for classes, make in ((4 * axis.size, ColumnParallelLinear), (4 * axis.size - 1, VocabParallelClassifier)):
        layer = make(8, classes, group=axis)
        unsharded = F.cross_entropy(F.linear(x, layer.master_weight, layer.master_bias), target)
        torch.testing.assert_close(ParallelCrossEntropyLoss(group=axis)(layer(x), target), unsharded)
        with pytest.raises(ValueError, match="pass num_classes"):
            ParallelCrossEntropyLoss(group=axis)(layer(x) * 2, target)
        with pytest.raises(ValueError, match=rf"num_classes is .*got 4, expected {classes} of"):
            ParallelCrossEntropyLoss(num_classes=4, group=axis)(layer(x), target)
        if classes % axis.size == 0:  # with one class less, the last class is padding
            fewer = ParallelCrossEntropyLoss(num_classes=classes - 1, group=axis)(layer(x), target)
            full = F.linear(x, layer.master_weight, layer.master_bias)[:, :-1]
            torch.testing.assert_close(fewer, F.cross_entropy(full, target))
    for layer in (
        ParallelLinear(8, 12, group=axis),
        RowParallelLinear(8, 12, group=axis),
        ColumnParallelLinear(8, 12, gather_output=True, group=axis),
    ):
        with pytest.raises(ValueError, match="pass num_classes"):
            ParallelCrossEntropyLoss(group=axis)(layer(x), target)
        found = ParallelCrossEntropyLoss(num_classes=12, group=axis)(layer(x), target)
        torch.testing.assert_close(found, F.cross_entropy(layer(x), target))
    fused = ColumnParallelLinear(8, 12, split_sizes=(4, 8), group=axis)
    for num_classes in (None, 12):
        with pytest.raises(ValueError, match="consecutive classes"):
            parallel_cross_entropy(fused(x), target, num_classes=num_classes, group=axis)
    sequence = ColumnParallelLinear(8, 12, group=axis)(x.view(2, 3, 8))  # classes in dim 2, expected in dim 1
    with pytest.raises(ValueError, match="pass num_classes"):
        parallel_cross_entropy(sequence, target, group=axis)
