"""Small models in sizes that vLLM supports, written by transformers."""

from pathlib import Path

from tests.support.models import Model

BASE = {
    "vocab_size": 1000,  # padded to 1024 by vLLM
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GQA = {**BASE, "num_key_value_heads": 2, "head_dim": 32}
MOE = {**GQA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA = {
    **BASE, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GDN = {
    **MOE, "num_hidden_layers": 4, "shared_expert_intermediate_size": 64, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}

MODELS = {
    "llama": Model("llama", GQA),
    "llama, tied": Model("llama", {**GQA, **TIED}),
    "qwen2": Model("qwen2", GQA),
    "qwen3": Model("qwen3", GQA),
    "gemma3_text": Model("gemma3_text", {**GQA, **TIED, "query_pre_attn_scalar": 32}),
    "phi3": Model("phi3", GQA),
    "gpt_neox": Model("gpt_neox", BASE),
    "falcon": Model("falcon", {**BASE, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}),
    "mixtral": Model("mixtral", MOE),
    "mixtral, 5 experts": Model("mixtral", {**MOE, "num_local_experts": 5}),
    "qwen3_moe": Model("qwen3_moe", MOE),
    "gpt_oss": Model("gpt_oss", MOE),
    "deepseek_v2": Model("deepseek_v2", MLA),
    "olmo2": Model("olmo2", GQA),
    "bert": Model("bert", BASE, auto="AutoModel"),  # its loader collects all weights first
    "gpt2": Model("gpt2", {**BASE, "n_positions": 128}),
    "mamba2": Model("mamba2", {**BASE, "num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2, "expand": 2}),
    "qwen3_next": Model("qwen3_next", GDN),
}
#: With fewer KV heads than ranks, or none.
ON_FOUR_RANKS = ("llama", "llama, tied", "qwen2", "phi3", "falcon", "mixtral", "qwen3_moe", "deepseek_v2", "olmo2")
#: Model to the tensor parallel sizes to test.
CASES = [*((name, 2) for name in MODELS), *((name, 4) for name in ON_FOUR_RANKS)]


def write(name: str, folder: Path) -> Path:
    """Write a model as a checkpoint; overwrites an existing one."""
    path = folder / name.replace(", ", "-")
    if not path.exists():
        MODELS[name].write(path, max_shard_size="1MB")
    return path
