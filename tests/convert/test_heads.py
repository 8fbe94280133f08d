"""Attention modules and norms over local heads on two ranks, compared with the same modules over all heads."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from shardconv.convert.engine import Conversion, LayerSpec
from shardconv.convert.modules import GlobalLayerNorm
from shardconv.convert.multihead_attention import ParallelMultiheadAttention
from shardconv.convert.overrides import SlicedOutput, SlicedTensors, extend_class
from shardconv.layers import ParallelLinear
from shardconv.layers.sharding import even_placement, take_shard
from shardconv.plan.placement import Interval, Padding, Placement, Unit, shard_dim
from shardconv.support.errors import PlanError
from tests.support.ranks import on_ranks

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


@on_ranks("pair")
def test_sliced_output(axis):
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


@on_ranks("pairs")
def test_slices_of_unexpected_sizes(axis):
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


@on_ranks("pair")
def test_layer_norm(axis):
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


@on_ranks("pair")
def test_replicated_rows(axis):
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


@on_ranks("pair")
def test_attention_with_masks_of_local_heads(axis):
    """Check the module without the model; test_torch_modules.py has other masks, and those of all heads."""
    module, unsharded = (with_values(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)) for _ in range(2))
    inputs, mask = [fixed(2, 5, WIDTH, seed=seed) for seed in (7, 8, 8)], fixed(2 * HEADS, 5, 5)
    expected = unsharded(*inputs, attn_mask=mask)[0]
    out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    out.load_state_dict(module.out_proj.state_dict())
    module.out_proj = ParallelLinear.convert_parallel_linear(out, 0, group=axis)
    placement = even_placement(0, (WIDTH,) * 3, 2, what="in_proj")
    extend_class(module, ParallelMultiheadAttention, axis)
    module.placements, module.styles = {"in_proj_weight": placement, "in_proj_bias": placement}, {}
    for name in module.placements:
        setattr(module, name, nn.Parameter(take_shard(getattr(module, name).data, placement, axis.rank)))
    own = mask.unflatten(0, (2, HEADS))[:, axis.rank * 2 :][:, :2].flatten(0, 1)
    near(module(*inputs, attn_mask=own)[0], expected)
    with pytest.raises(ValueError, match="need_weights: each rank has the attention weights of its local heads only"):
        module(*inputs, attn_mask=own, need_weights=True)
    with pytest.raises(ValueError, match="is_causal without attn_mask"):
        module(*inputs, is_causal=True)
    with pytest.raises(ValueError, match=r"query has shape .* \(expected 3 dims\): add a batch dim"):
        module(*(one[0] for one in inputs))


@pytest.mark.parametrize("options", [{"kdim": 6}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@on_ranks("pair")
def test_attention_with_other_options_is_refused(axis, options):
    refused = nn.MultiheadAttention(WIDTH, HEADS, **options)
    with pytest.raises(ValueError, match="pool: a MultiheadAttention with kdim, vdim, add_bias_kv or"):
        Conversion.prepare("pool", refused, LayerSpec(ParallelMultiheadAttention, {}), axis)
