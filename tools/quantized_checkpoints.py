"""Write the GPTQ and AWQ checkpoints of tests/data/quantized with gptqmodel, and record its dequantized weights.

Needs gptqmodel 7.7 and runs on a CPU in minutes: ``python -m tools.quantized_checkpoints [NAME ...]``.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[1] / "tests/data/quantized"

_VOCABULARY = 16
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 128, "vocab_size": _VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip

#: Name of the checkpoint to gptqmodel's settings.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "gptq-4-act-order": {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "format": "gptq"},
    "gptq-3": {"bits": 3, "group_size": 32, "desc_act": False, "sym": False, "format": "gptq_v2"},
    "gptq-2-one-group": {
        "bits": 2,
        "group_size": -1,
        "desc_act": False,
        "act_group_aware": False,
        "sym": False,
        "format": "gptq",
    },
    "awq-4": {"method": "awq", "bits": 4, "group_size": 32, "format": "gemm"},
}


def _write_source(folder: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_SIZES)).half().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(_VOCABULARY)}, unk_token="t3"))
    tokens = {"unk_token": "t3", "pad_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)


def _quantize(source: Path, folder: Path, settings: dict[str, Any]) -> None:
    gptqmodel: Any = import_module("gptqmodel")
    config = gptqmodel.QuantizeConfig(device="cpu", **settings)
    model = gptqmodel.GPTQModel.load(str(source), config)
    ids = torch.randint(3, _VOCABULARY, (16, 48), generator=torch.Generator().manual_seed(1))
    model.quantize([{"input_ids": row.tolist(), "attention_mask": [1] * 48} for row in ids], batch_size=4)
    model.save(str(folder))


def _dequantize(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weight of each layer as gptqmodel's Torch kernel computes it, [in, out]."""
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        layer, _, end = name.rpartition(".")
        if end == "qweight":
            stored = {key: tensors[f"{layer}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx")
                      if f"{layer}.{key}" in tensors}  # fmt: skip
            yield layer, _awq(stored, settings) if settings.get("method") == "awq" else _gptq(stored, settings)


def _awq(stored: dict[str, torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    packing: Any = import_module("gptqmodel.quantization.awq.utils.packing_utils")
    weight = packing.dequantize_gemm(**stored, bits=settings["bits"], group_size=settings["group_size"])
    assert isinstance(weight, torch.Tensor)
    return weight


def _gptq(stored: dict[str, torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    kernel: Any = import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    options = {key: settings[key] for key in ("bits", "group_size", "desc_act", "sym")}
    features = {"in_features": len(stored["g_idx"]), "out_features": stored["scales"].shape[1]}
    module = kernel(**options, **features, bias=False)
    for key, tensor in stored.items():
        module.register_buffer(key, tensor.clone())
    if settings["format"] == "gptq":
        module.qzero_format(format=1)
        utilities: Any = import_module("gptqmodel.utils.model")
        utilities.convert_gptq_v1_to_v2_format_module(module, bits=settings["bits"], pack_dtype=torch.int32)
    weight = module.eval().dequantize_weight()
    assert isinstance(weight, torch.Tensor)
    return weight


def write(name: str) -> None:
    """Write one checkpoint and the SHA-256 of its dequantized weights."""
    target = FOLDER / name
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source, quantized = Path(scratch, "source"), Path(scratch, "quantized")
        _write_source(source)
        _quantize(source, quantized, CHECKPOINTS[name])
        config = json.loads((quantized / "config.json").read_text())
        config["quantization_config"].pop("meta")  # has paths of this machine
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.copyfile(quantized / "model.safetensors", target / "model.safetensors")
    digests = {
        layer: hashlib.sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for layer, weight in _dequantize(target, CHECKPOINTS[name])
    }
    (target.with_suffix(".json")).write_text(json.dumps(digests, indent=2) + "\n")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or CHECKPOINTS:
        write(wanted)
