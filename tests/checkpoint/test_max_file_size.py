"""split --max-file-size: several files per rank, each with some of the rank's tensors."""

import json
from pathlib import Path

import pytest
import torch

import shardconv
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.checkpoint.split.rank_reader import RankFileReader
from shardconv.files.containers.safetensors import read_header
from shardconv.files.weight_formats import NUMBERED_NAME
from shardconv.support.errors import PlanError, ShardconvError, SplitCheckpointError, UsageError
from shardconv.support.formatting import parse_size
from tests.support.checkpoints import contents, write_checkpoint
from tests.support.command import call
from tests.support.damage import flip
from tests.support.manifests import change_manifest
from tests.support.tensors import check_equal, check_equal_files, tensors_of

TP, LIMIT, MANIFEST = 2, 20_000, "shardconv.json"
#: The options of each layout; dcp does not support padding.
REPLICATE = ("model.embed_tokens.weight", "lm_head.weight")
OPTIONS = {"native": {}, "dcp": {"layout": "dcp", "replicate": REPLICATE}, "vllm": {"layout": "vllm"}}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "source", parts=2)


@pytest.fixture(scope="module", params=OPTIONS)
def split(request, source, tmp_path_factory) -> Path:
    """The source, split into small files in each layout; ``one`` next to it has one file per rank."""
    folder = tmp_path_factory.mktemp(request.param)
    shardconv.split(source, folder / "one", tp=TP, **OPTIONS[request.param])
    shardconv.split(source, folder / "several", tp=TP, max_file_size=LIMIT, **OPTIONS[request.param])
    return folder / "several"


@pytest.fixture
def native(source, tmp_path) -> Path:
    """A split that a test may damage."""
    shardconv.split(source, tmp_path / "split", tp=TP, max_file_size=LIMIT)
    return tmp_path / "split"


#: The files of a rank.
OF_RANK = "*rank-{}*.safetensors"


def files_of(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(OF_RANK.format(rank)))


def test_files_of_a_rank_have_the_tensors_of_its_one_file(split):
    for rank in range(TP):
        check_equal(tensors_of(split, OF_RANK.format(rank)), tensors_of(split.parent / "one", OF_RANK.format(rank)))
    names = [name for path in split.glob("*.safetensors") for name in read_header(path).tensors()]
    assert len(names) == sum(len(read_header(path).tensors()) for path in (split.parent / "one").glob("*.safetensors"))


def test_only_a_file_with_one_tensor_exceeds_the_limit(split):
    sizes = {path: (path.stat().st_size, len(read_header(path).tensors())) for path in split.glob("*.safetensors")}
    assert len(sizes) > 2 * TP
    assert all(size <= LIMIT or count == 1 for size, count in sizes.values())


def test_merge_restores_the_source(split, source, tmp_path):
    report = shardconv.verify(split, against=source)
    assert (report.differences, report.other_weights) == ((), ())
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors_of(source).values())
    assert shardconv.merge(split, tmp_path / "merged").is_identical
    assert contents(tmp_path / "merged") == contents(source)


def test_reshard_equals_a_split_of_the_source(split, source, tmp_path):
    shardconv.reshard(split, tmp_path / "resharded", tp=4)
    options = OPTIONS[read_manifest(split).layout.name]
    shardconv.split(source, tmp_path / "expected", tp=4, max_file_size=LIMIT, **options)
    check_equal_files(tmp_path / "resharded", tmp_path / "expected")


def test_reshard_joins_and_divides_files(split, source, tmp_path):
    assert shardconv.reshard(split, tmp_path / "one", tp=TP, max_file_size="1TB").files_per_rank == 1
    shardconv.reshard(split.parent / "one", tmp_path / "several", tp=TP, max_file_size=LIMIT)
    for name in ("one", "several"):
        found, expected = contents(tmp_path / name), contents(split.parent / name)
        assert found.keys() == expected.keys()
        assert [file for file in found if found[file] != expected[file] and file != MANIFEST] == []


