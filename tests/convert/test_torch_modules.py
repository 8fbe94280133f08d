"""Every module class of torch.nn with sharded layers or parameters: it computes what the unsharded module computes, or
it is refused.

The tables go over all classes that torch.nn has, so that a new one of torch fails until it is in a table. Values are
float64 and compared to 1e-10, as sums over ranks, and vectorized code for other sizes, round otherwise.
"""

import copy
import inspect
import itertools
import re
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers.activations import ACT2CLS

import shardconv
from shardconv.convert import convert_parallel_linear, load_full_state_dict
from shardconv.convert.engine import Conversion, LayerSpec
from shardconv.convert.feature_checks import check_chains, is_elementwise
from shardconv.distributed import Axis
from shardconv.layers import ColumnParallelLinear, ParallelLinear
from tests.support.comparison import check_refused
from tests.support.matrix import cases, each_once
from tests.support.operation_checks import from_all
from tests.support.ranks import on_ranks

CLASSES = {name: kind for name, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
WIDTH = 8
TWO = Axis("tensor", 0, 2, (0, 1), None)
#: The arguments of classes that need some, for WIDTH features.
ARGUMENTS = {
    **dict.fromkeys([f"Adaptive{kind}Pool{n}d" for kind in ("Avg", "Max") for n in (1, 2, 3)], (2,)),
    **dict.fromkeys([f"{kind}Pool{n}d" for kind in ("Avg", "Max") for n in (1, 2, 3)], (1,)),
    **dict.fromkeys([f"LPPool{n}d" for n in (1, 2, 3)], (2, 1)),
    **dict.fromkeys([f"MaxUnpool{n}d" for n in (1, 2, 3)], (1,)),
    **dict.fromkeys([f"{kind}Norm{n}d" for kind in ("Batch", "Instance") for n in (1, 2, 3)], (WIDTH,)),
    **dict.fromkeys(
        [f"{kind}Pad{n}d" for kind in ("Circular", "Reflection", "Replication", "Zero") for n in (1, 2, 3)], (1,)
    ),
    **dict.fromkeys([f"ConstantPad{n}d" for n in (1, 2, 3)], (1, 2.0)),
    **dict.fromkeys([f"Conv{kind}{n}d" for kind in ("", "Transpose") for n in (1, 2, 3)], (WIDTH, WIDTH, 1)),
    **dict.fromkeys([f"LazyConv{kind}{n}d" for kind in ("", "Transpose") for n in (1, 2, 3)], (WIDTH, 1)),
    **dict.fromkeys(["RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"], (WIDTH, WIDTH)),
    "AdaptiveLogSoftmaxWithLoss": (WIDTH, 16, [6]),
    "Bilinear": (WIDTH, WIDTH, WIDTH),
    "ChannelShuffle": (2,),
    "CrossMapLRN2d": (3,),
    "DataParallel": (nn.Tanh(),),
    "Embedding": (16, WIDTH),
    "EmbeddingBag": (16, WIDTH),
    "Fold": ((2, 2), 1),
    "FractionalMaxPool2d": (1, 2),
    "FractionalMaxPool3d": (1, 2),
    "GroupNorm": (2, WIDTH),
    "LayerNorm": (WIDTH,),
    "LazyLinear": (WIDTH,),
    "Linear": (WIDTH, WIDTH),
    "LinearCrossEntropyLoss": (WIDTH, 16),
    "LocalResponseNorm": (3,),
    "MultiheadAttention": (WIDTH, 4),
    "PixelShuffle": (1,),
    "PixelUnshuffle": (1,),
    "RMSNorm": (WIDTH,),
    "RNNBase": ("LSTM", WIDTH, WIDTH),
    "RNNCellBase": (WIDTH, WIDTH, True, 4),
    "SyncBatchNorm": (WIDTH,),
    "Threshold": (0.1, 2.0),
    "Transformer": (WIDTH, 4, 1, 1, 16, 0.0),
    "TransformerDecoderLayer": (WIDTH, 4, 16, 0.0),
    "TransformerEncoderLayer": (WIDTH, 4, 16, 0.0),
    "Unflatten": (-1, (2, -1)),
    "Unfold": (1,),
    "Upsample": (None, 2),
    "UpsamplingBilinear2d": (None, 2),
    "UpsamplingNearest2d": (None, 2),
}


def build(name, **options):
    if name in ("TransformerEncoder", "TransformerDecoder"):
        return CLASSES[name](build(f"{name}Layer", **options), 2)
    return CLASSES[name](*ARGUMENTS.get(name, ()), **options)


def number(*shape):
    return torch.randn(shape, dtype=torch.float64)


def ids(*shape, most=16):
    return torch.randint(most, shape)


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# --- in a chain behind a column parallel layer ----------------------------------------------------------------------

#: Arguments by which a layer may compute with features as rows.
OTHER_DIMS = {
    "Softmax": {"dim": 0}, "LogSoftmax": {"dim": 1}, "Softmin": {"dim": 0}, "GLU": {"dim": 0},
    "BatchNorm1d": {"affine": False, "track_running_stats": False}, "InstanceNorm1d": {"affine": False},
}  # fmt: skip
#: Classes whose modules cannot be called: a Sequential with one is a holder, and not a chain.
HOLDERS = {
    "Module",
    "Container",
    "ModuleList",
    "ModuleDict",
    "ParameterList",
    "ParameterDict",
    "RNNBase",
    "RNNCellBase",
}
RIGHT = {
    "AlphaDropout", "CELU", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "ELU", "FeatureAlphaDropout", "GELU",
    "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish", "RReLU",
    "ReLU", "ReLU6", "SELU", "Sequential", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh",
    "Tanhshrink", "Threshold",
}  # fmt: skip


def chain(name, **options):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: sizes of transformers
        return nn.Sequential(nn.Linear(4, WIDTH), build(name, **options)).double().eval()


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - RIGHT - HOLDERS - {"DataParallel"}))  # that is a wrapper
def test_class_behind_a_column_parallel_layer_is_refused(name):
    """As if on two ranks, by options with which features may be rows, too."""
    for options in ({}, *([OTHER_DIMS[name]] if name in OTHER_DIMS else [])):
        layers = chain(name, **options)
        column = Conversion.prepare("0", layers[0], LayerSpec(ColumnParallelLinear, {}), TWO).replacement
        for is_planned in (False, True):
            with pytest.raises(ValueError, match=rf"^1: this {name} (needs|is not known) .*expected 8\): pass "):
                check_chains(layers, {layers[0]: column}, 2, is_planned=is_planned)


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_elementwise_class_computes_with_each_half_of_the_features(name):
    """Also backward; in evaluation, where dropout does nothing."""
    layers = chain(name)
    column = Conversion.prepare("0", layers[0], LayerSpec(ColumnParallelLinear, {}), TWO).replacement
    check_chains(layers, {layers[0]: column}, 2, is_planned=False)
    shapes = [(WIDTH,), (3, WIDTH), (2, 3, WIDTH), (2, 3, 5, WIDTH)]
    if name in (
        "Dropout1d",
        "Dropout2d",
        "Dropout3d",
    ):  # their inputs have dims behind the channels, and may be of one example
        shapes = [(2, 3, 5, 6, WIDTH)[-(int(name[-2]) + 2) :]]
    for shape in shapes:
        x, weights = number(*shape).requires_grad_(), number(*shape)
        halves = torch.cat([layers[1](half) for half in x.chunk(2, -1)], -1)
        near(halves, layers[1](x))
        near(*(torch.autograd.grad((one * weights).sum(), x)[0] for one in (halves, layers[1](x))))


