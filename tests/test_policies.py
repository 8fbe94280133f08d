"""Policies in the format of parallelformers: sharded models of transformers, compared with unsharded ones.

Outputs are close, as in test_model.py: sums are computed per rank. The policies are written as users write
them, for two and four ranks; if a family shards the same tensors, placements are equal.
"""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertIntermediate, BertLayer, BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.t5.modeling_t5 import T5Block
from transformers.pytorch_utils import Conv1D

import shardconv
from shardconv import ColumnParallelLinear, Layer, ParallelLinear, PlanError, Policy, RowParallelLinear
from shardconv.convert import gather_state_dict
from shardconv.layers.sharding import description
from shardconv.support.errors import UsageError
from tests.support.comparison import SCALE, check_gradients, check_refused, inputs_of, numbers
from tests.support.gpt import GPT, Block, batch
from tests.support.matrix import cases
from tests.support.models import MODELS, Model
from tests.support.ranks import on_ranks


def both(path, **options):
    return Layer(weight=f"{path}.weight", bias=f"{path}.bias", **options)


def changed(policy, **roles):
    """The policy with other results of its methods."""
    return type(
        "Changed", (policy,), {role: staticmethod(lambda *_, answer=answer: answer) for role, answer in roles.items()}
    )


def weights(pattern, names, **options):
    return [Layer(pattern.format(name), **options) for name in names]


