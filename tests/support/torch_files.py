"""PyTorch files, written as libraries write them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import deal, part_names, write_index

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def write_pytorch(folder: Path, tensors: Mapping[str, torch.Tensor], *, parts: int = 1, **options: Any) -> Path:
    """Write tensors to one file, or to several with an index; ``options`` are those of ``torch.save``."""
    folder.mkdir(parents=True, exist_ok=True)
    if parts == 1:
        torch.save(dict(tensors), folder / SINGLE, **options)
        return folder
    names = [name.replace(".safetensors", ".bin") for name in part_names(parts, "pytorch_model")]
    weight_map: dict[str, str] = {}
    for name, chosen in zip(names, deal(list(tensors), parts), strict=True):
        torch.save({tensor: tensors[tensor] for tensor in chosen}, folder / name, **options)
        weight_map |= dict.fromkeys(chosen, name)
    write_index(folder, weight_map, INDEX)
    return folder


def read_pytorch(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The tensors of files, by torch."""
    return {name: tensor for path in paths for name, tensor in torch.load(path, weights_only=True).items()}