@pytest.mark.parametrize("name", sorted(HOLDERS))
def test_sequential_with_a_module_that_cannot_be_called_is_not_a_chain(name):
    layers = chain(name)
    column = Conversion.prepare("0", layers[0], LayerSpec(ColumnParallelLinear, {}), TWO).replacement
    check_chains(layers, {layers[0]: column}, 2, is_planned=False)


class Doubled(nn.Tanh):
    def forward(self, x):
        return 2 * x


class Renamed(nn.Tanh):
    pass


@on_ranks("pair")
def test_own_classes_behind_a_column_parallel_layer(axis):
    """Check that a class with torch's forward is known, and any other is not."""
    convert_parallel_linear(nn.Sequential(nn.Linear(4, 8), Renamed()), -1, group=axis)
    patched = nn.Tanh()
    patched.forward = lambda x: x.softmax(-1)
    for layer in (Doubled(), patched, nn.PReLU()):
        with pytest.raises(ValueError, match=r"^1: this .* is not known to compute each feature by itself"):
            convert_parallel_linear(nn.Sequential(nn.Linear(4, 8), layer), -1, group=axis)
    with pytest.raises(ValueError, match=r"^the layer: this AdaptiveLogSoftmaxWithLoss .* parallel head shards them "):
        convert_parallel_linear(nn.AdaptiveLogSoftmaxWithLoss(8, 17, [5]), -1, group=axis)


