"""Checkpoints of Megatron-Core, made of those of Hugging Face with torch alone, and the models that tests convert."""

import argparse
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.support.models import GQA, MLA, MOE, Model, Tensors

#: A vocabulary that is not a multiple of what ranks need.
VOCAB = 250
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
DENSE = {**GQA, "vocab_size": VOCAB}
SPARSE = {**DENSE, **{name: value for name, value in MOE.items() if "shared" not in name}}
LATENT = {**MLA, **MOE, "vocab_size": VOCAB}


def with_mtp_layer(tensors: Tensors) -> Tensors:
    """Add an MTP layer after the last layer, as checkpoints on the Hub have it: with copies of embedding and head."""
    last = max(int(match[1]) for name in tensors if (match := re.search(r"\.layers\.(\d+)\.", name)))
    old, new, hidden = f"model.layers.{last}.", f"model.layers.{last + 1}.", tensors["model.norm.weight"].shape[0]
    layer = {name.replace(old, new): tensor + 1 for name, tensor in tensors.items() if name.startswith(old)}
    norms = {f"{new}{name}.weight": torch.randn(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    return {
        **tensors, **layer, **norms, f"{new}eh_proj.weight": torch.randn(hidden, 2 * hidden),
        f"{new}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{new}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }  # fmt: skip


#: One checkpoint per form of layers that the layout has.
KINDS = {
    "llama": Model("llama", {**DENSE, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": Model("llama", {**DENSE, "tie_word_embeddings": True}),
    "mistral": Model("mistral", {**DENSE, "sliding_window": None}),
    "qwen2": Model("qwen2", {"num_key_value_heads": 2, "vocab_size": VOCAB}),
    "qwen3": Model("qwen3", DENSE),
    "gemma": Model("gemma", {**DENSE, "tie_word_embeddings": True}),
    "gemma2": Model(
        "gemma2",
        {**DENSE, "tie_word_embeddings": True, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": Model(
        "gemma3_text",
        {**DENSE, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 2},
    ),
    "olmo": Model("olmo", {**DENSE, "tie_word_embeddings": False}),
    "gpt_oss": Model(
        "gpt_oss",
        {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "rope_parameters": ROPE},
    ),
    "mixtral": Model("mixtral", SPARSE),
    "qwen2_moe": Model("qwen2_moe", {**DENSE, **MOE}),
    "qwen3_moe": Model("qwen3_moe", {**SPARSE, "norm_topk_prob": True}),
    "glm4_moe": Model(
        "glm4_moe", {**DENSE, **MOE, "attention_bias": True, "use_qk_norm": True}, rewrite=with_mtp_layer
    ),
    "deepseek_v2": Model("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "kimi_k2": Model("deepseek_v3", LATENT, extra={"model_type": "kimi_k2"}),
    "deepseek_v3": Model("deepseek_v3", {**LATENT, "norm_topk_prob": True}, rewrite=with_mtp_layer),
}

#: Tensors of a layer that only have another name: end of the name in the source to that in Megatron-Core.
_RENAMED = {
    "self_attn.o_proj": "self_attention.linear_proj", "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm", "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj", "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm", "mlp.down_proj": "mlp.linear_fc2",
    "mlp.gate": "mlp.router", "mlp.router": "mlp.router", "block_sparse_moe.gate": "mlp.router",
    "input_layernorm": "input_layernorm",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
    "mlp.shared_expert.down_proj": "mlp.shared_experts.linear_fc2",
    "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "final_layernorm",
}  # fmt: skip
_OF_MTP = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_OUTER = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight", "lm_head.weight": "output_layer.weight",
}  # fmt: skip


def megatron_tensors(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """The tensors of Megatron-Core, with separate layers and the names of local specs."""
    found = {_OUTER[name]: tensor for name, tensor in tensors.items() if name in _OUTER}
    num_layers = config["num_hidden_layers"]
    layers: dict[int, Tensors] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
    for layer, held in layers.items():
        for name, tensor in _layer(held, config):
            is_mtp, module = layer >= num_layers, name.partition(".")[0]
            inner = f"mtp.layers.{layer - num_layers}.{'' if module in _OF_MTP else 'transformer_layer.'}"
            found[f"{inner if is_mtp else f'decoder.layers.{layer}.'}{name}"] = tensor
    if config["model_type"] == "olmo":  # its norms do not have weights
        hidden = config["hidden_size"]
        layers_norms = (
            f"layers.{layer}.{norm}" for layer in layers for norm in ("input_layernorm", "pre_mlp_layernorm")
        )
        for norm in ("final_layernorm", *layers_norms):
            found[f"decoder.{norm}.weight"] = torch.ones(hidden)
            found[f"decoder.{norm}.bias"] = torch.zeros(hidden)
    return found


def _layer(held: Tensors, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layer."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    is_sandwich, is_latent = "pre_feedforward_layernorm.weight" in held, "self_attn.kv_b_proj.weight" in held
    norms = {"post_attention_layernorm": "pre_mlp_layernorm"}
    if is_sandwich:
        norms = {
            "post_attention_layernorm": "self_attention.linear_proj.post_layernorm",
            "pre_feedforward_layernorm": "pre_mlp_layernorm",
            "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm",
        }
    renamed = _RENAMED | norms | ({"self_attn.q_proj": "self_attention.linear_q_proj"} if is_latent else {})
    for name, tensor in held.items():
        module, _, kind = name.rpartition(".")
        if module in renamed:
            yield f"{renamed[module]}.{'expert_bias' if kind == 'e_score_correction_bias' else kind}", tensor
    for kind in ("weight", "bias"):
        if f"self_attn.k_proj.{kind}" in held:
            parts = [held[f"self_attn.{name}_proj.{kind}"] for name in "qkv"]
            by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
            yield f"self_attention.linear_qkv.{kind}", torch.cat(by_group, 1).flatten(0, 1)
        for module in ("mlp", "mlp.shared_experts", "mlp.shared_expert"):
            if f"{module}.gate_proj.{kind}" in held:
                gate, up = (held[f"{module}.{name}_proj.{kind}"] for name in ("gate", "up"))
                yield (
                    f"{module.replace('expert', 'experts').replace('ss', 's')}.linear_fc1.{kind}",
                    torch.cat([gate, up]),
                )
    if "self_attn.sinks" in held:
        yield "self_attention.core_attention.softmax_offset", held["self_attn.sinks"]
    if "mlp.shared_expert_gate.weight" in held:
        yield "mlp.shared_experts.gate_weight", held["mlp.shared_expert_gate.weight"]
    yield from _experts(held)


def _experts(held: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all experts of a layer."""
    for module, names in (("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))):
        count = sum(name.startswith(f"{module}.experts.") and name.endswith(f"{names[0]}.weight") for name in held)
        if count:
            gate, up, down = (
                torch.stack([held[f"{module}.experts.{expert}.{name}.weight"] for expert in range(count)])
                for name in names
            )
            yield "mlp.experts.experts.linear_fc1.weight", torch.cat([gate, up], 1)
            yield "mlp.experts.experts.linear_fc2.weight", down
    if "mlp.experts.gate_up_proj" in held:  # gpt-oss: columns of gate and up alternate
        gate_up, bias = held["mlp.experts.gate_up_proj"].mT, held["mlp.experts.gate_up_proj_bias"]
        yield "mlp.experts.experts.linear_fc1.weight", torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1)
        yield "mlp.experts.experts.linear_fc1.bias", torch.cat([bias[:, 0::2], bias[:, 1::2]], 1)
        yield "mlp.experts.experts.linear_fc2.weight", held["mlp.experts.down_proj"].mT.contiguous()
        yield "mlp.experts.experts.linear_fc2.bias", held["mlp.experts.down_proj_bias"]


#: The other name of a tensor, that of specs with fused norms.
_FUSED = (
    (r"(.*\.layers\.\d+\..*?)input_layernorm\.(.+)", r"\1self_attention.linear_qkv.layer_norm_\2"),
    (r"(.*\.layers\.\d+\..*?)pre_mlp_layernorm\.(.+)", r"\1mlp.linear_fc1.layer_norm_\2"),
)
_FUSED_LATENT = ((r"(.*)\.(q|kv)_layernorm\.weight", r"\1.linear_\2_up_proj.layer_norm_weight"),)


def all_names(tensors: Tensors) -> Tensors:
    """The tensors under their names in local specs and in those with fused norms, and in Megatron-Core 0.17."""
    is_latent = any("linear_kv_up_proj" in name for name in tensors)
    found = dict(tensors)
    for pattern, replacement in (*_FUSED, *(_FUSED_LATENT if is_latent else ())):
        found |= {
            re.sub(pattern, replacement, name): one for name, one in tensors.items() if re.fullmatch(pattern, name)
        }
    return found | {name.replace(".transformer_layer.", ".mtp_model_layer."): one for name, one in found.items()}


def load_dcp(folder: Path) -> Tensors:
    """The tensors of a folder, as torch.distributed.checkpoint reads them."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def write_megatron(folder: Path, tensors: Tensors, config: Path | None = None, others: Any = None) -> Path:
    """Write a checkpoint of the 500th iteration with torch.distributed.checkpoint."""
    inner = folder / "iter_0000500"
    with warnings.catch_warnings(action="ignore"):  # of a single process
        dcp.save({**tensors, **(others or {})}, checkpoint_id=inner, no_dist=True)
    write_frame(folder, config)
    return folder


def write_frame(folder: Path, config: Path | None) -> None:
    """Write the files beside the chunks."""
    inner = folder / "iter_0000500"
    (inner / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save({"iteration": 500, "checkpoint_version": 3.0}, inner / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("500")
    if config is not None:
        (folder / "config.json").write_bytes(config.read_bytes())


def _shard(name: str, tensor: torch.Tensor, tp: int) -> list[torch.Tensor]:
    """The shards of a tensor of Megatron-Core, of each rank."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return [*tensor.chunk(tp, -1)]
    if re.search(r"linear_fc1\.(weight|bias)$", name):
        gate, up = (half.chunk(tp) for half in tensor.chunk(2))
        return [torch.cat(pair) for pair in zip(gate, up, strict=True)]
    names = "linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|word_embeddings|output_layer"
    rows = rf"(({names})\.(weight|bias)|core_attention\.softmax_offset)$"
    return [*tensor.chunk(tp)] if re.search(rows, name) else [tensor] * tp


def legacy_ranks(tensors: Tensors, config: dict[str, Any], tp: int, pp: int) -> dict[str, Tensors]:
    """Folder of each rank to its tensors in the format ``torch``, with a vocabulary padded for 2 x 16 rows."""
    stages: list[Tensors] = [{} for _ in range(pp)]
    per_stage = config["num_hidden_layers"] // pp
    for name, tensor in tensors.items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        stage, layer = divmod(int(match[1]), per_stage) if match else (0 if name.startswith("embedding") else pp - 1, 0)
        local = f"decoder.layers.{layer}.{match[2]}" if match else name
        module, is_expert, end = local.partition(".experts.experts.")
        if is_expert:
            stages[stage] |= {f"{module}.experts.local_experts.{at}.{end}": one for at, one in enumerate(tensor)}
        else:
            is_padded = "word_embeddings" in name or name.startswith("output_layer")
            rows = -len(tensor) % 32 if is_padded else 0
            stages[stage][local] = torch.cat([tensor, torch.full((rows, *tensor.shape[1:]), 7.0)]) if rows else tensor
    return {
        f"mp_rank_{rank:02}" + (f"_{stage:03}" if pp > 1 else ""): {
            name: _shard(name, tensor, tp)[rank].clone() for name, tensor in held.items()
        }
        for stage, held in enumerate(stages)
        for rank in range(tp)
    }


def write_legacy(folder: Path, ranks: dict[str, Tensors], config: Path) -> Path:
    """Write a checkpoint of an iteration in the format ``torch``, with the state of an optimizer and random numbers."""
    folder.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("500\n")
    (folder / "config.json").write_bytes(config.read_bytes())
    for name, tensors in ranks.items():
        (inner := folder / "iter_0000500" / name).mkdir(parents=True)
        state = {
            "args": argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16), "checkpoint_version": 3.0,
            "iteration": 500, "model": {**tensors, "decoder.layers.0.mlp.linear_fc1._extra_state": None},
            "optimizer": {"exp_avg": torch.ones(3)}, "rng_state": [{"np_rng_state": np.arange(3)}],
        }  # fmt: skip
        torch.save(state, inner / "model_optim_rng.pt")
    return folder
