"""Conversion of single modules other than linear layers, on two ranks, compared with the unsharded module.

Values are small integers, so sums are exact in any order.
"""

import copy

import pytest
import torch
from torch import nn

import shardconv
from shardconv.convert.engine import Conversion, LayerSpec
from shardconv.convert.modules import AllReducedOutput, GroupedRMSNorm, ParallelDepthwise, Sharded, current_substitution
from shardconv.convert.overrides import InputGradientAllReduce, Overrides, apply_overrides, extend_class, gather_on_use
from shardconv.distributed import Axis
from shardconv.layers import ParallelLinear
from shardconv.layers.sharding import even_placement
from tests.support.ranks import on_ranks


def single():
    return Axis("tensor", 0, 1, (0,), None)


def numbers(*shape, start=-3):
    """Integers of both signs."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 5 % 7 + start).view(shape).float()


class Product(nn.Module):
    """A product with a parameter, plus a bias."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(numbers(4, 6))
        self.added = nn.Parameter(numbers(6))

    def forward(self, x, scale=None):
        output = x @ self.weight + self.added
        return output if scale is None else output * scale


@on_ranks("pairs")
def test_all_reduced_input_gradient(axis):
    """Check that the input gradient is the sum over ranks."""
    module = Product()
    with torch.no_grad():
        module.weight += axis.rank
    extend_class(module, InputGradientAllReduce, axis)
    x = numbers(2, 4).requires_grad_()
    scale = numbers(2, 1).requires_grad_()
    (module(x, scale=scale) * (axis.rank + 1)).sum().backward()
    wanted = numbers(2, 4).requires_grad_(), numbers(2, 1).requires_grad_()
    weight, added = numbers(4, 6), numbers(6)
    sum((((wanted[0] @ (weight + rank) + added) * wanted[1]) * (rank + 1)).sum() for rank in range(2)).backward()
    assert torch.equal(x.grad, wanted[0].grad)
    assert torch.equal(scale.grad, wanted[1].grad)


@on_ranks("pairs")
def test_all_reduced_output(axis):
    """Check a row parallel product: the sum over ranks, with the bias added once."""
    module = Product()
    rows = slice(2 * axis.rank, 2 * axis.rank + 2)
    module.weight = nn.Parameter(module.weight.detach()[rows])
    placement = even_placement(0, (4,), axis.size, what="rows")
    extend_class(module, AllReducedOutput, axis, styles={})
    module.placements = {"weight": placement}
    unsharded, x = Product(), numbers(3, 4)
    expected = unsharded(x)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert torch.equal(module(x[:, rows]), expected)
    expected.square().sum().backward()
    module(x[:, rows]).square().sum().backward()
    assert torch.equal(module.weight.grad, unsharded.weight.grad[rows])
    assert torch.equal(module.added.grad, unsharded.added.grad)


class Fails(Product):
    def forward(self, x):
        assert (self, "weight") in current_substitution.values
        raise KeyError(x)


def test_parameter_is_restored_after_a_failed_forward():
    """The full parameter is set during forward only."""
    module = Fails()
    extend_class(module, Sharded, single(), styles={"weight": "replicated_with_grad_allreduce"})
    with pytest.raises(KeyError):
        module(numbers(2, 4))
    assert not current_substitution.values


class Head(nn.Module):
    """Reads the table of another module, and optionally raises."""

    def __init__(self, table):
        super().__init__()
        self.tables = [table]  # not registered as a submodule

    def forward(self, x, *, fails=False):
        assert (self.tables[0], "weight") in current_substitution.values
        return (x if not fails else None) @ self.tables[0].weight.t()


def test_table_that_another_module_reads_is_full_during_forward():
    table = ParallelLinear(4, 6, dim=-1, group=single())
    head = Head(table)
    gather_on_use(head, ((table, "weight"),), single())
    x = numbers(2, 4)
    assert torch.equal(head(x), x @ table.weight.t())
    with pytest.raises(TypeError):
        head(x, fails=True)
    assert not current_substitution.values


def test_count_is_limited_to_local_rows():
    """With 12 local rows and 4 rows each, a count of 8 becomes 3."""
    module = nn.Module()
    module.layer, module.wide, module.chosen, module.few = nn.Linear(2, 12), 4, 8, 2
    limits = {"chosen": ("layer", "wide"), "few": ("layer", "wide")}
    apply_overrides(module, [Overrides(module, limits=limits)], single())
    assert (module.chosen, module.few) == (3, 2)


def converted(name, module, kind, dim, sizes):
    """The first of two ranks' module, evenly sharded."""
    placements = {own: even_placement(dim, (size,), 2, what=own) for own, size in sizes.items()}
    spec = LayerSpec(kind, {"placements": placements})
    return Conversion.prepare(name, module, spec, Axis("tensor", 0, 2, (0, 1), None)).replacement


