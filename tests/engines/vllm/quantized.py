"""Small quantized checkpoints in formats that vLLM loads."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.formats.test_gptq import DATA, GROUP
from tests.formats.test_gptq import quantize as quantize_4_bits
from tests.formats.test_other_formats import (
    F32,
    GPT_OSS,
    TENSOR,
    UE8M0,
    to_fp8,
    to_modelopt_fp8,
    to_modelopt_nvfp4,
    write_mxfp4,
)
from tests.support.compressed import write_compressed
from tests.support.gptq import write_gptq
from tests.support.models import change_config, read
from tests.support.quantized import MODELS
from tests.support.quantized import write as write_quantized

#: Modules that quantized checkpoints of the Hub leave unquantized.
_UNQUANTIZED = ["lm_head", "re:.*gate$"]
#: The quantized layers, by a part of their names.
_NAMED = {"modules_in_block_to_quantize": [["_proj"]]}
_GPTQ_SIZES = {"hidden": 256, "heads": 8, "kv_heads": 2, "intermediate": 512}


@dataclass(frozen=True)
class Checkpoint:
    """The recipe of a quantized checkpoint.

    Attributes:
        write: writes it into a folder, from that of the unquantized models.
        tps: the tensor parallel sizes to test.
    """

    write: Callable[[Path, Path], object]
    tps: tuple[int, ...] = (2,)


def _unquantized(models: Path, name: str) -> Path:
    """The unquantized checkpoint of a model; written once."""
    folder = models / "unquantized" / name
    return folder if folder.exists() else {**MODELS, "gpt_oss": GPT_OSS}[name].write(folder)


def _compressed(scheme: str, model: str, models: Path, folder: Path, *, width: int = 32) -> None:
    write_compressed(_unquantized(models, model), folder, (scheme, "Linear"), width=width)
    _change_settings(folder, {"ignore": _UNQUANTIZED})


def _fp8(kind: str, model: str, models: Path, folder: Path) -> None:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    settings |= {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}
    settings |= {"scale_fmt": "ue8m0"} if kind == UE8M0 else {}
    settings |= {"weight_block_size": None} if kind == TENSOR else {}
    write_quantized(_unquantized(models, model), folder, partial(to_fp8, kind=kind), settings)


def _deepseek(models: Path, folder: Path) -> None:
    """All projections of attention are quantized, as vLLM fuses two of them."""
    _fp8(F32, "deepseek_v3", models, folder)
    tensors, end = read(folder), "kv_a_proj_with_mqa.weight"
    for name in [name for name in tensors if name.endswith(end)]:
        tensors |= to_fp8(name, tensors[name], kind=F32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, {"topk_method": "noaux_tc"})  # with a bias of the scores


def _modelopt(algorithm: str, model: str, models: Path, folder: Path) -> None:
    """With settings in hf_quant_config.json."""
    to_modelopt = {"FP8": to_modelopt_fp8, "NVFP4": to_modelopt_nvfp4}[algorithm]
    source = write_quantized(_unquantized(models, model), folder, to_modelopt, None)
    settings = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "*.gate"]}
    settings |= {"group_size": 16} if algorithm == "NVFP4" else {}
    file = {"producer": {"name": "modelopt"}, "quantization": settings}
    (source / "hf_quant_config.json").write_text(json.dumps(file))


def _gptq(group: int, *, act_order: bool = False, names_layers: bool = True) -> Checkpoint:
    def write(_models: Path, folder: Path) -> None:
        write_gptq(folder, bits=4, group=group, act_order=act_order, **_GPTQ_SIZES)
        if names_layers:
            _change_settings(folder, _NAMED)

    return Checkpoint(write, (2, 4))


def _of_method(method: str, model: str, models: Path, folder: Path) -> None:
    """Random values in the format of GPTQ or AWQ."""
    settings = {"quant_method": method, "bits": 4, "group_size": GROUP}
    settings |= {**_NAMED, "desc_act": False, "sym": True} if method == "gptq" else {"zero_point": True}
    settings |= {"modules_to_not_convert": ["lm_head", "mlp.gate"]} if (method, model) == ("awq", "qwen3_moe") else {}
    write_quantized(_unquantized(models, model), folder, partial(quantize_4_bits, method=method), settings)


def _recorded(name: str, tps: tuple[int, ...] = (2,)) -> Checkpoint:
    """A checkpoint that gptqmodel wrote."""
    return Checkpoint(lambda _, folder: shutil.copytree(DATA / name, folder), tps)


def _gpt_oss(models: Path, folder: Path) -> None:
    write_mxfp4(_unquantized(models, "gpt_oss"), folder)


def _change_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    change_config(folder, {"quantization_config": found | dict(settings)})


#: Schemes of compressed-tensors that vLLM loads for all linear layers. On 8 ranks KV heads are replicated.
_SCHEMES = {
    "W8A8": (2, 4, 8), "W4A16": (2, 4, 8), "W4A16_ASYM": (2, 4), "W8A16": (2,), "FP8": (2, 4, 8), "FP8_DYNAMIC": (2, 4),
    "FP8_BLOCK": (2, 4, 8), "NVFP4": (2, 4, 8), "NVFP4A16": (2,), "MXFP4": (2, 4), "MXFP8": (2,),
}  # fmt: skip
#: Those that vLLM loads for experts, too: it refuses other static input scales for gate than for up.
_OF_EXPERTS = ("W8A8", "W4A16", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4")

#: Format and model to checkpoint.
CHECKPOINTS = {
    **{
        (f"compressed-tensors {scheme}", "llama"): Checkpoint(partial(_compressed, scheme, "llama"), tps)
        for scheme, tps in _SCHEMES.items()
    },
    **{
        (f"compressed-tensors {scheme}", model): Checkpoint(partial(_compressed, scheme, model))
        for model, schemes in {"phi3": ("W4A16", "FP8"), "qwen3_moe": _OF_EXPERTS, "qwen2_moe": ("W4A16",)}.items()
        for scheme in schemes
    },
    ("fp8, block scales", "llama"): Checkpoint(partial(_fp8, F32, "llama"), (2, 4)),
    ("fp8, block scales", "qwen3_moe"): Checkpoint(partial(_fp8, F32, "qwen3_moe")),
    ("fp8, block scales", "deepseek_v3"): Checkpoint(_deepseek, (2, 4)),
    ("fp8, UE8M0 block scales", "llama"): Checkpoint(partial(_fp8, UE8M0, "llama")),
    ("ModelOpt FP8", "llama"): Checkpoint(partial(_modelopt, "FP8", "llama"), (2, 4)),
    ("ModelOpt FP8", "qwen3_moe"): Checkpoint(partial(_modelopt, "FP8", "qwen3_moe")),
    ("ModelOpt NVFP4", "llama"): Checkpoint(partial(_modelopt, "NVFP4", "llama"), (2, 4)),
    ("ModelOpt NVFP4", "qwen3_moe"): Checkpoint(partial(_modelopt, "NVFP4", "qwen3_moe")),
    ("GPTQ 4 bits", "llama"): _gptq(32),
    **{
        (f"{method.upper()} 4 bits", model): Checkpoint(partial(_of_method, method, model))
        for method in ("gptq", "awq")
        for model in ("qwen2", "phi3", "qwen3_moe")
    },
    ("GPTQ 4 bits, without `modules_in_block_to_quantize`", "llama"): _gptq(32, names_layers=False),
    ("GPTQ 4 bits, one group", "llama"): _gptq(-1),
    ("GPTQ 4 bits, one group, `desc_act`", "llama"): _gptq(-1, act_order=True),
    ("AWQ 4 bits", "llama"): _recorded("awq-4", (2, 4)),
    ("MXFP4", "gpt_oss"): Checkpoint(_gpt_oss),
}
#: Name of a checkpoint that vLLM does not load, to its recipe and vLLM's error.
NOT_LOADED = {
    "GPTQ desc_act": (_recorded("gptq-4-act-order"), "desc_act"),
    "GPTQ 3 bits": (_recorded("gptq-3"), "Unsupported quantization config: bits=3"),
    "FP8 experts": (Checkpoint(partial(_compressed, "FP8", "qwen3_moe")), "input_scales of w1 and w3"),
    "one scale per weight": (Checkpoint(partial(_fp8, TENSOR, "llama")), "weight_scale_inv"),
}
#: Format, model and tensor parallel size.
CASES = [(*name, tp) for name, checkpoint in CHECKPOINTS.items() for tp in checkpoint.tps]


def write(name: tuple[str, str], folder: Path) -> Path:
    """Write a checkpoint, once."""
    path = folder / "-".join(name).replace(" ", "-")
    if not path.exists():
        CHECKPOINTS[name].write(folder, path)
    return path
