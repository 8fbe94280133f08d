"""Conversion of layers in place, and gathered state dicts, which equal the unsharded model's."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardconv
from shardconv.convert import (
    convert_parallel_embedding,
    convert_parallel_linear,
    gather_state_dict,
    load_full_state_dict,
)
from shardconv.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    ParallelLinear,
    RowParallelLinear,
    VocabParallelClassifier,
)
from shardconv.layers.init import shard_init_
from shardconv.layers.sharding import description
from tests.support.comparison import check_refused
from tests.support.ranks import on_ranks

VOCAB, WIDTH = 21, 16


class Net(nn.Module):
    """Nested, shared and tied layers: ``again`` is ``inner.up``, and the head is tied to the embedding."""

    def __init__(self, vocab=VOCAB, inner=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH, padding_idx=2, max_norm=3.0, scale_grad_by_freq=True)
        self.inner = nn.ModuleDict({"up": nn.Linear(WIDTH, inner), "down": nn.Linear(inner, WIDTH)})
        self.again = self.inner["up"]
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for _ in range(2):
            x = x + self.inner["down"](torch.tanh(self.again(x)))
        return self.head(self.norm(x.flatten(0, -2)))


IDS = torch.tensor([[1, 2, 20], [3, 3, 0]])


def net(**options):
    torch.manual_seed(8)
    return Net(**options).double()


@pytest.mark.parametrize("layout", ["pairs", "strided", "four"])
@on_ranks()
def test_model(axis):
    """Check forward and backward of a model that is converted in steps, and that nothing else changes."""
    unsharded, model = net(), net()
    calls = []
    up, down, embedding = model.inner["up"], model.inner["down"], model.embedding
    up.register_forward_hook(lambda *_: calls.append("forward"))
    up.register_full_backward_hook(lambda *_: calls.append("backward"))
    up.note = "mine"
    down.bias.requires_grad_(False)
    model.eval()
    parameters = list(model.parameters())
    assert convert_parallel_linear(up, -1, group=axis) is up  # in place, as the layers of a module
    assert convert_parallel_linear(nn.ModuleList([up]), -1, group=axis)[0] is up
    assert convert_parallel_linear(nn.Sequential(down), 0, group=axis)[0] is down
    assert convert_parallel_embedding(nn.ModuleDict({"embedding": embedding, "head": model.head}), 0, group=axis)
    assert [type(layer) for layer in (up, down, embedding, model.head)] == [
        ColumnParallelLinear, RowParallelLinear, ParallelEmbedding, VocabParallelClassifier
    ]  # fmt: skip
    assert model.again is model.inner["up"] is up
    assert model.head.weight is embedding.weight
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    assert (up.note, up.training, down.bias.requires_grad, up.weight.dtype) == ("mine", False, False, torch.float64)
    assert (embedding.padding_idx, embedding.max_norm, embedding.scale_grad_by_freq) == (2, 3.0, True)
    assert tuple(up.weight.shape) == (32 // axis.size, WIDTH)
    state = gather_state_dict(model)
    assert list(state) == list(unsharded.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in unsharded.state_dict().items())
    before = copy.deepcopy(model.state_dict())
    convert_parallel_linear(nn.ModuleList([up]), 1, group=axis)
    convert_parallel_embedding(nn.ModuleList([embedding]), 0, group=axis)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    for dim, options in ((0, {}), (-1, {"gather_output": True})):
        with pytest.raises(ValueError, match="0: is already converted"):
            convert_parallel_linear(nn.ModuleList([up]), dim, group=axis, **options)
    model.train()
    unsharded.inner["down"].bias.requires_grad_(False)
    expected, found = unsharded(IDS), model(IDS)
    torch.testing.assert_close(found, expected)  # sums over ranks
    expected.square().sum().backward()
    found.square().sum().backward()
    assert calls == ["forward"] * 2 + ["backward"] * 2
    mine = axis.rank * (32 // axis.size)
    torch.testing.assert_close(up.weight.grad, unsharded.again.weight.grad[mine : mine + 32 // axis.size])
    assert down.bias.grad is None
    copied = copy.deepcopy(model)
    assert copied.again.axis is axis
    assert description(copied.again.weight) == description(up.weight)
    torch.testing.assert_close(copied.eval()(IDS), model.eval()(IDS))


@on_ranks("four")
def test_tied_layers_are_converted_together(axis):
    """Check that converting linear layers also converts an embedding tied to one of them."""
    unsharded = net(vocab=24)
    model = net(vocab=24)
    both = nn.ModuleDict({"embedding": model.embedding, "head": model.head})
    convert_parallel_linear(both, -1, gather_output=True, group=axis)
    assert isinstance(model.embedding, ParallelEmbedding)
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(model(IDS), unsharded(IDS))
    model = net(vocab=24)
    both = nn.ModuleDict({"embedding": model.embedding, "head": model.head})
    convert_parallel_embedding(both, -1, group=axis)
    assert (model.head.dim, model.embedding.dim) == (0, -1)
    torch.testing.assert_close(model(IDS), unsharded(IDS))


class Odd(nn.Module):
    """Holds a parameter of another layer."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight


