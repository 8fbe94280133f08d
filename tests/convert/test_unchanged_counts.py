"""Modules whose code divides local features: what is refused is what computes something else than the unsharded module.

Each form of attention is converted without the check first, and its outputs are compared with those of the unsharded
module; the check has to refuse exactly the forms whose outputs differ, or that fail.
"""

import copy
import gc
import re
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardconv
from shardconv import convert_parallel_linear
from shardconv.convert import unchanged_counts
from shardconv.convert.forward_reader import ForwardReader
from shardconv.convert.unchanged_counts import examine_forwards
from shardconv.distributed import Axis
from shardconv.layers import ColumnParallelLinear, RowParallelLinear
from tests.support.ranks import on_ranks

HEADS, SIZE, WIDTH = 8, 4, 32


def split_heads(x, num_heads):
    return x.unflatten(-1, (num_heads, -1))


class Config:
    num_heads = HEADS


class Processor:
    """Computes for a module, as the attention processors of diffusers."""

    def __call__(self, attn, x, mask=None):
        q, k, v = attn.q(x), attn.k(x), attn.v(x)
        inner = k.shape[-1]
        size = inner // attn.num_heads
        q, k, v = (one.view(x.shape[0], -1, attn.num_heads, size).transpose(1, 2) for one in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(x.shape[0], -1, inner)
        return attn.to_out[1](attn.to_out[0](found))


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = HEADS

    def forward(self, q, k, v):
        return functional.scaled_dot_product_attention(
            *(one.unflatten(-1, (self.count, -1)).transpose(1, 2) for one in (q, k, v))
        )


class Attention(nn.Module):
    """Attention whose derived classes divide features into heads."""

    columns, rows = ("q", "k", "v"), ("to_out.0",)

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(HEADS * SIZE, WIDTH), nn.Dropout(0.0)])
        self.num_heads, self.head_dim, self.config = HEADS, SIZE, Config()
        self.core, self.processor = Core(), Processor()

    def forward(self, x):
        q, k, v = (self.heads(layer(x)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.to_out[0](functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def heads(self, x):
        raise NotImplementedError


class Sizes(Attention):
    def heads(self, x):
        return x.view(*x.shape[:-1], -1, self.head_dim)


class Computed(Attention):
    def heads(self, x):
        batch, tokens, features = x.shape
        return x.view(batch, tokens, features // self.head_dim, self.head_dim)


class Parts(Attention):
    def heads(self, x):
        return torch.stack(x.split(self.head_dim, -1), -2)


class Condition(Attention):
    """The other branch, for features that a layer without shards computes, is not taken."""

    other = None

    def heads(self, x):
        if self.other is not None:
            return x.unflatten(-1, (self.num_heads, -1))
        return x.unflatten(-1, (-1, self.head_dim))


class Recursive(Sizes):
    """A function in the forward calls itself."""

    def forward(self, x):
        def halved(x, times):
            return halved(x / 2, times - 1) if times else x

        return super().forward(halved(x, 2))


class Counts(Attention):
    def heads(self, x):
        return x.view(x.shape[0], x.size(1), self.num_heads, -1)


class Both(Attention):
    def heads(self, x):
        return x.view(x.shape[0], -1, self.num_heads, self.head_dim)


class Sum(Attention):
    def heads(self, x):
        shape = x.size()[:-1] + (self.num_heads, x.size(-1) // self.num_heads)  # noqa: RUF005 - as some models have it
        return torch.reshape(x, shape)


class FromConfig(Attention):
    def heads(self, x):
        return split_heads(x, self.config.num_heads)


class Literal(Attention):
    def heads(self, x):
        return x.unflatten(-1, (8, -1))


class Inherited(Counts):
    def forward(self, x):
        return super().forward(x) * 2


class Mapped(Attention):
    def forward(self, x):
        count = self.num_heads

        def local(one):
            return one.unflatten(-1, (count, -1)).transpose(1, 2)

        q, k, v = map(local, (self.q(x), self.k(x), self.v(x)))
        return self.to_out[0](functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Processed(Attention):
    def forward(self, x, **options):
        return self.processor(self, x, **options)


class WithCore(Attention):
    def forward(self, x):
        return self.to_out[0](self.core(self.q(x), self.k(x), self.v(x)).transpose(1, 2).flatten(2))


class OneHead(Attention):
    """Does not divide features: sums over them are those of one rank."""

    def forward(self, x):
        return self.to_out[0](functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Segments(Attention):
    """The features of k are two segments, which a contiguous shard does not have."""

    def forward(self, x):
        first, second = self.k(x).chunk(2, dim=-1)
        return self.to_out[0](torch.cat([first * 2, second], -1) + self.q(x) + self.v(x))


def converted(module, axis, counts=None):
    """Convert layers by hand, without the module that contains them."""
    for names, dim in ((module.columns, -1), (module.rows, 0)):
        convert_parallel_linear(nn.ModuleList(map(module.get_submodule, names)), dim, counts=counts, group=axis)
    return module


def is_right(module, expected):
    try:
        found = module(torch.ones(1, 3, WIDTH).cumsum(1))
    except RuntimeError:  # a size does not divide
        return False
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)  # sums in another order


@on_ranks("pair")
def test_counts_are_divided_once(axis):
    torch.manual_seed(0)
    module, x = Processed(), torch.randn(1, 3, WIDTH)
    expected = module(x)
    with pytest.raises(
        ValueError, match=r"divides .* by num_heads = 8, .* counts=\[\"num_heads\"\] to divide it by 2;"
    ):
        converted(module, axis)
    assert (type(module.q), module.num_heads) == (nn.Linear, HEADS)
    for layer in (module.q, module.k, module.v):
        convert_parallel_linear(nn.ModuleList([layer]), -1, counts=["num_heads"], group=axis)
    convert_parallel_linear(nn.ModuleList([module.to_out[0]]), 0, group=axis)
    assert module.num_heads == HEADS // 2  # once for all layers
    torch.testing.assert_close(module(x), expected, atol=1e-6, rtol=1e-5)  # sums in another order
    copied = copy.deepcopy(module)
    convert_parallel_linear(nn.ModuleList([copied.q]), -1, counts=["num_heads"], group=axis)
    assert copied.num_heads == HEADS // 2


@on_ranks("pair")
def test_counts_are_those_of_the_modules_that_have_them(axis):
    """Check that a count of one module says nothing about another, and the remedy for a count of another object."""
    both = nn.ModuleList([Counts(), WithCore()])
    del both[1].num_heads
    with pytest.raises(
        ValueError, match=r"^1 \(WithCore\): .* by core.count = 8, .*: set it to 4 where only this module"
    ):
        convert_parallel_linear(both, -1, counts=["num_heads"], group=axis)


@on_ranks("pair")
def test_module_that_contains_a_lone_layer_is_examined(axis):
    """Check a layer that is passed alone: the module that contains it is examined, and no count is changed before."""
    module = Counts()
    with pytest.raises(ValueError, match=r"^Counts: .* num_heads"):
        convert_parallel_linear(module.q, -1, group=axis)
    with pytest.raises(ValueError, match="counts: 'heads' names no integer attribute of Counts"):
        convert_parallel_linear(module.q, -1, counts=["heads"], group=axis)
    module.odd = 3
    with pytest.raises(ValueError, match=r"counts: odd = 3 of Counts is not a multiple of 2 ranks"):
        convert_parallel_linear(module.q, -1, counts=["odd"], group=axis)
    layer = convert_parallel_linear(module.q, -1, counts=["num_heads"], group=axis)
    assert layer is module.q
    assert (type(layer), module.num_heads) == (ColumnParallelLinear, HEADS // 2)


PLAN = """
[units]
head = { count = 8, size = 4 }
[rules]
"attn.{q,k,v}" = { style = "colwise", unit = "head" }
"attn.to_out.0" = { style = "rowwise", unit = "head" }
"""


class Net(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attn = attention

    def forward(self, x):
        return self.attn(x)


def check_plan(axis, kind, path, modules, message):
    """Check the error, or that the converted module is right; the override ``{}`` turns the check off."""
    torch.manual_seed(0)
    net, x = Net(kind()), torch.randn(1, 3, WIDTH)
    expected = net(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardconv.PlanWarning)
        if message:
            with pytest.raises(shardconv.PlanError, match=message):
                shardconv.convert_model(net, rules=path, group=axis)
            return
        shardconv.convert_model(net, rules=path, group=axis)
    assert torch.allclose(net(x), expected, atol=1e-5) is (modules != NONE)


NONE = '[modules]\n"attn" = {}\n'
OVERRIDE = '[modules]\n"attn" = { attributes = { num_heads = "head" } }\n'
OF_CORE = '[modules]\n"attn.core" = { attributes = { count = "head" } }\n'


@pytest.mark.parametrize(
    ("kind", "modules", "message"),
    [
        (
            Processed,
            "",
            r'attn \(Processed\): .* num_heads = 8, .*: add "attn" = { attributes = { num_heads = "head" } } to',
        ),
        (Processed, OVERRIDE, ""),
        (Processed, NONE, ""),
        (FromConfig, "", r'config.num_heads = 8.* "attn" = { attributes = { "config.num_heads" = "head" } }'),
        (WithCore, "", r'by core.count = 8, .* "attn.core" = { attributes = { count = "head" } }'),
        (WithCore, OF_CORE, ""),
        (OneHead, "", r'has the sharded layers of an attention.* or, if no number has to be changed, "attn" = {} to'),
        (Literal, "", r'by 8, a number in its code, .*, add "attn" = {} to'),
        (Sizes, "", ""),
    ],
)
def test_plan_files(ranks, tmp_path, kind, modules, message):
    (tmp_path / "net.toml").write_text(PLAN + modules)
    ranks("pair", check_plan, kind, tmp_path / "net.toml", modules, message)


def hidden():
    """An attention whose source is not available."""
    code = "def forward(self, x):\n    return self.processor(self, x)\n"
    names = {}
    exec(code, names)
    return type("Hidden", (Attention,), {"forward": names["forward"]})()


@on_ranks("pair")
def test_attention_without_source_is_refused_until_counts_are_named(axis):
    with pytest.raises(
        ValueError, match=r"^Hidden: has the sharded layers of an attention, and its code does not show"
    ):
        converted(hidden(), axis)
    converted(hidden(), axis, counts=["num_heads"])


class Named(nn.Module):
    """Layers by name; the last one is row parallel."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


def sequential():
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))


class Experts(Named):
    columns, rows = ("experts.0.0", "experts.1.0", "experts.2.0"), ("experts.0.2", "experts.1.2", "experts.2.2")

    def __init__(self):
        super().__init__(gate=nn.Linear(WIDTH, 3), experts=nn.ModuleList(sequential() for _ in range(3)))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Looping(Experts):
    def forward(self, x):
        for one in self.experts:
            x = x + one(x)
        return x


class Gated(Named):
    columns, rows = ("w1", "w3", "w4"), ("w2",)

    def __init__(self):
        super().__init__(**{name: nn.Linear(WIDTH, 16) for name in self.columns}, w2=nn.Linear(16, WIDTH))

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x) + self.w4(x))


GATED_PLAN = """
[units]
hidden = { count = 16 }
[rules]
"gate_up" = { style = "packed_colwise", segments = ["hidden", "hidden"] }
"down" = { style = "rowwise", unit = "hidden" }
"""


class Fused(Named):
    def __init__(self):
        super().__init__(gate_up=nn.Linear(WIDTH, 32), down=nn.Linear(16, WIDTH))

    def forward(self, x):
        both = self.gate_up(x)
        half = both.shape[-1] // 2
        return self.down(functional.silu(both[..., :half]) * both[..., half:])


@on_ranks("pair", plan=GATED_PLAN)
def test_gated_mlp_with_a_fused_projection_is_not_taken_for_an_attention(axis, path):
    torch.manual_seed(0)
    module, x = Fused(), torch.randn(1, 3, WIDTH)
    expected = module(x)
    shardconv.convert_model(module, rules=path, group=axis)
    torch.testing.assert_close(module(x), expected, atol=1e-6, rtol=1e-5)  # sums in another order


def unavailable(kind):
    """The same module, whose source is not available."""
    names = {"functional": functional}
    exec("def forward(self, x):\n    return self.w2(self.w1(x) * self.w3(x) * self.w4(x))\n", names)
    return type("Unavailable", (kind,), {"forward": names["forward"]})()


@on_ranks("pair")
def test_three_layers_without_source_could_be_an_attention(axis):
    module = unavailable(Gated)
    convert_parallel_linear(nn.ModuleList([module.w1, module.w3, module.w4]), -1, group=axis)
    with pytest.raises(ValueError, match=r"^Unavailable: has the sharded layers of an attention"):
        convert_parallel_linear(module.w2, 0, group=axis)


class Property(Attention):
    @property
    def heads_of_all(self):
        return self.num_heads

    def heads(self, x):
        return x.unflatten(-1, (self.heads_of_all, -1))


@on_ranks("pair", plan=f'{PLAN}[modules]\n"attn" = {{ attributes = {{ heads_of_all = "head" }} }}\n')
def test_properties_without_a_setter_are_refused_before_anything_changes(axis, path):
    """Check that a property without a setter is refused before anything changes, and is not proposed."""
    module = Property()
    with pytest.raises(ValueError, match=r"counts: heads_of_all of Property is a property without a setter"):
        converted(module, axis, counts=["heads_of_all"])
    with pytest.raises(ValueError, match=r"by num_heads = 8, .*: pass counts=\[\"num_heads\"\] to divide it by 2"):
        converted(module, axis)
    net = Net(module)
    with pytest.raises(shardconv.PlanError, match=r"^Property: 'heads_of_all' is a property without a setter \(exp"):
        shardconv.convert_model(net, rules=path, group=axis)
    assert {type(one) for one in (module.q, module.k, module.v)} == {nn.Linear}


@on_ranks("pair")
def test_that_no_count_is_wrong_is_remembered_for_layers(axis):
    """Check that counts=() is remembered for its layers, and not for others of the same module."""
    module = Counts()
    convert_parallel_linear(module.q, -1, counts=(), group=axis)
    with pytest.raises(ValueError, match=r"divides the features of k by num_heads = 8"):
        convert_parallel_linear(nn.ModuleList([module.k]), -1, group=axis)
    convert_parallel_linear(nn.ModuleList([module.k, module.v]), -1, counts=(), group=axis)
    convert_parallel_linear(module.to_out[0], 0, group=axis)


def test_counts_are_a_list():
    with pytest.raises(TypeError, match=r"counts is 'num_heads' \(expected a list of names\): pass a list"):
        convert_parallel_linear(Counts(), -1, counts="num_heads")


class Widths(Attention):
    unrelated = 3

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, -1))


@pytest.mark.parametrize("modules", ["attributes = { unrelated = 5 }", "gathered_output = true"])
@pytest.mark.parametrize("kind", [Widths, OneHead])
def test_overrides_of_other_things_do_not_turn_the_check_off(ranks, tmp_path, kind, modules):
    modules = modules.replace("unrelated", "head_dim") if kind is OneHead else modules
    path = tmp_path / "net.toml"
    path.write_text(f'{PLAN}[modules]\n"attn" = {{ {modules} }}\n')
    message = "num_heads = 8" if kind is Widths else "has the sharded layers of an attention"
    ranks("pair", check_plan, kind, path, modules, message)


def parallel_down():
    return RowParallelLinear(16, WIDTH, group=Axis("tensor", 0, 1, (0,), None))


def test_the_set_of_modules_is_made_once(monkeypatch):
    """A set for each module would take quadratic time."""
    made = []
    monkeypatch.setattr(unchanged_counts, "ForwardReader", lambda *args: made.append(1) or ForwardReader(*args))
    module = nn.ModuleList(Fused() for _ in range(20))
    assert len(list(examine_forwards(module, {one.down: parallel_down() for one in module}, ()))) == 20
    assert len(made) == 1


NANO = """
[rules]
"attn.c_attn" = { style = "colwise_gather_output" }
"attn.c_proj" = { style = "rowwise" }
"""


class NanoAttention(nn.Module):
    """Fused projections, and reshapes by the width of the input."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.size()  # noqa: N806 - as the field has it
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (one.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for one in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(found.transpose(1, 2).contiguous().view(B, T, C))


@on_ranks("pair", plan=NANO)
def test_attention_that_reshapes_to_the_width_of_the_input_is_gathered(axis, path):
    torch.manual_seed(0)
    net, x = Net(NanoAttention()), torch.randn(2, 5, WIDTH)
    before = copy.deepcopy(net)
    shardconv.convert_model(net, rules=path, group=axis)
    torch.testing.assert_close(net(x), before(x), atol=1e-6, rtol=1e-5)  # sums in another order
    net(x).square().sum().backward()
    before(x).square().sum().backward()
    columns = before.attn.c_proj.weight.grad.chunk(axis.size, 1)[axis.rank]
    torch.testing.assert_close(net.attn.c_proj.weight.grad, columns, atol=1e-5, rtol=1e-4)  # sums in another order


def test_unknown_units_in_expressions_are_named(ranks, tmp_path):
    path = tmp_path / "net.toml"
    path.write_text(f'{PLAN}[modules]\n"attn" = {{ attributes.num_heads = "4 * heads" }}\n')
    message = r"modules 'attn': unit 'heads' is unknown \(expected head, .*or a field of the config\): write head"
    ranks("pair", check_plan, Counts, path, "", message)


class Unnamed(OneHead):
    def __init__(self):
        super().__init__()
        self.heads_of_all = self.__dict__.pop("num_heads")


class Countless(OneHead):
    def __init__(self):
        super().__init__()
        del self.num_heads


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (Unnamed, 'as "attn" = { attributes = { heads_of_all = "head" } }, or'),
        (Countless, 'add the attributes with its numbers of heads, if it has any, to "attn", or'),
    ],
)
def test_remedies_name_attributes_that_exist(ranks, tmp_path, kind, advice):
    (tmp_path / "net.toml").write_text(PLAN)
    ranks("pair", check_plan, kind, tmp_path / "net.toml", "", re.escape(advice))


class Mlp(nn.Module):
    """Two layers, between which derived classes compute with the features of the first."""

    inner, columns, rows = 2 * WIDTH, ("a",), ("b",)

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(self.inner, WIDTH)

    def forward(self, x):
        return self.b(self.features(self.a(x)))


class Halved(Mlp):
    inner = WIDTH


class Glu(Halved):
    def features(self, h):
        return functional.glu(h, dim=-1)


class GluModule(Halved):
    module = nn.GLU(-1)

    def features(self, h):
        return self.module(h)


class Sliced(Halved):
    def features(self, h):
        size = h.shape[-1] // 2
        return functional.silu(h[..., :size]) * h[..., size:]


class SplitInHalves(Halved):
    def features(self, h):
        first, second = torch.split(h, h.shape[-1] // 2, dim=-1)
        return functional.silu(first) * second


class ViewedAsHalves(Halved):
    def forward(self, x):
        h = self.a(x.flatten(0, 1))
        h = h.view(h.shape[0], 2, -1)
        return self.b(functional.silu(h[:, 0]) * h[:, 1]).view(x.shape)


class OfFeatures(Mlp):
    def features(self, h):
        return h.softmax(-1)


class OfTokens(Mlp):
    def features(self, h):
        return h.softmax(1) + h.transpose(1, 2).softmax(-1).transpose(1, 2) + h.mean(dim=1, keepdim=True)


class Mean(Mlp):
    def features(self, h):
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


class Normalized(Mlp):
    def features(self, h):
        return functional.layer_norm(h, h.shape[-1:]) + functional.normalize(h, dim=-1)


class SoftmaxModule(Mlp):
    module = nn.Softmax(-1)

    def features(self, h):
        return self.module(h)


class Pairs(Mlp):
    inner = WIDTH

    def features(self, h):
        return h[..., ::2] * h[..., 1::2]


class Weights(Mlp):
    def forward(self, x):
        return functional.linear(functional.linear(x, self.a.weight, self.a.bias), self.b.weight, self.b.bias)


class RowWeight(Mlp):
    def forward(self, x):
        return self.a(x) @ self.b.weight.t()


class TypeOfWeight(Mlp):
    def features(self, h):
        return h.to(self.b.weight.dtype) if isinstance(self.b.weight, torch.Tensor) else h


class FusedAttention(nn.Module):
    """Attention with q, k, v in one layer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads, self.head_dim, self.width = HEADS, SIZE, WIDTH

    def forward(self, x):
        q, k, v = (one.transpose(1, 2) for one in self.heads(self.qkv(x), x))
        found = functional.scaled_dot_product_attention(q, k, v, scale=self.scale(x))
        return self.out(found.transpose(1, 2).flatten(2))

    def scale(self, x):
        return 0.5


class FusedView(FusedAttention):
    def heads(self, h, x):
        return h.view(*x.shape[:2], 3, self.num_heads, self.head_dim).unbind(2)


class FusedSplit(FusedAttention):
    def heads(self, h, x):
        return [one.view(*x.shape[:2], self.num_heads, -1) for one in h.split(self.width, dim=-1)]


class FusedSizes(FusedAttention):
    def heads(self, h, x):
        sizes = [self.width, self.width, self.width]
        return [one.view(*x.shape[:2], -1, self.head_dim) for one in h.split(sizes, dim=-1)]


class Interleaved(FusedAttention):
    def heads(self, h, x):
        return h.view(*x.shape[:2], self.num_heads, 3, self.head_dim).unbind(3)


class FullScale(Interleaved):
    def scale(self, x):
        return (x.shape[-1] // self.num_heads) ** -0.5


@pytest.mark.parametrize(
    ("kind", "counts", "is_same"),
    [
        (FusedView, ["num_heads"], False),
        (FusedSplit, ["num_heads", "width"], False),
        (FusedSizes, ["width"], False),
        (Interleaved, ["num_heads"], True),
        (FullScale, ["num_heads"], False),
    ],
)
@on_ranks("pair")
def test_counts_that_only_make_it_run_are_refused(axis, kind, counts, is_same):
    """Convert with counts that make it run, and compare: the check refuses it if it computes something else."""
    torch.manual_seed(0)
    module, x = kind(), torch.ones(1, 3, WIDTH).cumsum(1)
    expected, unchecked = module(x), copy.deepcopy(module)
    for one, dim in ((unchecked.qkv, -1), (unchecked.out, 0)):
        convert_parallel_linear(nn.ModuleList([one]), dim, counts=(), group=axis)
    for name in counts:
        setattr(unchecked, name, getattr(unchecked, name) // 2)
    assert is_right(unchecked, expected) is is_same
    if is_same:
        convert_parallel_linear(nn.ModuleList([module.qkv]), -1, counts=counts, group=axis)
        return
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: .*: shard the segments of a fused layer by a plan file"):
        convert_parallel_linear(nn.ModuleList([module.qkv]), -1, counts=counts, group=axis)


class Flag(Sizes):
    fused = False

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, -1)) if self.fused else super().heads(x)


class Flags(Flag):
    pretraining_tp = 1

    def heads(self, x):
        if (self.pretraining_tp > 1 and x.ndim > 2) or self.fused:
            return x.unflatten(-1, (self.num_heads, -1))
        return super().heads(x)


class Checkpointed(Sizes):
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint  # noqa: PLC0415 - as some models have it

        found = checkpoint(self.attend, self.q(x), self.k(x), self.v(x), use_reentrant=False)
        return self.to_out[0](found)

    def attend(self, *parts):
        q, k, v = (self.heads(one).transpose(1, 2) for one in parts)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OfWeight(Attention):
    @property
    def count(self):
        return self.q.weight.shape[0] // self.head_dim

    def heads(self, x):
        return x.view(*x.shape[:2], self.count, -1)


RIGHT = (
    Sizes, Computed, Parts, Condition, Recursive, Flag, Flags, Checkpointed, OfWeight, Experts, Looping, Gated,
    OfTokens, Pairs, TypeOfWeight,
)  # fmt: skip
WRONG = (
    Counts, Both, Sum, FromConfig, Literal, Inherited, Mapped, Processed, WithCore, OneHead, Segments, Glu, GluModule,
    Sliced, SplitInHalves, ViewedAsHalves, OfFeatures, Mean, Normalized, SoftmaxModule, Weights, RowWeight,
)  # fmt: skip


@pytest.mark.parametrize("kind", [*RIGHT, *WRONG])
@on_ranks("pair")
def test_forms_that_compute_something_else_are_refused(axis, kind):
    torch.manual_seed(0)
    module = kind()
    expected = module(torch.ones(1, 3, WIDTH).cumsum(1))
    right = is_right(converted(copy.deepcopy(module), axis, counts=()), expected)
    assert right is (kind in RIGHT)
    if right:
        assert is_right(converted(module, axis), expected)
        return
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: (its forward|has the sharded layers) .*counts="):
        converted(module, axis)


def check_released(axis):
    """Check that reading a function does not keep what it encloses."""
    found = enclosed(axis)
    gc.collect()
    return found() is None


def enclosed(axis):
    module, captured = Sizes(), nn.Linear(1, 1)

    def forward(x):
        return Sizes.forward(module, x) + captured.weight

    module.forward = forward
    converted(module, axis)
    return weakref.ref(captured)


def test_functions_that_were_read_are_released(ranks):
    assert ranks("pair", check_released) == [True, True]
