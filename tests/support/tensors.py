"""The tensors of safetensors files, and their comparison bit for bit, as random values may be NaN."""

from pathlib import Path

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path, pattern: str = "*.safetensors") -> Tensors:
    """The tensors of all files of a folder."""
    return {name: tensor for path in folder.glob(pattern) for name, tensor in load_file(path).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in the order of its elements."""
    return tensor.flatten().view(torch.uint8)


def check_equal(found: Tensors, expected: Tensors) -> None:
    """Compare names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def check_equal_files(folder: Path, other: Path) -> None:
    """Compare the tensors of the files of two folders, file by file."""
    found, expected = ({path.name: load_file(path) for path in each.glob("*.safetensors")} for each in (folder, other))
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        check_equal(found[name], tensors)
