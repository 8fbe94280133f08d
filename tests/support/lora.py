"""LoRA files for the small pipelines of :mod:`tests.support.diffusion`, in the names of diffusers and others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch
from diffusers.training_utils import _collate_lora_metadata
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardconv.hf.package import quiet

#: The width of the transformers.
WIDTH = 64
#: Layers of a Flux-like transformer under their original names, to input and output features, rank and alpha. diffusers
#: expects 3,072 features in ``linear1``, which is therefore compared apart.
_FLUX = {
    "double_blocks.0.img_attn.qkv": (WIDTH, 3 * WIDTH, 4, 2),
    "double_blocks.0.txt_attn.qkv": (WIDTH, 3 * WIDTH, 4, None),
    "double_blocks.0.img_attn.proj": (WIDTH, WIDTH, 4, 4),
    "double_blocks.0.txt_attn.proj": (WIDTH, WIDTH, 6, 3),
    "double_blocks.0.img_mlp.0": (WIDTH, 4 * WIDTH, 4, 1),
    "double_blocks.0.txt_mlp.2": (4 * WIDTH, WIDTH, 4, 1),
    "double_blocks.0.img_mod.lin": (WIDTH, 6 * WIDTH, 4, 2),
    "single_blocks.0.linear2": (5 * WIDTH, WIDTH, 4, 2),
    "single_blocks.0.modulation.lin": (WIDTH, 3 * WIDTH, 4, 8),
}
_CLIP = {
    f"text_model.encoder.layers.{layer}.{name}": (*sizes, 4, 2)
    for layer in range(2)
    for name, sizes in {
        "mlp.fc1": (32, 64),
        "mlp.fc2": (64, 32),
        "self_attn.q_proj": (32, 32),
        "self_attn.out_proj": (32, 32),  # without it, diffusers leaves out those of queries
    }.items()
}
_WAN = {
    f"blocks.{layer}.{name}": (WIDTH, WIDTH, 4, 2)
    for layer in range(2)
    for name in ("ffn.0", "ffn.2", *(f"{attention}_attn.{one}" for attention in ("self", "cross") for one in "qkvo"))
}
#: Name of a file to its pipeline, and prefix to layers.
FILES: dict[str, tuple[str, dict[str, Mapping[str, tuple[Any, ...]]]]] = {
    "kohya": ("flux", {"lora_unet_": _FLUX, "lora_te1_": _CLIP}),
    "musubi": ("wan", {"lora_unet_": _WAN}),
    "comfy": ("wan", {"diffusion_model.": _WAN}),
}
#: Layers that PEFT adapts, in files that diffusers saves.
_TARGETS = {"transformer": ["to_q", "to_out.0", "proj_out", "norm1.linear", "net.2"], "text_encoder": ["q_proj", "fc1"]}


def write_lora(path: Path, parts: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> Path:
    """Write a file with random values in the names of Kohya, or with dots if a prefix ends with one."""
    generator, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for prefix, layers in parts.items():
        for layer, (inputs, outputs, rank, alpha) in layers.items():
            name = prefix + (layer if prefix.endswith(".") else layer.replace(".", "_"))
            tensors[f"{name}.lora_down.weight"] = torch.randn(rank, inputs, generator=generator) / 4
            tensors[f"{name}.lora_up.weight"] = torch.randn(outputs, rank, generator=generator) / 4
            if alpha is not None:
                tensors[f"{name}.alpha"] = torch.tensor(float(alpha))
    save_file(tensors, path)
    return path


def save_by_diffusers(folder: Path, source: Path, *, has_metadata: bool) -> Path:
    """Let diffusers save an adapter of a transformer and a text encoder; without metadata, products are not scaled."""
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = diffusers.DiffusionPipeline.from_pretrained(source)
        models = {name: getattr(pipeline, name) for name in _TARGETS}
        for name, model in models.items():
            config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=_TARGETS[name])
            model.add_adapter(config)
        layers = {f"{name}_lora_layers": get_peft_model_state_dict(model) for name, model in models.items()}
        metadata = _collate_lora_metadata(models) if has_metadata else {}
        pipeline.save_lora_weights(folder, **layers, **metadata)
    return folder


def change_lora(path: Path, target: Path, change: Any) -> Path:
    """Write a changed copy of the tensors of a file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, target)
    return target
