"""Formats of which tests write each weight, as published or by a library: their values, padding and commands."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import FineGrainedFP8Config

import shardconv
from shardconv.convert.model import DTYPE_NAMES
from shardconv.formats.detect import with_grids
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Unit, shard_dim
from shardconv.plan.plan import TensorSpec
from shardconv.runtime.rank_tensors import Stored, dequantize
from shardconv.support.errors import IntegrityError, PlanError
from tests.support.matrix import cases
from tests.support.models import Model, Tensors, change_tensors, read
from tests.support.quantized import (
    SIZES,
    check_commands,
    check_config_alone,
    check_padding,
    check_run,
    check_values,
    rank_file,
    write,
)

#: The values of FP4 (E2M1) by the lower three bits; the highest is the sign.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


# --- MXFP4 of gpt-oss -----------------------------------------------------------------------------------------------

GPT_OSS = Model(
    "gpt_oss",
    {
        "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 16,
        "num_key_value_heads": 4, "num_local_experts": 2, "num_experts_per_tok": 2,
    },
)  # fmt: skip


def write_mxfp4(source: Path, folder: Path) -> Path:
    """Write a copy of a checkpoint with blocks of random codes and exponents in place of its experts."""
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, tensor in read(source).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 130, shape, generator=generator, dtype=torch.uint8)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> tuple[Path, Path]:
    """An unquantized checkpoint, and one with blocks; 192 features are 6 blocks."""
    source = GPT_OSS.write(tmp_path_factory.mktemp("gpt_oss"))
    return source, write_mxfp4(source, tmp_path_factory.mktemp("gpt_oss-mxfp4"))


def from_mxfp4(tensors: Tensors) -> Tensors:
    """The experts."""
    names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    return {name: convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]) for name in names}


def test_mxfp4(gpt_oss, tmp_path):
    unquantized, source = gpt_oss
    assert check_values(source, unquantized, 2, from_mxfp4, tmp_path / "tp2") == 2
    check_commands(source, tmp_path, tmp_path / "tp2", "_scales", tp=2)
    check_config_alone(source, tmp_path / "config")
    check_run(source, tmp_path / "run")


def test_mxfp4_block_over_two_ranks_is_refused(gpt_oss, tmp_path):
    with pytest.raises(PlanError, match=r"192 / 4 = 48 input features per rank is not a multiple of the 32-wide group"):
        shardconv.split(gpt_oss[1], tmp_path / "out", tp=4)
    assert shardconv.report_plan(gpt_oss[0]).supported_tp == (1, 2, 4, 8)
    assert shardconv.report_plan(gpt_oss[1]).supported_tp == (1, 2)
    with pytest.raises(PlanError, match=r"tp=8 is unsupported \(expected one of 1, 2\).*pad=True to pad"):
        shardconv.split(gpt_oss[1], tmp_path / "out", tp=8)


@pytest.mark.parametrize("tp", [4, 8])
def test_mxfp4_with_blocks_of_padding(gpt_oss, tmp_path, tp):
    """6 blocks are padded to 8, as 90 of gpt-oss are to 92 or 96."""
    assert check_padding(gpt_oss[1], tp, from_mxfp4, tmp_path) == 2
    bias = "model.layers.0.mlp.experts.gate_up_proj_bias"
    local = load_file(rank_file(tmp_path / "split", tp - 1, tp))[bias]
    assert local.shape == (2, 2 * 256 // tp)
    assert not local.any()


# --- ModelOpt -------------------------------------------------------------------------------------------------------


def to_modelopt_fp8(name: str, tensor: torch.Tensor) -> Tensors:
    layer = name.removesuffix("weight")
    scale = tensor.abs().max().float() / 448
    return {
        name: (tensor / scale).to(torch.float8_e4m3fn),
        f"{name}_scale": scale,
        f"{layer}input_scale": torch.tensor(0.25),
    }


def from_modelopt_fp8(tensors: Tensors) -> Tensors:
    names = [name.removesuffix("_scale") for name in tensors if name.endswith("weight_scale")]
    return {name: tensors[name].float() * tensors[f"{name}_scale"] for name in names}


def to_modelopt_nvfp4(name: str, tensor: torch.Tensor) -> Tensors:
    layer = name.removesuffix("weight")
    groups = tensor.float().unflatten(-1, (-1, 16))
    scale_2 = groups.abs().max() / (6 * 448)
    scale = (groups.abs().amax(-1) / 6 / scale_2).to(torch.float8_e4m3fn)
    scaled = (groups / (scale.float() * scale_2).unsqueeze(-1)).flatten(-2)
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1).byte() | (scaled < 0).byte() << 3
    return {
        name: codes[:, ::2] | codes[:, 1::2] << 4,
        f"{name}_scale": scale,
        f"{name}_scale_2": scale_2,
        f"{layer}input_scale": torch.tensor(0.25),
    }


def from_modelopt_nvfp4(tensors: Tensors) -> Tensors:
    names = [name.removesuffix("_scale") for name in tensors if name.endswith("weight_scale")]
    return {name: _from_nvfp4(*(tensors[name + end] for end in ("", "_scale", "_scale_2"))) for name in names}


def _from_nvfp4(packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
    values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    return (values.unflatten(-1, (-1, 16)) * (scale.float() * scale_2).unsqueeze(-1)).flatten(-2)


OF_MODELOPT = ("llama", "qwen3_moe")

# --- FP8 of transformers and DeepSeek: transformers quantizes, and its conversion on loading is the oracle ----------

BLOCK, SCALE = 16, "_scale_inv"
#: Dtypes of block scales, or one scale for a weight.
F32, UE8M0, BYTES, TENSOR = KINDS = (
    "F32 block scales", "UE8M0 block scales", "UE8M0 block scales as U8", "one scale per weight",
)  # fmt: skip


def to_fp8(name: str, tensor: torch.Tensor, *, kind: str) -> Tensors:
    """The tensors of one weight; ``kind`` is one of :data:`KINDS`."""
    config = FineGrainedFP8Config(weight_block_size=None if kind == TENSOR else (BLOCK, BLOCK))
    stored = Fp8Quantize(SimpleNamespace(quantization_config=config, pre_quantized=False)).convert(
        {name: tensor.float()}
    )
    assert set(stored) == {name, f"{name}{SCALE}"}
    scale = stored[f"{name}{SCALE}"]
    if kind in (UE8M0, BYTES):
        scale = torch.exp2(torch.round(torch.log2(scale))).to(torch.float8_e8m0fnu)
    return {name: stored[name], f"{name}{SCALE}": scale.view(torch.uint8) if kind == BYTES else scale}


def from_fp8(tensors: Tensors) -> Tensors:
    convert, names = Fp8Dequantize(None).convert, [name for name in tensors if f"{name}{SCALE}" in tensors]
    return {
        name: convert({"weight": tensors[name], "weight_scale_inv": tensors[f"{name}{SCALE}"]})["weight"]
        for name in names
    }


def of_fp8(kind: str) -> dict[str, Any]:
    blocks = {"weight_block_size": None if kind == TENSOR else [BLOCK, BLOCK]}
    powers = {"scale_fmt": "ue8m0"} if kind in (UE8M0, BYTES) else {}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **blocks, **powers}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("shape", "dim"), [((2, 1, 1), 0), ((2, 1, 1), 1), ((2, 64, 1), 1), ((2, 4, 4), 2)])
def test_fp8_scales_of_packed_experts(dtype, shape, dim):
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
        local = dequantize(stored, placement.shard_shape(size, rank), torch.float32)
        assert torch.equal(local, take_shard(full, placement, rank))


# --- FP8 of AutoFP8 -------------------------------------------------------------------------------------------------

AUTOFP8 = ("one scale per weight", "one scale per row")


def to_autofp8(name: str, tensor: torch.Tensor, *, kind: str) -> Tensors:
    stored = to_modelopt_fp8(name, tensor)
    if kind == AUTOFP8[1]:
        scale = tensor.abs().amax(1, keepdim=True).float() / 448
        stored |= {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    return stored


def to_fbgemm(name: str, tensor: torch.Tensor) -> Tensors:
    stored = to_autofp8(name, tensor, kind=AUTOFP8[1])
    bound = f"{name.removesuffix('weight')}input_scale_ub"
    return {name: stored[name], f"{name}_scale": stored[f"{name}_scale"], bound: torch.tensor([1200.0])}


# --- bitsandbytes ---------------------------------------------------------------------------------------------------


OF_BITSANDBYTES = ("llama", "phi3")
OF_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}


def to_int8(name: str, tensor: torch.Tensor) -> Tensors:
    from bitsandbytes.functional import int8_vectorwise_quant  # noqa: PLC0415 - takes seconds to import

    values, scale, _ = int8_vectorwise_quant(tensor.half())
    layer = name.removesuffix("weight")
    return {name: values, f"{layer}SCB": scale.float(), f"{layer}weight_format": torch.tensor(0, dtype=torch.uint8)}


def from_int8(tensors: Tensors) -> Tensors:
    from bitsandbytes.functional import int8_vectorwise_dequant  # noqa: PLC0415 - likewise

    layers = [name.removesuffix("SCB") for name in tensors if name.endswith("SCB")]
    return {
        f"{layer}weight": int8_vectorwise_dequant(tensors[f"{layer}weight"], tensors[f"{layer}SCB"]) for layer in layers
    }


def test_bitsandbytes_int8_in_another_order_is_refused(unquantized, tmp_path):
    """The orders of older GPUs, which the library no longer writes."""
    source = write(unquantized("llama"), tmp_path / "source", to_int8, OF_INT8)
    name = "model.layers.0.mlp.up_proj.weight_format"
    change_tensors(source, lambda tensors: tensors.update({name: torch.tensor(1, dtype=torch.uint8)}))
    with pytest.raises(IntegrityError, match=rf"{name}: is 1 \(expected 0, the order of rows\)"):
        shardconv.split(source, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


# --- Quanto ---------------------------------------------------------------------------------------------------------

QUANTO = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


def quanto_tensor(weight: torch.Tensor, kind: str) -> torch.Tensor:
    from optimum.quanto import absmax_scale, qfloat8, qint8, quantize_weight  # noqa: PLC0415 - takes seconds to import

    qtype = {"int8": qint8, "float8": qfloat8}[kind]
    return quantize_weight(weight, qtype, 0, absmax_scale(weight, qtype, axis=0))


def to_quanto(name: str, tensor: torch.Tensor, *, kind: str) -> Tensors:
    quantized, layer = quanto_tensor(tensor, kind), name.removesuffix("weight")
    one = torch.tensor(1.0, dtype=tensor.dtype)
    return {
        f"{name}._data": quantized._data, f"{name}._scale": quantized._scale, f"{layer}input_scale": one,
        f"{layer}output_scale": one.clone(),
    }  # fmt: skip


def from_quanto(tensors: Tensors) -> Tensors:
    from optimum.quanto import WeightQBytesTensor, qfloat8, qint8  # noqa: PLC0415 - likewise

    names = [name.removesuffix("._data") for name in tensors if name.endswith("._data")]
    found = {}
    for name in names:
        data, scale = tensors[f"{name}._data"], tensors[f"{name}._scale"]
        qtype = qint8 if data.dtype is torch.int8 else qfloat8
        found[name] = WeightQBytesTensor(qtype, 0, data.shape, data.stride(), data, scale, None).dequantize()
    return found


OF_QUANTO = ("llama", "phi3", "qwen3_moe")


# --- values, padding and commands of each of them -------------------------------------------------------------------


class Form(NamedTuple):
    """The storage of the layers of a model.

    Attributes:
        quantize: returns the tensors of a weight.
        dequantize: returns the weights of a file.
        settings: ``quantization_config``; None if another file has the settings.
        scale: the end of the names of scales.
        models: those that are split.
        file: the name of the other file, and its contents by the names of the tensors.
        rtol: of weights that are dequantized while they are loaded.
    """

    quantize: Callable[[str, torch.Tensor], Tensors]
    dequantize: Callable[[Tensors], Tensors]
    settings: dict[str, Any] | None
    scale: str = "weight_scale"
    models: tuple[str, ...] = OF_MODELOPT
    file: tuple[str, Callable[[Iterable[str]], Any]] | None = None
    rtol: float = 0.0

    def write(self, source: Path, folder: Path) -> Path:
        """Write a quantized copy of a checkpoint."""
        write(source, folder, self.quantize, self.settings)
        if self.file is not None:
            (folder / self.file[0]).write_text(json.dumps(self.file[1](read(folder))))
        return folder


def of_modelopt(algorithm: str, **settings: Any) -> dict[str, Any]:
    return {"quant_algo": algorithm, "exclude_modules": ["lm_head", "*.gate"], **settings}


def of_quanto(kind: str) -> tuple[str, Callable[[Iterable[str]], Any]]:
    """The file that the library writes."""
    form = {"weights": f"q{kind}", "activations": "none"}
    return "quanto_qmap.json", lambda names: {
        name.removesuffix(".weight._data"): form for name in names if name.endswith("._data")
    }


FP8, NVFP4 = of_modelopt("FP8"), of_modelopt("NVFP4", group_size=16)
OF_AUTOFP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
OF_FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
#: Settings of ModelOpt are in hf_quant_config.json, and in newer checkpoints in config.json. AutoFP8 has the method of
#: transformers, with weight_scale in place of weight_scale_inv.
FORMS = {
    "ModelOpt FP8": Form(
        to_modelopt_fp8, from_modelopt_fp8, None, "input_scale",
        file=("hf_quant_config.json", lambda _: {"producer": {"name": "modelopt"}, "quantization": FP8}),
    ),
    "ModelOpt NVFP4": Form(to_modelopt_nvfp4, from_modelopt_nvfp4, {**NVFP4, "quant_method": "modelopt"}),
    "FBGEMM": Form(to_fbgemm, from_modelopt_fp8, OF_FBGEMM),
    # rtol: two roundings of float32: of scale / 127, by which bitsandbytes multiplies in two steps
    "bitsandbytes": Form(to_int8, from_int8, OF_INT8, "SCB", OF_BITSANDBYTES, rtol=2 * 2.0**-23),
    **{kind: Form(partial(to_fp8, kind=kind), from_fp8, of_fp8(kind), SCALE, tuple(SIZES)) for kind in KINDS},
    **{f"AutoFP8, {kind}": Form(partial(to_autofp8, kind=kind), from_modelopt_fp8, OF_AUTOFP8) for kind in AUTOFP8},
    **{
        f"Quanto {kind}": Form(
            partial(to_quanto, kind=kind), from_quanto, None, "weight._scale", OF_QUANTO, of_quanto(kind)
        )
        for kind in QUANTO
    },
}  # fmt: skip


#: The models of formats by default, where it is not a llama.
DEFAULT = {"ModelOpt NVFP4": "qwen3_moe", F32: "qwen3_moe", UE8M0: "phi3", BYTES: "deepseek_v3"}


@pytest.mark.parametrize(
    ("name", "model"),
    cases(
        [(name, model) for name, form in FORMS.items() for model in form.models],
        lambda name, model: model == DEFAULT.get(name, "llama"),
    ),
)
def test_shards_have_the_values_of_shards(unquantized, tmp_path, name, model):
    form = FORMS[name]
    source = form.write(unquantized(model), tmp_path / "source")
    for tp in SIZES[model]:
        out = tmp_path / f"tp{tp}"
        assert check_values(source, unquantized(model), tp, form.dequantize, out, rtol=form.rtol) >= 4
    if model == "llama" or name == F32:  # the structures of models are run in test_compressed_tensors.py
        check_run(source, tmp_path / "run")
    check_commands(source, tmp_path, tmp_path / "tp2", form.scale, tp=2, reshard=4)
    if name in ("bitsandbytes", F32):
        check_config_alone(source, tmp_path / "config")


@pytest.mark.parametrize("name", FORMS)
def test_padding_is_zero(unquantized, tmp_path, name):
    form = FORMS[name]
    assert check_padding(form.write(unquantized("padded"), tmp_path / "source"), 4, form.dequantize, tmp_path) >= 4
