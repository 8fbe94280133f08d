"""Rank files in the dcp layout, loaded by torch into full tensors and DTensors."""

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardconv
from shardconv import convert_model, gather_state_dict
from shardconv.layouts.layout import DCP
from shardconv.support.errors import PlanError, SplitCheckpointError
from shardconv.tensor import as_dtensor
from tests.support.manifests import change_manifest
from tests.support.matrix import each_once
from tests.support.tensors import check_equal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # intended


def tiny_model(kind, **config):
    from tests.support.models import GQA, MOE, Model  # noqa: PLC0415 - transformers takes seconds to import

    fields = {"llama": GQA, "mixtral": {**GQA, **MOE}, "phi3": {"num_key_value_heads": 2}}[kind]
    return Model(kind, {**fields, "vocab_size": 128, **config})


def write(folder, kind, **config):
    return tiny_model(kind, **config).write(folder / f"{kind}-source")


def load_full(folder, expected):
    """Load by torch alone, into tensors with other values."""
    found = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return found


@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("mixtral", {}), ("mixtral", {"ep": 4})])
def test_torch_reads_full_tensors(tmp_path, kind, options):
    """Four ranks replicate two KV heads; with whole experts, some ranks do not have a tensor."""
    source = write(tmp_path, kind)
    expected = load_file(source / "model.safetensors")
    shardconv.split(source, tmp_path / "out", tp=4, layout="dcp", **options)
    check_equal(load_full(tmp_path / "out", expected), expected)


def test_torch_cannot_read_the_native_layout(tmp_path):
    source = write(tmp_path, "llama")
    shardconv.split(source, tmp_path / "out", tp=4)
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        load_full(tmp_path / "out", load_file(source / "model.safetensors"))


def check_dtensors(axis, folder, source):
    """Check DTensors with other sharded dims and meshes than the split."""
    expected = load_file(source)
    mesh = DeviceMesh.from_group(axis.group, "cpu")
    for placed in ([Shard(0)], [Shard(-1)], [Replicate()]):
        found = {name: distribute_tensor(torch.full_like(full, 7), mesh, placed) for name, full in expected.items()}
        dcp.load(found, storage_reader=HuggingFaceStorageReader(folder), process_group=axis.group)
        check_equal({name: tensor.full_tensor() for name, tensor in found.items()}, expected)


def check_model(axis, folder, source):
    model = convert_model(tiny_model("llama").build(), group=axis)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    dcp.load(as_dtensor(model), storage_reader=HuggingFaceStorageReader(folder), process_group=axis.group)
    check_equal(gather_state_dict(model), load_file(source))
    dist.barrier()


@pytest.mark.parametrize(("check", "layout"), each_once([check_dtensors, check_model], ["pairs", "four"]))
def test_torch_reads_dtensors(ranks, tmp_path, check, layout):
    source = write(tmp_path, "llama")
    shardconv.split(source, tmp_path / "out", tp=4, layout="dcp")
    ranks(layout, check, str(tmp_path / "out"), str(source / "model.safetensors"))


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("phi3", {}, "model.layers.0.mlp.gate_up_proj.weight: is sharded as dim 0, 2 intervals, but torch"),
        ("llama", {"vocab_size": 131}, "lm_head.weight: is sharded as dim 0, padded from 131, but torch"),
    ],
)
def test_unsupported_placements_are_errors(tmp_path, kind, config, expected):
    source = write(tmp_path, kind, **config)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(PlanError) as caught:
        shardconv.split(source, tmp_path / "out", tp=4, layout="dcp")
    assert expected in str(caught.value)
    assert 'use the native layout (layout="native")' in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_manifest_with_an_unsupported_placement(tmp_path):
    source = write(tmp_path, "llama", vocab_size=131)
    shardconv.split(source, tmp_path / "out", tp=4)
    layout = msgspec.to_builtins(DCP)
    change_manifest(tmp_path / "out", lambda data: data.update(layout=layout, is_identified=data.pop("is_identified")))
    with pytest.raises(SplitCheckpointError, match=r"cannot be used: lm_head\.weight: is sharded as dim 0, padded"):
        shardconv.merge(tmp_path / "out", tmp_path / "back")
