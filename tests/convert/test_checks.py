"""Errors of convert_parallel_linear and convert_parallel_embedding, and the padding of an odd vocabulary.

Converted models are compared with unsharded ones in float64 to 1e-12, as sums over ranks round
otherwise.
"""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch import nn

from shardconv import Layer, Policy, convert_model
from shardconv.convert import convert_parallel_embedding, convert_parallel_linear
from shardconv.layers import (
    ColumnParallelLinear,
    ParallelCrossEntropyLoss,
    ParallelEmbedding,
    ParallelLinear,
    RowParallelLinear,
    VocabParallelClassifier,
    VocabParallelEmbedding,
)
from shardconv.layers.functional import parallel_linear
from tests.support.comparison import check_refused
from tests.support.matrix import cases
from tests.support.operation_checks import from_all
from tests.support.ranks import on_ranks

LAYOUTS = ["pairs", "four"]


def linears(*sizes):
    """A chain of linear layers of these sizes, with activations in between."""
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    return [one for layer in layers for one in (layer, nn.GELU())][:-1]


def refused(model, message, axis):
    check_refused(model, partial(convert_parallel_linear, dim=-1, group=axis), message)


class Mlp(nn.Module):
    """A chain in a submodule."""

    def __init__(self, *layers):
        super().__init__()
        self.mlp = nn.Sequential(*layers)

    def forward(self, x):
        return self.mlp(x)


def check_chains(axis):
    tp = axis.size
    two = (
        rf"mlp\.2: this Linear needs all features, and column parallel mlp\.0 shards them \(got {16 // tp} per rank, "
        rf"expected 16\): pass gather_output=True, convert mlp\.2 with dim=0 .*, or, if mlp\.2 does not read them, "
    )
    refused(Mlp(*linears(8, 16, 8)), two, axis)
    refused(nn.Sequential(nn.Sequential(*linears(8, 16)), nn.Dropout(), nn.Linear(16, 8)), "^2: .* parallel 0.0", axis)
    for last in (nn.Softmax(-1), nn.Softmax(1), nn.LogSoftmax(-1), nn.LogSoftmax(), nn.GLU()):  # wrong without an error
        message = (
            r"(not known to compute each|computes \w+ over the|divides the) feature.* 16.*: pass gather_output=True"
        )
        refused(Mlp(nn.Linear(8, 16), last), message, axis)
    half = Mlp(*linears(8, 16, 8))
    convert_parallel_linear(nn.ModuleList([half.mlp[0]]), -1, group=axis)
    refused(half, two, axis)


def check_no_false_alarms(axis):
    """Check that correct models are converted."""
    torch.manual_seed(1)
    x = torch.randn(3, 8)
    for model in (Mlp(*linears(8, 16, 8)), Mlp(*linears(8, 16, 16, 8)), Mlp(nn.Linear(8, 16), nn.LayerNorm(16))):
        unsharded = copy.deepcopy(model)
        convert_parallel_linear(model, -1, gather_output=True, group=axis)
        torch.testing.assert_close(model(x), unsharded(x))
        rows = copy.deepcopy(unsharded)
        convert_parallel_linear(rows, 0, group=axis)
        torch.testing.assert_close(rows(x), unsharded(x))
    unsharded, model = Mlp(*linears(8, 16, 8)), Mlp(*linears(8, 16, 8))
    model.load_state_dict(unsharded.state_dict())
    convert_parallel_linear(model.mlp[:2], -1, group=axis)
    convert_parallel_linear(model.mlp[2:], 0, group=axis)
    torch.testing.assert_close(model(x), unsharded(x))
    not_called = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4))  # like q, k and v: not a chain
    assert all(type(layer) is ColumnParallelLinear for layer in convert_parallel_linear(not_called, -1, group=axis))


class Attention(nn.Module):
    """A module whose order of calls is unknown."""

    def __init__(self, norm=None):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm = norm or nn.Identity()

    def forward(self, x):
        return self.o(self.norm(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))))


