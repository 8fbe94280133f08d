"""Checkpoints of torch.distributed.checkpoint as a source: written by torch on four ranks, read without it.

All comparisons of tensors are exact.
"""

import io
import pickle
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as EarlyProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardconv
from shardconv.checkpoint.sources.opening import open_source
from shardconv.files.containers.torch_files import UnpicklerProcess, list_metadata
from shardconv.support.errors import ShardconvError, SourceError
from tests.support.models import GQA, Model
from tests.support.tensors import check_equal_files

LLAMA = Model("llama", {**GQA, "head_dim": 8, "vocab_size": 131})
#: The tensor parallel sizes of the splits; the checkpoint has 4 ranks.
TPS = (2, 4)
FORMAT = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
R, S0, S1 = Replicate(), Shard(0), Shard(1)
#: By the end of a name, the placements on a mesh of 2 x 2 ranks: those of FSDP and tensor parallelism, and others.
PLACEMENTS = {
    "embed_tokens.weight": (S0, S0), "lm_head.weight": (S0, R), "q_proj.weight": (S0, S0), "k_proj.weight": (R, S0),
    "v_proj.weight": (S1, S1), "o_proj.weight": (S0, S1), "down_proj.weight": (R, S1), "up_proj.weight": (S1, S0),
    "norm.weight": (S0, R),
}  # fmt: skip


