"""Parallel linear layers, compared with nn.Linear.

Outputs and gradients that are sums over ranks are compared to 1e-12 of the
largest in float64 and 1e-6 in float32, as partial sums round differently.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from shardconv import gather_state_dict, load_full_state_dict
from shardconv.layers import (
    ColumnParallelLinear,
    LoRALinear,
    ParallelLinear,
    RowParallelLinear,
)
from shardconv.layers.functional import parallel_linear
from shardconv.layers.init import INITIALIZERS, init_affine_weight_, shard_init_
from shardconv.plan.placement import Interval, Placement, Unit, shard_dim
from tests.support.matrix import each_once
from tests.support.mesh_layouts import spied
from tests.support.ranks import on_ranks

LAYOUTS = ["pairs", "strided", "four"]
BATCH, IN, OUT = 5, 24, 40
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def assert_near(found, expected, what=""):
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    assert error <= TOLERANCE[expected.dtype], f"{what}: {error}"


def unsharded_layer(dtype=torch.float64, *, bias=True, out=OUT, seed=3):
    """nn.Linear with the same values on every rank."""
    layer = nn.Linear(IN, out, bias, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=dtype, generator=generator))
    return layer


def fixed(shape, dtype=torch.float64, seed=4):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def columns_of(axis, parts):
    """The columns of a rank, of each segment."""
    starts = [sum(parts[:number]) for number in range(len(parts))]
    ranges = [
        (start + axis.rank * size // axis.size, size // axis.size) for start, size in zip(starts, parts, strict=True)
    ]
    return torch.cat([torch.arange(start, start + size) for start, size in ranges])


def run(layer, x, grad):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad


FULL = slice(None)


def check_layer(axis, kind, dtype, bias, parts, option):
    """Check outputs, gradients and full tensors for each input of the layer that its option allows."""
    is_column = kind is ColumnParallelLinear
    unsharded, x = unsharded_layer(dtype, bias=bias), fixed((2, BATCH, IN), dtype)
    grad = fixed((2, BATCH, OUT), dtype, seed=5)
    options = {"gather_output" if is_column else "input_is_parallel": option}
    layer = kind(IN, OUT, bias, split_sizes=parts, dtype=dtype, group=axis, **options)
    mine = columns_of(axis, parts or (OUT if is_column else IN,))
    of_weight, of_bias = (mine, mine) if is_column else ((FULL, mine), FULL)
    with torch.no_grad():
        layer.weight.copy_(unsharded.weight[of_weight])
        if bias:
            layer.bias.copy_(unsharded.bias[of_bias])
    expected, expected_x = run(unsharded, x, grad)
    accepted = {None: (FULL, mine), True: (mine,), False: (FULL,)}[option] if not is_column else (FULL,)
    outputs = mine if is_column and not option else FULL
    for inputs in accepted:
        layer.zero_grad()
        found, found_x = run(layer, x[..., inputs], grad[..., outputs])
        assert found.shape == expected[..., outputs].shape
        assert_near(found, expected[..., outputs], "output")
        assert_near(found_x, expected_x[..., inputs], "input gradient")
        assert_near(layer.weight.grad, unsharded.weight.grad[of_weight], "weight gradient")
        if bias:
            assert_near(layer.bias.grad, unsharded.bias.grad[of_bias], "bias gradient")
    assert torch.equal(layer.master_weight, unsharded.weight)
    if bias:
        assert torch.equal(layer.master_bias, unsharded.bias)
    for wrong in {1, IN, len(mine)} - {x[..., inputs].shape[-1] for inputs in accepted}:
        with pytest.raises(ValueError, match=r"has \d+ features \(expected"):
            layer(fixed((BATCH, wrong), dtype))


#: A class, the parts of its sharded dim, and its option ``gather_output`` or ``input_is_parallel``.
KINDS = [
    *itertools.product([ColumnParallelLinear], [None, (8, 8, 24), (16, 12, 12)], [False, True]),
    *itertools.product([RowParallelLinear], [None, (8, 16)], [None, True, False]),
]


@pytest.mark.parametrize(("kind", "parts", "option"), KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers(ranks, layout, kind, parts, option):
    for dtype, bias in ((torch.float64, True), (torch.float32, False)):
        ranks(layout, check_layer, kind, dtype, bias, parts, option)


@on_ranks("four")
def test_functional(axis):
    unsharded, x = unsharded_layer(), fixed((BATCH, IN))
    mine, rows = columns_of(axis, (OUT,)), columns_of(axis, (IN,))
    column = parallel_linear(x, unsharded.weight[mine], unsharded.bias[mine], -1, gather_output=True, group=axis)
    assert_near(column, unsharded(x))
    assert torch.equal(parallel_linear(x, unsharded.weight, unsharded.bias), unsharded(x))
    for each in (x, x[:, rows]):
        assert_near(parallel_linear(each, unsharded.weight[:, rows], unsharded.bias, 0, group=axis), unsharded(x))
    with pytest.raises(ValueError, match=r"dim is not supported \(got 2, expected None"):
        parallel_linear(x, unsharded.weight, dim=2)


def unsharded_pair(dtype):
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN)).to(dtype)


def split_pair(dtype, axis):
    pair = unsharded_pair(dtype)
    pair[0] = ParallelLinear.convert_parallel_linear(pair[0], -1, group=axis)
    pair[1] = ParallelLinear.convert_parallel_linear(pair[1], 0, group=axis)
    return pair


@pytest.mark.parametrize("layout", ["pairs", "four"])
@on_ranks()
def test_pair_takes_one_collective_per_direction(axis):
    """Check a column and a row parallel layer, and their number of collectives."""
    pair, x, grad = split_pair(torch.float64, axis), fixed((BATCH, IN)).requires_grad_(), fixed((BATCH, IN), seed=6)
    with spied() as seen:
        y = pair(x)
    with spied() as seen_backward:
        y.backward(grad)
    assert [kind for kind, _ in seen] == [kind for kind, _ in seen_backward] == ["all_reduce"]
    expected, expected_x = run(unsharded_pair(torch.float64), fixed((BATCH, IN)), grad)
    assert_near(y, expected)
    assert_near(x.grad, expected_x)


@pytest.mark.parametrize("gather", [False, True])
@on_ranks("four")
def test_replicated_rows(axis, gather):
    """Check output, gradients and an optimizer step with replicated rows, as of fewer KV heads than ranks."""
    heads, size = axis.size // 2, 3
    placement = shard_dim(0, [Unit(heads, size, replicate=True)], axis.size)
    unsharded = unsharded_layer(out=heads * size)
    layer = ParallelLinear(
        IN, heads * size, dim=-1, placement=placement, gather_output=gather, dtype=torch.float64, group=axis
    )
    own = torch.arange(axis.rank // 2 * size, axis.rank // 2 * size + size)
    with torch.no_grad():
        layer.weight.copy_(unsharded.weight[own])
        layer.bias.copy_(unsharded.bias[own])
    grads = [fixed((BATCH, heads * size), seed=7 + rank) for rank in range(axis.size)]
    if gather:
        expected, expected_grad = run(unsharded, fixed((BATCH, IN)), grads[0])
        found, found_grad = run(layer, fixed((BATCH, IN)), grads[0])
    else:  # both replicas are used differently
        owners = [
            torch.zeros_like(grad).index_copy(1, rank // 2 * size + torch.arange(size), grad[:, :size])
            for rank, grad in enumerate(grads)
        ]
        expected, expected_grad = run(unsharded, fixed((BATCH, IN)), sum(owners))
        expected = expected[:, own]
        found, found_grad = run(layer, fixed((BATCH, IN)), grads[axis.rank][:, :size])
    assert_near(found, expected, "output")
    assert_near(found_grad, expected_grad, "gradient of the input")
    assert_near(layer.weight.grad, unsharded.weight.grad[own], "gradient of the weight")
    assert_near(layer.bias.grad, unsharded.bias.grad[own], "gradient of the bias")
    layer.zero_grad()
    layer.master_weight.pow(2).sum().backward()
    assert_near(layer.weight.grad, 2 * unsharded.weight[own], "gradient through the full weight")


@on_ranks("pairs")
def test_invalid_placements_are_errors(axis):
    for dim, ranks, message in [
        (-1, ((Interval(0, 3),), (Interval(3, 4),)), "shards of different sizes"),
        (0, ((Interval(0, 2), Interval(3, 4)), (Interval(0, 3),)), "expected every row on the same number of ranks"),
    ]:
        size = max(entry.stop for rank in ranks for entry in rank if isinstance(entry, Interval))
        placement = Placement(0 if dim else 1, size, ranks)
        with pytest.raises(ValueError, match=message):
            ParallelLinear(size, size, dim=dim, placement=placement, group=axis)


@on_ranks("pairs")
def test_autocast(axis):
    """Check the dtypes, which are torch's: bfloat16 outputs, float32 gradients."""
    pair, x = split_pair(torch.float32, axis), fixed((BATCH, IN), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = pair(x), unsharded_pair(torch.float32)(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < 4 * torch.finfo(torch.bfloat16).eps  # partial sums, their sum and the bias are rounded
    found.sum().backward()
    assert {parameter.grad.dtype for parameter in pair.parameters()} == {torch.float32}


def penalised(pair):
    """The gradient of a gradient penalty."""
    x = fixed((BATCH, IN)).requires_grad_()
    (grad,) = torch.autograd.grad(pair(x).pow(2).sum(), x, create_graph=True)
    grad.pow(2).sum().backward()
    return x.grad


@on_ranks("four")
def test_second_gradients(axis):
    gathers, scatters = unsharded_pair(torch.float64), unsharded_pair(torch.float64)
    gathers[0] = ParallelLinear.convert_parallel_linear(gathers[0], -1, gather_output=True, group=axis)
    scatters[0] = ParallelLinear.convert_parallel_linear(scatters[0], 0, group=axis)
    for pair in (split_pair(torch.float64, axis), gathers, scatters):
        assert_near(penalised(pair), penalised(unsharded_pair(torch.float64)))


@on_ranks("pairs")
def test_inputs_of_any_shape(axis):
    pair, unsharded = split_pair(torch.float64, axis), unsharded_pair(torch.float64)
    for x in (fixed((IN,)), fixed((0, IN)), fixed((3, 0, IN)), fixed((IN, BATCH)).t(), fixed((4, 3, IN))[:, ::2]):
        found, expected = pair(x), unsharded(x)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # partial sums


@pytest.mark.parametrize("seeds_differ", [False, True])
@pytest.mark.parametrize("layout", ["strided", "four"])
@on_ranks()
def test_initial_values(axis, seeds_differ):
    """Check that initial values and the generator's state are those of nn.Linear on the first rank."""
    for dim in (None, -1, 0):
        for options in ({}, {"split_sizes": (8, 8, 8)}):
            if dim is None and options:
                continue
            seed = 10 + (axis.rank if seeds_differ else 0)
            torch.manual_seed(10)
            unsharded = nn.Linear(24, 24)
            torch.manual_seed(seed)
            nn.Linear(24, 24)
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            layer = ParallelLinear(24, 24, True, dim, group=axis, **options)
            assert torch.equal(torch.get_rng_state(), state)
            if seeds_differ and dim is None:
                continue  # replicated, so not compared
            assert torch.equal(layer.master_weight, unsharded.weight)
            assert torch.equal(layer.master_bias, unsharded.bias)


@on_ranks("pairs")
def test_initialisers(axis):
    for name in sorted(set(INITIALIZERS) - {"dirac"}):
        torch.manual_seed(1)
        unsharded = torch.empty(OUT, IN)
        INITIALIZERS[name](unsharded)
        for dim in (-1, 0):
            torch.manual_seed(1)
            layer = ParallelLinear(IN, OUT, False, dim, weight_init=name, group=axis)
            assert torch.equal(layer.master_weight, unsharded), name
    torch.manual_seed(1)
    expected = nn.init.kaiming_normal_(torch.empty(OUT, IN), a=0.3, mode="fan_out")
    torch.manual_seed(1)
    shard_init_(nn.init.kaiming_normal_, layer.weight, a=0.3, mode="fan_out")
    assert torch.equal(layer.master_weight, expected)
    shard_init_(nn.init.ones_, copy.deepcopy(layer).weight)
    with pytest.raises(ValueError, match=r"the initializer is unknown \(got 'typo'\)"):
        ParallelLinear(IN, OUT, weight_init="typo", group=axis)
    torch.manual_seed(1)
    expected = nn.init.xavier_normal_(torch.empty(OUT, IN))
    torch.manual_seed(1)
    shard = init_affine_weight_(torch.empty(OUT // axis.size, IN), OUT, IN, OUT // axis.size, 0, stride=5, group=axis)
    assert torch.equal(shard, expected[columns_of(axis, (8, 8, 8, 8, 8))])
    meta = torch.empty(OUT // axis.size, IN, device="meta")
    assert init_affine_weight_(meta, OUT, IN, OUT // axis.size, 0, group=axis) is meta
    with pytest.raises(ValueError, match="does not match partition_size 3"):
        init_affine_weight_(torch.empty(3, IN), OUT, IN, 3, 0, group=axis)


@on_ranks("pairs")
def test_options(axis):
    column = ColumnParallelLinear(IN, OUT, skip_bias_add=True, gather_output=True, dtype=torch.float64, group=axis)
    x = fixed((BATCH, IN))
    output, bias = column(x)
    assert_near(output, x @ column.master_weight.T)
    assert torch.equal(bias, column.master_bias)
    row = RowParallelLinear(IN, OUT, skip_bias_add=True, dtype=torch.float64, group=axis)
    output, bias = row(x)
    assert_near(output, x @ row.master_weight.T)
    assert bias is row.bias
    meta = ColumnParallelLinear(IN, OUT, device="meta", dtype=torch.bfloat16, group=axis)
    assert (meta.weight.is_meta, meta.weight.dtype, tuple(meta.weight.shape)) == (
        True, torch.bfloat16, (OUT // axis.size, IN)
    )  # fmt: skip
    for message, build in {
        "skip_bias_add=True needs a bias": lambda: RowParallelLinear(IN, OUT, False, skip_bias_add=True, group=axis),
        f"out_features: 7 is not a multiple of {axis.size}": lambda: ColumnParallelLinear(IN, 7, group=axis),
        f"in_features: 7 is not a multiple of {axis.size}": lambda: RowParallelLinear(7, OUT, group=axis),
        r"split_sizes \[3, 4\] .*got 7, expected 8": lambda: ColumnParallelLinear(
            IN, 8, split_sizes=(3, 4), group=axis
        ),
        "gather_output needs dim = -1": lambda: RowParallelLinear(IN, OUT, gather_output=True, group=axis),
        "input_is_parallel dim = 0": lambda: ColumnParallelLinear(IN, OUT, input_is_parallel=True, group=axis),
        "got 'x', expected None": lambda: ParallelLinear(IN, OUT, dim="x", group=axis),
        r"weight has shape \[2, 2\] \(expected .* on rank": lambda: ColumnParallelLinear(
            IN, OUT, weight=nn.Parameter(torch.zeros(2, 2)), group=axis
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            build()
    assert "dim=-1" in repr(column)
    assert f"tp={axis.size}" in repr(column)


@pytest.mark.parametrize(("dim", "layout"), each_once([-1, 0], ["pairs", "four"]))
@on_ranks()
def test_low_rank(axis, dim):
    """Check a low-rank pair and all gradients against unsharded matrices."""
    options = {"gather_output": True} if dim == -1 else {}
    base = ParallelLinear(IN, OUT, dim=dim, dtype=torch.float64, group=axis, **options)
    layer = LoRALinear(base, 3, alpha=6)
    assert torch.equal(layer.lora_b, torch.zeros_like(layer.lora_b))
    full_b = fixed((OUT, 3), seed=7)
    names = {-1: ("lora_b", columns_of(axis, (OUT,))), 0: ("lora_a", columns_of(axis, (IN,)))}
    with torch.no_grad():
        layer.lora_b.copy_(full_b[names[-1][1]] if dim == -1 else full_b)
    a = layer.gather_parameter("lora_a").detach().requires_grad_()
    b = layer.gather_parameter("lora_b").detach().requires_grad_()
    assert torch.equal(b, full_b)
    weight, bias = base.master_weight.detach().requires_grad_(), base.master_bias.detach()
    x, grad = fixed((BATCH, IN)), fixed((BATCH, OUT), seed=5)
    full_x = x.clone().requires_grad_()
    expected = full_x @ (weight + 2 * b @ a).T + bias
    expected.backward(grad)
    found, found_x = run(layer, x, grad)
    assert_near(found, expected)
    assert_near(found_x, full_x.grad)
    rows, columns = (names[-1][1], slice(None)) if dim == -1 else (slice(None), names[0][1])
    assert_near(layer.lora_a.grad, a.grad[:, columns])
    assert_near(layer.lora_b.grad, b.grad[rows])
    assert_near(base.weight.grad, weight.grad[rows][:, columns])
    assert list(layer.state_dict()) == ["lora_a", "lora_b", "layer.weight", "layer.bias"]
    full = gather_state_dict(layer)
    assert torch.equal(full["lora_a"], a)
    assert torch.equal(full["lora_b"], b)
    copied = copy.deepcopy(layer)
    load_full_state_dict(copied, full)
    assert torch.equal(copied.lora_b, layer.lora_b)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), found)
    with pytest.raises(ValueError, match="got 0, expected at least 1"):
        LoRALinear(base, 0)


@on_ranks("strided")
def test_master_tensors_are_differentiable(axis):
    """Check the shards' gradients of a loss of the full tensors."""
    for dim, parts in ((-1, (8, 8, 24)), (0, None)):
        layer = ParallelLinear(IN, OUT, dim=dim, split_sizes=parts, dtype=torch.float64, group=axis)
        weights = fixed((OUT, IN))
        (layer.master_weight * weights).sum().backward()
        mine = columns_of(axis, parts or (IN,))
        assert torch.equal(layer.weight.grad, weights[mine] if dim == -1 else weights[:, mine])
        (layer.master_bias * weights[:, 0]).sum().backward()
        assert torch.equal(layer.bias.grad, weights[mine, 0] if dim == -1 else weights[:, 0])
