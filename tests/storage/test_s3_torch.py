"""PyTorch files, DCP and Megatron-Core in S3, on a real S3 server on loopback: results are those of local folders."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

import shardconv
from shardconv.files.containers import torch_files
from shardconv.support.errors import SourceError
from tests.support.checkpoints import contents
from tests.support.megatron import DENSE, legacy_ranks, megatron_tensors, write_legacy
from tests.support.models import Model, read
from tests.support.s3_server import upload
from tests.support.torch_files import INDEX, SINGLE, write_pytorch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
#: Files whose tensors are large, compared with their names and positions.
LARGE = Model("llama", {**DENSE, "vocab_size": 16384})


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return LARGE.write(tmp_path_factory.mktemp("large") / "source")


def save_dcp(source: Path, folder: Path) -> None:
    dcp.save(read(source), checkpoint_id=folder, no_dist=True)


def save_legacy(source: Path, folder: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    write_legacy(folder, legacy_ranks(megatron_tensors(read(source), config), config, 2, 2), source / "config.json")


WRITE: dict[str, Callable[[Path, Path], object]] = {
    "PyTorch": lambda source, folder: write_pytorch(folder, read(source)),
    "PyTorch, two files": lambda source, folder: write_pytorch(folder, read(source), parts=2),
    "before 1.6": lambda source, folder: write_pytorch(folder, read(source), _use_new_zipfile_serialization=False),
    "DCP": save_dcp,
    "Megatron-Core": lambda source, folder: shardconv.split(source, folder, layout="megatron"),
    "Megatron-Core, format torch": save_legacy,
}


@pytest.fixture
def saved(source, s3, tmp_path) -> Callable[[str], str]:
    """Writes a format to a local folder, and uploads that; returns the URL."""

    def save(name: str) -> str:
        WRITE[name](source, tmp_path / "saved")
        (tmp_path / "saved" / "config.json").write_bytes((source / "config.json").read_bytes())
        upload(tmp_path / "saved", "bucket", f"{tmp_path.name}/saved")
        return f"s3://bucket/{tmp_path.name}/saved"

    return save


@pytest.mark.parametrize("name", WRITE)
def test_a_split_of_a_url_is_that_of_the_local_folder(saved, s3, tmp_path, name):
    """And a plan fetches a small part of the files."""
    url, before = saved(name), s3.num_sent
    shardconv.report_plan(url)
    assert s3.num_sent - before < 0.1 * sum(map(len, contents(tmp_path / "saved").values()))
    shardconv.split(url, tmp_path / "remote", tp=2)
    shardconv.split(tmp_path / "saved", tmp_path / "local", tp=2)
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")


@pytest.mark.parametrize("name", ["DCP", "Megatron-Core"])
def test_each_chunk_takes_one_request(saved, s3, tmp_path, name):
    """Its end and the start of the next one are fetched together; only one of each shape is fetched again."""
    url = saved(name)
    (inner,) = (path.parent for path in (tmp_path / "saved").rglob(".metadata"))
    metadata = FileSystemReader(inner).read_metadata()
    chunks = {(one.relative_path, one.offset) for one in metadata.storage_data.values()}
    tensors = (one for one in metadata.state_dict_metadata.values() if isinstance(one, TensorStorageMetadata))
    shapes = {tuple(chunk.sizes) for one in tensors for chunk in one.chunks}
    s3.requests.clear()
    shardconv.report_plan(url)
    assert (
        sum(path.endswith(".distcp") for method, path, _ in s3.requests if method == "GET")
        <= len(chunks) + len(shapes) + 1
    )


@pytest.mark.parametrize(("name", "file"), [("PyTorch", SINGLE), ("PyTorch, two files", INDEX)])
def test_the_url_of_a_file_or_an_index(saved, tmp_path, name, file):
    remote, local = (shardconv.report_plan(f"{folder}/{file}") for folder in (saved(name), tmp_path / "saved"))
    assert (remote.tensors, remote.left_out) == (local.tensors, local.left_out)


@pytest.mark.parametrize(("name", "kind"), [("PyTorch", "file"), ("DCP", "chunk")])
def test_a_file_that_changes_is_an_error(saved, s3, tmp_path, monkeypatch, name, kind):
    url, list_tensors = saved(name), torch_files.UnpicklerProcess.run

    def run(child, requests, files):
        yield from list_tensors(child, requests, files)
        if requests[0][0] == kind:
            path = max((tmp_path / "saved").iterdir(), key=lambda path: path.stat().st_size)
            other = bytes(path.stat().st_size)
            s3.client.put_object(Bucket="bucket", Key=f"{tmp_path.name}/saved/{path.name}", Body=other)

    monkeypatch.setattr(torch_files.UnpicklerProcess, "run", run)
    with pytest.raises(SourceError, match="changed while it was read"):
        shardconv.split(url, tmp_path / "split", tp=2)


def test_a_duplicate_beside_safetensors_files_is_left_out(source, s3, tmp_path):
    saved = {"duplicate": read(source), "different": {**read(source), "another.weight": torch.ones(2)}}
    for name, tensors in saved.items():
        upload(source, "bucket", name)
        upload(write_pytorch(tmp_path / name, tensors), "bucket", name)
    report = shardconv.report_plan("s3://bucket/duplicate")
    assert report.left_out == {SINGLE: "duplicate of the checkpoint in another format"}
    with pytest.raises(SourceError, match=r"pytorch_model.bin \(has another.weight, which .*ignore="):
        shardconv.report_plan("s3://bucket/different")


@pytest.mark.parametrize("fault", ["403", "cut"])
def test_a_file_that_cannot_be_read_is_not_damaged(source, s3, tmp_path, fault):
    upload(write_pytorch(tmp_path / "saved", read(source)), "bucket", "denied")
    s3.fault = lambda _method, path, _query: fault if path.endswith(".bin") else None
    with pytest.raises(SourceError, match=r"access is denied|the connection .* was lost|the request failed"):
        shardconv.report_plan("s3://bucket/denied")
