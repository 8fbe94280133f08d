"""Layers in the formats of GPTQ and AWQ: random ones, and their weights without quantization."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import llama_config, llama_specs

#: Where AWQ puts each of the 8 output features of a word.
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def pack(codes: np.ndarray, bits: int, axis: int) -> torch.Tensor:
    """Pack codes into words of 32 bits along an axis: a stream of bits, the lowest first."""
    rows = np.moveaxis(codes, axis, -1).astype(np.uint8)[..., None]
    stream = np.unpackbits(rows, axis=-1, bitorder="little")[..., :bits].reshape(*rows.shape[:-2], -1)
    words = np.packbits(stream, axis=-1, bitorder="little").view("<i4")
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)))


def unpack(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """The inverse of :func:`pack`."""
    rows = np.ascontiguousarray(np.moveaxis(words.numpy(), axis, -1)).view(np.uint8)
    stream = np.unpackbits(rows, axis=-1, bitorder="little").reshape(*rows.shape[:-1], -1, bits)
    codes = (stream.astype(np.int16) << np.arange(bits, dtype=np.int16)).sum(-1, dtype=np.int16)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(codes, -1, axis)))


def dequantize(tensors: dict[str, torch.Tensor], settings: dict) -> dict[str, torch.Tensor]:
    """The weights [in, out] of the quantized layers of a file, by name of the layer."""
    bits, names = settings["bits"], [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    weights = {}
    for layer in names:
        words, zeros, scales = (tensors[f"{layer}.{key}"] for key in ("qweight", "qzeros", "scales"))
        if settings["quant_method"] == "awq":
            codes, offsets = (
                unpack(packed, bits, 1).reshape(len(packed), -1, 8)[..., _AWQ_ORDER].reshape(len(packed), -1)
                for packed in (words, zeros)
            )
            groups = torch.arange(len(codes)) // (len(codes) // len(scales))
        else:
            codes, offsets, groups = unpack(words, bits, 0), unpack(zeros, bits, 1), tensors[f"{layer}.g_idx"].long()
            if settings["checkpoint_format"] == "gptq":
                offsets = (offsets + 1) % 2**bits
        weights[layer] = (codes - offsets[groups]).to(scales.dtype) * scales[groups]
    return weights


def write_gptq(
    folder: Path, *, bits: int, group: int, act_order: bool = False, version: str = "gptq", **sizes: int
) -> Path:
    """Write a llama with random codes, scales and zero points.

    Args:
        folder: the folder to write.
        bits: of a value.
        group: input features with one scale, or -1 for all.
        act_order: whether the groups are in a random order.
        version: of the format, ``gptq`` or ``gptq_v2``, or ``awq`` for the format of AWQ.
        sizes: see :func:`~tests.support.checkpoints.llama_config`.
    """
    config = llama_config(**{"layers": 1, "vocab": 16, **sizes})
    random, tensors = np.random.default_rng(0), {}
    for name, (_, shape) in llama_specs(config).items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            tensors[name] = torch.from_numpy(random.standard_normal(shape).astype(np.float16))
            continue
        out, size = shape
        width = size if group == -1 else group
        groups = np.arange(size, dtype=np.int32) // width
        tensors[f"{layer}.qweight"] = pack(random.integers(0, 2**bits, (size, out)), bits, int(version == "awq"))
        tensors[f"{layer}.qzeros"] = pack(random.integers(0, 2**bits, (size // width, out)), bits, 1)
        tensors[f"{layer}.scales"] = torch.from_numpy(random.random((size // width, out)).astype(np.float16))
        if version != "awq":
            tensors[f"{layer}.g_idx"] = torch.from_numpy(random.permutation(groups) if act_order else groups)
    of_gptq = {"quant_method": "gptq", "desc_act": act_order, "sym": True, "checkpoint_format": version}
    of_awq = {"quant_method": "awq", "version": "gemm"}
    method = of_awq if version == "awq" else of_gptq
    config["quantization_config"] = {"bits": bits, "group_size": group, **method}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
