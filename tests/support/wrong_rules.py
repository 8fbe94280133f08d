"""Rules and module overrides that are wrong for a model type."""

from tools.model_matrix.trial import KINDS

KIND_OF = {model_type: kind for kind, names in reversed(KINDS.items()) for model_type in names}
#: Model type, and rules that are wrong for it: for each kind of rule a plausible mistake.
WRONG = {
    "fused projection sharded as one segment": ("phi3", '"**.qkv_proj" = { style = "colwise" }'),
    "gate and up sharded as one segment": ("phi3", '"**.gate_up_proj" = { style = "colwise" }'),
    "packed experts as one segment": (
        "llama4_text",
        '"**.gate_up_proj" = { style = "colwise", transposed = true }',
    ),
    "packed experts as (out, in)": (
        "llama4_text",
        '"**.gate_up_proj" = { style = "packed_colwise", segments = ["element", "element"] }\n'
        '"**.down_proj" = { style = "rowwise" }',
    ),
    "interleaved qkv as packed": (
        "gpt_neox",
        '"**.query_key_value" = { style = "packed_colwise", segments = ["element", "element", "element"] }',
    ),
    "packed qkv as interleaved": ("gpt2", '"**.c_attn" = { style = "colwise", transposed = true }'),
    "grouped qkv as three segments": (
        "gpt_bigcode",
        '"**.c_attn" = { style = "packed_colwise", segments = ["element", "element", "element"] }',
    ),
    "norm per head without an all-reduced gradient": ("qwen3", '"**.q_norm" = { style = "replicate" }'),
    "norm over all heads as a norm per head": ("olmo2", '"**.{q_norm,k_norm}" = { style = "replicate" }'),
    "replicated query projection": ("qwen2", '"**.q_proj" = { style = "replicate" }'),
    "replicated key and value projections": ("llama", '"**.{k_proj,v_proj}" = { style = "replicate" }'),
    "replicated attention sinks": ("gpt_oss", '"**.sinks" = { style = "replicate" }'),
    "interleaved gate and up as packed": (
        "gpt_oss",
        '"**.{gate_up_proj,gate_up_proj_bias}" = { style = "packed_colwise", segments = ["element", "element"], '
        "transposed = true }",
    ),
    "kv heads in another order": (
        "llama",
        '"**.q_proj" = { style = "packed_colwise", segments = ["element", "element"] }\n'
        '"**.o_proj" = { style = "packed_rowwise", segments = ["element", "element"] }',
    ),
    "replicated relative position bias": ("t5", '"**.relative_attention_bias" = { style = "replicate" }'),
    "concatenated experts sharded as one segment": ("dbrx", '"**.experts.mlp.w1" = { style = "colwise" }'),
    "replicated up projection of a latent": ("deepseek_v3", '"**.kv_b_proj" = { style = "replicate" }'),
    "output without all-gather": ("mamba", '"**.in_proj" = { style = "colwise" }'),
    "parameter without all-gather": ("albert", '"**.embedding_hidden_mapping_in" = { style = "colwise" }'),
    "logits without all-gather": ("llama", '"lm_head" = { style = "colwise", pad = true }'),
}
#: Model type, and module overrides that are wrong for it.
WRONG_OVERRIDES = {
    "width of a projection": ("gpt2", '"**.attn" = { attributes = { split_size = "n_embd" } }'),
    "position bias per head": (
        "bloom",
        '"**.self_attention" = { inputs = { alibi = { dim = 0, unit = "replicated" } } }',
    ),
    "heads of an output": ("doge", '"**.dt_proj" = { output = { dim = 1, unit = "kv_row" } }'),
    "heads of a buffer": ("minimax", '"**.self_attn" = { slices = { query_decay = { dim = 1, unit = "head" } } }'),
    "states per channel": (
        "rwkv",
        '"**.attention" = { inputs = { state = { dim = 1, unit = "channel", size = 1, items = [2, 3] } } }',
    ),
    "slice of a replicated latent": ("deepseek_v3", '"**.kv_a_proj_with_mqa" = { shared_output = 0 }'),
}