@pytest.mark.parametrize(
    ("conv", "dim", "sizes", "message"),
    [
        ((8, 8, 8), 1, {"weight": 2, "bias": 8}, "only the channels of a convolution can be sharded"),
        ((8, 8, 8), 0, {"weight": 8, "bias": 4}, "only the channels of a convolution can be sharded"),
        ((9, 6, 3), 0, {"weight": 6, "bias": 6}, "a convolution is split between its groups of 2 channels"),
        ((8, 8, 8), 0, {"weight": 8}, "weight and bias"),
    ],
    ids=["dim 1", "part of the bias", "boundary in a group", "weight alone"],
)
def test_only_groups_of_a_convolution_can_be_sharded(conv, dim, sizes, message):
    channels, outputs, groups = conv
    with pytest.raises(ValueError, match=f"conv: .*{message}"):
        converted("conv", nn.Conv1d(channels, outputs, 3, groups=groups), ParallelDepthwise, dim, sizes)


@pytest.mark.parametrize(
    ("channels", "groups", "local"), [(8, 8, (4, 4, 4)), (12, 4, (2, 6, 4))], ids=["depthwise", "groups"]
)
def test_sharded_convolution_has_the_local_channels(channels, groups, local):
    conv = nn.Conv1d(channels, 8, 3, groups=groups)
    sharded = converted("conv", conv, ParallelDepthwise, 0, {"weight": 8, "bias": 8})
    assert (sharded.groups, sharded.in_channels, sharded.out_channels) == local
    assert (type(conv), conv.groups) == (nn.Conv1d, groups)


class Norm(nn.Module):
    def __init__(self, features, group_size):
        super().__init__()
        self.weight, self.group_size = nn.Parameter(torch.ones(features)), group_size


@pytest.mark.parametrize(("group_size", "held", "full"), [(6, 6, 6), (12, 6, 12), (24, 6, 24), (2, 2, 2)])
def test_groups_of_norms(group_size, held, full):
    """Each rank holds 6 of 12 features: full groups, or an equal fraction of one."""
    norm = converted("norm", Norm(12, group_size), GroupedRMSNorm, 0, {"weight": 12})
    assert (norm.group_size, norm.full_group_size) == (held, full)


def test_uneven_groups_of_norms():
    with pytest.raises(ValueError, match="norm: 6 features per rank are neither groups of 4 nor an equal part of one"):
        converted("norm", Norm(12, 4), GroupedRMSNorm, 0, {"weight": 12})


class Normed(nn.Module):
    """A norm over the features between two layers."""

    def __init__(self, norm, dtype):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), norm, nn.Linear(16, 8)
        with torch.no_grad():
            self.up.weight.mul_(1e-3)  # so that eps matters
            self.up.bias.zero_()
            for parameter in norm.parameters():
                parameter.normal_()
        self.to(dtype)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


NORMED = """
[units]
feature = { count = 16 }
[rules]
"{up,norm}" = { style = "colwise", unit = "feature" }
"down" = { style = "rowwise", unit = "feature" }
"""
NORMS = {
    "RMSNorm": lambda: nn.RMSNorm(16),
    "RMSNorm with eps": lambda: nn.RMSNorm(16, eps=1e-3),
    "LayerNorm": lambda: nn.LayerNorm(16),
    "LayerNorm without a bias": lambda: nn.LayerNorm(16, bias=False),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
@on_ranks("pair", plan=NORMED)
def test_norms_of_torch_over_sharded_features(axis, path, name, dtype):
    """The default eps of RMSNorm is that of the dtype in which torch computes."""
    torch.manual_seed(0)
    before, x = Normed(NORMS[name](), dtype), torch.randn(3, 8, dtype=dtype)
    after = shardconv.convert_model(copy.deepcopy(before), rules=path, group=axis)
    found, expected = after(x), before(x)
    near = {"atol": 1e-12, "rtol": 1e-10} if dtype is torch.float64 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(found, expected, **near)  # sums over ranks; bfloat16 has 8 bits
    found.float().square().sum().backward()
    expected.float().square().sum().backward()
    for (key, parameter), full in zip(after.norm.named_parameters(), before.norm.parameters(), strict=True):
        wanted = full.grad.chunk(axis.size)[axis.rank]
        assert (parameter.grad - wanted).abs().max() <= near["rtol"] * full.grad.abs().max(), key


class Planes(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16), nn.RMSNorm((16, 4))


@on_ranks("pair", plan=NORMED.replace('"down" = { style = "rowwise", unit = "feature" }', ""))
def test_norm_over_two_dims_is_refused(axis, path):
    with pytest.raises(
        ValueError, match=r"norm: a RMSNorm over 2 dims cannot be sharded \(expected one dim\): flatten"
    ):
        shardconv.convert_model(Planes(), rules=path, group=axis)