@pytest.mark.parametrize("name", ACT2CLS)
def test_activation_of_transformers_is_known_where_it_is_elementwise(name):
    kind = ACT2CLS[name]
    options = kind[1] if isinstance(kind, tuple) else {}
    layer = (kind[0] if isinstance(kind, tuple) else kind)(**options).double().eval()
    x = torch.linspace(-4, 4, 48, dtype=torch.float64).view(3, 16)
    halves = torch.cat([layer(x[:, :8]), layer(x[:, 8:])], -1)
    is_local = not list(layer.parameters()) and torch.allclose(halves, layer(x), rtol=1e-10, atol=1e-10)
    assert is_elementwise(layer) is is_local


# --- sharded parameters of one module -------------------------------------------------------------------------------

#: Styles that any module may have, and styles of linear layers, embeddings and convolutions.
OF_ANY = ("gathered", "replicated_with_grad_allreduce")
STYLES = (
    *OF_ANY, "colwise", "colwise_gather_output", "rowwise", "by_rows", "embedding_rowwise", "embedding_colwise",
    "embedding_colwise_gather_output",
)  # fmt: skip
#: Modules that compute with shards of their inputs, as other tests check.
OVER_SHARDS = {"LayerNorm", "RMSNorm", "depthwise"}


class Holder(nn.Module):
    """Holds a module and calls it."""

    def __init__(self, module):
        super().__init__()
        self.m = module

    def forward(self, *inputs):
        return self.m(*inputs)


#: The inputs of classes with parameters; by default [4, WIDTH].
INPUTS = {
    **{
        f"Conv{kind}{n}d": (lambda n=n: (number(2, WIDTH, *[WIDTH] * n),))
        for kind in ("", "Transpose")
        for n in (1, 2, 3)
    },
    **{f"BatchNorm{n}d": (lambda n=n: (number(3, WIDTH, *[2] * n),)) for n in (2, 3)},
    "AdaptiveLogSoftmaxWithLoss": lambda: (number(4, WIDTH), ids(4)),
    "Bilinear": lambda: (number(4, WIDTH), number(4, WIDTH)),
    "Embedding": lambda: (ids(4, 3),),
    "EmbeddingBag": lambda: (ids(4, 3),),
    "GroupNorm": lambda: (number(4, WIDTH, 3),),
    "LinearCrossEntropyLoss": lambda: (number(4, WIDTH), ids(4)),
    "MultiheadAttention": lambda: (number(5, 2, WIDTH),) * 3,
    **dict.fromkeys(("RNN", "LSTM", "GRU"), lambda: (number(5, 2, WIDTH),)),
    **dict.fromkeys(("TransformerEncoder", "TransformerEncoderLayer"), lambda: (number(5, 2, WIDTH),)),
    **dict.fromkeys(
        ("Transformer", "TransformerDecoder", "TransformerDecoderLayer"),
        lambda: (number(5, 2, WIDTH), number(5, 2, WIDTH)),
    ),
}
#: Modules with wrapped parameters, beside the classes of torch.nn.
WRAPPED = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "own parametrization": lambda: parametrize.register_parametrization(
        nn.Conv1d(WIDTH, WIDTH, 1), "weight", nn.Tanh()
    ),
    "depthwise": lambda: nn.Conv1d(WIDTH, WIDTH, 1, groups=WIDTH),
}
INPUTS["own parametrization"] = INPUTS["depthwise"] = INPUTS["Conv1d"]
#: Classes that cannot be called on their own, or only on a GPU.
NOT_CALLED = ("DataParallel", "RNNBase", "RNNCellBase", "SyncBatchNorm")
NAMES = [name for name in CLASSES if name not in NOT_CALLED]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    WITH_PARAMETERS = [name for name in NAMES if not name.startswith("Lazy") and list(build(name).parameters())]


