"""MTP layers (multi-token prediction), as checkpoints on the Hub have them."""

import re

import torch
from safetensors.torch import load_file, save_file

from tools.model_matrix.trial import KINDS

QWEN = {
    "mtp.fc.weight": 2,
    "mtp.pre_fc_norm_embedding.weight": 0,
    "mtp.pre_fc_norm_hidden.weight": 0,
    "mtp.norm.weight": 0,
}
NEXTN = {"enorm.weight": 0, "hnorm.weight": 0, "eh_proj.weight": 2, "final_layernorm.weight": 0}

#: Type to the renamed tensors of a layer, those left out, and those added, with their columns in multiples of the
#: hidden size (0 for vectors).
HUB = {
    "qwen3_next": (r"model\.layers\.\d+\.", "mtp.layers.0.", "linear_attn", QWEN),
    "qwen3_5": (r"model\.language_model\.layers\.\d+\.", "mtp.layers.0.", "linear_attn", QWEN),
    "qwen3_5_moe": (r"model\.language_model\.layers\.\d+\.", "mtp.layers.0.", "linear_attn", QWEN),
    "exaone_moe": (r"model\.layers\.0\.", "mtp.layers.0.", "", QWEN),
    "exaone4_5": (r"model\.language_model\.layers\.0\.", "mtp.layers.0.", "", QWEN),
    "mimo_v2_flash": (
        r"model\.layers\.0\.",
        "model.mtp.layers.0.",
        "post_attention_layernorm",
        {f"model.mtp.layers.0.{name}": size for name, size in {**NEXTN, "pre_mlp_layernorm.weight": 0}.items()},
    ),
    "ernie4_5_moe": (
        r"model\.layers\.0\.",
        "model.mtp_block.0.",
        "",
        {
            "model.mtp_emb_norm.0.weight": 0,
            "model.mtp_hidden_norm.0.weight": 0,
            "model.mtp_linear_proj.0.weight": 2,
        },
    ),
    "hy_v3": (
        r"model\.layers\.1\.",
        "model.layers.2.",
        "",
        {f"model.layers.2.{name}": size for name, size in NEXTN.items()},
    ),
    "step3p7": (
        r"model\.layers\.1\.",
        "model.layers.2.",
        "",
        {
            "model.layers.2.enorm.weight": 0,
            "model.layers.2.hnorm.weight": 0,
            "model.layers.2.eh_proj.weight": 2,
            "model.layers.2.transformer.shared_head.norm.weight": 0,
            "model.layers.2.transformer.shared_head.output.weight": 1,
        },
    ),
    "longcat_flash": (
        r"model\.layers\.0\.(?=self_attn\.0)",
        "model.mtp.layers.0.",
        "mlp",
        {
            "model.mtp.embed_tokens.weight": 1,
            "model.mtp.norm.weight": 0,
            "model.mtp.layers.0.enorm.m.weight": 0,
            "model.mtp.layers.0.hnorm.m.weight": 0,
            "model.mtp.layers.0.eh_proj.weight": 2,
            "model.mtp.layers.0.input_layernorm.weight": 0,
            "model.mtp.layers.0.transformer_layer.mlp.up_proj.weight": 1,
            "model.mtp.layers.0.transformer_layer.mlp.down_proj.weight": 1,
        },
    ),
    "nemotron_h": (
        r"(backbone|model)\.layers\.\d+\.(?=mixer\.([qkvo]_proj|gate|experts|shared_experts)|norm\.)",
        "mtp.layers.0.",
        "",
        {f"mtp.layers.0.{name}": size for name, size in NEXTN.items()},
    ),
}  # fmt: skip
#: Of composite and text-only types, the composite ones: their names differ.
KIND_OF = {model_type: kind for kind, names in KINDS.items() for model_type in names}


def with_mtp(source, model_type):
    """Add MTP layers to a checkpoint; returns added names to the layer's tensors they copy, and random tensors."""
    pattern, place, left_out, extra = HUB[model_type]
    tensors = load_file(source / "model.safetensors")
    of_layer = {
        re.sub(pattern, place, name).replace("self_attn.0.", "self_attn."): name
        for name in tensors
        if re.match(pattern, name) and not (left_out and left_out in name)
    }
    vocab, hidden = next(tensor.shape for name, tensor in tensors.items() if "embed" in name)
    rows = {name: vocab if "embed_tokens" in name else hidden for name in extra}
    shapes = {name: (rows[name], columns * hidden) if columns else (hidden,) for name, columns in extra.items()}
    drawn = {name: torch.randn(shape) for name, shape in shapes.items() if name not in of_layer}
    copied = {new: tensors[name].clone() for new, name in of_layer.items()}
    save_file({**tensors, **copied, **drawn}, source / "model.safetensors", metadata={"format": "pt"})
    return of_layer, drawn
