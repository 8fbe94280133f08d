"""Tiny, randomly initialized models of each family, as transformers writes them and in other forms of the Hub.

Models have 8 heads, 2 KV heads where they may differ, an odd vocabulary, and random
values in all tensors, including norms and biases.
"""

import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shardconv.plan.families.family import NAMES_FAMILY
from shardconv.plan.families.loading import family_names, load_family

Tensors = dict[str, torch.Tensor]

HEADS, KV_HEADS, LAYERS, HIDDEN, INTERMEDIATE, EXPERTS, VOCAB = 8, 2, 2, 64, 96, 4, 131
FP8_BLOCK = 8

#: Fields of every config; configs ignore, but store, unknown fields.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GQA = {"num_key_value_heads": KV_HEADS, "head_dim": 16}
MOE = {
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "moe_num_experts": EXPERTS,
    "moe_num_shared_experts": 2,
    "moe_k": 2,
    "shared_intermediate_size": 48,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
BART = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "num_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "attention_heads": HEADS,
    "encoder_ffn_dim": INTERMEDIATE,
    "decoder_ffn_dim": INTERMEDIATE,
    "ffn_dim": INTERMEDIATE,
    "word_embed_proj_dim": HIDDEN,
    "decoder_start_token_id": 2,
}
T5 = {"d_model": HIDDEN, "d_ff": INTERMEDIATE, "d_kv": 16, "num_heads": HEADS, "num_layers": LAYERS}


@dataclass(frozen=True)
class Model:
    """The recipe of a tiny model.

    Attributes:
        model_type: its type.
        config: fields beside :data:`COMMON`.
        auto: the transformers class that builds the model from its config.
        rewrite: converts the tensors that transformers wrote into another form.
        extra: additional fields of config.json for the rewritten tensors.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"
    rewrite: Callable[[Tensors], Tensors] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def build(self, scale: float = 1.0) -> transformers.PreTrainedModel:
        """Build the model; all values are random with this standard deviation."""
        torch.manual_seed(0)
        require_type(self.model_type, transformers.CONFIG_MAPPING)
        config = transformers.AutoConfig.for_model(self.model_type, **{**COMMON, **self.config})
        make = getattr(transformers, self.auto)
        model = make.from_config(config) if self.auto.startswith("Auto") else make(config)
        for tensor in model.state_dict().values():
            tensor.normal_(std=scale)
        return model

    def write(self, folder: Path, *, max_shard_size: str = "1GB") -> Path:
        """Write the model as a checkpoint: weights and config.json."""
        model = self.build()
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if self.rewrite is not None:
            save_file(self.rewrite(read(folder)), folder / "model.safetensors", metadata={"format": "pt"})
        if self.extra:
            change_config(folder, self.extra)
        return folder


def require_type(model_type: str, types: Container[str]) -> None:
    """Skip the test of a type of a family that the installed transformers does not have yet."""
    if model_type not in types:
        known = [
            name for name in family_names() if name != NAMES_FAMILY and model_type in load_family(name).model_types
        ]
        assert known, f"{model_type} is not a model type"
        pytest.skip(f"transformers {transformers.__version__} does not have {model_type}")


def model_class(kind: str, model_type: str) -> Any:
    """The model class of a type, for one of the tasks of tools/model_matrix."""
    from tools.model_matrix import trial  # noqa: PLC0415 - takes long to import, and few tests need it

    require_type(model_type, trial.KINDS[kind])
    return trial.model_class(kind, model_type)


def read(folder: Path) -> Tensors:
    """The tensors of a checkpoint in one file."""
    return load_file(folder / "model.safetensors")


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """Change the tensors of a checkpoint in one file."""
    tensors = read(folder)
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Set fields of a checkpoint's config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def pack_experts(tensors: Tensors) -> Tensors:
    """Per-expert tensors, packed as transformers holds them: [experts, gate and up, hidden], [experts, hidden, ...]."""
    packed = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    packed = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in packed.items()}
    for layer in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        gates, ups, downs = (
            torch.stack([
                next(tensors[name] for end in ends if (name := f"{layer}.experts.{expert}.{end}.weight") in tensors)
                for expert in range(EXPERTS)
            ])
            for ends in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        )  # fmt: skip
        experts = f"{layer.replace('block_sparse_moe', 'mlp')}.experts"
        packed |= {f"{experts}.gate_up_proj": torch.cat([gates, ups], dim=1), f"{experts}.down_proj": downs}
    return packed


def deepseek_hub(tensors: Tensors) -> Tensors:
    """The form of DeepSeek-V3 on the Hub: an MTP layer, and matrices of layers in fp8 with block scales."""
    last = f"model.layers.{LAYERS - 1}."
    extra = {name.replace(last, f"model.layers.{LAYERS}."): tensor for name, tensor in tensors.items() if last in name}
    for name, shape in {
        "embed_tokens": (VOCAB, HIDDEN),
        "enorm": (HIDDEN,),
        "hnorm": (HIDDEN,),
        "eh_proj": (HIDDEN, 2 * HIDDEN),
        "shared_head.norm": (HIDDEN,),
        "shared_head.head": (VOCAB, HIDDEN),
    }.items():
        extra[f"model.layers.{LAYERS}.{name}.weight"] = torch.randn(shape)
    hub: Tensors = {}
    for name, tensor in {**tensors, **extra}.items():
        if re.search(r"(self_attn\..*|mlp|experts?)\.?.*proj(_with_mqa)?\.weight$", name) and tensor.dim() == 2:
            hub[name] = tensor.to(torch.float8_e4m3fn)
            hub[f"{name}_scale_inv"] = torch.rand([-(-size // FP8_BLOCK) for size in tensor.shape])
        else:
            hub[name] = tensor.clone()
    return hub


def adding(buffers: Mapping[str, tuple[int, ...]], *, without_prefix: str = "") -> Callable[[Tensors], Tensors]:
    """The form of old checkpoints: with stored buffers, and optionally without the prefix of names."""

    def rewrite(tensors: Tensors) -> Tensors:
        old = {name.removeprefix(without_prefix): tensor for name, tensor in tensors.items()}
        return {**old, **{name: torch.randn(shape) for name, shape in buffers.items()}}

    return rewrite


def old_bert(tensors: Tensors) -> Tensors:
    """The form of Google's BERT on the Hub: old names of norms, and stored positions."""
    old = {name.replace("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"): tensors[name] for name in tensors}
    return {**old, "bert.embeddings.position_ids": torch.randn(1, 32)}