def outputs_of(value):
    """The tensors of an output."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value or () for tensor in outputs_of(one)]


def parameter_groups(module):
    """Each parameter alone, if there are few, and all parameters of each module in it."""
    names = [name for name, _ in module.named_parameters()]
    owners = {name.rpartition(".")[0] for name in names}
    together = [[name for name in names if name.rpartition(".")[0] == owner] for owner in owners]
    alone = [[name] for name in names if len(names) < 20]
    return alone + [group for group in sorted(together) if len(group) > 1]


def held(name):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Holder(WRAPPED[name]() if name in WRAPPED else build(name)).double()


def numbered_cases(name, path):
    """Write a plan file for each style and group of parameters."""
    before = held(name)
    styles = OF_ANY if name in OVER_SHARDS else STYLES
    styles = STYLES[:5] if len(list(before.parameters())) >= 20 else styles
    for number_, (style, group) in enumerate(itertools.product(styles, parameter_groups(before))):
        styles_of = {own: style if own in group else "replicate" for own in before.state_dict()}
        rules = [f'"{own}" = {{ style = "{chosen}" }}' for own, chosen in styles_of.items()]
        file = path / f"{number_}.toml"
        file.write_text("[rules]\n" + "\n".join(rules) + "\n")
        yield style, group, file


def check_parameters(axis, name, numbered):
    """Check each parameter of a module with each style; returns the styles with which some conversion is right."""
    before = held(name)
    inputs = INPUTS.get(name, lambda: (number(4, WIDTH),))()
    right = set()
    for style, group, file in numbered:
        after = copy.deepcopy(before)
        try:
            shardconv.convert_model(after, str(file), group=axis)
        except (ValueError, shardconv.PlanError) as error:
            if not re.search(r"\bm\b", str(error)):
                raise
            continue
        for mode, training in MODES:
            compare(axis, before.train(training), after.train(training), inputs, mode, style, group)
        right.add(style)
    return right


MODES = (("grad", True), ("inference_mode", False))  # the second one with the fused paths of torch


def compare(axis, before, after, inputs, mode, style, group):
    """Compare outputs, which may be shards of columns, and gradients."""
    context = nullcontext() if mode == "grad" else getattr(torch, mode)()
    before.zero_grad(), after.zero_grad()
    with context:
        torch.manual_seed(1)
        expected = outputs_of(before(*inputs))
        torch.manual_seed(1)
        found = outputs_of(after(*inputs))
        weights = [torch.randn_like(one) for one in expected]
    assert len(found) == len(expected)
    own = []
    for one, other, weight in zip(found, expected, weights, strict=True):
        is_local = one.shape != other.shape and one.shape[-1] * axis.size == other.shape[-1]
        assert not (is_local and style.endswith("gather_output"))
        near(torch.cat(from_all(axis, one.detach()), -1) if is_local else one, other)
        own.append((one * (weight.chunk(axis.size, -1)[axis.rank] if is_local else weight)).sum())
    if mode != "grad":
        return
    sum((one * weight).sum() for one, weight in zip(expected, weights, strict=True)).backward()
    sum(own).backward()
    for (name, parameter), full in zip(after.named_parameters(), before.parameters(), strict=True):
        if full.grad is None or (style == "replicated_with_grad_allreduce" and name in group):
            continue
        dims = [dim for dim in range(full.dim()) if parameter.shape[dim] != full.shape[dim]]
        near(parameter.grad, full.grad.chunk(axis.size, dims[0])[axis.rank] if dims else full.grad)


#: Modules none of whose parameters can be sharded, and the reason.
NEVER_SHARDED = {
    **dict.fromkeys(("RNN", "LSTM", "GRU"), "compute with a list of their parameters"),
    "LinearCrossEntropyLoss": "computes with the parameters of a layer that it does not call",
}


#: Classes of which some conversion with each style is right.
OF_EVERY_STYLE = ("Linear", "Embedding")


#: Classes whose parameters are those of their layers, which are classes of their own.
OF_LAYERS = ("Transformer", "TransformerEncoder", "TransformerDecoder")


@pytest.mark.parametrize("name", cases([*WITH_PARAMETERS, *WRAPPED], lambda name: name not in OF_LAYERS))
def test_parameters_of_every_class_are_right_or_refused(ranks, tmp_path, name):
    found = ranks("pair", check_parameters, name, list(numbered_cases(name, tmp_path)))
    assert found[0] == found[1]
    assert found[0].issuperset(OF_ANY) is (name not in NEVER_SHARDED)
    assert name not in OF_EVERY_STYLE or found[0] == {*STYLES}


# --- torch's transformers by heads ----------------------------------------------------------------------------------

HEADS, HIDDEN, TOKENS = 4, 16, 5
PLAN_FILE = """
[units]
head = { count = 4, size = 2 }
hidden = { count = 16 }
[rules]
"**.{in_proj_weight,in_proj_bias}" = { style = "packed_colwise", segments = ["head", "head", "head"] }
"**.out_proj" = { style = "rowwise", unit = "head" }
"**.linear1"  = { style = "colwise", unit = "hidden" }
"**.linear2"  = { style = "rowwise", unit = "hidden" }
"**.{norm,norm1,norm2,norm3}" = { style = "replicate" }
"**.in_proj_bias" = { style = "replicate", optional = true }
"""
CAUSAL = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), 1)
PADDED = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [3]])
#: The masks of an encoder, and of the decoder behind it.
MASKS = {
    "none": {},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "numbers": {"mask": -CAUSAL.double()},
    "heads": {"mask": CAUSAL | (torch.arange(2 * HEADS)[:, None, None] % 3 + 1 == torch.arange(TOKENS))},
    "padding": {"padding": PADDED},
    "both": {"mask": CAUSAL, "padding": PADDED},
}


def stack(kind, **options):
    """An encoder or decoder of two layers, or both."""
    torch.manual_seed(3)
    options = {"dim_feedforward": HIDDEN, "dropout": 0.0, "dtype": torch.float64, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: options without fused path
        if kind == "Transformer":
            return nn.Transformer(WIDTH, HEADS, 2, 2, **options)
        return CLASSES[kind](
            CLASSES[f"{kind}Layer"](WIDTH, HEADS, **options), 2, nn.LayerNorm(WIDTH, dtype=torch.float64)
        )


def call(model, x, mask=None, padding=None, is_causal=False):
    """Call an encoder, decoder or both with masks; returns the outputs at tokens that are not padding."""
    first = model.encoder if isinstance(model, nn.Transformer) else model
    batch_first = first.layers[0].self_attn.batch_first
    given = x if batch_first else x.transpose(0, 1)
    if isinstance(model, nn.TransformerEncoder):
        found = model(given, mask=mask, src_key_padding_mask=padding, is_causal=is_causal)
    elif isinstance(model, nn.TransformerDecoder):
        masks = {"tgt_mask": mask, "tgt_key_padding_mask": padding, "memory_key_padding_mask": padding}
        found = model(given, 2 * given, tgt_is_causal=is_causal, **masks)
    else:
        masks = {"src_key_padding_mask": padding, "tgt_key_padding_mask": padding, "memory_key_padding_mask": padding}
        found = model(
            given, 2 * given, src_mask=mask, tgt_mask=mask, src_is_causal=is_causal, tgt_is_causal=is_causal, **masks
        )
    found = found if batch_first else found.transpose(0, 1)
    return found if padding is None else found[~padding]


@contextmanager
def without_fused_paths():
    """Compute the reference without torch's fused paths, which take masks of numbers for masks of True and False."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def by_hand(model, axis):
    """Convert the linear layers of an MLP, in modules that do not hold its parent."""
    layers = [layer for layer in model.modules() if hasattr(layer, "linear1")]
    shardconv.convert_parallel_linear(nn.ModuleList([layer.linear1 for layer in layers]), -1, group=axis)
    for layer in layers:
        assert shardconv.convert_parallel_linear(layer.linear2, 0, group=axis) is layer.linear2


