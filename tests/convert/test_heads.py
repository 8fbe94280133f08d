"""Attention modules and norms over local heads on two ranks, compared with the same modules over all heads."""

import threading

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from shardconv.convert.engine import Conversion, LayerSpec
from shardconv.convert.heads import (
    FullWidth,
    SlicedOutput,
    SlicedTensors,
    with_local_values,
    with_unsharded_methods,
)
from shardconv.convert.modules import Sharded
from shardconv.convert.multihead_attention import FunctionalAttention, ParallelMultiheadAttention
from shardconv.convert.norms import GlobalLayerNorm
from shardconv.convert.overrides import extend_class
from shardconv.convert.products import with_parallel_products
from shardconv.distributed import Axis
from shardconv.layers import ParallelLinear
from shardconv.layers.sharding import even_placement, take_shard
from shardconv.plan.placement import Interval, Padding, Placement
from shardconv.plan.units import Unit, shard_dim
from shardconv.support.errors import PlanError

HEADS, SIZE = 4, 3
WIDTH = HEADS * SIZE


def fixed(*shape, seed=1):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_values(module):
    for number, parameter in enumerate(module.parameters()):
        parameter.data = fixed(*parameter.shape, seed=number)
    return module.double()


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Joined(nn.Module):
    """Joins heads to the width of its input, and reshapes the input to that width."""

    def forward(self, x, heads):
        batch, tokens, width = x.shape
        return torch.reshape(heads.transpose(1, 2), (batch, tokens, width)), x.view(-1, width)


