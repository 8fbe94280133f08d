"""Folders with some of the ranks, as on hosts with disks of their own.

Rank files are compared with those of a split for all ranks, merged files with the source.
"""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardconv
from shardconv.checkpoint.engine import geometry as byte_ranges
from shardconv.checkpoint.engine.copy import Scratch
from shardconv.checkpoint.engine.geometry import geometry
from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.split.chosen_ranks import choose_ranks
from shardconv.checkpoint.split.loadable import open_loadable
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.files.containers.safetensors import read_header
from shardconv.files.input_files import LocalFile
from shardconv.support.errors import OutputError, SplitCheckpointError, UsageError
from tests.support.checkpoints import contents, llama_config, llama_specs, write_checkpoint
from tests.support.command import call
from tests.support.damage import flip, place
from tests.support.faults import failing_after
from tests.support.manifests import change_manifest
from tests.support.matrix import cases, each_once

TP = 4

pytestmark = pytest.mark.usefixtures("stripes_without_gaps")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A source whose tensors four ranks shard, pad and replicate, with replicated KV heads."""
    return write_checkpoint(tmp_path_factory.mktemp("some") / "source", parts=2)


def split(source: Path, folder: Path, *hosts: str, **options) -> list[Path]:
    """Split a source on each of some hosts."""
    paths = [folder / f"host{number}" for number in range(len(hosts))]
    for path, ranks in zip(paths, hosts, strict=True):
        shardconv.split(source, path, tp=TP, ranks=ranks, **options)
    return paths


# --- the files ------------------------------------------------------------------------------------------------------

OPTIONS = {
    "native": {},
    "dcp": {"layout": "dcp"},
    "vllm": {"layout": "vllm"},
    "several files": {"max_file_size": 30_000},
    "fp32": {"dtype": "fp32"},
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    cases(
        [(name, ranks) for name in OPTIONS for ranks in ("0", "3", "1-2", "0,2")],
        lambda name, ranks: name == "native" or ranks == "1-2",
    ),
)
def test_files_are_those_of_a_split_for_all_ranks(tmp_path, name, ranks):
    config = llama_config(vocab=128, kv_heads=4) if name == "dcp" else None
    source = write_checkpoint(tmp_path / "source", config=config)
    shardconv.split(source, tmp_path / "all", tp=TP, checksums=False, **OPTIONS[name])
    shardconv.split(source, tmp_path / "some", tp=TP, ranks=ranks, checksums=False, **OPTIONS[name])
    every, some = contents(tmp_path / "all"), contents(tmp_path / "some")
    chosen = choose_ranks(ranks, TP)
    is_other = re.compile("|".join(rf"(model-)?rank-{rank}-.*" for rank in range(TP) if rank not in chosen))
    assert {**some, MANIFEST_NAME: b""} == {
        **{name: data for name, data in every.items() if not is_other.fullmatch(name)},
        MANIFEST_NAME: b"",
    }
    assert len(some) < len(every)


@pytest.mark.parametrize("name", cases(["gptq-3", "gptq-4-act-order", "awq-4"], lambda name: name == "gptq-3"))
def test_quantized_layers(tmp_path, name):
    """Indices of groups count from the first group of each rank."""
    source = Path(__file__).parents[1] / "data" / "quantized" / name
    shardconv.split(source, tmp_path / "all", tp=2, checksums=False)
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for rank, folder in enumerate(folders):
        file = f"rank-{rank}-of-2.safetensors"
        shardconv.split(source, folder, tp=2, ranks=rank, checksums=False)
        assert (folder / file).read_bytes() == (tmp_path / "all" / file).read_bytes()
        assert shardconv.verify(folder, against=source).differences == ()
    shardconv.merge(folders, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.parametrize("gap_bytes", cases([1, 2**20], lambda gap_bytes: gap_bytes > 1))
@pytest.mark.parametrize("name", ["gptq-2-one-group", "gptq-3", "gptq-4-act-order"])
def test_quantized_layers_of_ranks_that_are_not_adjacent(tmp_path, monkeypatch, name, gap_bytes):
    """Values between those of the ranks, which no rank has, are not compared; those of the ranks are."""
    monkeypatch.setattr(byte_ranges, "GAP_BYTES", gap_bytes)
    geometry.cache_clear()
    take = Scratch.take

    def take_used(scratch, name, size):
        buffer = take(scratch, name, size)
        buffer[:] = b"\xa5" * size
        return buffer

    monkeypatch.setattr(Scratch, "take", take_used)
    source = Path(__file__).parents[1] / "data" / "quantized" / name
    shardconv.split(source, tmp_path / "some", tp=4, ranks="0,2", checksums=False)
    assert shardconv.verify(tmp_path / "some").differences == ()
    assert shardconv.verify(tmp_path / "some", against=source).differences == ()
    path = tmp_path / "some" / "rank-2-of-4.safetensors"
    index = next(name for name in read_header(path).tensors() if name.endswith("o_proj.g_idx"))
    flip(path, place(path, index)[0], bit=6)
    differences = shardconv.verify(tmp_path / "some").differences
    assert any(f"{index}: input feature " in text and "is in group " in text for text in differences), differences


def test_checksums_are_those_of_a_split_for_all_ranks(source, tmp_path):
    shardconv.split(source, tmp_path / "all", tp=TP)
    report = shardconv.split(source, tmp_path / "some", tp=TP, ranks=[3, 1])
    every, some = read_manifest(tmp_path / "all"), read_manifest(tmp_path / "some")
    assert report.ranks == some.ranks == (1, 3)
    assert report.rank_bytes == (every.rank_layout.rank_bytes[1], every.rank_layout.rank_bytes[3])
    assert some.checksums == (every.checksums[1], every.checksums[3])
    assert some.identity not in {every.identity, None}
    for path in some.rank_paths(tmp_path / "some"):
        assert some.identity in path.read_bytes()[:200].decode()


def test_all_ranks_by_name_are_the_whole_split(source, tmp_path):
    shardconv.split(source, tmp_path / "all", tp=TP)
    shardconv.split(source, tmp_path / "named", tp=TP, ranks="0-3")
    assert contents(tmp_path / "named") == contents(tmp_path / "all")


def test_only_what_ranks_need_is_read(tmp_path, monkeypatch):
    """Of column parallel tensors their rows; of row parallel and replicated tensors everything."""
    config = llama_config(hidden=256, intermediate=512, vocab=512, heads=8, kv_heads=8)
    source = write_checkpoint(tmp_path / "source", config=config)
    plan = shardconv.make_plan(source, tp=TP)
    header = 8 + struct.unpack("<Q", (source / "model.safetensors").read_bytes()[:8])[0]
    sizes = {name: 2 * shape[0] * (shape[1] if shape[1:] else 1) for name, (_, shape) in llama_specs(config).items()}
    needed = sum(size // TP if plan.placement(name).dim == 0 else size for name, size in sizes.items())
    read = []
    original = LocalFile.read

    def counted(file, buffer, offset):
        if file.size > 100_000:  # the weights
            read.append((offset, len(buffer)))
        original(file, buffer, offset)

    monkeypatch.setattr(LocalFile, "read", counted)
    monkeypatch.setattr("shardconv.checkpoint.operations.split_writing.sample_checksum", lambda _: "")
    monkeypatch.setattr("shardconv.checkpoint.output.job.checksum_of_tensors", lambda *_: "")
    monkeypatch.setattr(byte_ranges, "GAP_BYTES", 1000)  # less than what other ranks have of a row
    geometry.cache_clear()
    shardconv.split(source, tmp_path / "one", tp=TP, ranks=2)
    data = [(offset, count) for offset, count in read if offset >= header]
    assert sum(count for _, count in data) == needed < 0.6 * sum(sizes.values())
    assert len({byte for offset, count in data for byte in range(offset, offset + count)}) == needed


# --- commands on one folder -----------------------------------------------------------------------------------------


def test_verify_checks_the_ranks_that_are_there(source, tmp_path):
    (folder,) = split(source, tmp_path, "1-2")
    assert shardconv.verify(folder).differences == ()
    report = shardconv.verify(folder, against=source)
    assert (report.ranks, report.differences, report.is_compared) == ((1, 2), (), True)
    assert f"ranks 1, 2 of every tensor of {source}" in report.checked
    assert f"{folder}: ranks 1, 2 of 4, 21 tensors" in call("verify", folder).out
    path = folder / "rank-2-of-4.safetensors"
    for position in (-1, -3000, -20_000):
        flip(path, position)
        for options in ({}, {"against": source}):
            differences = shardconv.verify(folder, **options).differences
            assert any(f"{path.name}: the bytes of" in text for text in differences), differences
        flip(path, position)
    path.unlink()
    (difference,) = shardconv.verify(folder).differences
    assert f"{path.name}: is missing (expected ranks 1, 2)" in difference


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
)
def test_verify_compares_every_byte_of_the_ranks(tmp_path, name):
    """And no other: a byte of the source that is on another rank may differ."""
    source = write_checkpoint(tmp_path / "source", dtype="F16")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (folder,) = split(source, tmp_path, "1", checksums=False)
    placement = shardconv.make_plan(source, tp=TP).placement(name)
    assert shardconv.verify(folder, against=source).differences == ()
    for rank in range(TP):
        changed = {key: value.copy() for key, value in tensors.items()}
        where = [slice(None)] * changed[name].ndim
        if placement.dim is not None:
            where[placement.dim] = placement.ranks[rank][0].stop - 1
        changed[name].view("u2")[tuple(where)] ^= 1
        save_file(changed, tmp_path / "source" / "model.safetensors", {"format": "pt"})
        differences = shardconv.verify(folder, against=source).differences
        assert bool(differences) is (rank == 1 or placement.dim is None)
        assert all("differs from the source" in text and name in text for text in differences)


def test_dry_run_writes_nothing(source, tmp_path):
    result = call("split", source, "--tp", 4, "--ranks", "0,2-3", "-o", tmp_path / "out", "--dry-run")
    assert "3 rank files (ranks 0, 2, 3 of 4) of " in result.out
    assert list(tmp_path.iterdir()) == []


# --- several folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hosts", [("0-1", "2-3"), ("3", "0,2", "1"), ("0-2", "2-3"), ("0-3", "1"), ("1", "0-3")], ids="; ".join
)
@pytest.mark.parametrize("checksums", [True, False])
def test_merge_of_several_folders(source, tmp_path, hosts, checksums):
    """In any order; a rank may be in several folders."""
    folders = split(source, tmp_path, *hosts, checksums=checksums)
    report = shardconv.merge(folders, tmp_path / "back")
    assert report.is_identical is (True if checksums else None)
    assert contents(tmp_path / "back") == contents(source)


def test_ranks_that_load_folders_of_different_kinds(source, tmp_path):
    """The kinds differ, so an error names them; folders with different ranks have the same facts."""
    folders = split(source, tmp_path, "0-3", "0-1", "2-3")
    whole, *some = (open_loadable(folder, tp=None, options={}) for folder in folders)
    assert some[0].facts() == some[1].facts()
    assert whole.kind == "a split checkpoint with all ranks"
    assert {one.kind for one in some} == {"a split checkpoint with some of the ranks"}


def test_verify_of_several_folders(source, tmp_path):
    folders = split(source, tmp_path, "2-3", "0-1")
    result = call("verify", *folders, "--against", source, "--html", tmp_path / "page.html")
    assert (result.code, result.err.count("\n")) == (0, 1)  # of the page
    assert "4 ranks" in result.out
    assert f"every tensor of {source}\ncorrect" in result.out
    assert (tmp_path / "page.html").is_file()
    report = shardconv.verify(folders)
    files = [path.read_bytes() for path in source.glob("*.safetensors")]
    num_bytes = sum(len(file) - 8 - struct.unpack("<Q", file[:8])[0] for file in files)
    assert (report.ranks, report.num_bytes) == ((0, 1, 2, 3), num_bytes)


def test_verify_of_several_folders_names_the_folder_of_a_difference(source, tmp_path):
    folders = split(source, tmp_path, "0-1", "2-3")
    (folders[1] / "config.json").write_text("{}")
    damaged = folders[1] / "rank-3-of-4.safetensors"
    flip(damaged)
    shutil.copy(folders[0] / "rank-0-of-4.safetensors", folders[0] / "other.safetensors")
    report = shardconv.verify(folders)
    assert any(text.startswith(f"{folders[1] / 'config.json'}: ") for text in report.differences)
    assert any(str(damaged) in text for text in report.differences)
    assert report.other_weights == (str(folders[0] / "other.safetensors"),)


def test_resumed_with_the_folders_in_another_order(source, tmp_path):
    """The copy is the same, whichever folder is the first; with another manifest in any of them it is not."""
    folders = split(source, tmp_path, "0-1", "2-3")
    with failing_after(3), pytest.raises(OutputError):
        shardconv.merge(folders, tmp_path / "back", resume=True, threads=1)
    assert (tmp_path / ".back.partial").exists()
    for folder in folders:
        manifest = folder / MANIFEST_NAME
        before = manifest.stat().st_mtime_ns
        os.utime(manifest, ns=(before, before + 10**9))
        with pytest.raises(OutputError, match=r"shardconv\.json is not as in the interrupted run"):
            shardconv.merge(folders, tmp_path / "back", resume=True)
        os.utime(manifest, ns=(before, before))
    assert shardconv.merge(folders[::-1], tmp_path / "back", resume=True).resumed_bytes > 0
    assert contents(tmp_path / "back") == contents(source)


REFUSED = {
    "missing rank": (["0", "2-3"], {}, "rank 1 of 4 is missing (got ranks 0, 2, 3): pass the folders"),
    "missing ranks": (["0"], {}, "ranks 1-3 of 4 are missing (got rank 0): pass the folders"),
    "other options": (["0-1"], {"replicate": ["lm_head.weight"]}, "was split with other options than"),
    "other layout": (["0-1"], {"layout": "vllm"}, "different plan, layout"),
    "no checksums": (["0-1"], {"checksums": False}, "(different checksums)"),
}


@pytest.mark.parametrize("command", [["merge"], ["reshard", "--tp", "2"]], ids=lambda command: command[0])
@pytest.mark.parametrize("what", REFUSED)
def test_folders_that_do_not_fit(source, tmp_path, command, what):
    hosts, options, message = REFUSED[what]
    folders = split(source, tmp_path, *hosts)
    if options:
        folders += split(source, tmp_path / "other", "2-3", **options)
    result = call(*command, *folders, "-o", tmp_path / "out")
    assert (result.code, result.out) == (1, "")
    assert message in result.err
    assert not (tmp_path / "out").exists()


def change_config(source: Path) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5.0}))


def change_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").write_text("{}")


def change_values(source: Path) -> None:
    for path in source.glob("*.safetensors"):
        save_file({name: value[::-1].copy() for name, value in load_file(path).items()}, path, {"format": "pt"})


@pytest.fixture
def with_another_norm(tmp_path, monkeypatch) -> Callable[[int, int], tuple[Path, Path]]:
    """Two sources that differ in a byte of a tensor that every rank holds; only those in its middle are sampled."""

    def write(byte: int, stripe_bytes: int = 4096) -> tuple[Path, Path]:
        monkeypatch.setattr("shardconv.checkpoint.split.manifest.STRIPE_BYTES", stripe_bytes)
        config = {**llama_config(hidden=4096, heads=8, kv_heads=8, intermediate=8, vocab=8, layers=1), "head_dim": 1}
        source, other = (write_checkpoint(tmp_path / name, dtype="F16", config=config) for name in ("source", "other"))
        path = other / "model.safetensors"
        flip(path, place(path, "model.norm.weight")[byte])
        return source, other

    return write


OTHER_SOURCES = {
    "config": (change_config, "another source than", "auxiliary files, config.json"),
    "tokenizer": (change_tokenizer, "another source than", "(different auxiliary files)"),
    "values": (change_values, "another source than", "sampled values)"),
}


@pytest.mark.parametrize("what", OTHER_SOURCES)
def test_hosts_with_different_sources(tmp_path, what):
    change, *messages = OTHER_SOURCES[what]
    source, other = (write_checkpoint(tmp_path / name, dtype="F16") for name in ("source", "other"))
    change(other)
    folders = [*split(source, tmp_path, "0-1"), *split(other, tmp_path / "b", "2-3")]
    with pytest.raises(SplitCheckpointError, match=r"host0: was split from another source") as raised:
        shardconv.merge(folders, tmp_path / "out")
    assert all(message in str(raised.value) for message in messages)


@pytest.mark.parametrize(
    ("stripe_bytes", "expected"),
    [(4096, "was split from another source .* bytes of model.norm.weight"), (10**6, "model.norm.weight differs from")],
)
def test_hosts_whose_sources_differ_in_a_byte(with_another_norm, tmp_path, stripe_bytes, expected):
    """If no sample has the byte, checksums of replicated stripes differ, or else replicas."""
    source, other = with_another_norm(0, stripe_bytes)
    folders = [*split(source, tmp_path, "0-1"), *split(other, tmp_path / "b", "2-3")]
    with pytest.raises(SplitCheckpointError, match=expected):
        shardconv.merge(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("byte", "what", "hosts"),
    each_once(
        [(4096, r"\(different sampled values\)"), (0, "bytes of model.norm.weight")],
        [(["0-1", "2", "3"],), (["0-3", "1", "2", "3"],)],
    ),
)
def test_the_host_with_another_source_is_named(with_another_norm, tmp_path, hosts, byte, what):
    """Also in the middle, and where the first folder has all ranks and is not sampled."""
    source, other = with_another_norm(byte)
    folders = split(source, tmp_path, *hosts)
    shardconv.split(other, folders[-2], tp=TP, ranks=hosts[-2], overwrite=True)
    with pytest.raises(SplitCheckpointError, match=rf"^{folders[-2]}: was split from another source than .*{what}"):
        shardconv.reshard(folders, tmp_path / "out", tp=2)


@pytest.mark.parametrize("ranks", [[], [2, 1], [1, 1], [1, 4], [-1, 1], [1, True], "1-2", [1]], ids=str)
def test_manifest_with_wrong_ranks(source, tmp_path, ranks):
    (folder,) = split(source, tmp_path, "1-2")
    change_manifest(folder, lambda data: data.update(ranks=ranks))
    with pytest.raises(SplitCheckpointError, match=f"{MANIFEST_NAME}: cannot be used"):
        shardconv.verify(folder)


# --- ranks that cannot be written -----------------------------------------------------------------------------------

WRONG_RANKS = [
    *((ranks, "--ranks is empty") for ranks in ("", " ", [])),
    *((ranks, "--ranks has rank 4 (expected ranks from 0 to 3, of 4 ranks)") for ranks in ("4", [4], [1, 4])),
    ("0-99999999999", "--ranks has rank 99999999999 (expected ranks from 0 to 3, of 4 ranks)"),
    ("9" * 18, f"--ranks has rank {'9' * 18} (expected ranks from 0 to 3, of 4 ranks)"),
    ([-1], "--ranks has rank -1 (expected"),
    ("0,2-1", "--ranks has a reversed range (got 2-1, expected 1-2): correct it"),
    ("1,", "--ranks is malformed (got '1,', expected numbers and ranges, such as 0,2,5-7)"),
    *((ranks, "--ranks is malformed (got '") for ranks in ("-1", "a", "1-2-3", f"0-{'9' * 5000}")),
    *((ranks, "expected integers") for ranks in ([1.0], [True], 1.5, True, np.float32(1), [np.ones(2, int)])),
    *((ranks, "--ranks has rank 0 twice") for ranks in ("0,0", [0, 0])),
    ("0-2,1", "--ranks has rank 1 twice"),
]


@pytest.mark.parametrize(("ranks", "message"), WRONG_RANKS, ids=lambda value: str(value)[:20])
def test_wrong_ranks(ranks, message):
    with pytest.raises(UsageError) as raised:
        choose_ranks(ranks, TP)
    assert message in raised.value.with_options()
    assert len(str(raised.value)) < 200


RIGHT_RANKS = {
    "3": (3,),
    "0-1": (0, 1),
    " 5-7 , 2,0": (0, 2, 5, 6, 7),
    0: (0,),
    range(6, 8): (6, 7),
    np.int64(3): (3,),
    (np.int64(1), 2): (1, 2),
    f"{'0' * 5000}1-{'0' * 20}2": (1, 2),
    None: tuple(range(8)),
}


@pytest.mark.parametrize("ranks", RIGHT_RANKS, ids=str)
def test_right_ranks(ranks):
    assert choose_ranks(ranks, 8) == RIGHT_RANKS[ranks]


def test_other_ranks_are_not_proposed_to_replace_those_in_a_folder(source, tmp_path):
    split(source, tmp_path, "0-1")
    before = contents(tmp_path)
    result = call("split", source, "--tp", TP, "--ranks", "2-3", "-o", tmp_path / "host0")
    assert result.err == (
        f"shardconv: {tmp_path / 'host0'}: exists (with ranks 0, 1 of 4, which --overwrite would remove): choose "
        f"another folder with -o, as merge, reshard and verify take several folders with some ranks each\n"
    )
    assert contents(tmp_path) == before


def test_the_same_ranks_may_replace_those_in_a_folder(source, tmp_path):
    (folder,) = split(source, tmp_path, "0-1")
    before = contents(folder)
    command = ["split", source, "--tp", TP, "--ranks", "1,0", "-o", folder]
    result = call(*command)
    expected = f"shardconv: {folder}: exists: choose another path with -o, or pass --overwrite\n"
    assert (result.code, result.err) == (1, expected)
    assert call(*command, "--overwrite", "--quiet").code == 0
    assert contents(folder) == before


def test_plan_for_another_tp_names_the_command_that_executes_it(source, tmp_path):
    split(source, tmp_path, "0-3")
    folder = tmp_path / "host0"
    line = f"{folder} has 4 ranks: this is the plan of shardconv reshard {folder} --tp 2\n"
    assert line in call("plan", folder, "--tp", 2).out
    shown = call("plan", folder, "--tp", 4).out
    assert "this is the plan of" not in shown
    assert "this folder has" not in shown


@pytest.mark.parametrize("options", [(), ("--tp", "2")], ids=["stored tp", "another tp"])
def test_plan_names_the_ranks_of_a_folder(source, tmp_path, options):
    split(source, tmp_path, "0,3")
    assert "this folder has ranks 0, 3 of 4\n" in call("plan", tmp_path / "host0", *options).out
    report = json.loads(call("plan", tmp_path / "host0", *options, "--json").out)
    assert (report["stored_tp"], report["ranks"]) == (4, [0, 3])