def replaced(model, axis):
    """Replace these layers by new ones."""
    for layer in [layer for layer in model.modules() if hasattr(layer, "linear1")]:
        for name, dim in (("linear1", -1), ("linear2", 0)):
            full = getattr(layer, name)
            new = ParallelLinear(
                full.in_features, full.out_features, full.bias is not None, dim, dtype=torch.float64, group=axis
            )
            load_full_state_dict(new, full.state_dict())
            setattr(layer, name, new)


def check_stack(axis, kind, options, how, path):
    before, x = stack(kind, **options), number(2, TOKENS, WIDTH)
    after = copy.deepcopy(before)
    if how == "plan file":
        shardconv.convert_model(after, str(path), group=axis)
    else:
        {"by hand": by_hand, "replaced": replaced}[how](after, axis)
        for one in after.modules():  # what the message of a nested input says
            vars(one).update({"use_nested_tensor": False} if isinstance(one, nn.TransformerEncoder) else {})
    for masks in MASKS.values():
        for mode, training in (*MODES, ("no_grad", False), ("grad", False)):
            before.train(training), after.train(training)
            with nullcontext() if mode == "grad" else getattr(torch, mode)():
                found = call(after, x, **masks)
                with without_fused_paths():
                    expected = call(before, x, **masks)
            near(found, expected)
            if mode == "grad":
                before.zero_grad(), after.zero_grad()
                expected.square().sum().backward()
                found.square().sum().backward()
    full = dict(before.named_parameters())
    state = {name: parameter.grad for name, parameter in after.named_parameters()}
    for name, grad in state.items():
        expected = full[name].grad
        if grad.shape != expected.shape:
            dim = next(dim for dim in range(grad.dim()) if grad.shape[dim] != expected.shape[dim])
            segments = expected.chunk(3) if "in_proj" in name else [expected]
            expected = torch.cat([one.chunk(axis.size, dim)[axis.rank] for one in segments])
        near(grad, expected)