class BertPolicy(changed(
    Policy,
    original_layer_class=BertLayer,
    attn_qkv=[
        *(both(f"attention.self.{name}") for name in ("query", "key", "value")),
        *(both(f"crossattention.self.{name}", ignore_checker=True) for name in ("query", "key", "value")),
    ],
    attn_out=[
        both("attention.output.dense", replace=RowParallelLinear),
        both("crossattention.output.dense", replace=RowParallelLinear, ignore_checker=True),
    ],
    mlp_in=[both("intermediate.dense")],
    mlp_out=[both("output.dense", replace=RowParallelLinear)],
)):  # fmt: skip
    """The policy of parallelformers, with ``replace`` for row parallel layers."""

    @staticmethod
    def replace_arguments(config, world_size):
        sizes = {"num_attention_heads": config.num_attention_heads, "all_head_size": config.hidden_size}
        modules = ("attention.self", "crossattention.self")
        return {f"{module}.{name}": size // world_size for module in modules for name, size in sizes.items()}


class GPT2Policy(changed(
    Policy,
    original_layer_class=GPT2Block,
    attn_qkv=[
        both("attn.c_attn", n_fused=3, reversed=True),
        both("crossattention.c_attn", n_fused=2, reversed=True, ignore_checker=True),
        both("crossattention.q_attn", reversed=True, ignore_checker=True),
    ],
    attn_out=[
        both("attn.c_proj", replace=RowParallelLinear, reversed=True),
        both("crossattention.c_proj", replace=RowParallelLinear, reversed=True, ignore_checker=True),
    ],
    mlp_in=[both("mlp.c_fc", reversed=True)],
    mlp_out=[both("mlp.c_proj", replace=RowParallelLinear, reversed=True)],
)):  # fmt: skip
    """Weights stored (in, out), and fused q, k and v."""

    @staticmethod
    def replace_arguments(config, world_size):
        sizes = {"num_heads": config.n_head, "split_size": config.n_embd}
        modules = ("attn", "crossattention")
        return {f"{module}.{name}": size // world_size for module in modules for name, size in sizes.items()}


class T5Policy(changed(
    Policy,
    original_layer_class=T5Block,
    attn_qkv=[
        *weights("layer[0].SelfAttention.{}.weight", "qkv"),
        *weights("layer[1].EncDecAttention.{}.weight", "qkv", ignore_checker=True),
    ],
    attn_out=[
        Layer("layer[0].SelfAttention.o.weight"),
        Layer("layer[1].EncDecAttention.o.weight", ignore_checker=True),
        Layer("layer[0].SelfAttention.relative_attention_bias.weight", ignore_checker=True),
    ],
    mlp_in=weights("layer[-1].DenseReluDense.{}.weight", ("wi", "wi_0", "wi_1"), ignore_checker=True),
    mlp_out=[Layer("layer[-1].DenseReluDense.wo.weight")],
)):  # fmt: skip
    """Paths into lists, also with negative indices; encoder and decoder; position biases per head."""

    @staticmethod
    def replace_arguments(config, world_size):
        return {
            f"{attention}.{name}": size // world_size
            for attention in ("layer[0].SelfAttention", "layer[1].EncDecAttention")
            for name, size in (("n_heads", config.num_heads), ("inner_dim", config.num_heads * config.d_kv))
        }


LlamaAttentionPolicy = changed(
    Policy,
    original_layer_class=LlamaAttention,
    attn_qkv=weights("{}_proj.weight", "qkv"),
    attn_out=[Layer("o_proj.weight")],
)
LlamaMlpPolicy = changed(
    Policy,
    original_layer_class=LlamaMLP,
    mlp_in=weights("{}_proj.weight", ("gate", "up")),
    mlp_out=[Layer("down_proj.weight")],
)


class Phi3Policy(changed(
    Policy,
    original_layer_class=Phi3DecoderLayer,
    attn_qkv=[Layer("self_attn.qkv_proj.weight", n_fused=3)],
    attn_out=[Layer("self_attn.o_proj.weight")],
    mlp_in=[Layer("mlp.gate_up_proj.weight", n_fused=2, replace=ColumnParallelLinear)],
    mlp_out=[Layer("mlp.down_proj.weight")],
)):  # fmt: skip
    """Fused weights stored (out, in); a module that reads its heads from the config, and a method of an instance."""

    def replace_arguments(self, config, world_size):
        heads = config.num_attention_heads // world_size
        return {"self_attn.config.num_attention_heads": heads, "self_attn.num_key_value_heads": heads}


#: Norms over each head.
Qwen3Policy = changed(
    Policy,
    original_layer_class=Qwen3DecoderLayer,
    attn_qkv=weights("self_attn.{}_proj.weight", "qkv"),
    attn_out=[Layer("self_attn.o_proj.weight")],
    on_shards=weights("self_attn.{}_norm.weight", "qk"),
)


_HEADS = {"num_key_value_heads": 4, "head_dim": 16}
CASES = {
    "bert": (MODELS["bert"], BertPolicy),
    "bert-decoder": (Model("bert", {"is_decoder": True, "add_cross_attention": True}), BertPolicy),
    "gpt2": (MODELS["gpt2"], GPT2Policy),
    "gpt2-cross": (Model("gpt2", {"add_cross_attention": True}), GPT2Policy),
    "t5": (MODELS["t5"], T5Policy),
    "t5-gated": (MODELS["t5-gated"], T5Policy),
    "llama": (Model("llama", _HEADS), [LlamaAttentionPolicy, LlamaMlpPolicy]),
    "phi3": (Model("phi3", {"num_key_value_heads": 8}), Phi3Policy),
    "qwen3": (Model("qwen3", _HEADS), (Qwen3Policy,)),
}


#: Models with cross-attention, for which their family does not have rules.
WITHOUT_FAMILY = ("bert-decoder", "gpt2-cross")


def given(name):
    """The arguments of a call; for cross-attention, with encoder states."""
    inputs = inputs_of(CASES[name][0])
    if name in WITHOUT_FAMILY:
        inputs["encoder_hidden_states"] = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
    return inputs


def outputs_of(model, inputs):
    found = numbers(model(**inputs))
    weights = {
        key: torch.randn(value.shape, generator=torch.Generator().manual_seed(2)) for key, value in found.items()
    }
    sum((found[key] * weight).sum() for key, weight in weights.items()).backward()
    return found


def is_near(found, expected):
    return all((found[key] - value).abs().max() <= 1e-5 * value.abs().max() for key, value in expected.items())


def check_placements(axis, before, after):
    """Check that a policy shards tensors as the family does, and replicates the others."""
    family = shardconv.convert_model(copy.deepcopy(before), group=axis)
    shards = {name: description(parameter) for name, parameter in after.named_parameters()}
    sharded = [name for name, shard in shards.items() if shard is not None]
    assert len(sharded) > 6
    for name in sharded:
        assert shards[name][0] == description(family.get_parameter(name))[0], name
    assert not any("norm" in name.lower() or "shared" in name or "embed" in name for name in sharded)


#: By default, models of different structures: every second of all models on two ranks and the others on four.
BY_DEFAULT = {"bert-decoder", "gpt2-cross", "llama", "phi3", "t5-gated"}
MODELS_ON_RANKS = cases(
    itertools.product(["pair", "four"], CASES),
    lambda layout, name: name in BY_DEFAULT and (layout == "pair") == ([*CASES].index(name) % 2 == 0),
)


@pytest.mark.parametrize(("layout", "name"), MODELS_ON_RANKS)
@on_ranks()
def test_models(axis, name):
    model, policy = CASES[name]
    before = model.build(SCALE).eval()
    after = shardconv.convert_model(copy.deepcopy(before), rules=policy, group=axis)
    expected, found = outputs_of(before, given(name)), outputs_of(after, given(name))
    assert expected.keys() == found.keys()
    assert is_near(found, expected)
    check_gradients(before, after, axis)
    state = gather_state_dict(after)
    assert all(torch.equal(state[key], value) for key, value in before.state_dict().items())
    if name not in WITHOUT_FAMILY:
        check_placements(axis, before, after)


#: Policies with one mistake, and the error of the conversion or the first pass; None for different outputs.
WRONG = {
    "not fused": (
        "gpt2", changed(GPT2Policy, attn_qkv=[both("attn.c_attn", reversed=True)]),
        r"takes a part of 32 features .*96 of its 192",
    ),
    "fused sizes": ("gpt2", changed(GPT2Policy, attn_qkv=[both("attn.c_attn", n_fused=6, reversed=True)]), None),
    "gate and up not fused": (
        "phi3", changed(Phi3Policy, mlp_in=[Layer("mlp.gate_up_proj.weight")]),
        r"gate_up_proj by 2, a number in its code, which is correct for all 192 features and not for the 96 of one",
    ),
    "no rows": ("bert", changed(BertPolicy, attn_out=[]), r"output.dense .* has 32 features \(expected 64\)"),
    "no columns": ("bert", changed(BertPolicy, attn_qkv=BertPolicy.attn_qkv()[1:]), "must match"),
    "swapped": (
        "bert", changed(BertPolicy, mlp_in=[both("output.dense")], mlp_out=[both("intermediate.dense")]), "must match",
    ),
    "heads not set": ("gpt2", changed(GPT2Policy, replace_arguments={}), "by split_size = 64, which is correct for"),
    "kv heads not set": (
        "phi3", changed(Phi3Policy, replace_arguments={"self_attn.config.num_attention_heads": 4}), None,
    ),
    "replicated position biases": ("t5", changed(T5Policy, attn_out=T5Policy.attn_out()[:2]), "must match"),
    "replicated norms": ("qwen3", changed(Qwen3Policy, on_shards=[]), "_norm.weight: its gradient is not the same"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@on_ranks("pair")
def test_wrong_policies_are_detected(axis, name):
    case, policy, message = WRONG[name]
    before = CASES[case][0].build(SCALE).eval()
    if message is None:
        after = shardconv.convert_model(copy.deepcopy(before), policy, group=axis)
        assert not is_near(after(**given(case)), numbers(before(**given(case))))
        return
    with pytest.raises((RuntimeError, ValueError, shardconv.PlanError), match=message):
        outputs_of(shardconv.convert_model(copy.deepcopy(before), policy, group=axis), given(case))


# --- errors ---------------------------------------------------------------------------------------------------------


class Halves(nn.Linear):
    pass


def qkv(*layers):
    return changed(BertPolicy, attn_qkv=[*layers, *BertPolicy.attn_qkv()[3:]])


def arguments_of(**arguments):
    return changed(BertPolicy, replace_arguments={path.replace("__", "."): value for path, value in arguments.items()})


BertIntermediatePolicy = changed(Policy, original_layer_class=BertIntermediate, mlp_in=[both("dense")])
HeadsPolicy = changed(Policy, original_layer_class=BertSelfAttention, replace_arguments={"num_attention_heads": 3})
REFUSED = {
    "path": (
        qkv(both("attention.self.quer")),
        "Changed, BertLayer .*layer.0: weight 'attention.self.quer.weight' does not exist",
    ),
    "index": (qkv(Layer("attention[0].weight")), r"weight 'attention\[0\].weight' does not exist"),
    "no path": (qkv(Layer("attention..weight")), "'attention..weight' is not a path"),
    "no bias": (qkv(Layer("attention.self.query.weight", "attention.self.query.bia")), "query.bia' does not exist"),
    "no parameter": (qkv(Layer("attention.self.query")), "is a Linear, not a parameter of a module"),
    "no layer": (qkv("attention.self.query.weight"), "'attention.self.query.weight' is not a shardconv.Layer"),
    "bias not named": (qkv(Layer("attention.self.query.weight")), "query.bias is not named, and the outputs"),
    "twice": (qkv(both("attention.self.query"), both("attention.self.query")), "query.weight is named by two layers"),
    "twice, by two": ([BertPolicy, BertIntermediatePolicy], "intermediate.dense.weight is named by two layers"),
    "attribute": (arguments_of(attention__self__num_head=4), "attribute 'attention.self.num_head', which"),
    "attribute of nothing": (arguments_of(attentio__self__num_heads=4), "attribute 'attentio.self.num_heads', which"),
    "attribute is a module": (arguments_of(attention__self=4), "cannot set a BertSelfAttention"),
    "attribute of others": (
        changed(BertPolicy, replace_arguments={"attention.self.config.id2label[0]": "a"}),
        "one of a dict, which others may share",
    ),
    "attribute twice": ([BertPolicy, HeadsPolicy], "attribute 'num_attention_heads' is set twice, to 2 and 3"),
    "heads": (
        [BertPolicy], "num_attention_heads': 6 is not a multiple of 4. Supported tensor parallel sizes: 1, 2, 3, 6",
        {"num_attention_heads": 6, "hidden_size": 48},
    ),
    "sizes": ([BertPolicy], r"expected one of 1, 2.*dense.* 90 is not a multiple of 4", {"intermediate_size": 90}),
    "fused sizes": (qkv(both("attention.self.query", n_fused=3)), "query.weight: 64 is not a multiple of n_fused = 3"),
    "fused heads": (qkv(both("attention.self.query", n_fused=32)), "expected one of 1, 2.* 2 is not a multiple of 4"),
    "reversed": (qkv(both("attention.self.query", reversed=True)), "a Linear stores it .out, in.: it cannot have"),
    "row of a norm": (changed(BertPolicy, attn_out=[both("output.LayerNorm")]), "only a matrix has input features"),
    "class": (changed(BertPolicy, original_layer_class=GPT2Block), "a module of exactly the class GPT2Block"),
    "replace": (qkv(both("attention.self.query", replace=Halves)), "replace = Halves is not derived from"),
    "replace by a row": (qkv(both("attention.self.query", replace=RowParallelLinear)), "not derived from .*Column"),
    "modules": (changed(BertPolicy, replace_modules={"BertSelf": nn.Linear}), "have a module of the class 'BertSelf'"),
    "modules by none": (changed(BertPolicy, replace_modules={"BertPooler": 3}), "3 is not a class of modules"),
    "modules that are sharded": (changed(BertPolicy, replace_modules={nn.Linear: Halves}), "and a layer names it"),
    "fused and replicated": (
        changed(BertPolicy, on_shards=[Layer("output.LayerNorm.weight", n_fused=2)]), "n_fused is for sharded layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@on_ranks("four")
def test_refused_policy_leaves_the_model_unchanged(axis, name):
    policy, message, *fields = REFUSED[name]
    model = Model("bert", dict(*fields), "BertForMaskedLM").build()
    convert = partial(shardconv.convert_model, rules=policy, group=axis)
    check_refused(model, convert, message, (PlanError, ValueError))
    assert {module.num_attention_heads for module in model.modules() if hasattr(module, "num_attention_heads")} == {
        model.config.num_attention_heads
    }


@on_ranks("four")
def test_stored_order_and_sharded_weights_are_checked(axis):
    with pytest.raises(PlanError, match=r"a Conv1D stores it .in, out.: it needs reversed=True"):
        shardconv.convert_model(Model("gpt2").build(), changed(GPT2Policy, mlp_in=[both("mlp.c_fc")]), group=axis)
    model = shardconv.convert_model(Model("gpt2").build(), GPT2Policy, group=axis)
    with pytest.raises(PlanError, match="is already sharded"):
        shardconv.convert_model(model, GPT2Policy, group=axis)


@on_ranks("four")
def test_tied_weights(axis):
    """Check that tied layers of a policy are converted, and that ties to other layers are refused."""
    tied = Model("bert").build()
    tied.bert.encoder.layer[1].intermediate.dense.weight = tied.bert.encoder.layer[0].intermediate.dense.weight
    shardconv.convert_model(copy.deepcopy(tied), BertPolicy, group=axis)
    tied.head = nn.Linear(64, 96)
    tied.head.weight = tied.bert.encoder.layer[1].intermediate.dense.weight
    with pytest.raises(PlanError, match=r"head.weight is tied to bert.encoder.layer.0.intermediate.dense.weight"):
        shardconv.convert_model(tied, BertPolicy, group=axis)


@on_ranks("four")
def test_policy_of_one_rank(axis):
    """Check that all ranks raise if the policy of one of them does not match."""
    mine = axis.rank == 1
    with pytest.raises(PlanError if mine else ValueError, match="does not exist" if mine else "do not hold the same"):
        shardconv.convert_model(Model("bert").build(), REFUSED["path"][0] if mine else BertPolicy, group=axis)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"n_fused": 3}, "has neither a weight"), ({"weight": "weight", "n_fused": 0}, "n_fused is 0")],
    ids=["no parameter", "no segments"],
)
def test_layer_that_describes_no_parameter_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Layer(**arguments)


@pytest.mark.parametrize(
    "policy",
    [BertLayer, [BertPolicy, BertLayer], []],
    ids=["module class", "list with a module class", "empty list"],
)
def test_only_classes_of_policies_are_accepted(policy):
    with pytest.raises(TypeError, match=r"is not a class derived from shardconv.Policy"):
        shardconv.convert_model(nn.Linear(2, 2), policy)


@pytest.mark.parametrize(
    "policy", [BertPolicy(None), [BertPolicy, "auto"], None], ids=["instance", "list with a name", "None"]
)
def test_other_rules_than_classes_and_names_are_refused(policy):
    with pytest.raises(UsageError, match=r"rules is .* a class or a sequence of classes\): pass the name"):
        shardconv.convert_model(nn.Linear(2, 2), policy)


def test_policy_without_a_layer_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        type("Lacking", (Policy,), {})(None)


# --- other options of a policy --------------------------------------------------------------------------------------


class Quiet(BertIntermediate):
    """Returns half of the output."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) / 2


class Counted(ParallelLinear):
    """A row parallel layer that counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("name", ["BertIntermediate", BertIntermediate])
@on_ranks("pair")
def test_classes(axis, name):
    """Check replaced classes of modules and of layers; other models do not change."""
    before, other = (Model("bert").build(SCALE).eval() for _ in range(2))
    attributes = [dict(vars(type(module))) for module in before.modules()]
    for layer in before.bert.encoder.layer:
        layer.intermediate.__class__ = Quiet
    policy = changed(BertPolicy, mlp_out=[both("output.dense", replace=Counted)], replace_modules={name: Quiet})
    after = shardconv.convert_model(copy.deepcopy(other), policy, group=axis)
    inputs = inputs_of(Model("bert"))
    assert is_near(after(**inputs), numbers(before(**inputs)))
    assert not is_near(after(**inputs), numbers(other(**inputs)))
    for layer in after.bert.encoder.layer:
        assert {Counted, RowParallelLinear} <= set(type(layer.output.dense).__mro__)
        assert layer.output.dense.calls == 2
    expected = Model("bert").build(SCALE).eval()(**inputs).logits
    assert torch.equal(other(**inputs).logits, expected)
    assert attributes == [dict(vars(type(module))) for module in other.modules()]


#: A custom module with a fused weight and bias, stored (out, in).
BlockPolicy = changed(
    Policy,
    original_layer_class=Block,
    attn_qkv=[both("qkv", n_fused=3)],
    attn_out=[both("out")],
    mlp_in=[both("up")],
    mlp_out=[both("down")],
)


@pytest.mark.parametrize("layout", ["pair", "four"])
@on_ranks()
def test_custom_model(axis):
    before = GPT()
    after = shardconv.convert_model(copy.deepcopy(before), BlockPolicy, group=axis)
    assert after.blocks[0].qkv.weight.shape[0] == 96 // axis.size
    expected, found = before(batch(0)), after(batch(0))
    assert (found - expected).abs() <= 1e-5 * expected.abs()
    expected.backward()
    found.backward()
    check_gradients(before, after, axis)
    with pytest.raises(shardconv.PlanError, match=r"blocks\.0 \(Block\): .* blocks\.0\.qkv by 3, a number in its code"):
        shardconv.convert_model(copy.deepcopy(before), changed(BlockPolicy, attn_qkv=[both("qkv")]), group=axis)


@pytest.mark.parametrize("transposed", [False, True])
@on_ranks("pair")
def test_fused_rows(axis, transposed):
    """Check a row parallel layer whose inputs are fused like the outputs of the preceding layer."""
    make = (lambda i, o: Conv1D(o, i)) if transposed else nn.Linear
    before = nn.Sequential(make(4, 24), nn.Tanh(), make(24, 4))
    x = torch.randn(3, 4)
    for parts, is_right in ((3, True), (1, False)):
        policy = changed(
            Policy,
            original_layer_class=nn.Sequential,
            mlp_in=[both("[0]", n_fused=3, reversed=transposed)],
            mlp_out=[both("[-1]", n_fused=parts, reversed=transposed)],
        )
        after = shardconv.convert_model(copy.deepcopy(before), policy, group=axis)
        assert torch.allclose(after(x), before(x), atol=1e-6) is is_right