MODELS = {
    "llama": Model("llama", GQA),
    "llama-old": Model("llama", GQA, rewrite=adding({"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)})),
    "llama-base": Model("llama", GQA, "AutoModel"),
    "llama-classifier": Model("llama", GQA, "AutoModelForSequenceClassification"),
    "llama-biases": Model("llama", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "qwen2": Model("qwen2", {"num_key_value_heads": KV_HEADS}),
    "qwen3": Model("qwen3", GQA),
    "stablelm": Model("stablelm", {"num_key_value_heads": KV_HEADS, "qk_layernorm": True, "use_qkv_bias": True}),
    "olmo2": Model("olmo2", {"num_key_value_heads": KV_HEADS}),
    "cohere": Model("cohere", {"num_key_value_heads": KV_HEADS, "use_qk_norm": True, "attention_bias": True}),
    "starcoder2": Model("starcoder2", {"num_key_value_heads": KV_HEADS}),
    "phi": Model("phi", {"num_key_value_heads": KV_HEADS, "qk_layernorm": True}),
    "phi3": Model("phi3", {"num_key_value_heads": KV_HEADS}),
    "glm4": Model("glm4", {**GQA, "attention_bias": True}),
    "mixtral": Model("mixtral", {**GQA, **MOE}),
    "mixtral-packed": Model("mixtral", {**GQA, **MOE}, rewrite=pack_experts),
    "qwen2_moe": Model("qwen2_moe", {"num_key_value_heads": KV_HEADS, **MOE}),
    "qwen2_moe-packed": Model("qwen2_moe", {"num_key_value_heads": KV_HEADS, **MOE}, rewrite=pack_experts),
    "qwen3_moe": Model("qwen3_moe", {**GQA, **MOE}),
    "qwen3_moe-packed": Model("qwen3_moe", {**GQA, **MOE}, rewrite=pack_experts),
    "olmoe": Model("olmoe", {"num_key_value_heads": KV_HEADS, **MOE}),
    "glm4_moe": Model("glm4_moe", {**GQA, **MOE, "use_qk_norm": True, "attention_bias": True}),
    "deepseek_v2": Model("deepseek_v2", {**MLA, **MOE, "q_lora_rank": None}),
    "deepseek_v3": Model("deepseek_v3", {**MLA, **MOE}),
    "deepseek_v3-packed": Model("deepseek_v3", {**MLA, **MOE}, rewrite=pack_experts),
    "deepseek_v3-hub": Model(
        "deepseek_v3",
        {**MLA, **MOE, "intermediate_size": 128},
        rewrite=deepseek_hub,
        extra={"quantization_config": {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}},
    ),
    "gpt2": Model("gpt2"),
    "gpt2-old": Model(
        "gpt2",
        rewrite=adding({"h.0.attn.bias": (1, 1, 32, 32), "h.0.attn.masked_bias": ()}, without_prefix="transformer."),
    ),
    "gpt2-classifier": Model("gpt2", auto="GPT2ForSequenceClassification"),
    "gpt_bigcode": Model("gpt_bigcode"),
    "gpt_bigcode-mha": Model("gpt_bigcode", {"multi_query": False}),
    "gpt_neox": Model("gpt_neox"),
    "gpt_neox-old": Model(
        "gpt_neox",
        rewrite=adding({
            "gpt_neox.layers.0.attention.bias": (1, 1, 32, 32),
            "gpt_neox.layers.0.attention.masked_bias": (),
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": (4,),
        }),
    ),
    "gpt_neox-classifier": Model("gpt_neox", auto="GPTNeoXForSequenceClassification"),
    "bloom": Model("bloom"),
    "bloom-classifier": Model("bloom", auto="BloomForSequenceClassification"),
    "bloom-old": Model(
        "bloom", extra={"n_embed": HIDDEN, "hidden_size": None, "num_attention_heads": HEADS, "n_head": None}
    ),
    "falcon-40b": Model("falcon", {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS, "bias": True}),
    "falcon-7b": Model("falcon", {"multi_query": True}),
    "falcon-7b-bare": Model("falcon", extra={"multi_query": None, "new_decoder_architecture": None}),
    "falcon-old": Model("falcon", rewrite=adding({"transformer.h.0.self_attention.rotary.inv_freq": (4,)})),
    "falcon-rw": Model("falcon", {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}),
    "bert": Model("bert", auto="BertForPreTraining"),
    "bert-old": Model(
        "bert",
        {"tie_word_embeddings": True},
        "BertForMaskedLM",
        old_bert,
    ),
    "bert-classifier": Model("bert", auto="BertForSequenceClassification"),
    "roberta": Model("roberta", auto="RobertaForMaskedLM"),
    "roberta-classifier": Model("roberta", auto="RobertaForSequenceClassification"),
    "electra": Model("electra", {"embedding_size": 32}, "ElectraForMaskedLM"),
    "electra-discriminator": Model("electra", {"embedding_size": 32}, "ElectraForPreTraining"),
    "electra-classifier": Model("electra", auto="ElectraForSequenceClassification"),
    "t5": Model("t5", {**T5, "tie_word_embeddings": True}, "T5ForConditionalGeneration"),
    "t5-gated": Model("t5", {**T5, "feed_forward_proj": "gated-gelu"}, "T5ForConditionalGeneration"),
    "t5-untied": Model("t5", T5, "T5ForConditionalGeneration", adding({"lm_head.weight": (VOCAB, HIDDEN)})),
    "t5-classifier": Model("t5", T5, "T5ForSequenceClassification"),
    "t5-encoder": Model("t5", T5, "T5EncoderModel"),
}  # fmt: skip


def default_model(model_type: str) -> Model:
    """A model of a type that does not require additional fields."""
    kinds = transformers.models.auto.modeling_auto
    if model_type in kinds.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return Model(model_type, {**(T5 if model_type.endswith("t5") else BART)}, "AutoModelForSeq2SeqLM")
    if model_type in kinds.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return Model(model_type, auto="AutoModelForMaskedLM")
    if model_type in ("biogpt", "opt", "trocr", "whisper", "xglm"):
        return Model(model_type, BART)
    is_latent = model_type in ("deepseek_v32", "youtu")
    indexer = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}
    heads = {"num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS}
    return Model(model_type, {**MOE, **(MLA | indexer if is_latent else heads)})
