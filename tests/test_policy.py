"""Policies: models of transformers cut by classes as parallelformers has them compute what the plain ones compute.

Near, not equal, as in test_convert_model.py: sums are taken rank by rank. The policies are written here as users write
them, for two and four ranks; where a family cuts the same tensors, its placements are the same.
"""

import copy

import pytest
import torch
from models import MODELS, Model
from test_convert_model import SCALE, check_gradients, inputs_of, numbers
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.opt.modeling_opt import OPTDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

import shardconv
from shardconv import ColumnParallelLinear, Layer, Policy, RowParallelLinear
from shardconv.convert import gather_state_dict
from shardconv.layers.sharding import description


def both(path, **options):
    return Layer(weight=f"{path}.weight", bias=f"{path}.bias", **options)


class BertPolicy(Policy):
    """As parallelformers has it, with the row layers' replace."""

    @staticmethod
    def replace_arguments(config, world_size):
        return {
            f"{attention}.self.{name}": value // world_size
            for attention in ("attention", "crossattention")
            for name, value in (
                ("num_attention_heads", config.num_attention_heads),
                ("all_head_size", config.hidden_size),
            )
        }

    @staticmethod
    def attn_qkv():
        names = ("query", "key", "value")
        return [both(f"attention.self.{name}") for name in names] + [
            both(f"crossattention.self.{name}", ignore_checker=True) for name in names
        ]

    @staticmethod
    def attn_out():
        return [
            both("attention.output.dense", replace=RowParallelLinear),
            both("crossattention.output.dense", replace=RowParallelLinear, ignore_checker=True),
        ]

    @staticmethod
    def mlp_in():
        return [both("intermediate.dense")]

    @staticmethod
    def mlp_out():
        return [both("output.dense", replace=RowParallelLinear)]

    @staticmethod
    def original_layer_class():
        return BertLayer


class GPT2Policy(Policy):
    """Weights stored (in, out), and q, k and v in one."""

    @staticmethod
    def replace_arguments(config, world_size):
        sizes = {"num_heads": config.n_head, "split_size": config.n_embd}
        return {
            f"{module}.{name}": size // world_size for module in ("attn", "crossattention")
            for name, size in sizes.items()
        }  # fmt: skip

    @staticmethod
    def attn_qkv():
        return [
            both("attn.c_attn", n_fused=3, reversed=True),
            both("crossattention.c_attn", n_fused=2, reversed=True, ignore_checker=True),
            both("crossattention.q_attn", reversed=True, ignore_checker=True),
        ]

    @staticmethod
    def attn_out():
        return [
            both("attn.c_proj", replace=RowParallelLinear, reversed=True),
            both("crossattention.c_proj", replace=RowParallelLinear, reversed=True, ignore_checker=True),
        ]

    @staticmethod
    def mlp_in():
        return [both("mlp.c_fc", reversed=True)]

    @staticmethod
    def mlp_out():
        return [both("mlp.c_proj", replace=RowParallelLinear, reversed=True)]

    @staticmethod
    def original_layer_class():
        return GPT2Block


