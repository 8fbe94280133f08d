"""Converted models under torch.compile, in threads and with hooks.

Compiled models equal the eager converted model, as backends "eager" and "aot_eager" run the same kernels; they are
close to the unsharded model, as sums are computed per rank.
"""

import copy
import threading

import pytest
import torch
from torch import nn

import shardconv
from shardconv.convert import gather_state_dict
from shardconv.convert.modules import ForwardWithShards, ParallelDepthwise, ParallelExperts, Sharded, Substitutable
from shardconv.convert.multihead_attention import ParallelMultiheadAttention
from shardconv.convert.overrides import GatherOnUse, SlicedTensors, extend_class, gather_on_use
from shardconv.hf.inputs import example_inputs
from shardconv.layers import ParallelEmbedding
from shardconv.layers.sharding import even_placement, take_shard
from tests.support.matrix import MATRIX, cases
from tests.support.models import model_class
from tests.support.ranks import on_ranks
from tools.model_matrix.trial import small

#: Model types that use each mechanism of a conversion.
TYPES = {
    "llama": ("text generation", None),
    "mixtral": ("text generation", ParallelExperts),
    "resnet": ("image classification", Sharded),
    "siglip": ("zero-shot image classification", ParallelMultiheadAttention),
    "mobilebert": ("fill-mask", GatherOnUse),
    "mamba2": ("text generation", ParallelDepthwise),
    "minimax": ("text generation", SlicedTensors),
}
BACKENDS = ["eager", "aot_eager"]


def compiled(module, backend="eager", *, fullgraph=True):
    torch.compiler.reset()
    return torch.compile(module, fullgraph=fullgraph, backend=backend)


def results(call, model, inputs):
    """The outputs of a model, and the gradient of each parameter."""
    model.zero_grad()
    outputs = [value for value in call(**inputs).values() if torch.is_tensor(value) and value.is_floating_point()]
    sum(output.square().mean() for output in outputs).backward()
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found, expected):
    assert len(found[0]) == len(expected[0]) > 0
    assert all(map(torch.equal, found[0], expected[0]))
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        if gradient is not found[1][name]:  # the compiler may sum in another order, also of unsharded models
            assert (found[1][name] - gradient).abs().max() <= 1e-6 * gradient.abs().max(), name


@pytest.mark.parametrize("model_type", cases(TYPES, lambda name: name == "llama"))
@on_ranks("pair")
def test_fullgraph(axis, model_type):
    """Check that forward and backward are compiled without graph breaks."""
    kind, mechanism = TYPES[model_type]
    unsharded = small(model_class(kind, model_type)).eval()
    inputs = example_inputs(unsharded)
    model = shardconv.convert_model(copy.deepcopy(unsharded), group=axis)
    assert mechanism is None or any(isinstance(module, mechanism) for module in model.modules())
    expected = results(model, model, inputs)
    for found, full in zip(expected[0], results(unsharded, unsharded, inputs)[0], strict=True):
        assert (found - full).abs().max() <= 1e-5 * full.abs().max()
    call = compiled(model, "aot_eager")
    assert_same(results(call, model, inputs), expected)
    assert_same(results(call, model, inputs), expected)  # the compiled graph


@MATRIX
@on_ranks("pair")
def test_dropout(axis):
    """Check that each pass of a graph compares the seeds of ranks."""
    model = small(model_class("fill-mask", "bert"))
    inputs = example_inputs(model)
    model = shardconv.convert_model(model, group=axis).train()
    torch.manual_seed(1)
    expected = model(**inputs).logits
    call = compiled(model, "aot_eager")
    torch.manual_seed(1)
    assert torch.equal(call(**inputs).logits, expected)
    torch.manual_seed(axis.rank)
    with pytest.raises(RuntimeError, match="are seeded differently"):
        call(**inputs)


def numbers(*shape):
    """Integers, so that sums are exact in any order."""
    return (torch.arange(torch.Size(shape).numel()) * 5 % 7 - 3).view(shape).float()


class Scaled(nn.Module):
    """Reads its parameter before and after a callback."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(4, 6))
        self.between = nn.Identity()

    def forward(self, x, meanwhile=lambda: None):
        first = self.between(x @ self.weight)
        meanwhile()
        return first * 2 + x @ self.weight


class Breaking(Scaled):
    def forward(self, x):
        return super().forward(x, torch._dynamo.graph_break)


def gathered(module, axis):
    """The module with its matrix sharded and gathered on use."""
    placement = even_placement(0, (4,), axis.size, what="rows")
    module.weight = nn.Parameter(take_shard(module.weight.detach(), placement, axis.rank))
    extend_class(module, Sharded, axis, styles={"weight": "gathered"})
    module.placements = {"weight": placement}
    return module


@on_ranks("pair")
def test_graph_breaks(axis):
    """Check two modules of one class, which share Dynamo's resume functions."""
    unsharded = nn.Sequential(Breaking(), nn.Linear(6, 4), Breaking())
    model = copy.deepcopy(unsharded)
    gathered(model[0], axis), gathered(model[2], axis)
    for backend in BACKENDS:
        call = compiled(model, backend, fullgraph=False)
        for number in range(3):
            x = numbers(3, 4) + number
            assert torch.equal(call(x), unsharded(x))
            unsharded(x).sum().backward()
            call(x).sum().backward()
        for index in (0, 2):
            full = take_shard(unsharded[index].weight.grad, model[index].placements["weight"], axis.rank)
            assert torch.equal(model[index].weight.grad, full)
        model.zero_grad(), unsharded.zero_grad()
        with torch.no_grad():
            for parameter in (*unsharded.parameters(), *model.parameters()):
                parameter.mul_(2)
    assert torch._dynamo.utils.counters["graph_break"]


