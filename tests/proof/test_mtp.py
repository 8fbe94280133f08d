"""MTP layers (multi-token prediction): checkpoints on the hub have them, transformers has not.

Their names are those that serving frameworks load; their tensors those of a layer of the model, or drawn.
"""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardconv.checkpoint.merge import merge
from shardconv.checkpoint.split import split
from shardconv.errors import PlanError
from shardconv.plan.family_file import parse_plan_file
from shardconv.plan.matcher import name_regex
from shardconv.plan.request import PlanRequest
from shardconv.proof.compare import write_reference
from shardconv.proof.prove import REFERENCE
from tools.model_matrix.matrix import KINDS, check, model_class, small, worst

QWEN = {
    "mtp.fc.weight": 2,
    "mtp.pre_fc_norm_embedding.weight": 0,
    "mtp.pre_fc_norm_hidden.weight": 0,
    "mtp.norm.weight": 0,
}
NEXTN = {"enorm.weight": 0, "hnorm.weight": 0, "eh_proj.weight": 2, "final_layernorm.weight": 0}

#: By the type: what names of a layer become, which are left out, and which are added with so many hidden sizes of
#: columns, 0 for none.
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
#: Of what is added, the dim that is cut; all else is whole on every rank.
CUT = {r"embed_tokens|up_proj|shared_head.output": 0, "down_proj": 1}
#: Of models with and without images the ones with: their names differ.
KIND_OF = {model_type: kind for kind, names in KINDS.items() for model_type in names}


def with_mtp(source, model_type):
    """Add to a checkpoint what the hub's has; gives the names, and whose tensors they are, where they are a layer's."""
    pattern, place, left_out, extra = HUB[model_type]
    tensors = load_file(source / "model.safetensors")
    of_layer = {
        re.sub(pattern, place, name).replace("self_attn.0.", "self_attn."): name
        for name in tensors
        if re.match(pattern, name) and not (left_out and left_out in name)
    }
    hidden = next(tensor.shape[-1] for name, tensor in tensors.items() if "embed" in name)
    shapes = {name: (hidden, columns * hidden) if columns else (hidden,) for name, columns in extra.items()}
    drawn = {name: torch.randn(shape) for name, shape in shapes.items() if name not in of_layer}
    copied = {new: tensors[name].clone() for new, name in of_layer.items()}
    save_file({**tensors, **copied, **drawn}, source / "model.safetensors", metadata={"format": "pt"})
    return of_layer, drawn


@pytest.mark.parametrize("model_type", HUB)
def test_layers_behind_the_last(ranks, tmp_path, model_type):
    """They are cut as a layer of the model is, merged byte for byte, and the model is the same with them."""
    made = small(model_class(KIND_OF[model_type], model_type))
    made.save_pretrained(tmp_path / "source")
    write_reference(type(made), tmp_path / "source", tmp_path / REFERENCE)
    of_layer, drawn = with_mtp(tmp_path / "source", model_type)
    assert of_layer
    assert drawn
    split(tmp_path / "source", tmp_path / "split", tp=2)
    shards = [load_file(path) for path in sorted((tmp_path / "split").glob("*-of-*.safetensors"))]
    for new, name in of_layer.items():
        assert all(torch.equal(shard[new], shard[name]) for shard in shards), new
    for name, tensor in drawn.items():
        dim = next((dim for pattern, dim in CUT.items() if re.search(pattern, name)), None)
        whole = shards[0][name] if dim is None else torch.cat([shard[name] for shard in shards], dim)
        assert shards[1][name].numel() == tensor.numel() // (1 if dim is None else 2), name
        assert torch.equal(whole, tensor), name
    merge(tmp_path / "split", tmp_path / "merged")
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (tmp_path / "source/model.safetensors").read_bytes()
    source, place = tmp_path / "source", tmp_path / "split"
    found = worst(ranks("pair", check, type(made).__name__, source, place, PlanRequest(), tmp_path / REFERENCE))
    assert not isinstance(found, str), found
    assert (found[0] < 1e-4, found[1] is not False) == (True, True)


def test_what_stands_in_the_place_of_a_prefix():
    regex = re.compile(name_regex("model.layers.*.norm", ("model.", "mtp.")))
    assert all(regex.fullmatch(f"{start}layers.0.norm") for start in ("model.", "mtp.", ""))
    assert not any(regex.fullmatch(f"{start}layers.0.norm") for start in ("mtp.model.", "model.mtp.", "a.mtp.", "m."))
    prefixes = {'"model."': ("model.",), '["model.", "mtp."]': ("model.", "mtp."), '""': (), "[]": ()}
    for text, prefix in prefixes.items():
        assert parse_plan_file("plan.toml", f"prefix = {text}").prefix == prefix
    for text in ("[1]", '[""]', "1"):
        with pytest.raises(PlanError, match="prefix"):
            parse_plan_file("plan.toml", f"prefix = {text}")
