"""Formats of compressed-tensors: the library quantizes, and its decompressor is the oracle."""

import json
import math
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardconv
from shardconv.layers.sharding import take_shard
from shardconv.support.errors import PlanError, RunError
from tests.support.checkpoints import contents
from tests.support.compressed import dequantize, write_compressed
from tests.support.gptq import pack, unpack
from tests.support.matrix import MATRIX, cases
from tests.support.models import Tensors, change_config, change_tensors, read
from tests.support.quantized import (
    SIZES,
    check_commands,
    check_config_alone,
    check_padding,
    check_run,
    check_values,
    loaded_values,
    rank_file,
)

SCHEMES = (
    "W4A16", "W4A16_ASYM", "W8A16", "W3A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4",
    "MXFP8",
)  # fmt: skip


@pytest.fixture(scope="session")
def compressed(unquantized, tmp_path_factory) -> Callable[[str, str], Path]:
    """A checkpoint by its scheme and model."""

    def make(scheme: str, model: str) -> Path:
        return write_compressed(unquantized(model), tmp_path_factory.mktemp(f"{model}-{scheme}"), (scheme, "Linear"))

    return cache(make)


@pytest.mark.parametrize(
    ("scheme", "model"),
    cases(
        [(scheme, model) for scheme in SCHEMES for model in SIZES],
        lambda scheme, model: (
            (model == "llama" and scheme in {"W4A16_ASYM", "FP8_BLOCK", "NVFP4", "MXFP4"})
            or (scheme, model) == ("W4A16", next(reversed(SIZES)))
        ),
    ),
)
def test_shards_have_the_values_of_shards(compressed, unquantized, tmp_path, scheme, model):
    source = compressed(scheme, model)
    assert set(SIZES[model]) <= set(shardconv.report_plan(source).supported_tp)
    for tp in SIZES[model]:
        sharded = check_values(source, unquantized(model), tp, partial(dequantize, source), tmp_path / f"tp{tp}")
        assert sharded >= 4
    check_commands(source, tmp_path, tmp_path / "tp2", "weight_scale", tp=2, reshard=4)


@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "FP8_BLOCK", "MXFP4"])
def test_config_alone_has_the_sizes_of_the_headers(compressed, tmp_path, scheme):
    check_config_alone(compressed(scheme, "llama"), tmp_path / "config")