class Head(nn.Module):
    """Calls an embedding and reads its table."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, ids, meanwhile=lambda: None):
        states = self.table(ids)
        meanwhile()
        return states @ self.table.weight.t()


def head(axis):
    unsharded = nn.Embedding(6, 4)
    unsharded.weight.data = numbers(6, 4)
    table = ParallelEmbedding(6, 4, dim=0, group=axis)
    table.weight.data = take_shard(unsharded.weight.detach(), table.placements["weight"], axis.rank)
    model = Head(table)
    gather_on_use(model, ((table, "weight"),), axis)
    return Head(unsharded), model


@on_ranks("pair")
def test_own_forward(axis):
    """Check that a layer computes with its shard although another module reads its full table."""
    unsharded, model = head(axis)
    ids = torch.tensor([0, 3, 5])
    assert isinstance(model.table, ForwardWithShards)
    assert torch.equal(model(ids), unsharded(ids))
    expected = unsharded(ids)
    calls = [lambda: (model.table(ids), unsharded.table(ids)), lambda: (model(ids), expected)]
    model.table.compile(fullgraph=True, backend="eager")
    for order in ((0, 1, 0), (1, 0, 1)):
        torch.compiler.reset()
        for number in order:
            found, wanted = calls[number]()
            assert torch.equal(found, wanted)
    (model(ids).square()).sum().backward()
    (expected.square()).sum().backward()
    full = take_shard(unsharded.table.weight.grad, model.table.placements["weight"], axis.rank)
    assert torch.equal(model.table.weight.grad, full)


def run_within(call, inner):
    """Call in a thread; during its forward, call ``inner`` in this thread."""
    entered, done, found = threading.Event(), threading.Event(), []

    def meanwhile():
        entered.set()
        assert done.wait(30)

    thread = threading.Thread(target=lambda: found.append(call(meanwhile)))
    thread.start()
    assert entered.wait(30)
    try:
        other = inner()
    finally:
        done.set()
        thread.join()
    return found[0], other


@on_ranks("pair")
def test_threads(axis):
    """Check two concurrent threads in one module, whose collectives have the same order on all ranks."""
    unsharded, module = Scaled(), gathered(Scaled(), axis)
    x, y = numbers(3, 4), numbers(2, 4) + 1
    outer, inner = run_within(lambda meanwhile: module(x, meanwhile), lambda: module(y))
    assert torch.equal(outer, unsharded(x))
    assert torch.equal(inner, unsharded(y))
    (outer.sum() + inner.sum()).backward()
    (unsharded(x).sum() + unsharded(y).sum()).backward()
    assert torch.equal(module.weight.grad, take_shard(unsharded.weight.grad, module.placements["weight"], axis.rank))
    shard = module.weight
    _, seen = run_within(lambda meanwhile: module(x, meanwhile), lambda: module.weight)
    assert seen is shard


@on_ranks("pair")
def test_threads_of_readers(axis):
    unsharded, model = head(axis)
    ids, others = torch.tensor([0, 3, 5]), torch.tensor([1, 2])
    outer, inner = run_within(lambda meanwhile: model(ids, meanwhile), lambda: model(others))
    assert torch.equal(outer, unsharded(ids))
    assert torch.equal(inner, unsharded(others))


@on_ranks("pair")
def test_hooks(axis):
    """Check that hooks and state dicts read the shard, and code in forward the full tensor."""
    unsharded, module = Scaled(), gathered(Scaled(), axis)
    shard = module.weight
    seen = []

    def outside(module, *_):
        seen.append(module.weight)

    def inside(*_):
        assert module.weight.shape == (4, 6)
        assert module.state_dict()["weight"].data_ptr() == shard.data_ptr()
        assert next(module.parameters()) is shard
        assert torch.equal(gather_state_dict(module)["weight"], unsharded.weight)

    module.register_forward_pre_hook(outside)
    module.register_forward_hook(outside)
    module.between.register_forward_hook(inside)
    assert torch.equal(module(numbers(3, 4)), unsharded(numbers(3, 4)))
    assert len(seen) == 2
    assert all(one is shard for one in seen)


@on_ranks("pair")
def test_compiled_hooks(axis):
    unsharded, module = Scaled(), gathered(Scaled(), axis)
    x = numbers(3, 4)
    expected = unsharded(x) + unsharded.weight.sum() + module.weight.sum()
    module.between.register_forward_hook(lambda _, inputs, output: output + module.weight.sum() / 2)
    module.register_forward_hook(lambda module, inputs, output: output + module.weight.sum())
    for backend in BACKENDS:
        assert torch.equal(compiled(module, backend)(x), expected)


@on_ranks("pair")
def test_copies(axis):
    """Check that a copy has separate parameters with the names of the unsharded module."""
    module = gathered(Scaled(), axis)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.zero_()
    assert not copied(numbers(3, 4)).any()
    assert torch.equal(module(numbers(3, 4)), Scaled()(numbers(3, 4)))
    assert isinstance(copied.weight, nn.Parameter)
    assert list(copied.state_dict()) == [name for name, _ in copied.named_parameters()] == ["weight"]


def test_missing_attributes_are_errors():
    """As for other modules."""
    with pytest.raises(AttributeError, match="attribute 'weight'"):
        _ = Substitutable().weight
