"""Small checkpoints of every model type that vLLM supports, as transformers writes them: config.json, names and shapes.

Defines the sizes of these models. Requires transformers, but not vLLM.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardconv.hf.build import build_small, real_heads, with_heads
from shardconv.hf.small import HEADS, default_config, small_fields

#: Number of consecutive integers that float32 represents.
MAX_NUMEL = 2**24

#: Values of integer fields of small configs: heads and widths that vLLM supports.
_SIZES = {"vocab_size": 1000, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}
_HEAD_FIELDS = (
    "head_dim", "linear_key_head_dim", "linear_value_head_dim", "swa_head_dim", "global_head_dim", "v_head_dim",
)  # fmt: skip
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")

#: Additional fields of single types.
_TYPES: dict[str, dict[str, Any]] = {
    "falcon": {"ffn_hidden_size": 4 * 8 * 32},
    "glm4_moe": {"hidden_size": 8 * 32},
    "gpt_oss": {"intermediate_size": 128},
    "longcat_flash": {"zero_expert_num": 0},
    "nemotron_h": {"n_groups": 4},
    "granitemoehybrid": {"mamba_n_heads": 16, "mamba_d_head": 32},
    "mamba2": {"num_heads": 8, "head_dim": 32, "hidden_size": 128, "n_groups": 1},
    "qwen4_exp_text": {"indexer_head_dim": 32},
}

#: Config fields that checkpoints on the Hub have and vLLM reads, but transformers does not write.
_ON_HUB: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "deepseek_v32": {"topk_method": "noaux_tc"},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
    "glm_moe_dsa": {"topk_method": "noaux_tc"},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 96, "route_norm": True, "qk_norm": True},
    "lfm2": {"conv_dim": 256, "block_dim": 256},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1], "layernorm_epsilon": 1e-5,
        "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 32, "swa_v_head_dim": 32,
        "sliding_window_size": 4, "partial_rotary_factor": 0.334, "add_swa_attention_sink_bias": True,
    },
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
}  # fmt: skip

#: Variants of types: config fields, and functions that change the shapes that transformers writes.
_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {"tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True}},
    "qwen2": {"tied": {"tie_word_embeddings": True}},
    "qwen3": {"tied": {"tie_word_embeddings": True}},
    "granite": {"untied": {"tie_word_embeddings": False}},
    "gemma3_text": {"untied": {"tie_word_embeddings": False}},
    "starcoder2": {"untied": {"tie_word_embeddings": False}},
    "gpt2": {"untied": {"tie_word_embeddings": False}},
    "bloom": {"untied": {"tie_word_embeddings": False}},
    "opt": {"untied": {"tie_word_embeddings": False}},
    "gpt_oss": {"4-kv-heads": {"num_key_value_heads": 4}},
    "cohere": {
        "norms": {"use_qk_norm": True},
        "norms-4-kv-heads": {"use_qk_norm": True, "num_key_value_heads": 4},
        "biases": {"attention_bias": True},
    },
    "falcon": {
        "40b": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        "rw": {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    },
    "stablelm": {"norms": {"qk_layernorm": True, "use_qkv_bias": True}},
    "gpt_bigcode": {"heads": {"multi_query": False}},
    "glm4_moe": {"norms": {"use_qk_norm": True, "attention_bias": True}},
    "mamba2": {"groups": {"n_groups": 4}},
    "granitemoehybrid": {"groups": {"mamba_n_groups": 4}},
    "deepseek_v2": {"no-q-lora": {"q_lora_rank": None}},
    "qwen3_moe": {"packed": {}},
    "qwen2_moe": {"packed": {}},
    "mixtral": {"packed": {}},
    "deepseek_v3": {"packed": {}},
    "olmoe": {"packed": {}},
    "glm4_moe_lite": {"packed": {}},
}


def kinds(served: Mapping[str, str]) -> dict[str, str]:
    """Model type to class, for the types in vLLM's registry."""
    found = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = names if isinstance(names, str) else names[0]
        if name in served:
            found[model_type] = name
    return found