@pytest.mark.parametrize(
    ("kind", "batch_first", "norm_first", "activation", "how"),
    each_once(
        ["TransformerEncoder", "TransformerDecoder", "Transformer"], [True, False], [False, True], ["relu", nn.GELU()],
        ["plan file", "by hand", "replaced"],
    ),
)  # fmt: skip
def test_transformer_of_torch(ranks, tmp_path, kind, batch_first, norm_first, activation, how):
    (tmp_path / "plan.toml").write_text(PLAN_FILE)
    options = {"batch_first": batch_first, "norm_first": norm_first, "activation": activation}
    ranks("pair", check_stack, kind, options, how, tmp_path / "plan.toml")


@on_ranks("pair")
def test_nested_tensor_is_refused(axis):
    """Check that a nested tensor of an encoder that is not converted as a whole is refused."""
    model = stack("TransformerEncoder", batch_first=True).eval()
    by_hand(model, axis)
    with torch.no_grad(), pytest.raises(ValueError, match=r"is a nested tensor .* set use_nested_tensor = False"):
        call(model, number(2, TOKENS, WIDTH), padding=PADDED)


#: Parts of the plan file, what replaces them, and the error.
REFUSED = {
    "no segments": ('"packed_colwise", segments = ["head", "head", "head"]', '"colwise"', "self_attn: in_.* by heads"),
    "bias": ('.{in_proj_weight,in_proj_bias}"', '.in_proj_weight"', "self_attn: in_proj_weight and in_proj_bias"),
    "output projection": ('"rowwise", unit = "head"', '"gathered"', r"self_attn\.out_proj: must be row parallel"),
    "no rows": ('"rowwise", unit = "hidden"', '"colwise"', r"0: this .* parallel layers\.0\.linear2"),
    "norm": ('norm3}" = { style = "replicate"', 'norm3}" = { style = "colwise"', "over all features: replicate it"),
}  # fmt: skip


def check_plan(axis, path, message, options):
    convert = partial(shardconv.convert_model, rules=str(path), group=axis)
    check_refused(stack("TransformerEncoder", **options), convert, message, (ValueError, shardconv.PlanError))


@pytest.mark.parametrize("name", REFUSED)
def test_transformer_of_torch_that_is_sharded_otherwise_is_refused(ranks, tmp_path, name):
    old, new, message = REFUSED[name]
    assert old in PLAN_FILE
    (tmp_path / "plan.toml").write_text(PLAN_FILE.replace(old, new))
    ranks("pair", check_plan, tmp_path / "plan.toml", message, {})


@pytest.mark.parametrize("activation", ["normalized", "failing"])
def test_activation_that_may_need_all_features_is_refused(ranks, tmp_path, activation):
    (tmp_path / "plan.toml").write_text(PLAN_FILE)
    message = r"layers\.0: this TransformerEncoderLayer is not known .* parallel layers\.0\.linear1"
    ranks("pair", check_plan, tmp_path / "plan.toml", message, {"activation": globals()[activation]})


@on_ranks("pair", plan=PLAN_FILE.replace("count = 4, size = 2", "count = 8").split('"**.linear1"')[0])
def test_boundary_in_a_head_is_refused(axis, path):
    with pytest.raises(ValueError, match=r"^m: in_proj_weight and in_proj_bias .* by heads: .* unit of 8 rows"):
        shardconv.convert_model(Holder(nn.MultiheadAttention(WIDTH, 1)), str(path), group=axis)


def normalized(x):
    return x.softmax(-1)


def failing(x):
    """Fail for examples on the CPU, as a function for another device does."""
    raise NotImplementedError(x.device)
