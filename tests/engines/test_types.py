"""Every checkpoint of tests/data/vllm, split for vLLM and loaded by the plugin.

Exact: values are the numbers of their elements, and the digests were recorded with vLLM's default loader.
"""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.numpy import save_file

import shardconv
from shardconv.engines.vllm_plugin import LOAD_FORMAT, register
from tools.composition import Numbering
from tools.vllm_kernels import without_kernels
from tools.vllm_record import digest, values_of

FIXTURE = json.loads((Path(__file__).parents[1] / "data" / "vllm" / "0.32.json").read_text())
LOADED = {name: line for name, line in FIXTURE.items() if line.get("status") == "loaded"}


@pytest.fixture(scope="session", autouse=True)
def plugin():
    from vllm.model_executor.models import registry  # noqa: PLC0415 - as late as all of vLLM

    register()
    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):  # 10 s less for each class
        yield


def write(folder, line):
    """The checkpoint of a line."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(line["config"]))
    tensors = dict(Numbering(line["sources"]).tensors())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", LOADED)
def test_type(name, tmp_path):
    line = LOADED[name]
    source = write(tmp_path / "source", line)
    for tp in (2, 4):
        if str(tp) in line["refused"]:
            continue
        split = tmp_path / f"tp{tp}"
        shardconv.split(source, split, tp=tp, engine="vllm")
        for rank in range(tp):
            with without_kernels():
                found = {tensor: digest(value) for tensor, value in values_of(split, tp, rank, LOAD_FORMAT).items()}
            assert found == {tensor: recorded(one, tp, rank) for tensor, one in line["tensors"].items()}, (tp, rank)


def recorded(tensor, tp, rank):
    """The digest of a tensor on a rank."""
    _, sizes, *constant = tensor
    shape, *digests = sizes[str(tp)]
    if constant:
        return digest(torch.full(shape, float(constant[0] or 0)))
    return digests[rank if len(digests) > 1 else 0]
