"""Checkpoints in the formats of compressed-tensors, made and dequantized by the library."""

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from torch import nn

from tests.support.models import Tensors, read
from tests.support.quantized import QUANTIZED, write

#: Groups and blocks of the presets are 128 wide; those of small models are smaller.
_WIDTH = 32


def write_compressed(source: Path, folder: Path, *schemes: tuple[str, str], width: int = _WIDTH) -> Path:
    """Write a compressed checkpoint.

    Args:
        source: an unquantized checkpoint.
        folder: the folder to write.
        schemes: names of presets, each with the pattern of the layers that it is for.
        width: of groups of 128 elements in the presets, and of blocks of 128 by 128.
    """
    weights = {name: tensor for name, tensor in read(source).items() if QUANTIZED.fullmatch(name)}
    model = _module(weights)
    groups = {f"group_{at}": _scheme(name, target, width) for at, (name, target) in enumerate(schemes)}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    _calibrate(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    stored = model.state_dict()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    compressor.update_config(str(folder))

    def tensors_of(name: str, _: torch.Tensor) -> Tensors:
        layer = name.removesuffix("weight")
        return {each: tensor for each, tensor in stored.items() if each.startswith(layer)}

    return write(source, folder, tensors_of, None)


def dequantize(folder: Path, tensors: Tensors) -> Tensors:
    """The weights of the quantized layers."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    layers: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        layers.setdefault(layer, {})[leaf] = tensor
    return {
        f"{layer}.weight": _weight(stored, layer, settings)
        for layer, stored in layers.items()
        if "weight_scale" in stored
    }


def _weight(stored: Tensors, layer: str, settings: dict[str, Any]) -> torch.Tensor:
    for group in settings["config_groups"].values():
        targets = [target.removeprefix("re:.*") for target in group["targets"]]
        if any(target == "Linear" or layer.endswith(target) for target in targets):
            scheme = QuantizationScheme.model_validate(group)
            compressor = BaseCompressor.get_value_from_registry(scheme.format or settings["format"])
            return compressor.decompress(dict(stored), scheme)["weight"]
    raise AssertionError(layer)


def _scheme(name: str, target: str, width: int) -> QuantizationScheme:
    scheme = preset_name_to_scheme(name, [target])
    for each in (scheme.weights, scheme.input_activations):
        if each is not None and each.group_size == 128:
            each.group_size = width
    if scheme.weights.block_structure is not None:
        scheme.weights.block_structure = [width, width]
    return scheme


def _module(weights: Tensors) -> nn.Module:
    """A model of linear layers with these weights, each under its name in the checkpoint."""
    root = nn.Module()
    for name, weight in weights.items():
        *path, leaf = name.removesuffix(".weight").split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        layer = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        module.add_module(leaf, layer)
    return root


def _calibrate(model: nn.Module) -> None:
    """Fill scales and zero points with values that differ from each other."""
    torch.manual_seed(0)
    for name, tensor in model.named_parameters():
        if name.endswith("_global_scale"):
            tensor.data.copy_(torch.rand(tensor.shape) + 1)
        elif name.endswith("_scale"):
            tensor.data.copy_(torch.exp2(torch.rand(tensor.shape) * 5 - 8))
        elif name.endswith("_zero_point"):
            tensor.data.copy_(torch.randint(-3, 4, tensor.shape))