def test_plan_names_the_settings_and_the_values_that_are_rewritten(compressed, tmp_path):
    source = compressed("W4A16", "llama")
    report = shardconv.report_plan(source, tp=2)
    assert report.quantization == "compressed-tensors pack-quantized, 4 bits"
    placements = {tensor.name.rpartition(".")[2]: tensor.placement for tensor in report.tensors}
    assert placements["weight_shape"] == "rewritten per rank"
    assert placements["weight_packed"].startswith("dim ")
    shardconv.split(source, tmp_path / "split", tp=2)
    local = load_file(rank_file(tmp_path / "split", 1, 2))
    assert local["model.layers.0.mlp.down_proj.weight_shape"].tolist() == [128, 256 // 2]


def order(size: int) -> torch.Tensor:
    """A random order of input features."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def with_act_order(source: Path, folder: Path) -> Path:
    """A copy with input features in another order, and the indices of their groups: the library does not write them."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("weight_packed")]:
            codes = unpack(tensors[name], 4, 1)
            features = order(codes.shape[1])
            tensors[name] = pack(codes[:, features].numpy(), 4, 1)
            tensors[name.replace("packed", "g_idx")] = (features // 32).int()

    change_tensors(shutil.copytree(source, folder), change)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    settings["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    change_config(folder, {"quantization_config": settings})
    return folder


def test_groups_in_the_order_of_activations(compressed, unquantized, tmp_path):
    """Every rank has all scales and zero points, and the indices of its input features."""
    original = compressed("W4A16_ASYM", "llama")
    source = with_act_order(original, tmp_path / "source")
    expected = {name: full[:, order(full.shape[1])] for name, full in dequantize(original, read(original)).items()}
    for tp in SIZES["llama"]:
        shardconv.split(source, tmp_path / f"tp{tp}", tp=tp)
        plan = shardconv.make_plan(unquantized("llama"), tp=tp)
        for rank in range(tp):
            found = loaded_values(tmp_path / f"tp{tp}", rank, torch.bfloat16)
            for name, full in expected.items():
                assert torch.equal(found[name], take_shard(full, plan.placement(name), rank)), name
    layer, full = "model.layers.0.mlp.down_proj.weight", read(source)
    local = load_file(rank_file(tmp_path / "tp2", 1, 2))
    assert torch.equal(local[f"{layer}_scale"], full[f"{layer}_scale"])
    assert torch.equal(local[f"{layer}_g_idx"], full[f"{layer}_g_idx"][128:])
    check_run(source, tmp_path / "run")
    check_commands(source, tmp_path, tmp_path / "tp2", "weight_scale", tp=2, reshard=4)


#: One per storage: packed with and without zero points, 8 bits per channel, blocks, and block scales of 4 and 8 bits.
PADDED_BY_DEFAULT = {"W4A16", "W4A16_ASYM", "W8A8", "FP8_BLOCK", "NVFP4", "MXFP4", "MXFP8"}


@pytest.mark.parametrize("scheme", cases(SCHEMES, lambda scheme: scheme in PADDED_BY_DEFAULT))
def test_padding_is_zero(compressed, tmp_path, scheme):
    source = compressed(scheme, "padded")
    assert check_padding(source, 4, partial(dequantize, source), tmp_path) >= 4


@pytest.mark.parametrize("tp", [2, 4])
def test_heads_are_padded_to_full_groups(unquantized, tmp_path, tp):
    """Two of the 6 heads share a group, so that 3 heads on each of 2 ranks would divide one: 8 heads."""
    source = write_compressed(unquantized("padded"), tmp_path / "source", ("W4A16", "Linear"), width=64)
    packed = shardconv.make_plan(source, tp=tp, pad=True).placement("model.layers.0.self_attn.o_proj.weight_packed")
    assert [packed.local_size(rank) for rank in range(tp)] == [8 * 32 // 8 // tp] * tp  # 8 values in a word
    assert check_padding(source, tp, partial(dequantize, source), tmp_path) >= 4
    check_run(source, tmp_path / "run", pad=True)


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True, "dynamic": False}
ATTENTION = "model.layers.0.self_attn"


def with_cache_scales(source: Path, folder: Path, shape: tuple[int, ...]) -> Path:
    """A copy with scales of the KV cache, which the library writes as [heads, 1, 1]."""
    numbers = torch.arange(math.prod(shape)).reshape(shape).bfloat16()
    scales = {f"{ATTENTION}.{name}": numbers + at for at, name in enumerate(("k_scale", "v_scale"))}
    change_tensors(shutil.copytree(source, folder), lambda tensors: tensors.update(scales))
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    change_config(folder, {"quantization_config": {**settings, "kv_cache_scheme": KV_SCHEME}})
    return folder


@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "FP8"])
@pytest.mark.parametrize("shape", [(4,), (4, 1, 1)])
def test_cache_scales_per_head_are_those_of_the_heads(compressed, tmp_path, scheme, shape):
    """Also where several ranks have the same KV head."""
    source = with_cache_scales(compressed(scheme, "llama"), tmp_path / "source", shape)
    full = read(source)
    for tp in (2, 4, 8):
        shardconv.split(source, tmp_path / f"tp{tp}", tp=tp)
        for rank in range(tp):
            local = load_file(rank_file(tmp_path / f"tp{tp}", rank, tp))
            heads = [rank * 4 // tp] if tp > 2 else [2 * rank, 2 * rank + 1]
            for name in ("k_scale", "v_scale"):
                assert torch.equal(local[f"{ATTENTION}.{name}"], full[f"{ATTENTION}.{name}"][heads])
    check_commands(source, tmp_path, tmp_path / "tp2", "k_scale", tp=2, reshard=8)


@pytest.mark.parametrize(("model", "shape"), [("llama", (8, 1, 1)), ("llama", (4, 32)), ("phi3", (4, 1, 1))])
def test_cache_scales_of_another_shape_are_refused(compressed, tmp_path, model, shape):
    """phi3 does not have a separate projection for keys."""
    source = with_cache_scales(compressed("FP8", model), tmp_path / "source", shape)
    with pytest.raises(PlanError, match=r"self_attn.k_scale has shape \[.*expected one element, or one per KV head"):
        shardconv.make_plan(source, tp=2)


def test_padding_of_cache_scales_is_refused(compressed, tmp_path):
    """Keys are divided by it."""
    source = with_cache_scales(compressed("FP8", "padded"), tmp_path / "source", (6, 1, 1))
    with pytest.raises(PlanError, match="the zero would be a scale to divide by"):
        shardconv.split(source, tmp_path / "out", tp=4, pad=True)


@MATRIX
def test_the_plan_of_a_quantized_source_is_proven(compressed):
    """A small model without quantization is sharded by the rules for the logical matrices."""
    report = shardconv.prove(compressed("W4A16_ASYM", "llama"), tps=(2,))
    assert report.is_proven
    assert report.unreached == ()
    assert (report.num_grids, report.grid_differences) == (3, ())


@pytest.mark.parametrize(
    ("scheme", "model"),
    cases(
        [
            ("W4A16_ASYM", "llama"),
            ("W8A8", "phi3"),
            ("FP8_BLOCK", "qwen3_moe"),
            ("NVFP4", "deepseek_v3"),
            ("MXFP8", "llama"),
        ],
        lambda _, model: model in {"phi3", "qwen3_moe", "deepseek_v3"},
    ),
)
def test_dequantized_models_compute_the_same(compressed, tmp_path, scheme, model):
    check_run(compressed(scheme, model), tmp_path / "split")


@pytest.mark.parametrize("scheme", cases(["W4A16_ASYM", "NVFP4"], lambda scheme: scheme == "W4A16_ASYM"))
def test_full_experts_on_each_rank(compressed, tmp_path, scheme):
    """With ``--ep`` the stored shape of an expert stays that of the full matrix."""
    source, split = compressed(scheme, "qwen3_moe"), tmp_path / "split"
    expert = "model.layers.0.mlp.experts.1.down_proj.weight"
    full = dequantize(source, read(source))[expert]
    check_run(source, split, ep=2)
    found = [load_file(rank_file(split, rank, 2)) for rank in range(2)]
    held = [{name: one for name, one in tensors.items() if expert in name and one.numel()} for tensors in found]
    assert [len(tensors) > 0 for tensors in held] == [False, True]
    assert torch.equal(dequantize(source, held[1])[expert], full)
    assert torch.equal(loaded_values(split, 1, full.dtype)[expert], full)
    assert loaded_values(split, 0, full.dtype)[expert].numel() == 0
    shardconv.merge(split, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


def test_dtype_that_weights_cannot_have_is_refused(compressed, tmp_path):
    shardconv.split(compressed("W4A16", "llama"), tmp_path / "split", tp=1)
    with pytest.raises(RunError, match=r"dtype is torch.float64 \(expected one of torch.bfloat16"):
        shardconv.load(tmp_path / "split", device="cpu", dequantize=True, dtype=torch.float64)


def test_dtype_of_stored_values_is_refused(compressed, tmp_path):
    """A module of the caller may take the stored values, but codes are not converted."""
    shardconv.split(compressed("FP8", "llama"), tmp_path / "split", tp=1)
    with pytest.raises(RunError, match="is quantized: pass dequantize=True"):
        shardconv.load(tmp_path / "split", device="cpu", model=torch.nn.Module, dtype=torch.float32)


@pytest.mark.parametrize("bands", [1, 10_000])
def test_bands_of_rows_have_the_values_of_the_weight(compressed, tmp_path, monkeypatch, bands):
    source = compressed("FP8_BLOCK", "llama")
    shardconv.split(source, tmp_path / "split", tp=1)
    monkeypatch.setattr("shardconv.runtime.rank_tensors._BAND_ELEMENTS", bands)
    loaded = loaded_values(tmp_path / "split", 0, torch.bfloat16)
    assert all(torch.equal(loaded[name], weight) for name, weight in dequantize(source, read(source)).items())


def test_quantized_models_are_not_run_as_they_are(compressed, tmp_path):
    shardconv.split(compressed("W4A16", "llama"), tmp_path / "split", tp=1)
    with pytest.raises(
        RunError, match=r"is quantized: pass dequantize=True.* as bfloat16, with about .* per rank instead of .* kB"
    ):
        shardconv.load(tmp_path / "split", device="cpu")


def test_progress_of_dequantization_ends_at_the_total(compressed, tmp_path):
    scales = {f"{ATTENTION}.{kind}_scale": torch.ones(1) for kind in "kv"}
    source = shutil.copytree(compressed("W4A16", "llama"), tmp_path / "source")
    change_tensors(source, lambda tensors: tensors.update(scales))
    shardconv.split(source, tmp_path / "split", tp=1)
    calls: list[tuple[int, int]] = []
    shardconv.load(tmp_path / "split", device="cpu", dequantize=True, progress=lambda *step: calls.append(step))
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_dtype_of_dequantized_weights(compressed, tmp_path, dtype):
    shardconv.split(compressed("W4A16", "llama"), tmp_path / "split", tp=1)
    model = shardconv.load(tmp_path / "split", device="cpu", dequantize=True, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype or torch.bfloat16}