def save(_axis, source, folder, entries) -> None:
    """Save a checkpoint with DTensors on every rank; runs on four."""
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = {}
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        placements = next((found for end, found in PLACEMENTS.items() if name.endswith(end)), (R, R))
        tensors[name] = distribute_tensor(tensor, mesh, placements)
    moments = {name: {"exp_avg": tensor, "step": torch.tensor(3.0)} for name, tensor in tensors.items()}
    state = {"model": tensors, "optimizer": {"state": moments}, "step": 3} if entries == "nested" else tensors
    dcp.save(state, checkpoint_id=folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return LLAMA.write(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def nested(llama, ranks, tmp_path_factory) -> Path:
    """A training checkpoint, with the config beside it."""
    folder = tmp_path_factory.mktemp("dcp") / "nested"
    ranks("four", save, str(llama), str(folder), "nested")
    (folder / "config.json").write_bytes((llama / "config.json").read_bytes())
    return folder


class EarlyPickler(pickle.Pickler):
    """Pickles members of enums as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class LatePickler(pickle.Pickler):
    """Pickles members of enums as Python 3.12 does."""

    def reducer_override(self, value):
        return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented


def dumps(value: object, pickler=pickle.Pickler) -> bytes:
    file = io.BytesIO()
    pickler(file).dump(value)
    return file.getvalue()


def changed(folder: Path, target: Path, change, pickler=pickle.Pickler) -> Path:
    """A copy of a checkpoint with other metadata."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (target / ".metadata").write_bytes(dumps(metadata, pickler))
    return target


def test_merge_has_the_tensors_that_were_saved_and_not_the_optimizers(llama, nested, tmp_path):
    report = shardconv.merge(nested, tmp_path / "merged")
    check_equal_files(tmp_path / "merged", llama)
    assert report.derived == ("converted from 4 files of torch.distributed.checkpoint, without optimizer",)


@pytest.mark.parametrize("tp", TPS)
def test_split_equals_a_split_of_the_model(llama, nested, tmp_path, tp):
    shardconv.split(nested, tmp_path / "from-dcp", tp=tp)
    shardconv.split(llama, tmp_path / "split", tp=tp)
    check_equal_files(tmp_path / "from-dcp", tmp_path / "split")
    assert not shardconv.verify(tmp_path / "from-dcp", against=nested).differences


def test_a_state_dict_that_is_not_nested_is_read(llama, ranks, tmp_path):
    ranks("four", save, str(llama), str(tmp_path / "flat"), "flat")
    shardconv.merge(tmp_path / "flat", tmp_path / "merged")
    check_equal_files(tmp_path / "merged", llama)


def use_early_properties(metadata) -> None:
    """Replace the properties of tensors by those of torch before 2.3."""
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.properties = EarlyProperties(entry.properties.dtype)


@pytest.mark.parametrize("pickler", [EarlyPickler, LatePickler])
@pytest.mark.parametrize("change", [lambda _: None, use_early_properties], ids=["torch 2.13", "torch 2.2"])
def test_metadata_of_other_versions_of_python_and_torch_is_read(nested, tmp_path, pickler, change):
    other = changed(nested, tmp_path / "changed", change, pickler)
    assert (b"getattr" in (other / ".metadata").read_bytes()) == (pickler is EarlyPickler)
    with UnpicklerProcess() as unpickling:
        found, expected = ([*list_metadata(unpickling, folder / ".metadata")] for folder in (other, nested))
    assert found == expected


class Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


@pytest.mark.parametrize(
    "attribute",
    [Call(getattr, type(FORMAT), "mro"), Call(getattr, type(FORMAT), "__class__"), Call(getattr, Path("x"), "touch")],
    ids=["method of an enum", "class of an enum", "method of a path"],
)
def test_getattr_of_anything_but_a_member_of_an_enum_is_refused(nested, tmp_path, attribute):
    source = changed(nested, tmp_path / "changed", lambda metadata: setattr(metadata, "planner_data", attribute))
    with pytest.raises(SourceError, match=r"\.metadata: asks for builtins\.getattr of '\w+', and nothing"):
        open_source(source)


def test_enum_in_metadata_cannot_be_changed(nested, tmp_path):
    """The pickle sets the members of the enum, and then asks for one of them that torch does not have."""
    enum = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    members = b"N}X\x0c\x00\x00\x00_member_map_}X\x03\x00\x00\x00mroK\x01ss"
    path = tmp_path / ".metadata"
    path.write_bytes(
        b"\x80\x02" + enum + members + b"\x86b0cbuiltins\ngetattr\n" + enum + b"X\x03\x00\x00\x00mro\x86R."
    )
    with UnpicklerProcess() as unpickling, pytest.raises(SourceError, match=r"builtins\.getattr of 'mro', and nothing"):
        list(list_metadata(unpickling, path))


QUERY, HEAD = "model.model.layers.0.self_attn.q_proj.weight", "model.lm_head.weight"


def of_tensor(name, change):
    """Change the entry of a tensor."""
    return lambda metadata: change(metadata.state_dict_metadata[name])


def of_files(name, value):
    """Set an attribute of the positions of all chunks."""
    return lambda metadata: [setattr(info, name, value) for info in metadata.storage_data.values()]


def rename_model(metadata) -> None:
    metadata.planner_data = {
        name: ("generator", *path[1:]) if path[0] == "model" else path for name, path in metadata.planner_data.items()
    }


def with_long_sizes(metadata) -> None:
    """Give all chunks one long tuple, which the pickle has once."""
    sizes = torch.Size([1] * 10**6)
    for entry in metadata.state_dict_metadata.values():
        for chunk in getattr(entry, "chunks", []):
            chunk.sizes = sizes


def with_long_paths(metadata) -> None:
    path = ("model",) * 10**6
    metadata.planner_data = dict.fromkeys(metadata.planner_data, path)


def with_one_path(metadata) -> None:
    """Give many entries one path, within the maxima of its depth and names."""
    path = ("x" * 4000,) * 60
    metadata.planner_data |= dict.fromkeys(map(str, range(100)), path)
    metadata.state_dict_metadata |= dict.fromkeys(map(str, range(100)), metadata.state_dict_metadata[HEAD])


def with_one_list_of_chunks(metadata) -> None:
    """Give many entries one list of chunks, without dims and with the shortest names of files."""
    scalar = torch.Size([])
    chunks = [ChunkStorageMetadata(scalar, scalar)] * 5000
    for name in map(str, range(200)):
        metadata.state_dict_metadata[name] = replace(metadata.state_dict_metadata[HEAD], size=scalar, chunks=chunks)
        metadata.storage_data[MetadataIndex(name, scalar)] = _StorageInfo("", 0, 1)


def nested_tuple():
    """A tuple with a million items that a pickle has once."""
    nested = ()
    for _ in range(20):
        nested = nested, nested
    return nested


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_long_sizes, r"has 1000000 sizes or offsets of a tensor \(expected at most 64\)"),
        (with_long_paths, r"has an entry in 1000000 nested dicts \(expected at most 64\)"),
        (of_files("relative_path", "x" * 10**6), r"has a name of 1000000 characters \(expected at most 4096\)"),
        (with_one_path, "repeats names and sizes too often"),
        (with_one_list_of_chunks, "repeats names and sizes too often"),
        (
            of_tensor(HEAD, lambda entry: setattr(entry, "chunks", entry.chunks[:1] * 10**5)),
            "repeats names and sizes too often",
        ),
        (of_files("relative_path", nested_tuple()), r"has a name that is not text \(got a tuple\)"),
        (of_files("offset", nested_tuple()), r"has sizes or offsets that are not numbers \(got a tuple\)"),
        (of_files("length", 0), r"distcp: is truncated or damaged: "),
        (of_files("length", 10**9), r"distcp: is truncated or damaged: "),
        (of_files("relative_path", "../x"), r"names the file '\.\./x'"),
        (
            of_tensor(HEAD, lambda entry: setattr(entry.chunks[0], "sizes", torch.Size([1, 64]))),
            r"lm_head\.weight is F32 \[\d+, 64\] \(expected F32 \[1, 64\]\): save",
        ),
        (of_tensor(QUERY, lambda entry: entry.chunks.pop()), r"q_proj\.weight cannot be merged"),
        (of_tensor(HEAD, lambda entry: entry.chunks.clear()), r"\.metadata: lm_head\.weight does not have chunks"),
        (
            of_tensor(HEAD, lambda entry: setattr(entry, "size", torch.Size([200, 64]))),
            r"lm_head\.weight cannot be merged",
        ),
        (
            of_tensor(QUERY, lambda entry: setattr(entry, "size", torch.Size([*entry.size, 1]))),
            r"q_proj\.weight cannot be merged: a chunk is outside of the tensor",
        ),
        (rename_model, "holds entries generator, optimizer"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(nested, tmp_path, change, text):
    with pytest.raises(ShardconvError, match=text):
        open_source(changed(nested, tmp_path / "changed", change))


def test_a_missing_file_is_named(nested, tmp_path):
    source = changed(nested, tmp_path / "changed", lambda _: None)
    (source / "__2_0.distcp").unlink()
    with pytest.raises(SourceError, match=r"__2_0\.distcp: is missing"):
        open_source(source)


def test_damaged_metadata_is_an_error_without_a_traceback(nested, tmp_path):
    path = tmp_path / ".metadata"
    data = bytearray((nested / ".metadata").read_bytes())
    for at in range(0, len(data), len(data) // 50):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        with UnpicklerProcess() as unpickling, suppress(SourceError):
            assert any("tensor" in part for part in list_metadata(unpickling, path))