def looked_up():
    table = nn.Embedding(8, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    return table


def patched():
    layer = nn.Linear(8, 8)
    layer.forward = layer.forward
    return layer


def with_common_weight():
    linear = nn.Linear(8, 8)
    return nn.ModuleList([linear, Odd(linear.weight)])


#: Models that are refused on four ranks, the error, and other arguments of the conversion.
REFUSED = {
    "out_features": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6)), r"1: out_features: 6 is not a multiple of 4 \(tp", {},
    ),
    "in_features": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(6, 8)), "1: in_features: 6 is not a multiple of 4", {"dim": 0},
    ),
    "embedding_dim": (
        lambda: nn.ModuleList([nn.Embedding(4, 6)]),
        "0: embedding_dim: 6 is not",
        {"convert": convert_parallel_embedding, "dim": 1},
    ),
    "dim": (lambda: nn.Sequential(nn.Linear(8, 8)), r"dim is not supported \(got 5", {"dim": 5}),
    "derived class": (lambda: nn.MultiheadAttention(8, 2), "out_proj: is a NonDynamicallyQuantizableLinear", {}),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), "0: is a ParametrizedLinear", {},
    ),
    "common parameter": (with_common_weight, "1: a Odd shares a parameter with", {}),
    "no linear layer": (lambda: nn.Sequential(nn.ReLU()), "this Sequential does not contain Linear layers", {}),
    "no embedding": (
        lambda: nn.Sequential(nn.Linear(8, 8)),
        "does not contain Embedding layers",
        {"convert": convert_parallel_embedding},
    ),
    "sparse gradient": (
        lambda: nn.Sequential(looked_up()), "0: has .* a sparse gradient", {"convert": convert_parallel_embedding},
    ),
    "own forward": (lambda: nn.Sequential(patched()), "0: has a forward of its own", {}),
}  # fmt: skip


@on_ranks("four")
def test_ranks_that_differ(axis):
    """Check that all ranks raise, and none waits for another."""

    def fails(model, message, dim=-1):
        with pytest.raises(ValueError, match=message):
            convert_parallel_linear(model, dim, group=axis)

    rolled = nn.Linear(8, 8)
    with torch.no_grad():
        rolled.weight.copy_(torch.arange(64.0).view(8, 8).roll(axis.rank, 0))  # the same bytes in another order
    fails(nn.ModuleList([nn.Linear(8, 8), rolled]), "hold different values in 1: seed all ranks alike")
    fails(nn.Sequential(nn.Linear(8, 8, device="meta" if axis.rank else "cpu")), "do not hold the same layers")
    width = 6 if axis.rank == 1 else 8
    fails(nn.Sequential(nn.Linear(8, width)), "6 is not a multiple" if axis.rank == 1 else "or one cannot convert them")


@on_ranks("pairs")
def test_descriptions(axis):
    """Check that new parameters of a parallel layer are its shards."""
    torch.manual_seed(0)
    expected = nn.init.normal_(torch.empty(16, 8)).chunk(axis.size)[axis.rank]
    layer = ParallelLinear(8, 16, dim=-1, device="meta", group=axis).to_empty(device="cpu")
    torch.manual_seed(0)
    assert torch.equal(shard_init_(nn.init.normal_, layer.weight), expected)
    layer.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict().items()}, assign=True)
    assert description(layer.weight) == (layer.placements["weight"], axis)
    assert description(layer.double().weight) == (layer.placements["weight"], axis)
    assert description(torch.zeros(1)) is None


@on_ranks("pairs")
def test_parameters_stored(axis, tmp_path):
    """Check that parameters are stored as torch.Tensor, which can be loaded without code of shardconv."""
    layer = ParallelLinear(8, 16, dim=-1, group=axis)
    torch.save(dict(layer.named_parameters()), f"{tmp_path}/{axis.ranks}-{axis.rank}")
    loaded = torch.load(f"{tmp_path}/{axis.ranks}-{axis.rank}", weights_only=True)
    assert torch.equal(loaded["weight"], layer.weight)


@pytest.mark.parametrize("name", REFUSED)
@on_ranks("four")
def test_refused_model_stays_unchanged(axis, name):
    build, message, options = REFUSED[name]
    convert = options.get("convert", convert_parallel_linear)
    check_refused(build(), partial(convert, dim=options.get("dim", -1), group=axis), message)


