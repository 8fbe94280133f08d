"""Tensors of a source in memory."""

import torch
from safetensors.torch import load_file

from shardconv.checkpoint.sources.opening import open_source
from shardconv.runtime.comparison import load_source
from tests.support.checkpoints import write_checkpoint
from tests.support.torch_files import write_pytorch


def test_tensors_of_several_safetensors_files(tmp_path):
    folder = write_checkpoint(tmp_path / "model", parts=3)
    expected = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    found = load_source(open_source(folder))
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)) for name, tensor in expected.items()
    )


def test_tensors_of_pytorch_files(tmp_path):
    matrix = torch.arange(12.0).view(3, 4)
    expected = {"a": matrix.T, "b": matrix[1:], "c": torch.zeros(0, 2), "d": matrix.bfloat16()[:, 1:3]}
    found = load_source(open_source(write_pytorch(tmp_path / "model", expected, parts=2)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