class OPTPolicy(Policy):
    """Methods need not be static."""

    def replace_arguments(self, config, world_size):
        return {"self_attn.num_heads": config.num_attention_heads // world_size}

    def attn_qkv(self):
        return tuple(both(f"self_attn.{name}_proj") for name in "qkv")

    def attn_out(self):
        return [both("self_attn.out_proj")]

    def mlp_in(self):
        return [both("fc1", replace=ColumnParallelLinear)]

    def mlp_out(self):
        return [both("fc2")]

    @staticmethod
    def original_layer_class():
        return OPTDecoderLayer


class T5Policy(Policy):
    """Paths into lists, also from their ends; encoder and decoder; position biases of each head."""

    @staticmethod
    def replace_arguments(config, world_size):
        return {
            f"{attention}.{name}": size // world_size
            for attention in ("layer[0].SelfAttention", "layer[1].EncDecAttention")
            for name, size in (("n_heads", config.num_heads), ("inner_dim", config.num_heads * config.d_kv))
        }

    @staticmethod
    def attn_qkv():
        own = [Layer(f"layer[0].SelfAttention.{name}.weight") for name in "qkv"]
        return own + [Layer(f"layer[1].EncDecAttention.{name}.weight", ignore_checker=True) for name in "qkv"]

    @staticmethod
    def attn_out():
        return [
            Layer("layer[0].SelfAttention.o.weight"),
            Layer("layer[1].EncDecAttention.o.weight", ignore_checker=True),
            Layer("layer[0].SelfAttention.relative_attention_bias.weight", ignore_checker=True),
        ]

    @staticmethod
    def mlp_in():
        return [
            Layer(f"layer[-1].DenseReluDense.{name}.weight", ignore_checker=True) for name in ("wi", "wi_0", "wi_1")
        ]

    @staticmethod
    def mlp_out():
        return [Layer("layer[-1].DenseReluDense.wo.weight")]

    @staticmethod
    def original_layer_class():
        return T5Block


class LlamaAttentionPolicy(Policy):
    """One of two: attention."""

    @staticmethod
    def attn_qkv():
        return [Layer(f"{name}_proj.weight") for name in "qkv"]

    @staticmethod
    def attn_out():
        return [Layer("o_proj.weight")]

    @staticmethod
    def original_layer_class():
        return LlamaAttention


class LlamaMlpPolicy(Policy):
    """The other of two: the MLP."""

    @staticmethod
    def mlp_in():
        return [Layer("gate_proj.weight"), Layer("up_proj.weight")]

    @staticmethod
    def mlp_out():
        return [Layer("down_proj.weight")]

    @staticmethod
    def original_layer_class():
        return LlamaMLP


class Qwen3Policy(Policy):
    """Norms over each head."""

    @staticmethod
    def attn_qkv():
        return [Layer(f"self_attn.{name}_proj.weight") for name in "qkv"]

    @staticmethod
    def attn_out():
        return [Layer("self_attn.o_proj.weight")]

    @staticmethod
    def on_parts():
        return [Layer("self_attn.q_norm.weight"), Layer("self_attn.k_norm.weight")]

    @staticmethod
    def original_layer_class():
        return Qwen3DecoderLayer


_HEADS = {"num_key_value_heads": 4, "head_dim": 16}
CASES = {
    "bert": (MODELS["bert"], BertPolicy),
    "bert-decoder": (Model("bert", {"is_decoder": True, "add_cross_attention": True}), BertPolicy),
    "gpt2": (MODELS["gpt2"], GPT2Policy),
    "gpt2-cross": (Model("gpt2", {"add_cross_attention": True}), GPT2Policy),
    "opt": (Model("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}), OPTPolicy),
    "t5": (MODELS["t5"], T5Policy),
    "t5-gated": (MODELS["t5-gated"], T5Policy),
    "llama": (Model("llama", _HEADS), [LlamaAttentionPolicy, LlamaMlpPolicy]),
    "qwen3": (Model("qwen3", _HEADS), (Qwen3Policy,)),
}


#: With cross attention that their family has no rules for.
WITHOUT_FAMILY = ("bert-decoder", "gpt2-cross")


def given(name):
    """The arguments of a call; where there is cross attention, with what it attends to."""
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


def check_case(axis, name):
    model, policy = CASES[name]
    before = model.build(SCALE).eval()
    after = shardconv.convert_model(copy.deepcopy(before), policy=policy, group=axis)
    expected, found = outputs_of(before, given(name)), outputs_of(after, given(name))
    assert expected.keys() == found.keys()
    assert is_near(found, expected)
    check_gradients(before, after, axis)
    state = gather_state_dict(after)
    assert all(torch.equal(state[key], value) for key, value in before.state_dict().items())
    if name not in WITHOUT_FAMILY:
        check_placements(axis, before, after)


def check_placements(axis, before, after):
    """What a policy cuts, the family cuts alike; what it leaves whole, is whole."""
    family = shardconv.convert_model(copy.deepcopy(before), group=axis)
    shards = {name: description(parameter) for name, parameter in after.named_parameters()}
    cut = [name for name, shard in shards.items() if shard is not None]
    assert len(cut) > 6
    for name in cut:
        assert shards[name][0] == description(family.get_parameter(name))[0], name
    assert not any("norm" in name.lower() or "shared" in name or "embed" in name for name in cut)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["pairs", "four"])
def test_models(ranks, layout, name):
    ranks(layout, check_case, name)