def check_forward(axis):
    """Check that the error of a forward pass has the layer, the sizes and the remedy."""
    shard, x = 8 // axis.size, torch.randn(2, 3, 8)
    remedy = rf"one rank's shard of 8 features on {axis.size} ranks\. Convert .* with gather_output=True, or .* dim=0"
    model = convert_parallel_linear(Attention(), -1, group=axis)
    with pytest.raises(
        ValueError, match=rf"^o \(ColumnParallelLinear\(.*\)\): .* has {shard} features \(expected 8\): .*{remedy}"
    ):
        model(x)
    for norm in (nn.LayerNorm(8), nn.RMSNorm(8)):
        model = convert_parallel_linear(Attention(norm), -1, group=axis)
        for each in (model, copy.deepcopy(model)):
            with pytest.raises(ValueError, match=rf"^norm \({type(norm).__name__}\(.*\)\): .*{remedy}"):
                each(x)
    convert_parallel_linear(model, -1, group=axis)  # a repeated conversion does nothing, and adds no second check
    assert len(model.norm._forward_pre_hooks) == 1
    with pytest.raises(
        ValueError, match=r"^ColumnParallelLinear\(.*\): input of shape \[2, 5\] has 5 features \(expected 8\)$"
    ):
        ParallelLinear(8, 8, dim=-1, group=axis)(torch.ones(2, 5))
    weight = torch.ones(8, 8).chunk(axis.size)[0]
    with pytest.raises(ValueError, match=rf"^parallel_linear: .*{remedy}"):
        parallel_linear(torch.ones(2, shard), weight, dim=-1, group=axis)


class ColumnsOnly(Policy):
    """Does not convert ``o``, which stays an nn.Linear."""

    @staticmethod
    def original_layer_class():
        return Attention

    @staticmethod
    def attn_qkv():
        return [Layer(weight=f"{name}.weight", bias=f"{name}.bias") for name in "qkv"]


def check_policy(axis):
    model = convert_model(Attention(), ColumnsOnly, group=axis)
    assert type(model.o) is nn.Linear
    with pytest.raises(
        ValueError, match=r"^o \(Linear\(.*\)\): .* has .* features \(expected 8\): .* gather_output=True"
    ):
        model(torch.randn(2, 3, 8))


class Tied(nn.Module):
    """An embedding, a layer, and a classification head, optionally tied to the embedding."""

    def __init__(self, vocab=21, *, tied=True, bias=False):
        super().__init__()
        self.embedding = nn.Embedding(vocab, 8, padding_idx=1)
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, vocab, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.up(self.embedding(ids))))


def check_ties(axis):
    """Check that messages name tied layers, and that tied layers are converted together."""
    model = Tied(24)
    convert_parallel_embedding(model, 0, group=axis)
    message = r"^head \(tied to embedding\): is already converted, to VocabParallelClassifier\(.*gather_output=False\)"
    refused(model, message, axis)
    model = Tied(21)
    refused(
        model,
        r"^head \(tied to embedding\): out_features: 21 is not .* \(tp\)\. To pad it, pass gather_output=True",
        axis,
    )
    for layer, convert in ((model.head, convert_parallel_linear), (model.embedding, convert_parallel_embedding)):
        part = nn.ModuleDict({"one": layer})
        other = model.embedding if layer is model.head else model.head
        with pytest.raises(ValueError, match=rf"^one: tied to {type(other).__name__}\(.*\), which is not in this Mod"):
            convert(part, 0, group=axis)
        assert tuple(model.embedding.weight.shape) == (21, 8)
    with pytest.raises(ValueError, match=r"^the layer: tied to Linear\(.*\), which is not in this Embedding"):
        convert_parallel_embedding(model.embedding, 0, group=axis)
    stray = nn.Embedding(24, 8)
    layer = nn.Linear(8, 24, bias=False)
    layer.weight = stray.weight
    stray.cycle = stray
    del stray  # only its reference cycle keeps it alive
    convert_parallel_linear(nn.ModuleList([layer]), -1, group=axis)


IDS, TARGET = torch.tensor([[0, 1, 20], [5, 20, 9]]), torch.tensor([20, 3, 0, 11, 19, 10])


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def gathered(shard, size, axis):
    """Gather a full tensor from shards of dim 0 with padding at the end."""
    full = torch.cat(from_all(axis, shard))
    assert not full[size:].any()  # the gradient of padding is zero
    return full[:size]


class Derived(RowParallelLinear):
    pass


