"""Quantized checkpoints in vLLM's layout: their tensors by torch, and what the layout does not support.

tests/engines/vllm compares the same files with the parameters of vLLM.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardconv
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.checkpoint.split.rank_reader import RankFileReader
from shardconv.layers.sharding import take_shard
from shardconv.layouts.layout import NATIVE
from shardconv.runtime.rank_tensors import read_tensors
from shardconv.support.errors import IntegrityError, PlanError
from tests.formats.test_gptq import quantize as quantize_4_bits
from tests.formats.test_other_formats import F32, to_fp8, to_int8, to_modelopt_fp8
from tests.support.checkpoints import contents
from tests.support.compressed import write_compressed
from tests.support.damage import flip, place
from tests.support.gptq import write_gptq
from tests.support.models import Tensors, change_config, change_tensors, read
from tests.support.quantized import MODELS, write
from tests.support.tensors import bits, check_equal, check_equal_files

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
EMBEDDING = "model.embed_tokens.weight"
#: A setting of GPTQ: a part of the names of quantized layers.
NAMED = {"modules_in_block_to_quantize": ["_proj"]}
#: Of the settings of fp8.
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory):
    return lambda name: MODELS[name].write(tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def packed(unquantized, tmp_path_factory) -> Path:
    """4-bit weights with zero points."""
    return write_compressed(unquantized("llama"), tmp_path_factory.mktemp("packed"), ("W4A16_ASYM", "Linear"))


def rank_files(folder: Path, tp: int) -> list[Tensors]:
    return [load_file(folder / f"model-rank-{rank}-part-0.safetensors") for rank in range(tp)]


def fused(source: Tensors, names: str, end: str, rank: int) -> torch.Tensor:
    """The shards of column-parallel layers on one of two ranks, concatenated."""
    return torch.cat([source[f"{ATTENTION}.{name}_proj.{end}"].chunk(2)[rank] for name in names])


def test_packed_weights(packed, tmp_path):
    """The shapes of q_proj and k_proj are not in the files."""
    shardconv.split(packed, tmp_path / "split", tp=2, layout="vllm")
    source = read(packed)
    for rank, found in enumerate(rank_files(tmp_path / "split", 2)):
        for end in ("weight_packed", "weight_scale", "weight_zero_point"):
            assert torch.equal(found[f"{ATTENTION}.qkv_proj.{end}"], fused(source, "qkv", end, rank)), end
            row_parallel = source[f"{ATTENTION}.o_proj.{end}"].chunk(2, 1)[rank]
            assert torch.equal(found[f"{ATTENTION}.o_proj.{end}"], row_parallel), end
        assert found[f"{ATTENTION}.qkv_proj.weight_shape"].tolist() == [128, 128]
        assert found[f"{MLP}.gate_up_proj.weight_shape"].tolist() == [256, 128]
        assert found[f"{ATTENTION}.o_proj.weight_shape"].tolist() == [128, 256]
        assert found[f"{ATTENTION}.attn.k_scale"].tolist() == [1.0]


def test_commands(packed, tmp_path):
    """Shapes that no file has are restored."""
    split = tmp_path / "split"
    shardconv.split(packed, split, tp=2, layout="vllm")
    assert shardconv.verify(split).differences == ()
    assert shardconv.verify(split, against=packed).differences == ()
    shardconv.merge(split, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(packed)
    for tp, layout in ((4, "vllm"), (2, "native")):
        engine = {"engine": "vllm"} if layout == "native" else {}
        shardconv.split(packed, tmp_path / layout, tp=tp, layout=layout, **engine)
        shardconv.reshard(split, tmp_path / f"resharded {layout}", tp=tp, layout=layout)
        assert shardconv.verify(tmp_path / f"resharded {layout}", against=packed).differences == ()
        check_equal_files(tmp_path / f"resharded {layout}", tmp_path / layout)
    shardconv.reshard(tmp_path / "native", tmp_path / "again", tp=2, layout="vllm")
    assert rank_files(tmp_path / "again", 2)[0].keys() == rank_files(split, 2)[0].keys()


def test_one_scale_per_weight(unquantized, tmp_path):
    """Each is one element of a vector."""
    source = write(
        unquantized("llama"), tmp_path / "source", to_modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}
    )
    shardconv.split(source, tmp_path / "split", tp=2, layout="vllm")
    tensors = read(source)
    for found in rank_files(tmp_path / "split", 2):
        expected = [tensors[f"{ATTENTION}.{name}_proj.weight_scale"] for name in "qkv"]
        assert torch.equal(found[f"{ATTENTION}.qkv_proj.weight_scale"], torch.stack(expected))
        assert found[f"{ATTENTION}.o_proj.input_scale"].tolist() == [0.25]
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_concatenation_along_the_output_features(method, unquantized, tmp_path):
    """They are dim 1 of the stored tensors; indices of groups are in no file. Layers have biases."""
    source = four_bits(method, "qwen2", unquantized, tmp_path / "source", **NAMED)
    split, tensors = tmp_path / "split", read(source)
    shardconv.split(source, split, tp=2, layout="vllm")
    for rank, found in enumerate(rank_files(split, 2)):
        assert not any("g_idx" in name for name in found)
        for end in ("qweight", "qzeros", "scales"):
            expected = torch.cat([tensors[f"{ATTENTION}.{name}_proj.{end}"].chunk(2, 1)[rank] for name in "qkv"], 1)
            assert torch.equal(found[f"{ATTENTION}.qkv_proj.{end}"], expected), end
            assert torch.equal(found[f"{MLP}.down_proj.{end}"], tensors[f"{MLP}.down_proj.{end}"].chunk(2)[rank]), end
        assert torch.equal(found[f"{ATTENTION}.qkv_proj.bias"], fused(tensors, "qkv", "bias", rank))
    shardconv.merge(split, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    assert shardconv.verify(split, against=source).differences == ()
    shardconv.reshard(split, tmp_path / "resharded", tp=4)
    assert shardconv.verify(tmp_path / "resharded", against=source).differences == ()
    manifest = read_manifest(split)
    reader = RankFileReader(manifest, split, 1, verify=True)
    for name, tensor in tensors.items():
        expected = take_shard(tensor, manifest.plan.placement(name), 1)
        assert bytes(reader.read(name)) == bits(expected).numpy().tobytes(), name


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_flipped_bit_of_a_concatenated_tensor_is_found(unquantized, tmp_path, method):
    options = NAMED if method == "gptq" else {}
    source = four_bits(method, "qwen2", unquantized, tmp_path / "source", **options)
    shardconv.split(source, tmp_path / "split", tp=2, layout="vllm")
    path = tmp_path / "split/model-rank-1-part-0.safetensors"
    flip(path, place(path, f"{ATTENTION}.qkv_proj.qweight")[0])
    (found,) = shardconv.verify(tmp_path / "split").differences
    assert "model-rank-1-part-0.safetensors" in found
    with pytest.raises(IntegrityError, match="differ from their checksum"):
        RankFileReader(read_manifest(tmp_path / "split"), tmp_path / "split", 1, verify=True).finish()


@pytest.mark.parametrize("model", ["qwen2", "packed"])
def test_loaded_tensors_are_those_of_the_native_layout(model, packed, unquantized, tmp_path):
    """``load`` with a module of the caller has all stored tensors, also those that are in no file."""
    source = packed if model == "packed" else four_bits("gptq", model, unquantized, tmp_path / "source", **NAMED)
    shardconv.split(source, tmp_path / "native", tp=2, engine="vllm")
    shardconv.split(source, tmp_path / "split", tp=2, layout="vllm")
    manifest = read_manifest(tmp_path / "split")
    for rank in range(2):
        found = read_tensors(RankFileReader(manifest, tmp_path / "split", rank))
        check_equal(found, load_file(tmp_path / "native" / NATIVE.rank_file(rank, 2)))


def compressed(scheme, model, unquantized, folder):
    return write_compressed(unquantized(model), folder, (scheme, "Linear"))


def blocks(model, unquantized, folder):
    return write(unquantized(model), folder, partial(to_fp8, kind=F32), FP8)


def with_cache_scale(unquantized, folder):
    return write(unquantized("llama"), folder, _cache_scale, FP8)


def _cache_scale(name, tensor):
    stored = to_fp8(name, tensor, kind=F32)
    is_key = name.endswith("k_proj.weight")
    return stored | ({name.replace("k_proj.weight", "k_scale"): torch.tensor(0.5)} if is_key else {})


def in_another_file(unquantized, folder):
    source = write(unquantized("llama"), folder, to_modelopt_fp8, None)
    settings = {"quantization": {"quant_algo": "FP8"}}
    (source / "hf_quant_config.json").write_text(json.dumps(settings))
    return source


def settings_only(unquantized, folder):
    source = shutil.copytree(unquantized("llama"), folder)
    change_config(source, {"quantization_config": FP8})
    return source


def four_bits(method, model, unquantized, folder, **settings):
    """GPTQ or AWQ."""
    settings = {"quant_method": method, "bits": 4, "group_size": 32, "desc_act": False, **settings}
    return write(unquantized(model), folder, partial(quantize_4_bits, method=method), settings)


def act_order(_, folder):
    sizes = {"hidden": 256, "heads": 8, "kv_heads": 2, "intermediate": 512}
    source = write_gptq(folder, bits=4, group=32, act_order=True, **sizes)
    settings = json.loads((source / "config.json").read_text())["quantization_config"]
    change_config(source, {"quantization_config": {**settings, **NAMED}})
    return source


def with_quantized(name, unquantized, folder):
    """FP8 of the projections and of another weight."""

    def change(tensors):
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 16), -(-columns // 16))

    return change_tensors(blocks("llama", unquantized, folder), change)


def int8(unquantized, folder):
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return write(unquantized("llama"), folder, to_int8, settings)


#: Checkpoint that the layout does not support, to a part of the error.
REFUSED = {
    "GPTQ without names of layers": (partial(four_bits, "gptq", "llama"), "it needs modules_in_block_to_quantize"),
    "GPTQ with act-order": (act_order, r"proj\.g_idx: .*act-order"),
    "experts of GPTQ": (partial(four_bits, "gptq", "qwen3_moe", **NAMED), "vLLM has biases of the experts"),
    "experts of AWQ": (partial(four_bits, "awq", "qwen3_moe"), "it needs modules_to_not_convert"),
    "latent attention": (partial(compressed, "W4A16", "deepseek_v3"), "latent attention is supported with FP8 only"),
    "a quantized lm_head": (partial(with_quantized, "lm_head.weight"), "lm_head.weight.* pads the vocabulary"),
    "a quantized embedding": (partial(with_quantized, EMBEDDING), f"{EMBEDDING}.* pads the vocabulary"),
    "another method": (int8, "SCB: layout vllm does not support this tensor of a quantized layer"),
    "one scale of fused layers": (partial(compressed, "FP8", "phi3"), "gate_up_proj.input_scale: is one number"),
    "input scales of experts": (partial(compressed, "FP8", "qwen3_moe"), "vLLM combines the input scales of an expert"),
    "a scale of the KV cache": (with_cache_scale, "self_attn.k_scale: layout vllm does not support this tensor"),
    "settings without quantized tensors": (settings_only, "no tensor is quantized"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, unquantized, tmp_path):
    write_source, message = REFUSED[name]
    source = write_source(unquantized, tmp_path / "source")
    with pytest.raises(PlanError, match=message):
        shardconv.split(source, tmp_path / "split", tp=2, layout="vllm")
    assert not (tmp_path / "split").exists()


def test_reshard_without_settings_is_refused(unquantized, tmp_path):
    """A manifest has config.json, but not hf_quant_config.json."""
    source = in_another_file(unquantized, tmp_path / "source")
    shardconv.split(source, tmp_path / "native", tp=2, engine="vllm")
    with pytest.raises(PlanError, match=r"quantization method \(got none in config\.json"):
        shardconv.reshard(tmp_path / "native", tmp_path / "split", tp=2, layout="vllm")
