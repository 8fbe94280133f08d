"""Quantized checkpoints without quantization_config are refused, by tensors or by settings next to config.json."""

import json

import pytest

import shardconv
from shardconv.plan.plan import TensorSpec
from shardconv.plan.quantization import check_quantization
from shardconv.support.errors import PlanError
from tests.support.checkpoints import llama_config, write_config, write_weights

LAYER = "model.layers.0.self_attn.q_proj"

#: Tensors of a quantized q_proj, as each tool names them.
QUANTIZED = {
    "fp8 by ModelOpt": {f"{LAYER}.weight": ("F8_E4M3", (8, 8)), f"{LAYER}.weight_scale": ("F32", ())},
    "fp8 weights alone": {f"{LAYER}.weight": ("F8_E5M2", (8, 8))},
    "fp8 by a scalar alone": {f"{LAYER}.input_scale": ("F32", ())},
    "fp8 with block scales": {f"{LAYER}.weight_scale_inv": ("F32", (1, 1))},
    "gptq": {f"{LAYER}.qweight": ("I32", (1, 8)), f"{LAYER}.g_idx": ("I32", (8,))},
    "awq": {f"{LAYER}.qzeros": ("I32", (1, 1))},
    "compressed-tensors": {f"{LAYER}.weight_packed": ("I32", (8, 1)), f"{LAYER}.weight_shape": ("I64", (2,))},
    "int8": {f"{LAYER}.weight": ("I8", (8, 8))},
    "nvfp4": {f"{LAYER}.weight": ("U8", (8, 4)), f"{LAYER}.weight_scale_2": ("F32", ())},
    "mxfp4": {"model.layers.0.mlp.experts.gate_up_proj_blocks": ("U8", (4, 8, 1, 16))},
    "bitsandbytes": {f"{LAYER}.weight.absmax": ("F32", (4,))},
    "bitsandbytes int8": {f"{LAYER}.SCB": ("F32", (8,))},
    "hqq": {f"{LAYER}.W_q": ("U8", (8, 4))},
    "quanto": {f"{LAYER}.weight._scale": ("F32", (8, 1))},
    "kv cache": {"model.layers.0.self_attn.k_scale": ("F32", ())},
}


def specs_of(what):
    return {name: TensorSpec(*spec) for name, spec in QUANTIZED[what].items()}


@pytest.mark.parametrize("what", QUANTIZED)
def test_quantized_tensors_without_settings_for_them_are_refused(what):
    with pytest.raises(PlanError, match=r"no quantization_config describes it .*hf_quant_config.json.* pass config="):
        check_quantization(specs_of(what), {"model_type": "llama"})
    with pytest.raises(PlanError, match="not part of the format that quantization_config describes"):
        check_quantization(specs_of(what), {"quantization_config": {"quant_method": "fp8"}})


def test_tensors_that_are_not_quantized():
    specs = {
        "model.layers.0.post.layer_scale": ("F32", (8,)),
        "logit_scale": ("F32", ()),
        "embeddings.position_ids": ("I64", (1, 8)),
        "norm.num_batches_tracked": ("I64", ()),
        "blocks.0.weight": ("BF16", (8, 8)),
        "blocks.0.attn.W_q": ("F32", (8, 8)),
        "blocks.0.attn.k_scale": ("F32", (8,)),
        "blocks.0.scales": ("F32", (8,)),
    }
    check_quantization({name: TensorSpec(*spec) for name, spec in specs.items()}, None)


SETTINGS = {
    "hf_quant_config.json": ({"quantization": {"quant_algo": "W4A8_AWQ"}}, "ModelOpt's 'W4A8_AWQ' is not supported"),
    "quantize_config.json": ({"bits": 5, "group_size": 128, "desc_act": False}, "bits is 5"),
    "quant_config.json": ({"w_bit": 3, "q_group_size": 128, "version": "GEMM"}, "bits is 3"),
}


@pytest.mark.parametrize("file", SETTINGS)
def test_settings_next_to_the_config(tmp_path, file):
    """They are read if config.json has none: here a value in them is not supported."""
    write_weights(tmp_path / "model.safetensors", QUANTIZED["fp8 by ModelOpt"])
    write_config(tmp_path, llama_config(layers=1))
    settings, message = SETTINGS[file]
    (tmp_path / file).write_text(json.dumps(settings))
    with pytest.raises(PlanError, match=message):
        shardconv.split(tmp_path, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "text"),
    [("hf_quant_config.json", '{"quantization": {"quant_algo": null}}'), ("quant_config.json", '{"note": "none"}')],
)
def test_settings_that_name_no_method(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    write_weights(tmp_path / "model.safetensors", {f"{LAYER}.weight": ("F32", (64, 64))})
    write_config(tmp_path, llama_config(layers=1))
    assert shardconv.report_plan(tmp_path).num_tensors == 1
