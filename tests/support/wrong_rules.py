"""Rules and module overrides that are wrong for a model type."""

from tools.model_matrix.trial import KINDS

KIND_OF = {model_type: kind for kind, names in reversed(KINDS.items()) for model_type in names}
#: A type, and rules that are wrong for it: each kind of rule, broken in the way that is nearest to being right.
WRONG = {
    "a fused projection cut as one": ("phi3", '"**.qkv_proj" = { style = "colwise" }'),
    "gate and up cut as one": ("phi3", '"**.gate_up_proj" = { style = "colwise" }'),
    "packed experts cut as one": ("llama4_text", '"**.gate_up_proj" = { style = "colwise", transposed = true }'),
    "packed experts taken for (out, in)": (
        "llama4_text",
        '"**.gate_up_proj" = { style = "packed_colwise", parts = ["part", "part"] }\n'
        '"**.down_proj" = { style = "rowwise" }',
    ),
    "heads that lie together cut apart": (
        "gpt_neox",
        '"**.query_key_value" = { style = "packed_colwise", parts = ["part", "part", "part"] }',
    ),
    "heads that lie apart cut together": ("gpt2", '"**.c_attn" = { style = "colwise", transposed = true }'),
    "groups of heads cut as three parts": (
        "gpt_bigcode",
        '"**.c_attn" = { style = "packed_colwise", parts = ["part", "part", "part"] }',
    ),
    "a norm over each head whose gradient is not summed": ("qwen3", '"**.q_norm" = { style = "replicate" }'),
    "a norm over all heads taken for one over each": ("olmo2", '"**.{q_norm,k_norm}" = { style = "replicate" }'),
    "a query projection whole": ("qwen2", '"**.q_proj" = { style = "replicate" }'),
    "key and value heads on every rank": ("llama", '"**.{k_proj,v_proj}" = { style = "replicate" }'),
    "attention sinks whole": ("gpt_oss", '"**.sinks" = { style = "replicate" }'),
    "a pair of gate and up cut apart": (
        "gpt_oss",
        '"**.{gate_up_proj,gate_up_proj_bias}" = { style = "packed_colwise", parts = ["part", "part"], '
        "transposed = true }",
    ),
    "kv heads in another order": (
        "llama",
        '"**.q_proj" = { style = "packed_colwise", parts = ["part", "part"] }\n'
        '"**.o_proj" = { style = "packed_rowwise", parts = ["part", "part"] }',
    ),
    "a relative position bias whole": ("t5", '"**.relative_attention_bias" = { style = "replicate" }'),
    "experts below each other cut as one": ("dbrx", '"**.experts.mlp.w1" = { style = "colwise" }'),
    "an up projection of a latent whole": ("deepseek_v3", '"**.kv_b_proj" = { style = "replicate" }'),
    "an output that is not put together": ("mamba", '"**.in_proj" = { style = "colwise" }'),
    "a parameter that is not put together": ("albert", '"**.embedding_hidden_mapping_in" = { style = "colwise" }'),
    "words cut and not put together": ("llama", '"lm_head" = { style = "colwise", pad = true }'),
}
TOLD_WRONG = {
    "the width of a projection": ("gpt2", '"**.attn" = { attributes = { split_size = "n_embd" } }'),
    "positions by head": ("bloom", '"**.self_attention" = { inputs = { alibi = { dim = 0, unit = "whole" } } }'),
    "how many blocks": ("codegen", '"**.attn" = { locals = { mp_num = 4 } }'),
    "the width of other heads": ("trocr", '"**.{self_attn,encoder_attn}" = { full_width = "d_model + 1" }'),
    "the heads of an output": ("doge", '"**.dt_proj" = { output = { dim = 1, unit = "kv_row" } }'),
    "the heads of a buffer": ("minimax", '"**.self_attn" = { slices = { query_decay = { dim = 1, unit = "head" } } }'),
    "the states of channels": (
        "rwkv",
        '"**.attention" = { inputs = { state = { dim = 1, unit = "channel", size = 1, items = [2, 3] } } }',
    ),
    "the heads of a method that mixes them": (
        "prophetnet",
        '"**.decoder.layers.*.self_attn" = '
        '{ unsharded = { get_predict_relative_pos_embeddings = { dim = 1, unit = "decoder_head" } } }',
    ),
    "a product of rows": ("xlnet", '"**.rel_attn" = { products = { o = "colwise" } }'),
    "a product of columns": ("xlnet", '"**.rel_attn" = { products = { r = "rowwise" } }'),
    "a product that goes on to shards": (
        "zamba",
        '"**.{mamba,mamba_decoder.mamba}" = { products = { x_proj_weight = "rowwise" } }',
    ),
    "a share of a latent": ("deepseek_v3", '"**.kv_a_proj_with_mqa" = { shared_output = 0 }'),
}
