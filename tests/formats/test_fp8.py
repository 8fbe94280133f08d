"""FP8 of transformers and DeepSeek: transformers quantizes, and its conversion on loading is the oracle."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from shardconv.convert.model import DTYPE_NAMES
from shardconv.formats.detect import with_grids
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Unit, shard_dim
from shardconv.plan.plan import TensorSpec
from shardconv.runtime.dequantize import Stored
from shardconv.runtime.dequantize import dequantize as load_weight
from tests.support.matrix import each_once
from tests.support.models import Tensors
from tests.support.quantized import (
    SIZES,
    check_commands,
    check_config_alone,
    check_padding,
    check_run,
    check_values,
    write,
)

BLOCK = 16
SCALE = "_scale_inv"
#: Dtypes of block scales, or one scale for a weight.
F32, UE8M0, BYTES, TENSOR = KINDS = (
    "F32 block scales", "UE8M0 block scales", "UE8M0 block scales as U8", "one scale per weight",
)  # fmt: skip


def quantize(name: str, tensor: torch.Tensor, *, kind: str) -> Tensors:
    """The tensors of one weight; ``kind`` is one of :data:`KINDS`."""
    config = FineGrainedFP8Config(weight_block_size=None if kind == TENSOR else (BLOCK, BLOCK))
    quantizer = SimpleNamespace(quantization_config=config, pre_quantized=False)
    stored = Fp8Quantize(quantizer).convert({name: tensor.float()})
    assert set(stored) == {name, f"{name}{SCALE}"}
    scale = stored[f"{name}{SCALE}"]
    if kind in (UE8M0, BYTES):
        scale = torch.exp2(torch.round(torch.log2(scale))).to(torch.float8_e8m0fnu)
    if kind == BYTES:
        scale = scale.view(torch.uint8)
    return {name: stored[name], f"{name}{SCALE}": scale}


def dequantize(tensors: Tensors) -> Tensors:
    """The weights of the quantized layers."""
    convert = Fp8Dequantize(None).convert
    scaled = [name for name in tensors if f"{name}{SCALE}" in tensors]
    return {
        name: convert({"weight": tensors[name], "weight_scale_inv": tensors[f"{name}{SCALE}"]})["weight"]
        for name in scaled
    }


@pytest.fixture(scope="session")
def fp8(unquantized, tmp_path_factory) -> Callable[[str, str], Path]:
    """A checkpoint by the kind of its scales and its model."""

    def make(kind: str, model: str) -> Path:
        settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        settings["weight_block_size"] = None if kind == TENSOR else [BLOCK, BLOCK]
        settings |= {"scale_fmt": "ue8m0"} if kind in (UE8M0, BYTES) else {}
        folder = tmp_path_factory.mktemp(model)
        return write(unquantized(model), folder, lambda *weight: quantize(*weight, kind=kind), settings)

    return cache(make)


@pytest.mark.parametrize(("kind", "model"), each_once(KINDS, SIZES))
def test_shards_have_the_values_of_shards(fp8, unquantized, tmp_path, kind, model):
    source = fp8(kind, model)
    for tp in SIZES[model]:
        assert check_values(source, unquantized(model), tp, dequantize, tmp_path / f"tp{tp}") >= 4
    check_commands(source, tmp_path, tmp_path / "tp2", SCALE, tp=2, reshard=4)


@pytest.mark.parametrize("model", ["phi3", "qwen3_moe"])
def test_config_alone_has_the_sizes_of_the_headers(fp8, tmp_path, model):
    check_config_alone(fp8(F32, model), tmp_path / "config")


def test_dequantized_models_compute_the_same(fp8, tmp_path):
    check_run(fp8(F32, "qwen3_moe"), tmp_path / "split")


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_zero(fp8, tmp_path, kind):
    assert check_padding(fp8(kind, "padded"), 4, dequantize, tmp_path) >= 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("shape", "dim"), [((2, 1, 1), 0), ((2, 1, 1), 1), ((2, 64, 1), 1), ((2, 4, 4), 2)])
def test_scales_of_packed_experts(dtype, shape, dim):
    """One per expert, one per row, and blocks."""
    config = {"quant_method": "fp8", "weight_block_size": [16, 16] if shape[-1] == 4 else None}
    name, size = "experts.gate_up_proj", (2, 64, 64)
    values, scale = torch.randn(size).to(dtype), torch.rand(shape)
    tensors = {name: TensorSpec(DTYPE_NAMES[dtype], size), f"{name}{SCALE}": TensorSpec("F32", shape)}
    found = with_grids(tensors, {"quantization_config": config})
    full, placement = values.float(), shard_dim(dim, [Unit(2, size[dim] // 2)], 2)
    full *= scale.repeat_interleave(64 // shape[1], 1).repeat_interleave(64 // shape[2], 2)
    for rank in range(2):
        stored = []
        for each, tensor in ((name, values), (f"{name}{SCALE}", scale)):
            grid = found[each].grid
            stored.append(Stored(take_shard(tensor, grid.place(placement, tensor.shape), rank), grid))
        local = load_weight(stored, placement.shard_shape(size, rank), torch.float32)
        assert torch.equal(local, take_shard(full, placement, rank))