@on_ranks("pairs")
def test_single_layers(axis):
    linear = nn.Linear(8, 16, dtype=torch.bfloat16)
    linear.weight.requires_grad_(False)
    weight, values = linear.weight, linear.weight.clone()
    new = ParallelLinear.convert_parallel_linear(linear, -1, group=axis)
    assert new is linear  # so a module that holds it is converted, whether the result is used or not
    assert new.weight is weight
    assert (new.weight.dtype, new.weight.requires_grad, new.bias.requires_grad) == (torch.bfloat16, False, True)
    assert torch.equal(new.master_weight, values)
    assert repr(new).startswith("ColumnParallelLinear(in_features=8, out_features=16, bias=True, dim=-1")
    table = nn.Embedding(9, 8, 3, sparse=True)
    model, values = nn.ModuleDict({"table": table}), table.weight.clone()
    new = ParallelEmbedding.convert_parallel_embedding(table, 0, group=axis)
    assert (new.padding_idx, new.sparse) == (3, True)
    assert model["table"] is table is new
    assert torch.equal(new.master_weight, values)
    assert type(shardconv.convert_parallel_linear(nn.Linear(4, 4), None, group=axis)) is ParallelLinear
    meta = convert_parallel_linear(nn.Linear(8, 16, device="meta"), -1, group=axis)
    assert (meta.weight.is_meta, tuple(meta.weight.shape)) == (True, (16 // axis.size, 8))
    new.reset_parameters()
    torch.manual_seed(0)
    graded = nn.Linear(8, 8)
    graded(torch.ones(8)).sum().backward()
    kept = graded.weight.grad.clone()
    convert_parallel_linear(graded, 0, group=axis)
    assert torch.equal(graded.weight.grad, kept.chunk(axis.size, 1)[axis.rank])


@on_ranks("four")
def test_stored_modules(axis, tmp_path):
    """Check that a stored layer gets its group from the current ones, and that another rank's is refused."""
    layer = convert_parallel_linear(nn.Linear(8, 16), -1, group=axis)
    torch.save(layer, f"{tmp_path}/{axis.ranks}-{axis.rank}")
    dist.barrier()
    stored = torch.load(f"{tmp_path}/{axis.ranks}-{axis.rank}", weights_only=False)
    assert torch.equal(stored.weight, layer.weight)
    assert torch.equal(stored.master_weight, layer.master_weight)  # its group works
    assert description(stored.weight)[0] == layer.placements["weight"]
    with pytest.raises(RuntimeError, match=r"does not have this axis: call shardconv.init_parallel as in"):
        torch.load(f"{tmp_path}/{axis.ranks}-{(axis.rank + 1) % axis.size}", weights_only=False)


def converted_net(axis):
    model = net()
    convert_parallel_embedding(model, 0, group=axis)
    for name, dim in (("up", -1), ("down", 0)):
        convert_parallel_linear(nn.ModuleList([model.inner[name]]), dim, group=axis)
    return model


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_state_dict_ties(axis, tmp_path):
    """Check that tied names share storage as in the unsharded state dict: in memory, saved and loaded."""
    unsharded, model = net(), converted_net(axis)
    state, expected = gather_state_dict(model), unsharded.state_dict()
    for first, second in itertools.combinations(expected, 2):
        is_tied = storage(expected[first]) == storage(expected[second])
        assert (storage(state[first]) == storage(state[second])) is is_tied, (first, second)
    assert storage(state["head.weight"]) == storage(state["embedding.weight"])
    torch.save(state, f"{tmp_path}/{axis.ranks}-{axis.rank}")
    saved = torch.load(f"{tmp_path}/{axis.ranks}-{axis.rank}", weights_only=True)
    assert storage(saved["head.weight"]) == storage(saved["embedding.weight"])
    unsharded.load_state_dict(saved)
    for assign in (False, True):
        assert not load_full_state_dict(model, saved, assign=assign).missing_keys
        assert model.head.weight is model.embedding.weight
        assert model.again.weight is model.inner["up"].weight
        assert description(model.head.weight)[0] == model.embedding.placements["weight"]
        torch.testing.assert_close(model(IDS), unsharded(IDS))
    untied = {**saved, "head.weight": saved["head.weight"] + 1}  # as in torch: two parameters with different values
    load_full_state_dict(model, untied, assign=True)
    assert all(torch.equal(tensor, untied[name]) for name, tensor in gather_state_dict(model).items())


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_state_dict(axis):
    unsharded, model = net(), converted_net(axis)
    other = {name: torch.randn_like(tensor) if tensor.is_floating_point() else tensor + 1
             for name, tensor in unsharded.state_dict().items()}  # fmt: skip
    other |= {"head.weight": other["embedding.weight"], "again.weight": other["inner.up.weight"]}
    other["again.bias"] = other["inner.up.bias"]
    assert load_full_state_dict(model, other).missing_keys == []
    state = gather_state_dict(model)
    assert all(torch.equal(state[name], tensor) for name, tensor in other.items())
    assert model.head.weight is model.embedding.weight
    load_full_state_dict(model, other, assign=True)
    up = model.inner["up"].weight
    assert up.untyped_storage().nbytes() == up.numel() * up.element_size()  # not the full tensor
    assert torch.equal(gather_state_dict(model)["again.weight"], other["again.weight"])
    wrong = {**other, "embedding.weight": torch.zeros(3, 3), "extra": torch.zeros(1)}
    del wrong["again.bias"], wrong["inner.up.bias"]
    messages = []
    for load in (unsharded.load_state_dict, lambda state: load_full_state_dict(model, state)):
        with pytest.raises(RuntimeError) as caught:
            load(wrong)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "size mismatch for embedding.weight: copying a param with shape torch.Size([3, 3])" in messages[0]
    found = load_full_state_dict(model, {"extra": torch.zeros(1)}, strict=False)
    assert found == unsharded.load_state_dict({"extra": torch.zeros(1)}, strict=False)