def check_classes(axis):
    """Check that a class for one dim refuses others."""
    for kind, dims in {ColumnParallelLinear: (None, 1), RowParallelLinear: (None,), ParallelLinear: (None,)}.items():
        for dim in dims:
            assert kind.convert_parallel_linear(nn.Linear(8, 8), dim, group=axis).dim == kind.dim
    head = VocabParallelClassifier.convert_parallel_linear(nn.Linear(8, 7), group=axis)
    assert (type(head), head.out_features) == (VocabParallelClassifier, 7)
    for kind, dim in ((RowParallelLinear, -1), (ColumnParallelLinear, 0), (VocabParallelClassifier, 0)):
        with pytest.raises(ValueError, match=rf"dim = {dim} \(expected .* for {kind.__name__}\)"):
            kind.convert_parallel_linear(nn.Linear(8, 8), dim, group=axis)
    derived = Derived.convert_parallel_linear(nn.Linear(8, 8), group=axis)
    assert (type(derived), type(Derived(8, 8, group=axis))) == (Derived, Derived)
    for dim, kind in {-1: ColumnParallelLinear, 0: RowParallelLinear, None: ParallelLinear}.items():
        assert type(ParallelLinear(8, 8, dim=dim, group=axis)) is kind
        assert type(ParallelLinear.convert_parallel_linear(nn.Linear(8, 8), dim, group=axis)) is kind
    for kind, dim in ((RowParallelLinear, -1), (Derived, -1)):
        with pytest.raises(ValueError, match=rf"dim = {dim} \(expected 0 for {kind.__name__}\)"):
            kind(8, 8, dim=dim, group=axis)
    assert VocabParallelEmbedding.convert_parallel_embedding(nn.Embedding(9, 8), group=axis).dim == 0
    assert ParallelEmbedding.convert_parallel_embedding(nn.Embedding(9, 8), -1, group=axis).dim == -1
    with pytest.raises(ValueError, match=r"dim = 1 \(expected 0 for VocabParallelEmbedding\)"):
        VocabParallelEmbedding.convert_parallel_embedding(nn.Embedding(9, 8), 1, group=axis)


CHECKS = (check_chains, check_no_false_alarms, check_forward, check_policy, check_ties, check_classes)


@pytest.mark.parametrize(
    ("layout", "check"), cases(itertools.product(LAYOUTS, CHECKS), lambda layout, _: layout == "pairs")
)
def test_checks(ranks, layout, check):
    ranks(layout, check)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks()
def test_odd_vocabulary(axis, tied, bias):
    """Check outputs, gradients and state of a padded vocabulary against the unsharded model."""
    torch.manual_seed(2)
    unsharded = Tied(tied=tied, bias=bias).double()
    expected = unsharded(IDS)
    F.cross_entropy(expected.flatten(0, 1), TARGET).backward()

    def check(model, head, loss):
        logits = model(IDS)
        near(logits, expected)
        loss(logits.flatten(0, 1), TARGET).backward()
        assert (type(model.embedding), type(model.head)) == (ParallelEmbedding, head)
        assert (model.head.weight is model.embedding.weight) is tied
        for layer, same in ((model.embedding, unsharded.embedding), (model.head, unsharded.head)):
            assert isinstance(layer, nn.Linear | nn.Embedding)
            for name, parameter in same.named_parameters():
                own = getattr(layer, name)
                grad = own.grad if own.shape == parameter.shape else gathered(own.grad, len(parameter), axis)
                near(grad, parameter.grad)

    model = copy.deepcopy(unsharded)
    convert_parallel_embedding(model, 0, group=axis)
    check(model, VocabParallelClassifier if tied else nn.Linear, F.cross_entropy)
    if not tied:
        model = copy.deepcopy(unsharded)
        convert_parallel_embedding(model, 0, group=axis)
    convert_parallel_linear(model, -1, gather_output=True, group=axis)
    model.zero_grad()
    check(model, VocabParallelClassifier, F.cross_entropy)
    if not tied:  # sharded logits, for the parallel loss
        model = copy.deepcopy(unsharded)
        convert_parallel_embedding(model, 0, group=axis)
        VocabParallelClassifier.convert_parallel_linear(nn.ModuleList([model.head]), group=axis)
        logits = model(IDS)
        width = -(-21 // axis.size)
        assert logits.shape[-1] == width
        full = F.pad(expected, (0, width * axis.size - 21), value=float("-inf"))
        near(logits, full[..., axis.rank * width : axis.rank * width + width])
        found = ParallelCrossEntropyLoss(num_classes=21, group=axis)(logits.flatten(0, 1), TARGET)
        near(found, F.cross_entropy(expected.flatten(0, 1), TARGET))
        found.backward()
        near(gathered(model.head.weight.grad, 21, axis), unsharded.head.weight.grad)
        near(gathered(model.embedding.weight.grad, 21, axis), unsharded.embedding.weight.grad)
