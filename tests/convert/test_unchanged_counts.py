"""Modules whose code divides local features: what is refused is what computes something else than the unsharded module.

Each form of attention is converted without the check first, and its outputs are compared with those of the unsharded
module; the check has to refuse exactly the forms whose outputs differ, or that fail.
"""

import copy
import gc
import re
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardconv
from shardconv import convert_parallel_linear
from shardconv.layers import ColumnParallelLinear
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
    """Attention whose forms divide features into heads."""

    columns, rows = ("q", "k", "v"), ("to_out.0",)
    other, fused, pretraining_tp = None, False, 1

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(HEADS * SIZE, WIDTH), nn.Dropout(0.0)])
        self.num_heads, self.head_dim, self.config = HEADS, SIZE, Config()
        self.core, self.processor = Core(), Processor()

    def forward(self, x):
        q, k, v = (self.heads(layer(x)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.to_out[0](functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Heads:
    """The method ``heads`` of each form."""

    def sizes(self, x):
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def computed(self, x):
        batch, tokens, features = x.shape
        return x.view(batch, tokens, features // self.head_dim, self.head_dim)

    def parts(self, x):
        return torch.stack(x.split(self.head_dim, -1), -2)

    def condition(self, x):  # the other branch, for features that a layer without shards computes, is not taken
        if self.other is not None:
            return x.unflatten(-1, (self.num_heads, -1))
        return x.unflatten(-1, (-1, self.head_dim))

    def flags(self, x):
        if (self.pretraining_tp > 1 and x.ndim > 2) or self.fused:
            return x.unflatten(-1, (self.num_heads, -1))
        return x.unflatten(-1, (-1, self.head_dim))

    def counts(self, x):
        return x.view(x.shape[0], x.size(1), self.num_heads, -1)

    def both(self, x):
        return x.view(x.shape[0], -1, self.num_heads, self.head_dim)

    def sum_of_sizes(self, x):
        shape = x.size()[:-1] + (self.num_heads, x.size(-1) // self.num_heads)  # noqa: RUF005 - as some models have it
        return torch.reshape(x, shape)

    def from_config(self, x):
        return split_heads(x, self.config.num_heads)

    def literal(self, x):
        return x.unflatten(-1, (8, -1))


class Forwards:
    """The method ``forward`` of further forms."""

    def mapped(self, x):
        count = self.num_heads

        def local(one):
            return one.unflatten(-1, (count, -1)).transpose(1, 2)

        q, k, v = map(local, (self.q(x), self.k(x), self.v(x)))
        return self.to_out[0](functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def processed(self, x, **options):
        return self.processor(self, x, **options)

    def with_core(self, x):
        return self.to_out[0](self.core(self.q(x), self.k(x), self.v(x)).transpose(1, 2).flatten(2))

    def one_head(self, x):  # does not divide features: sums over them are those of one rank
        return self.to_out[0](functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))

    def segments(self, x):  # the features of k are two segments, which a contiguous shard does not have
        first, second = self.k(x).chunk(2, dim=-1)
        return self.to_out[0](torch.cat([first * 2, second], -1) + self.q(x) + self.v(x))


class Recursive(Attention):
    """A function in the forward calls itself."""

    heads = Heads.sizes

    def forward(self, x):
        def halved(x, times):
            return halved(x / 2, times - 1) if times else x

        return super().forward(halved(x, 2))


class Inherited(Attention):
    heads = Heads.counts

    def forward(self, x):
        return super().forward(x) * 2


class Checkpointed(Attention):
    heads = Heads.sizes

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


class Mlp(nn.Module):
    """Two layers, between which forms compute with the features of the first."""

    inner, columns, rows = 2 * WIDTH, ("a",), ("b",)
    glu, softmax = nn.GLU(-1), nn.Softmax(-1)

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(self.inner, WIDTH)

    def forward(self, x):
        return self.b(self.features(self.a(x)))


class Halved(Mlp):
    inner = WIDTH


class Features:
    """The method ``features`` of the forms of :class:`Mlp`."""

    def of_features(self, h):
        return h.softmax(-1)

    def of_tokens(self, h):
        return h.softmax(1) + h.transpose(1, 2).softmax(-1).transpose(1, 2) + h.mean(dim=1, keepdim=True)

    def mean(self, h):
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)

    def normalized(self, h):
        return functional.layer_norm(h, h.shape[-1:]) + functional.normalize(h, dim=-1)

    def softmax_module(self, h):
        return self.softmax(h)

    def type_of_weight(self, h):
        return h.to(self.b.weight.dtype) if isinstance(self.b.weight, torch.Tensor) else h


class Halves:
    """The method ``features`` of the forms of :class:`Halved`."""

    def gated_by_glu(self, h):
        return functional.glu(h, dim=-1)

    def glu_module(self, h):
        return self.glu(h)

    def sliced(self, h):
        size = h.shape[-1] // 2
        return functional.silu(h[..., :size]) * h[..., size:]

    def split_in_halves(self, h):
        first, second = torch.split(h, h.shape[-1] // 2, dim=-1)
        return functional.silu(first) * second

    def pairs(self, h):
        return h[..., ::2] * h[..., 1::2]


class MlpForwards:
    """The method ``forward`` of further forms of :class:`Mlp`."""

    def weights(self, x):
        return functional.linear(functional.linear(x, self.a.weight, self.a.bias), self.b.weight, self.b.bias)

    def row_weight(self, x):
        return self.a(x) @ self.b.weight.t()


class ViewedAsHalves(Halved):
    def forward(self, x):
        h = self.a(x.flatten(0, 1))
        h = h.view(h.shape[0], 2, -1)
        return self.b(functional.silu(h[:, 0]) * h[:, 1]).view(x.shape)


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


class FusedHeads:
    """The method ``heads`` of the forms of :class:`FusedAttention`."""

    def fused_view(self, h, x):
        return h.view(*x.shape[:2], 3, self.num_heads, self.head_dim).unbind(2)

    def fused_split(self, h, x):
        return [one.view(*x.shape[:2], self.num_heads, -1) for one in h.split(self.width, dim=-1)]

    def fused_sizes(self, h, x):
        sizes = [self.width, self.width, self.width]
        return [one.view(*x.shape[:2], -1, self.head_dim) for one in h.split(sizes, dim=-1)]

    def interleaved(self, h, x):
        return h.view(*x.shape[:2], self.num_heads, 3, self.head_dim).unbind(3)


class FullScale(FusedAttention):
    heads = FusedHeads.interleaved

    def scale(self, x):
        return (x.shape[-1] // self.num_heads) ** -0.5


def forms(base, method, functions):
    """A class derived from ``base`` for each function, which is its method."""
    return {
        name: type(name, (base,), {method: function}) for name, function in vars(functions).items() if name[0] != "_"
    }


FORMS = {
    **forms(Attention, "heads", Heads), **forms(Attention, "forward", Forwards), **forms(Mlp, "features", Features),
    **forms(Halved, "features", Halves), **forms(Mlp, "forward", MlpForwards),
    **forms(FusedAttention, "heads", FusedHeads),
    **{kind.__name__: kind for kind in (Recursive, Inherited, Checkpointed, OfWeight, Experts, Looping, Gated,
                                        ViewedAsHalves, FullScale)},
}  # fmt: skip


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
    module, x = FORMS["processed"](), torch.randn(1, 3, WIDTH)
    expected = module(x)
    with pytest.raises(
        ValueError, match=r"divides .* by num_heads = 8, .* counts=\[\"num_heads\"\] to divide it by 2;"
    ):
        converted(module, axis)
    assert (type(module.q), module.num_heads) == (nn.Linear, HEADS)
    for layer in (module.q, module.k, module.v):
        convert_parallel_linear(nn.ModuleList([layer]), -1, counts=iter(["num_heads"]), group=axis)
    convert_parallel_linear(nn.ModuleList([module.to_out[0]]), 0, group=axis)
    assert module.num_heads == HEADS // 2  # once for all layers
    torch.testing.assert_close(module(x), expected, atol=1e-6, rtol=1e-5)  # sums in another order
    copied = copy.deepcopy(module)
    convert_parallel_linear(nn.ModuleList([copied.q]), -1, counts="num_heads", group=axis)
    assert copied.num_heads == HEADS // 2


@on_ranks("pair")
def test_counts_are_those_of_the_modules_that_have_them(axis):
    """Check that a count of one module says nothing about another, and the remedy for a count of another object."""
    both = nn.ModuleList([FORMS["counts"](), FORMS["with_core"]()])
    del both[1].num_heads
    with pytest.raises(
        ValueError, match=r"^1 \(with_core\): .* by core.count = 8, .*: set it to 4 where only this module"
    ):
        convert_parallel_linear(both, -1, counts=["num_heads"], group=axis)


@on_ranks("pair")
def test_module_that_contains_a_lone_layer_is_examined(axis):
    """Check a layer that is passed without its module: the module is examined, and no count is changed before."""
    module = FORMS["counts"]()
    with pytest.raises(ValueError, match=r"^counts: .* num_heads"):
        convert_parallel_linear(module.q, -1, group=axis)
    with pytest.raises(ValueError, match="counts: 'heads' is not an integer attribute of counts"):
        convert_parallel_linear(module.q, -1, counts=["heads"], group=axis)
    module.odd = 3
    with pytest.raises(ValueError, match=r"counts: odd = 3 of counts is not a multiple of 2 ranks"):
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


class Unnamed(Attention):
    forward = Forwards.one_head

    def __init__(self):
        super().__init__()
        self.heads_of_all = self.__dict__.pop("num_heads")


class Countless(Attention):
    forward = Forwards.one_head

    def __init__(self):
        super().__init__()
        del self.num_heads


FORMS |= {"Unnamed": Unnamed, "Countless": Countless}
NONE = '[modules]\n"attn" = {}\n'
OVERRIDE = '[modules]\n"attn" = { attributes = { num_heads = "head" } }\n'
OF_CORE = '[modules]\n"attn.core" = { attributes = { count = "head" } }\n'
#: Overrides of other things, which do not turn the check off.
OTHERS = tuple(
    f'[modules]\n"attn" = {{ {override} }}\n'
    for override in ("attributes = { head_dim = 5 }", "gathered_output = true")
)


@pytest.fixture
def path(tmp_path, modules):
    (tmp_path / "net.toml").write_text(PLAN + modules)
    return tmp_path / "net.toml"


@pytest.mark.parametrize(
    ("name", "modules", "message"),
    [
        (
            "processed",
            "",
            r'attn \(processed\): .* num_heads = 8, .*: add "attn" = { attributes = { num_heads = "head" } } to',
        ),
        ("processed", OVERRIDE, ""),
        ("processed", NONE, ""),
        ("from_config", "", r'config.num_heads = 8.* "attn" = { attributes = { "config.num_heads" = "head" } }'),
        ("with_core", "", r'by core.count = 8, .* "attn.core" = { attributes = { count = "head" } }'),
        ("with_core", OF_CORE, ""),
        (
            "one_head",
            "",
            r'has the sharded layers of an attention.* or, if no number has to be changed, "attn" = {} to',
        ),
        ("literal", "", r'by 8, a number in its code, .*, add "attn" = {} to'),
        ("sizes", "", ""),
        *(("counts", modules, "num_heads = 8") for modules in OTHERS),
        *(("one_head", modules, "has the sharded layers of an attention") for modules in OTHERS),
        (
            "counts",
            '[modules]\n"attn" = { attributes.num_heads = "4 * heads" }\n',
            r"modules 'attn': unit 'heads' is unknown \(expected head, .*or a field of the config\): write head",
        ),
        ("Unnamed", "", re.escape('as "attn" = { attributes = { heads_of_all = "head" } }, or')),
        ("Countless", "", re.escape('add the attributes with its numbers of heads, if it has any, to "attn", or')),
    ],
)
@on_ranks("pair")
def test_plan_files(axis, path, name, modules, message):
    """Check the error, or that the converted module is right; the override ``{}`` turns the check off."""
    torch.manual_seed(0)
    net, x = Net(FORMS[name]()), torch.randn(1, 3, WIDTH)
    expected, convert = net(x), partial(shardconv.convert_model, rules=path, group=axis)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardconv.PlanWarning)
        if message:
            with pytest.raises(shardconv.PlanError, match=message):
                convert(net)
            return
        convert(net)
    assert torch.allclose(net(x), expected, atol=1e-5) is (modules != NONE)


def without_source(kind, code):
    """A module of a class whose forward is not available as source."""
    names = {}
    exec(f"def forward(self, x):\n    return {code}\n", names)
    return type("Hidden", (kind,), {"forward": names["forward"]})()


@on_ranks("pair")
def test_attention_without_source_is_refused_until_counts_are_named(axis):
    message = r"^Hidden: has the sharded layers of an attention, and its code does not show"
    with pytest.raises(ValueError, match=message):
        converted(without_source(Attention, "self.processor(self, x)"), axis)
    converted(without_source(Attention, "self.processor(self, x)"), axis, counts=["num_heads"])


@on_ranks("pair")
def test_three_layers_without_source_could_be_an_attention(axis):
    module = without_source(Gated, "self.w2(self.w1(x) * self.w3(x) * self.w4(x))")
    convert_parallel_linear(nn.ModuleList([module.w1, module.w3, module.w4]), -1, group=axis)
    with pytest.raises(ValueError, match=r"^Hidden: has the sharded layers of an attention"):
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
    module = FORMS["counts"]()
    convert_parallel_linear(module.q, -1, counts=(), group=axis)
    with pytest.raises(ValueError, match=r"divides the features of k by num_heads = 8"):
        convert_parallel_linear(nn.ModuleList([module.k]), -1, group=axis)
    convert_parallel_linear(nn.ModuleList([module.k, module.v]), -1, counts=(), group=axis)
    convert_parallel_linear(module.to_out[0], 0, group=axis)


@pytest.mark.parametrize(
    ("name", "counts", "is_same"),
    [
        ("fused_view", ["num_heads"], False),
        ("fused_split", ["num_heads", "width"], False),
        ("fused_sizes", ["width"], False),
        ("interleaved", ["num_heads"], True),
        ("FullScale", ["num_heads"], False),
    ],
)
@on_ranks("pair")
def test_counts_that_only_make_it_run_are_refused(axis, name, counts, is_same):
    """Convert with counts that make it run, and compare: the check refuses it if it computes something else."""
    torch.manual_seed(0)
    module, x = FORMS[name](), torch.ones(1, 3, WIDTH).cumsum(1)
    expected, unchecked = module(x), copy.deepcopy(module)
    for one, dim in ((unchecked.qkv, -1), (unchecked.out, 0)):
        convert_parallel_linear(nn.ModuleList([one]), dim, counts=(), group=axis)
    for count in counts:
        setattr(unchecked, count, getattr(unchecked, count) // 2)
    assert is_right(unchecked, expected) is is_same
    if is_same:
        convert_parallel_linear(nn.ModuleList([module.qkv]), -1, counts=counts, group=axis)
        return
    with pytest.raises(ValueError, match=rf"^{name}: .*; shard the segments of a fused layer by a plan file"):
        convert_parallel_linear(nn.ModuleList([module.qkv]), -1, counts=counts, group=axis)


RIGHT = (
    "sizes", "computed", "parts", "condition", "Recursive", "flags", "Checkpointed", "OfWeight", "Experts",
    "Looping", "Gated", "of_tokens", "pairs", "type_of_weight",
)  # fmt: skip
WRONG = (
    "counts", "both", "sum_of_sizes", "from_config", "literal", "Inherited", "mapped", "processed", "with_core",
    "one_head", "segments", "gated_by_glu", "glu_module", "sliced", "split_in_halves", "ViewedAsHalves", "of_features",
    "mean", "normalized", "softmax_module", "weights", "row_weight",
)  # fmt: skip


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
@on_ranks("pair")
def test_forms_that_compute_something_else_are_refused(axis, name):
    torch.manual_seed(0)
    module = FORMS[name]()
    expected = module(torch.ones(1, 3, WIDTH).cumsum(1))
    right = is_right(converted(copy.deepcopy(module), axis, counts=()), expected)
    assert right is (name in RIGHT)
    if right:
        assert is_right(converted(module, axis), expected)
        return
    with pytest.raises(ValueError, match=rf"^{name}: (its forward|has the sharded layers) .*counts="):
        converted(module, axis)


@on_ranks("pair")
def test_functions_that_were_read_are_released(axis):
    """Check that reading a function does not keep what it encloses."""

    def enclosed():
        module, captured = FORMS["sizes"](), nn.Linear(1, 1)

        def forward(x):
            return Attention.forward(module, x) + captured.weight

        module.forward = forward
        converted(module, axis)
        return weakref.ref(captured)

    found = enclosed()
    gc.collect()
    assert found() is None
