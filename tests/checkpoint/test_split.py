"""split, merge and reshard from Python: every dtype and shape of the format, and the rank files."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import safe_open

import shardconv
from shardconv.checkpoint.engine import copy
from shardconv.checkpoint.operations.split_writing import split_by
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.files.containers.safetensors import DTYPE_BITS, Header, num_bytes, read_header
from shardconv.plan.planner import Planner
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.support.errors import SplitCheckpointError
from tests.support.checkpoints import contents, llama_config, safetensors_bytes, write_checkpoint
from tests.support.matrix import each_once

#: Rules for tensors that do not belong to a model.
PLAN = """
[rules]
"rows.*" = { style = "colwise" }
"columns.*" = { style = "rowwise" }
"vocabulary.*" = { style = "embedding_rowwise", pad = true }
"replicated.*" = { style = "replicate" }
"""


def write_all_dtypes(path: Path) -> None:
    """Write a file with every dtype, each sharded in every way, and with scalars, empty tensors and integer buffers."""
    rng = np.random.default_rng(0)
    specs = {}
    for dtype in DTYPE_BITS:
        specs |= {
            f"rows.{dtype}": (dtype, (8, 12)),
            f"columns.{dtype}": (dtype, (3, 32)),
            f"vocabulary.{dtype}": (dtype, (7, 4)),
            f"replicated.{dtype}": (dtype, (4,)),
        }
    specs |= {
        "replicated.scalar": ("F32", ()),
        "rows.empty": ("BF16", (0, 4)),
        "replicated.ids": ("I64", (1, 5)),
        "columns.none": ("F16", (4, 0)),
    }
    header, end = {}, 0
    for name, (dtype, shape) in specs.items():
        start, end = end, end + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    path.write_bytes(safetensors_bytes({"__metadata__": {"made_by": "ä test"}, **header}, rng.bytes(end)))


@pytest.fixture(scope="module", params=[1, 2, 4])
def every_dtype(request, tmp_path_factory) -> Path:
    """A folder with a file that has every dtype, ``all.safetensors``, and its split, ``out``."""
    folder = tmp_path_factory.mktemp("dtypes")
    write_all_dtypes(folder / "all.safetensors")
    opened = open_source(folder / "all.safetensors")
    split_by(opened, folder / "out", planner(opened, PLAN).plan(request.param), PlanRequest())
    return folder


def headers(folder: Path) -> list[Header]:
    """The headers of the rank files."""
    tp = read_manifest(folder).plan.tp
    return [read_header(folder / f"rank-{rank}-of-{tp}.safetensors") for rank in range(tp)]


def test_merge_restores_every_dtype(every_dtype, tmp_path):
    assert shardconv.verify(every_dtype / "out", against=every_dtype / "all.safetensors").differences == ()
    assert shardconv.merge(every_dtype / "out", tmp_path / "back.safetensors").is_identical
    assert (tmp_path / "back.safetensors").read_bytes() == (every_dtype / "all.safetensors").read_bytes()


def test_rank_files_have_the_metadata_of_the_source(every_dtype):
    """And tensors that are aligned to their dtype."""
    checksums = json.loads((every_dtype / "out" / "shardconv.json").read_text())["checksums"]
    identity = xxhash.xxh3_128_hexdigest("\n".join(map(" ".join, checksums)).encode())
    for header in headers(every_dtype / "out"):
        assert header.metadata == {"format": "pt", "made_by": "ä test", "shardconv": identity}
        for name, info in header.tensors().items():
            assert info.start % max(DTYPE_BITS[info.dtype] // 8, 1) == 0, f"{name} is not aligned to its dtype"


def planner(source, plan_file):
    """The planner of a plan file for tensors of any dtype, also of dtypes that only quantized checkpoints have."""
    specs = {name: spec._replace(dtype="U8") for name, spec in source.specs.items()}
    rules = planner_for(specs, None, PlanRequest(plan_file=("plan.toml", plan_file))).rules
    return Planner(source.specs, rules)


def test_boundary_inside_a_byte_is_refused(tmp_path):
    source = tmp_path / "packed.safetensors"
    source.write_bytes(
        safetensors_bytes({"columns.a": {"dtype": "F4", "shape": [3, 6], "data_offsets": [0, 9]}}, bytes(9))
    )
    plan_file = '[rules]\n"columns.*" = { style = "rowwise" }'
    with pytest.raises(shardconv.PlanError, match=r"expected one of 1, 3\).*columns\.a: a boundary of F4 would"):
        planner(open_source(source), plan_file).plan(2)


def read_by_safetensors(path: Path) -> dict[str, bytes]:
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}


@pytest.mark.parametrize(("old", "new"), [(6, 4), (4, 6), (2, 3), (3, 2), (1, 12), (12, 1), (6, 6)])
def test_reshard_equals_a_split_of_the_source(tmp_path, monkeypatch, old, new):
    """Includes sizes of which neither divides the other, and stripes and blocks that end in the middle of a row."""
    monkeypatch.setattr("shardconv.checkpoint.split.manifest.STRIPE_BYTES", 5000)
    monkeypatch.setattr(copy, "BLOCK_BYTES", 700)
    config = llama_config(hidden=96, heads=12, kv_heads=12, intermediate=120)
    source = write_checkpoint(tmp_path / "model", parts=3, config=config)
    shardconv.split(source, tmp_path / "old", tp=old)
    shardconv.split(source, tmp_path / "new", tp=new)
    shardconv.reshard(tmp_path / "old", tmp_path / "again", tp=new)
    assert contents(tmp_path / "again") == contents(tmp_path / "new")
    shardconv.merge(tmp_path / "again", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin.index.json"])
def test_merge_of_an_unsharded_checkpoint_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(SplitCheckpointError, match=r"is not a split checkpoint .*, but already unsharded: make"):
        shardconv.merge(tmp_path, tmp_path / "merged")


def test_merge_into_one_file_keeps_all_tensors(tmp_path):
    source = write_checkpoint(tmp_path / "model", parts=3, dtype="F32")
    shardconv.split(source, tmp_path / "out", tp=2)
    report = shardconv.merge(tmp_path / "out", tmp_path / "one.safetensors")
    assert not report.is_identical
    found = read_by_safetensors(tmp_path / "one.safetensors")
    parts = map(read_by_safetensors, source.glob("*.safetensors"))
    assert found == {name: data for part in parts for name, data in part.items()}


def test_report_agrees_with_the_files(tmp_path):
    source = write_checkpoint(tmp_path / "model", parts=2)
    report = shardconv.split(source, tmp_path / "out", tp=4)
    files = sorted((tmp_path / "out").glob("rank-*"))
    assert list(report.rank_bytes) == [path.stat().st_size for path in files]
    planned = shardconv.report_plan(source, tp=4)
    for path, num in zip(files, planned.rank_bytes, strict=True):
        assert read_header(path).data_bytes == num
    for rank, path in enumerate(files):
        found = {name: info.shape for name, info in read_header(path).tensors().items()}
        assert found == {tensor.name: tensor.shard_shapes[rank] for tensor in planned.tensors}


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def mode_after_cp(path: Path, folder: Path) -> int:
    """The permissions of a copy by ``cp`` under the umask of this process."""
    copy = folder / f"cp-of-{path.name}"
    subprocess.run(["cp", path, copy], check=True)
    mode = mode_of(copy)
    copy.unlink()
    return mode


@pytest.fixture(params=[0o022, 0o002, 0o077], ids="umask-{:03o}".format)
def umask(request) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    ("weights", "index"), each_once([0o600, 0o644, 0o444, 0o400, 0o664, 0o755], [0o644, 0o600]), ids=oct
)
def test_files_have_the_permissions_of_a_copy_by_cp(tmp_path, weights, index):
    """safetensors writes weights that only the owner may read, and an index and a config that everyone may read."""
    source = write_checkpoint(tmp_path / "model", parts=2)
    (source / "run.sh").write_text("#!/bin/sh")
    for path in source.iterdir():
        path.chmod({".safetensors": weights, ".sh": 0o755, ".json": 0o644}[path.suffix])
    (source / "model.safetensors.index.json").chmod(index)
    expected = {path.name: mode_after_cp(path, tmp_path) for path in source.iterdir()}
    of_weights, of_index = expected["model-00001-of-00002.safetensors"], expected["model.safetensors.index.json"]

    shardconv.split(source, tmp_path / "split", tp=2)
    shardconv.reshard(tmp_path / "split", tmp_path / "again", tp=4)
    shardconv.merge(tmp_path / "again", tmp_path / "back")
    shardconv.merge(tmp_path / "split", tmp_path / "one.safetensors")
    assert {path.name: mode_of(path) for path in (tmp_path / "back").iterdir()} == expected
    assert mode_of(tmp_path / "one.safetensors") == of_weights
    for folder in (tmp_path / "split", tmp_path / "again"):
        modes = {path.name: mode_of(path) for path in folder.iterdir()}
        assert modes.pop("shardconv.json") == of_index
        ranks = {modes.pop(name) for name in list(modes) if name.startswith("rank-")}
        assert ranks == {of_weights}
        assert modes == {name: expected[name] for name in modes}
        assert modes.keys() == {"config.json", "run.sh", "tokenizer.json"}


def test_permissions_of_rank_files_are_common_to_all_source_files(tmp_path):
    """A rank file has bytes of every source file, so only users who may read all of them may read it."""
    source = write_checkpoint(tmp_path / "model", parts=3)
    for path, mode in zip(sorted(source.glob("*.safetensors")), [0o644, 0o640, 0o604], strict=True):
        path.chmod(mode)
    shardconv.split(source, tmp_path / "out", tp=2)
    assert {mode_of(path) for path in (tmp_path / "out").glob("rank-*")} == {0o600}


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o500, 0o755], ids=oct)
def test_private_folder_stays_private(tmp_path, mode):
    """As with ``cp -r``; the owner of the new folder has to be able to write into it."""
    source = write_checkpoint(tmp_path / "model")
    source.chmod(mode)
    shardconv.split(source, tmp_path / "split", tp=2)
    shardconv.reshard(tmp_path / "split", tmp_path / "again", tp=4)
    shardconv.merge(tmp_path / "again", tmp_path / "back")
    assert {mode_of(tmp_path / name) for name in ("split", "again", "back")} == {mode | 0o700}


@pytest.mark.parametrize(("parts", "private"), [(2, "config.json"), (1, "model.safetensors")])
def test_manifest_is_readable_only_by_those_who_may_read_config_and_index(tmp_path, parts, private):
    """Of one file without an index, by those who may read the file."""
    source = write_checkpoint(tmp_path / "model", parts=parts)
    (source / private).chmod(0o600)
    shardconv.split(source, tmp_path / "out", tp=2)
    assert mode_of(tmp_path / "out" / "shardconv.json") == 0o600