class Functional(nn.Module):
    """Passes the weights of its layers to torch's function, with a mask per head."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask, **options):
        biases = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        weights = {f"{name}_proj_weight": getattr(self, name).weight for name in "qkv"}
        options = {"use_separate_proj_weight": True, **weights, **options}
        fixed_options = (None, biases, options.pop("bias_k", None), None, False, 0.0, self.o.weight, self.o.bias)
        attend = torch.nn.functional.multi_head_attention_forward
        return attend(x, x, x, WIDTH, HEADS, *fixed_options, attn_mask=mask, **options)[0]


def check_functional(axis):
    unsharded, own = with_values(Functional()), with_values(Functional())
    placements = {name: shard_dim(0, [Unit(HEADS, SIZE)], axis.size) for name in "qkv"}
    for name, placement in placements.items():
        layer = getattr(own, name)
        for leaf in ("weight", "bias"):
            setattr(layer, leaf, nn.Parameter(take_shard(getattr(layer, leaf).data, placement, axis.rank)))
    own.o.weight = nn.Parameter(take_shard(own.o.weight.data, shard_dim(1, [Unit(HEADS, SIZE)], axis.size), axis.rank))
    extend_class(own, FunctionalAttention, axis, heads=shard_dim(0, [Unit(HEADS)], axis.size))
    results = []
    for module in (unsharded, own):
        x, mask = fixed(5, 2, WIDTH).requires_grad_(), fixed(2 * HEADS, 5, 5, seed=2).requires_grad_()
        output = module(x, mask, key_padding_mask=torch.arange(5).expand(2, 5) > 3)
        output.sin().sum().backward()
        results.append((output.detach(), x.grad, mask.grad, module.o.bias.grad))
    for expected, found in zip(*results, strict=True):
        near(found, expected)
    near(own.q.weight.grad, take_shard(unsharded.q.weight.grad, placements["q"], axis.rank))
    with pytest.raises(ValueError, match="is supported only with use_separate_proj_weight"):
        own(fixed(5, 2, WIDTH), None, bias_k=fixed(1, 1, WIDTH))


class Split(nn.Module):
    """Divides the width of its input by the number of heads."""

    def forward(self, x, heads, joined):
        return joined.reshape(*joined.shape[:-1], heads, x.shape[-1] // heads)


def check_full_width(axis):
    x, heads = fixed(2, 5, WIDTH), fixed(2, HEADS, 5, SIZE)
    expected, kept = Joined()(x, heads)
    module = Joined()
    extend_class(module, FullWidth, axis, full_width=WIDTH)
    own = slice(axis.rank * 2, axis.rank * 2 + 2)
    found, found_heads = module(x, heads[:, own])
    assert torch.equal(found, expected.chunk(2, -1)[axis.rank])
    assert torch.equal(found_heads, kept)
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        module(x, heads[:, :1])
    split = Split()
    extend_class(split, FullWidth, axis, full_width=WIDTH)
    assert torch.equal(split(x, 2, fixed(2, 5, 2 * SIZE)), fixed(2, 5, 2 * SIZE).view(2, 5, 2, SIZE))


class Blocks(nn.Module):
    def forward(self, x):
        count = 4
        return x.unflatten(-1, (count, -1)).sum(-1)


class Mixed(nn.Module):
    """One method returns values per head; the other rolls them to the next head."""

    def __init__(self):
        super().__init__()
        self.heads, self.proj = HEADS, nn.Linear(WIDTH, HEADS)

    def own(self, x):
        return self.proj(x).view(-1, self.heads)

    def other(self, x):
        return self.proj(x).view(-1, self.heads).roll(1, -1)

    def forward(self, x):
        return self.own(x) * self.other(x)


def check_mixed_heads(axis):
    unsharded, module = with_values(Mixed()), with_values(Mixed())
    x, own = (fixed(2, WIDTH).requires_grad_() for _ in range(2))
    expected = unsharded(x)
    (expected * fixed(2, HEADS)).sum().backward()
    module.proj = ParallelLinear.convert_parallel_linear(module.proj, -1, counts=["heads"], group=axis)
    full = {"heads": HEADS}
    halves = shard_dim(1, [Unit(HEADS)], 2)
    kind = with_unsharded_methods(("other",), tuple(full))
    extend_class(module, kind, axis, unsharded={"other": halves}, full_attributes=full)
    for _ in range(2):
        found = module(own)
        near(found, take_shard(expected, halves, axis.rank))
    (found * take_shard(fixed(2, HEADS), halves, axis.rank)).sum().backward()
    near(own.grad, x.grad)
    near(module.proj.weight.grad, unsharded.proj.weight.grad.chunk(2)[axis.rank])


def check_full_width_with_padding(axis):
    """Check three heads on two ranks; the second rank has one head of padding."""
    module = Joined()
    module.proj = ParallelLinear(WIDTH, 9, dim=-1, placement=shard_dim(0, [Unit(3, SIZE, pad=True)], 2), group=axis)
    extend_class(module, FullWidth, axis, full_width=9)
    heads = fixed(2, 2, 5, SIZE)
    found, _ = module(fixed(2, 5, 9), heads)
    assert torch.equal(found, heads.transpose(1, 2).flatten(2))


class Attending(nn.Module):
    """A column parallel product, a row parallel one, and a row parallel one with sharded output, in two methods."""

    def __init__(self):
        super().__init__()
        self.q, self.gate, self.o = (nn.Parameter(torch.empty(WIDTH, HEADS)) for _ in range(3))

    def joined(self, heads, residual):
        return torch.einsum("bn,wn->bw", heads, self.o) + residual

    def forward(self, x):
        heads = torch.tanh(x.to(self.q.dtype) @ self.q[:, :])
        gates = torch.einsum("bn,wn->bw", heads, self.gate)
        return self.joined(heads * gates.sum(-1, keepdim=True), x)


class Read(Attending):
    """Reads a parameter without a product."""

    def forward(self, x):
        return x * self.q.sum()


class Enclosed(Attending):
    """Uses ``__class__`` in its method."""

    def forward(self, x):
        return super().forward(x @ self.q)


PRODUCTS = (("gate", "rowwise_shared"), ("o", "rowwise"), ("q", "colwise"))


def check_products(axis):
    unsharded, module = with_values(Attending()), with_values(Attending())
    x, own = (fixed(2, WIDTH).requires_grad_() for _ in range(2))
    expected = unsharded(x)
    (expected * fixed(2, WIDTH)).sum().backward()
    columns = shard_dim(1, [Unit(HEADS)], 2)
    extend_class(module, Sharded, axis, styles={})
    extend_class(module, with_parallel_products(Attending, PRODUCTS), axis)
    module.placements = dict.fromkeys(("q", "gate", "o"), columns)
    for name in module.placements:
        setattr(module, name, nn.Parameter(take_shard(getattr(module, name).data, columns, axis.rank)))
    found = module(own)
    near(found, expected)
    (found * fixed(2, WIDTH)).sum().backward()
    near(own.grad, x.grad)
    for name, parameter in unsharded.named_parameters():
        near(getattr(module, name).grad, take_shard(parameter.grad, columns, axis.rank))


@pytest.mark.parametrize(
    ("kind", "products", "message"),
    [
        (Attending, (("q", "colwise"), ("w", "rowwise")), "have a product with w: its rules are for other code"),
        (Read, (("q", "colwise"),), "Read.forward: uses q otherwise than in a product"),
        (Enclosed, (("q", "colwise"),), "uses __class__ of an enclosing function"),
    ],
)
def test_products_of_other_code(kind, products, message):
    with pytest.raises(ValueError, match=message):
        with_parallel_products(kind, products)


class Counted(nn.Module):
    def forward(self, x):
        return x


def check_local_names(axis):
    module = Blocks()
    extend_class(module, with_local_values(Blocks, ("count",)), axis, local_values={"count": 2})
    assert torch.equal(module(torch.arange(8)), torch.tensor([6, 22]))
    assert torch.equal(Blocks()(torch.arange(8)), torch.tensor([1, 5, 9, 13]))
    with pytest.raises(PlanError, match=r"Counted.forward assigns no count"):
        with_local_values(Counted, ("count",))


def check_sliced_output(axis):
    """Check the gradient of a replicated output whose slices ranks use: the sum over the slices."""
    layer = with_values(nn.Linear(3, 4))
    expected = with_values(nn.Linear(3, 4))
    (expected(fixed(2, 3)) * fixed(2, 4)).sum().backward()
    halves = shard_dim(0, [Unit(4)], 2)
    extend_class(layer, SlicedOutput, axis, item=None, output_dim=-1, output_units=halves)
    found = layer(fixed(2, 3))
    near(found, expected(fixed(2, 3))[:, axis.rank * 2 :][:, :2])
    (found * fixed(2, 4)[:, axis.rank * 2 :][:, :2]).sum().backward()
    near(layer.weight.grad, expected.weight.grad)


class Slopes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.arange(8.0).view(1, 8))

    def forward(self):
        return self.slopes


def check_slices_of_unexpected_sizes(axis):
    """Check the error if a dim does not have one element per unit; its first elements are not used."""
    layer, halves = nn.Linear(3, 8).double(), shard_dim(0, [Unit(4)], 2)
    extend_class(layer, SlicedOutput, axis, item=None, output_dim=-1, output_units=halves)
    with pytest.raises(PlanError, match=r"an output of shape \[2, 8\] does not have 4 elements along dim -1"):
        layer(fixed(2, 3))
    module = Slopes()
    extend_class(module, SlicedTensors, axis, slices={"slopes": shard_dim(-1, [Unit(8)], 2)})
    assert module().shape == (1, 4)
    for dim, units in ((0, 8), (1, 4), (2, 8)):
        other = Slopes()
        extend_class(other, SlicedTensors, axis, slices={"slopes": shard_dim(dim, [Unit(units)], 2)})
        with pytest.raises(PlanError, match=rf"slopes of shape \[1, 8\] .* {units} elements along dim {dim}"):
            other()


def test_slices_of_unexpected_sizes(ranks):
    ranks("pairs", check_slices_of_unexpected_sizes)


def check_attention(axis, batch_first, mask):
    unsharded = with_values(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first))
    inputs = [fixed(2, 5, WIDTH, seed=seed) for seed in (7, 8, 8)]
    inputs = inputs if batch_first else [one.transpose(0, 1) for one in inputs]
    masks = {"none": None, "tokens": fixed(5, 5) > 1, "heads": fixed(2 * HEADS, 5, 5)}
    expected = unsharded(*inputs, attn_mask=masks[mask])[0]
    (expected * fixed(*expected.shape)).sum().backward()
    grads = {name: parameter.grad for name, parameter in unsharded.named_parameters()}

    module = with_values(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first))
    out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    out.load_state_dict(module.out_proj.state_dict())
    module.out_proj = ParallelLinear.convert_parallel_linear(out, 0, group=axis)
    placement = even_placement(0, (WIDTH,) * 3, 2, what="in_proj")
    extend_class(module, ParallelMultiheadAttention, axis)
    module.placements, module.styles = {"in_proj_weight": placement, "in_proj_bias": placement}, {}
    for name in module.placements:
        setattr(module, name, nn.Parameter(take_shard(getattr(module, name).data, placement, axis.rank)))
    own = masks[mask]
    if mask == "heads":
        own = own.unflatten(0, (2, HEADS))[:, axis.rank * 2 :][:, :2].flatten(0, 1)
    found = module(*inputs, attn_mask=own)[0]
    near(found, expected)
    (found * fixed(*found.shape)).sum().backward()
    for name in module.placements:
        near(getattr(module, name).grad, take_shard(grads[name], placement, axis.rank))
    padded = torch.tensor([[False] * 4 + [True]] * 2)
    near(module(*inputs, padded, attn_mask=own)[0], unsharded(*inputs, padded, attn_mask=masks[mask])[0])
    with pytest.raises(ValueError, match="need_weights: each rank has the attention weights of its local heads only"):
        module(*inputs, attn_mask=own, need_weights=True)
    with pytest.raises(ValueError, match="is_causal without attn_mask"):
        module(*inputs, is_causal=True)
    with pytest.raises(ValueError, match=r"query has shape .* \(expected 3 dims\): add a batch dim"):
        module(*(one[0] for one in inputs))
    for options in ({"kdim": 6}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        refused = nn.MultiheadAttention(WIDTH, HEADS, **options)
        with pytest.raises(ValueError, match="pool: a MultiheadAttention with kdim, vdim, add_bias_kv or"):
            Conversion.prepare("pool", refused, LayerSpec(ParallelMultiheadAttention, {}), axis)


def check_layer_norm(axis):
    """Check features with a mean far from 0, sharded evenly, with padding, and with a rank of padding only."""
    ragged = shard_dim(0, [Unit(3, 4, pad=True)], 2)
    lopsided = Placement(0, WIDTH, ((Interval(0, WIDTH),), (Padding(WIDTH),)))
    for placement in (even_placement(0, (WIDTH,), 2, what="norm"), ragged, lopsided):
        unsharded, module = (with_values(nn.LayerNorm(WIDTH)) for _ in range(2))
        x, weights = (fixed(2, 5, WIDTH) + 30).requires_grad_(), fixed(2, 5, WIDTH, seed=3)
        expected = unsharded(x)
        (expected * weights).sum().backward()

        def shard(full, dim, placement=placement):
            return take_shard(full, replace(placement, dim=dim), axis.rank)

        extend_class(module, GlobalLayerNorm, axis)
        module.placements, module.styles = {"weight": placement, "bias": placement}, {}
        for name in module.placements:
            setattr(module, name, nn.Parameter(shard(getattr(module, name).data, 0)))
        own = shard(x.detach(), 2).clone().requires_grad_()
        found = module(own)
        torch.testing.assert_close(found, shard(expected, 2), rtol=1e-9, atol=1e-9)
        (found * shard(weights, 2)).sum().backward()
        torch.testing.assert_close(own.grad, shard(x.grad, 2), rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(module.weight.grad, shard(unsharded.weight.grad, 0), rtol=1e-8, atol=1e-9)


def check_replicated_rows(axis):
    """Check replicated rows, as of fewer KV heads than ranks; the gathered output has them once."""
    unsharded, all_rows = with_values(nn.Linear(4, 3)), Interval(0, 4)
    layer = ParallelLinear(
        4, 3, dim=0, placement=Placement(1, 4, ((all_rows,), (all_rows,))), dtype=torch.float64, group=axis
    )
    layer.load_state_dict(unsharded.state_dict())
    x, own = (fixed(2, 4).requires_grad_() for _ in range(2))
    expected, found = unsharded(x), layer(own)
    near(found, expected)
    expected.sum().backward()
    found.sum().backward()
    near(layer.weight.grad, unsharded.weight.grad)
    near(2 * own.grad, x.grad)  # of each replica; the preceding layer sums them


@pytest.mark.parametrize(
    "check",
    [
        check_full_width,
        check_functional,
        check_local_names,
        check_sliced_output,
        check_products,
        check_mixed_heads,
        check_full_width_with_padding,
        check_layer_norm,
        check_replicated_rows,
    ],
)
def test_modules(ranks, check):
    ranks("pair", check)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "tokens", "heads"])
def test_attention(ranks, batch_first, mask):
    ranks("pair", check_attention, batch_first, mask)


class Paused(Mixed):
    """Waits in the method that mixes heads until another thread has run."""

    entered, may_leave = threading.Event(), threading.Event()

    def other(self, x):
        self.entered.set()
        assert self.may_leave.wait(60)
        return super().other(x)


def test_threads_of_mixed_heads():
    """A thread reads local attributes while a method in another thread reads full ones."""
    axis = Axis("tensor", 0, 1, (0,), None)
    module = with_values(Paused())
    layer = module.proj = ParallelLinear.convert_parallel_linear(module.proj, -1, group=axis)
    module.heads = HEADS // 2
    kind = with_unsharded_methods(("other",), ("heads",))
    places = {"other": shard_dim(1, [Unit(HEADS)], 1)}
    extend_class(module, kind, axis, unsharded=places, full_attributes={"heads": HEADS})
    x, found = fixed(2, WIDTH), []
    thread = threading.Thread(target=lambda: found.append(module.other(x)))
    thread.start()
    try:
        assert module.entered.wait(60)
        assert (module.heads, module.proj, layer.gather_output) == (HEADS // 2, layer, False)
        assert module.own(x).shape == (4, HEADS // 2)
        module.heads = 1  # neither thread resets it
    finally:
        module.may_leave.set()
        thread.join()
    assert found[0].shape == (2, HEADS)
    assert module.heads == 1