def variants(model_type: str) -> dict[str, dict[str, Any]]:
    """The names of the checkpoints of a type, and their fields."""
    more = _VARIANTS.get(model_type, {})
    return {model_type: {}, **{f"{model_type}-{name}": fields for name, fields in more.items()}}


def small_config(kind: Any, fields: Mapping[str, Any]) -> Any:
    """A small config of a class of models."""
    default = default_config(kind.config_class)
    own = _sized(real_heads(default, has_sizes=True), default)
    more = {**_TYPES.get(default["model_type"], {}), **fields}
    small = {**default, **small_fields(default, {**own, **more})}
    return kind.config_class(**{**_vllm_sizes(with_heads(small, 2 * HEADS), default), **more})


def _sized(own: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Set head sizes to 32, except of multi-head latent attention."""
    is_latent = bool(default.get("kv_lora_rank"))
    sized: dict[str, Any] = {}
    for name, value in own.items():
        if isinstance(value, Mapping):
            sized[name] = _sized(value, default[name])
        elif name in _HEAD_FIELDS and not is_latent:
            sized[name] = 32
        else:
            sized[name] = HEADS * 32 if name in _WIDTHS else value
    return sized


def _vllm_sizes(small: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Set sizes of the vocabulary, experts and KV heads."""
    sized = dict(small)
    for name, value in small.items():
        if isinstance(value, Mapping) and str(name).endswith("_config"):
            sized[name] = _vllm_sizes(value, default.get(name) or {})
        elif type(value) is int and name in _SIZES:
            sized[name] = _SIZES[name]
        elif type(value) is int and name in _KV_HEADS and value == HEADS:
            sized[name] = 2
    return sized


def pack_experts(shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Shapes of stacked experts, as transformers holds them: concatenated gate and up, and down."""
    packed: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        before, found, after = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        number, _, end = after.partition(".")
        if not found or not number.isdigit():
            packed[name.replace("block_sparse_moe", "mlp")] = shape
            continue
        new = "down_proj" if end in ("down_proj.weight", "w2.weight") else "gate_up_proj"
        of_expert = packed.setdefault(
            f"{before}.experts.{new}", [0, shape[0] * (1 + (new == "gate_up_proj")), shape[1]]
        )
        of_expert[0] = max(of_expert[0], int(number) + 1)
    return packed


def write(folder: Path, class_name: str, fields: Mapping[str, Any], *, packed: bool) -> None:
    """Write config.json and shapes.json of one small model."""
    kind = getattr(transformers, class_name)
    model = build_small(kind, small_config(kind, fields))
    saved = folder / "saved"
    model.save_pretrained(saved, max_shard_size="1TB")
    with safe_open(saved / "model.safetensors", "np") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    shapes = pack_experts(shapes) if packed else shapes
    if (total := sum(math.prod(shape) for shape in shapes.values())) >= MAX_NUMEL:
        raise ValueError(f"{total} elements, expected fewer than {MAX_NUMEL}")
    (folder / "shapes.json").write_text(json.dumps(shapes))
    config = json.loads((saved / "config.json").read_text())
    config |= _ON_HUB.get(config["model_type"], {})
    (folder / "config.json").write_text(json.dumps(config))
    shutil.rmtree(saved)


def write_all(home: Path, served: Mapping[str, str], only: list[str]) -> Iterator[tuple[str, str, str]]:
    """Write a folder for each checkpoint; yields its name, its type, and the error if there was one."""
    for model_type, class_name in kinds(served).items():
        for name, fields in variants(model_type).items():
            if only and name not in only and model_type not in only:
                continue
            folder = home / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                write(folder, class_name, fields, packed=name.endswith("-packed"))
            except Exception as error:  # noqa: BLE001 - the table reports it
                yield name, model_type, f"{type(error).__name__}: {error}".splitlines()[0][:300]
            else:
                yield name, model_type, ""