def test_names_follow_the_layout(split):
    manifest, several = read_manifest(split), contents(split)
    count = len(files_of(split, 0))
    name = "rank-{rank}-of-2-file-{file}-of-{count}.safetensors"
    name = "model-rank-{rank}-part-{file}.safetensors" if manifest.layout.name == "vllm" else name
    expected = [name.format(rank=rank, file=file, count=count) for rank in range(TP) for file in range(count)]
    assert manifest.rank_files == expected
    assert not any(NUMBERED_NAME.fullmatch(name) or name == "model.safetensors.index.json" for name in several)


def test_index_of_a_rank(native):
    for rank in range(TP):
        index = json.loads((native / f"rank-{rank}-of-{TP}.safetensors.index.json").read_text())
        found = {name: path.name for path in files_of(native, rank) for name in read_header(path).tensors()}
        assert index["weight_map"] == found
        tensors = tensors_of(native, OF_RANK.format(rank)).values()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_files_of_layout_dcp(source, tmp_path):
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - takes time
    from torch.distributed.checkpoint import HuggingFaceStorageReader  # noqa: PLC0415

    shardconv.split(source, tmp_path / "split", tp=TP, max_file_size=LIMIT, **OPTIONS["dcp"])
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(source).items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "split")), no_dist=True)
    check_equal(found, tensors_of(source))


def test_tiny_limit_gives_each_tensor_a_file(source, tmp_path):
    report = shardconv.split(source, tmp_path / "split", tp=TP, max_file_size=1)
    assert report.files_per_rank == report.num_tensors
    assert shardconv.verify(tmp_path / "split", against=source).differences == ()
    assert report.rank_bytes[0] == sum(path.stat().st_size for path in files_of(tmp_path / "split", 0))


def test_too_many_files_are_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr("shardconv.checkpoint.engine.layout._MAX_FILES", 40)
    with pytest.raises(PlanError, match=r"maximum file size is too small \(got 1 bytes.*max_file_size"):
        shardconv.split(source, tmp_path / "split", tp=TP, max_file_size=1)


def test_changed_byte_names_the_file_of_the_rank(native):
    path = files_of(native, 1)[2]
    flip(path)
    (difference,) = shardconv.verify(native).differences
    assert "rank-1-of-2-file-" in difference
    assert path.name in difference
    with pytest.raises(ShardconvError, match=path.name):
        RankFileReader(read_manifest(native), native, 1, verify=True).finish()
    RankFileReader(read_manifest(native), native, 0, verify=True).finish()


@pytest.mark.parametrize("value", [0, -1, True, "5GB", 2.5])
def test_invalid_limit_in_the_manifest(native, value):
    change_manifest(native, lambda data: data["layout"].update(max_file_bytes=value))
    with pytest.raises(SplitCheckpointError, match="max_file_bytes"):
        read_manifest(native)


def test_overwrite_replaces_several_files(native, source):
    shardconv.split(source, native, tp=TP, overwrite=True)
    assert sorted(path.name for path in native.glob("*rank*")) == ["rank-0-of-2.safetensors", "rank-1-of-2.safetensors"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * 10**9), ("5gb", 5 * 10**9), ("5G", 5 * 10**9), ("1.5 MB", 1_500_000), ("20k", 20_000),
        ("2GiB", 2**31), ("2Gi", 2**31), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "123", "5XB", "1e9", "0.1B", "5 G B", "5BB", "5I", "\u0665GB"])
def test_invalid_sizes(text, source):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
    with pytest.raises(UsageError, match="max_file_size"):
        shardconv.split(source, tp=TP, max_file_size=text)


def test_command_prints_the_number_of_files(source, tmp_path):
    result = call("split", source, "--tp", TP, "--max-file-size", "20kB", "-o", tmp_path / "out")
    count = len(files_of(tmp_path / "out", 0))
    assert f"2 ranks of 77.4 kB in {count} files each" in result.out
    report = json.loads(call("reshard", tmp_path / "out", "--tp", 1, "--json", "-o", tmp_path / "tp1").out)
    assert report["files_per_rank"] == len(files_of(tmp_path / "tp1", 0))
    assert call("split", source, "--tp", TP, "--max-file-size", "big").code == 2
