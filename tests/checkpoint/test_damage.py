"""Damaged split checkpoints: verify reports where the damage is, merge and reshard refuse them."""

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardconv.checkpoint.operations.split import split
from shardconv.checkpoint.operations.verify import verify
from shardconv.files.containers.safetensors import read_header
from shardconv.layouts.layout import NATIVE
from tests.support.checkpoints import contents, llama_config, llama_specs, write_checkpoint, write_weights
from tests.support.command import call
from tests.support.damage import flip, place
from tests.support.manifests import change_manifest, change_text
from tests.support.matrix import cases, each_once

TP = 4
RANK_FILES = [NATIVE.rank_file(rank, TP) for rank in range(TP)]
LAYER = "model.layers.0"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Split checkpoints of one source with and without checksums, and of another of the same shape."""
    folder = tmp_path_factory.mktemp("made")
    for name, seed in (("source", 0), ("other-source", 1)):
        write_checkpoint(folder / name, parts=2, config=llama_config(layers=1), seed=10 * seed)
    split(folder / "source", folder / "split", tp=TP)
    split(folder / "source", folder / "unsummed", tp=TP, checksums=False)
    split(folder / "other-source", folder / "other", tp=TP)
    return folder


@pytest.fixture(params=["split", "unsummed"])
def either(request, made, tmp_path) -> Path:
    """A copy of a split checkpoint, with and without checksums."""
    return shutil.copytree(made / request.param, tmp_path / "split")


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy of a split checkpoint with checksums."""
    return shutil.copytree(made / "split", tmp_path / "split")


def check_refused(folder: Path, *words: str, verified: bool = True) -> None:
    """Check that verify exits 3 and prints ``words``, and that merge and reshard exit 1 and write nothing."""
    before = sorted(contents(folder.parent))
    result = call("verify", folder)
    assert result.code == (3 if verified else 1)
    said = result.out if verified else result.err
    assert all(word in said for word in words), said
    for command in (["merge", folder], ["reshard", folder, "--tp", "2"], ["reshard", folder, "--tp", TP]):
        result = call(*command, "-o", folder.parent / "result")
        assert (result.code, result.out) == (1, "")
        assert "internal error" not in result.err
        assert result.err.startswith("shardconv: ")
    assert sorted(contents(folder.parent)) == before


def remove(path: Path) -> None:
    path.unlink()


def resize(change: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, max(path.stat().st_size + change, 0))


def test_undamaged_checkpoint_passes(either):
    result = call("verify", either)
    assert result.code == 0
    summed = verify(either).has_checksums
    assert result.out.endswith("correct\n" if summed else "--against SRC compares all\n")
    assert ("no checksums: " in result.out) is not summed


def test_checkpoint_without_checksums_is_not_verified(made, tmp_path):
    """merge says so, and reshard adds none."""
    folder = shutil.copytree(made / "unsummed", tmp_path / "split")
    flip(folder / RANK_FILES[1], place(folder / RANK_FILES[1], f"{LAYER}.mlp.up_proj.weight")[9])
    result = call("merge", folder, "-o", tmp_path / "merged")
    line = r": \d+ tensors, .*B, as the source, but not verified \(no checksums\); .*/s"
    assert (result.code, bool(re.search(line, result.out))) == (0, True)
    assert re.search(line, call("merge", folder, "-o", tmp_path / "quiet", "-q").err)
    assert call("reshard", folder, "--tp", "2", "-o", tmp_path / "two").code == 0
    assert not verify(tmp_path / "two").has_checksums


def test_rank_file_without_read_permission(folder, monkeypatch):
    """An error, not a difference: the file may be correct."""
    opened = os.open

    def refuse(path, *arguments, **options):
        if Path(path).name == RANK_FILES[1]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    check_refused(folder, f"{RANK_FILES[1]}: cannot be opened: Permission denied", verified=False)


# --- bits -----------------------------------------------------------------------------------------------------------


TENSORS = [
    "model.embed_tokens", f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.down_proj", "model.norm",
    f"{LAYER}.self_attn.k_proj",
]  # fmt: skip


@pytest.mark.parametrize(("tensor", "at", "rank"), each_once(itertools.product(TENSORS, [0, -1]), range(TP)))
def test_flipped_bit_of_a_tensor_is_found(folder, rank, tensor, at):
    """Sharded by rows and by columns, replicated, replicated KV heads; the first and the last byte."""
    path = folder / RANK_FILES[rank]
    flip(path, place(path, f"{tensor}.weight")[at])
    check_refused(folder, path.name)


@pytest.mark.parametrize(
    ("tensor", "rank"), each_once(["model.norm.weight", f"{LAYER}.self_attn.v_proj.weight"], range(TP))
)
def test_flipped_bit_of_a_replica_is_found(either, rank, tensor):
    """Replicated tensors and KV heads are compared, also without checksums."""
    path = either / RANK_FILES[rank]
    flip(path, place(path, tensor)[5])
    sharers = TP if "norm" in tensor else 2
    differing = rank if rank % sharers else rank + 1  # of two that differ, the higher rank is named
    said = [path.name] if verify(either).has_checksums else [tensor, RANK_FILES[differing]]
    check_refused(either, *said)


@pytest.mark.parametrize("at", [-128, -1])
def test_flipped_bit_of_the_padding_is_found(either, at):
    path = either / RANK_FILES[-1]
    flip(path, place(path, "lm_head.weight")[at])
    padding = [] if verify(either).has_checksums else ["the padding of lm_head.weight is not zero"]
    check_refused(either, path.name, *padding)


@pytest.mark.parametrize(("position", "rank"), each_once([0, 7, 8, 20, 400, -1], range(TP)))
def test_flipped_bit_of_a_header_is_found(either, rank, position):
    path = either / RANK_FILES[rank]
    flip(path, position % read_header(path).data_offset)
    check_refused(either, f"{path}: its header is not the expected one")


def test_all_differences_are_reported(folder):
    for name in RANK_FILES[1:3]:
        flip(folder / name, place(folder / name, f"{LAYER}.mlp.up_proj.weight")[0])
    (folder / "tokenizer.json").write_text("{}")
    found = verify(folder).differences
    assert sorted(difference.partition(":")[0] for difference in found) == [*RANK_FILES[1:3], "tokenizer.json"]


def test_against_the_source_names_tensor_and_byte(made, tmp_path):
    """Without checksums, only the comparison with the source finds a wrong shard."""
    folder = shutil.copytree(made / "unsummed", tmp_path / "split")
    name = f"{LAYER}.mlp.gate_proj.weight"
    path = folder / RANK_FILES[1]
    flip(path, place(path, name)[3])
    assert call("verify", folder).code == 0
    result = call("verify", folder, "--against", made / "source")
    shard_bytes = len(place(path, name))
    assert result.code == 3
    assert f"{name}: byte {shard_bytes + 3} of the tensor differs from the source" in result.out


@pytest.mark.parametrize("name", ["split", "unsummed"])
def test_against_a_source(made, name):
    """Differences from the source alone are not damage."""
    assert call("verify", made / name, "--against", made / "source").out.endswith("correct\n")
    report = verify(made / name, against=made / "other-source")
    assert report.differences
    assert not report.is_damaged


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": ("F16", (64,))}, "model.norm.weight: is BF16 [64] (expected F16 [64] as in {})"),
        ({"extra": ("U8", (1,))}, "extra: is in {} only"),
        ({"lm_head.weight": None}, "lm_head.weight: is not in {}"),
    ],
)
def test_against_a_source_of_another_shape(made, tmp_path, change, said):
    specs = {name: spec for name, spec in {**llama_specs(llama_config(layers=1)), **change}.items() if spec is not None}
    other = write_weights(tmp_path / "other.safetensors", specs)
    result = call("verify", made / "split", "--against", other)
    assert result.code == 3
    assert [line for line in result.out.splitlines() if said.format(other) in line]
    assert "is another model" not in result.out


def test_against_a_source_with_an_additional_tensor_compares_all_others(made, tmp_path):
    source = shutil.copytree(made / "source", tmp_path / "source")
    write_weights(source / "extra.safetensors", {"model.layers.0.mlp.gate_proj.bias": ("BF16", (96,))})
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.mlp.gate_proj.bias"] = "extra.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    path = min(source.glob("model-*.safetensors"))
    flip(path)
    name = [*read_header(path).tensors()][-1]
    found = verify(made / "unsummed", against=source).differences
    assert any("gate_proj.bias: is in " in text for text in found)
    assert any(text.startswith(f"{name}: byte ") for text in found)


def test_against_another_model_is_one_difference(made, tmp_path):
    other = write_checkpoint(tmp_path / "other", config=llama_config(hidden=32))
    result = call("verify", made / "split", "--against", other)
    assert result.code == 3
    (line,) = [line for line in result.out.splitlines() if line.startswith("differs: ")]
    assert f"{other}: is another model (of " in line
    assert "verification failed: 1 difference: pass the source that was split to --against" in result.out


def test_config_that_the_split_replaced_is_not_a_difference(made, tmp_path):
    config = {**llama_config(layers=1), "rope_theta": 123.0}
    (tmp_path / "given.json").write_text(json.dumps(config))
    split(made / "source", tmp_path / "split", tp=2, config=tmp_path / "given.json")
    report = verify(tmp_path / "split", against=made / "source")
    assert (report.differences, report.left_out) == ((), {"config.json": "replaced by --config of the split"})
    (tmp_path / "split" / "config.json").write_text("{}")
    assert verify(tmp_path / "split").differences == ("config.json: differs from its checksum",)


# --- files ----------------------------------------------------------------------------------------------------------


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link_out(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


WAYS = [
    (remove, f"{{path.name}}: is missing (expected {TP} rank files)"),
    (replace_by_pipe, "{path.name}: is missing"),
    (replace_by_link_out, "{path.name}: is a link out of its folder"),
    *((resize(change), "{path}: was modified or truncated (got ") for change in (-1, 1, -10_000)),
    (resize(-(10**9)), "{path.name}: was modified or truncated (got 0 bytes"),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("way", "name"), each_once(range(len(WAYS)), RANK_FILES))
def test_rank_file_that_is_missing_or_another_kind_or_size(either, name, way):
    damage, message = WAYS[way]
    damage(either / name)
    check_refused(either, message.format(path=either / name))


@pytest.mark.parametrize("ranks", [(0, 1), (1, 2), (0, 3)])
def test_two_swapped_rank_files(folder, ranks):
    one, two = (folder / RANK_FILES[rank] for rank in ranks)
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)
    check_refused(folder, f"{one.name}: ", f"got the bytes of {two.name}")


def test_rank_file_of_another_split(folder, made):
    """With the same shapes and other values: the identity in its header differs, and without it the checksums do."""
    name = RANK_FILES[1]
    ours, theirs = (folder / name).read_bytes(), (made / "other" / name).read_bytes()
    (folder / name).write_bytes(theirs)
    check_refused(folder, f"{name}: ", "it was modified or is of another checkpoint")
    header = read_header(made / "split" / name).data_offset
    (folder / name).write_bytes(ours[:header] + theirs[header:])
    check_refused(folder, f"{name}: ", "differ from their checksum")


@pytest.mark.parametrize(
    "damaged", [{1: "lm_head"}, {0: "model.norm"}, {2: "model.norm"}, {1: "model.norm", 2: "model.norm"}]
)
def test_damage_in_a_stripe_with_several_tensors(tmp_path, damaged):
    """Only a replicated tensor that differs on one rank is named; or else all of the stripe are."""
    config = llama_config(layers=1)
    split(write_checkpoint(tmp_path / "source", config=config), tmp_path / "split", tp=TP)
    for rank, name in damaged.items():
        path = tmp_path / "split" / RANK_FILES[rank]
        flip(path, place(path, f"{name}.weight")[rank])
    names = list(llama_specs(config, "BF16"))
    tensors = f"one or more of {len(names)} tensors from {names[0]} to {names[-1]}"
    if [*damaged.values()] == ["model.norm"]:
        tensors = f"model.norm.weight (possibly also of others of these {len(names)} tensors)"
    assert verify(tmp_path / "split").differences == tuple(
        f"{RANK_FILES[rank]}: the bytes of {tensors} differ from their checksum" for rank in damaged
    )


@pytest.mark.parametrize("damage", [flip, remove])
def test_remedy_of_damage(folder, made, damage):
    """merge and reshard say it, with the path; verify says it once for all, and not that the source is another."""
    path = folder / RANK_FILES[1]
    damage(path)
    for command in (["merge", folder], ["reshard", folder, "--tp", "2"]):
        found = call(*command, "-o", folder.parent / "result").err
        assert found.startswith(f"shardconv: {path}: ")
        assert re.search(r": copy it (again|to this folder), or split the source again\n$", found)
    for options in ([], ["--against", made / "source"]):
        *_, difference, verdict = call("verify", folder, *options).out.splitlines()
        assert path.name in difference
        assert "copy it" not in difference
        assert verdict.endswith(": copy the damaged files again, or split the source again")
    report = verify(folder, against=made / "source")
    assert report.is_damaged
    assert report.checked[:1] == ("auxiliary files",)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("to", "said"),
    [(None, "is missing"), ("shardconv.json", "differs from its checksum"), ("../secret", "a link out")],
)
def test_auxiliary_file_changed_missing_or_replaced(either, name, to, said):
    (either.parent / "secret").write_text("secret")
    path = either / name
    path.unlink()
    if to is not None:
        path.symlink_to(to)
    check_refused(either, f"{name}: ", said)
    result = call("merge", either, "-o", either.parent / "result")
    assert f"{path}: " in result.err
    assert said in result.err


def test_auxiliary_file_in_a_folder_that_is_a_link(made, tmp_path):
    source = shutil.copytree(made / "source", tmp_path / "source")
    (source / "sub").mkdir()
    (source / "sub" / "notes.txt").write_text("notes")
    split(source, tmp_path / "split", tp=2)
    (tmp_path / "split" / "sub").rename(tmp_path / "outside")
    (tmp_path / "split" / "sub").symlink_to(tmp_path / "outside")
    check_refused(tmp_path / "split", "sub/notes.txt: is missing, not a regular file, or a link out of its folder")


def test_split_checkpoint_in_a_hugging_face_cache(folder, made, tmp_path):
    """There every file is a link to a blob next to the snapshots."""
    snapshot, blobs = tmp_path / "models--org--split" / "snapshots" / "1f", tmp_path / "models--org--split" / "blobs"
    shutil.copytree(folder, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert call("verify", snapshot).code == 0
    assert call("merge", snapshot, "-o", tmp_path / "merged").code == 0
    assert contents(tmp_path / "merged") == contents(made / "source")


# --- the manifest ---------------------------------------------------------------------------------------------------


def test_manifest_with_a_recomputed_checksum_is_read(folder):
    """Otherwise the following tests would not test anything."""
    change_manifest(folder, lambda data: data.update(created_by="somebody"))
    assert call("verify", folder).code == 0


def in_manifest(change: Callable[[dict[str, Any]], object], *, sign: bool = True) -> Callable[[Path], None]:
    return lambda folder: change_manifest(folder, change, sign=sign)


def with_text(old: bytes, new: bytes) -> Callable[[Path], None]:
    return lambda folder: change_text(folder, old, new)


def replace_manifest(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / "shardconv.json").unlink()
        make(folder / "shardconv.json")

    return replace


def text(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "shardconv.json").write_text(content) and None


UNSAFE_NAMES = [
    "../evil", "../../evil", "/tmp/evil", "sub/../../evil", "./evil", "", ".", "..", "C:\\evil", "..\\evil", "evil\0",
    "evil\n",
]  # fmt: skip
PLACES: dict[str, Callable[[dict[str, Any], str], object]] = {
    "source file": lambda data, name: data["source_files"][0].__setitem__(0, name),
    "index": lambda data, name: data["index"].__setitem__(0, name),
    "auxiliary file": lambda data, name: data["auxiliary_files"].update({name: "0" * 32}),
}
TEXTS = ["", "{", "[]", "null", "{}", "\ufeff{}", "[" * 100_000, '{"format_version": true}']
FIELDS = ["created_by", "plan", "request", "source_files", "auxiliary_files", "checksums", "manifest_checksum", "x"]
FOLDER, STRIPES = b'"is_folder":true', b'"stripe_bytes":33554432'
DEEP = b"[" * 10**5 + b"]" * 10**5

#: Problem to a change of the folder, and the message.
MANIFESTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (replace_manifest(lambda _: None), "a rank file of shardconv, without its manifest (no shardconv.json)"),
    "folder": (replace_manifest(Path.mkdir), "shardconv.json: cannot be used: it is not a regular file"),
    "pipe": (replace_manifest(os.mkfifo), "shardconv.json: cannot be used"),
    **{f"text {one:.30}": (text(one), "shardconv.json: cannot be used") for one in TEXTS},
    "older": (
        in_manifest(lambda data: data.update(format_version=0), sign=False),
        "(got 0, expected 1): copy it again, or split the source again",
    ),
    **{
        f"changed {key}": (in_manifest(lambda data, key=key: data.update({key: 0}), sign=False), "was changed after")
        for key in FIELDS
    },
    "key twice": (with_text(FOLDER, FOLDER + b"," + FOLDER), "cannot be used"),
    "name twice": (with_text(b'"auxiliary_files":{', b'"auxiliary_files":{"config.json":"",'), "cannot be used"),
    "space": (with_text(FOLDER, b'"is_folder": true'), "cannot be used"),
    "NaN": (with_text(STRIPES, b'"stripe_bytes":NaN'), "cannot be used"),
    "unknown key": (with_text(STRIPES, STRIPES + b',"x":0'), "cannot be used"),
    "nested deeply": (with_text(FOLDER, b'"is_folder":' + DEEP), "cannot be used"),
    "of a padded checkpoint": (in_manifest(lambda data: data.update(original_config="{}")), "belongs to a padded"),
    **{
        f"ignore {one!r}": (in_manifest(lambda data, one=one: data.update(ignore=one)), "cannot be used")
        for one in ("*.gguf", {"*.gguf": 1}, [1], None, 7)
    },
    "engine": (in_manifest(lambda data: data["request"].update(engine="other")), "engine 'other' is not supported"),
    "options": (in_manifest(lambda data: data["request"].update(pad=1, engine="vllm")), "cannot be used"),
    **{
        f"{where} {name!r}": (in_manifest(lambda data, at=PLACES[where], name=name: at(data, name)), "cannot be used")
        for name, where in zip(UNSAFE_NAMES, itertools.cycle(PLACES))
    },
    **{
        f"auxiliary {name}": (
            in_manifest(lambda data, name=name: data["auxiliary_files"].update({name: "0" * 32})),
            "two of its files have the same name",
        )
        for name in ("shardconv.json", RANK_FILES[0], "model-00001-of-00002.safetensors")
    },
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", MANIFESTS)
def test_manifest_that_cannot_be_used(folder, what):
    change, message = MANIFESTS[what]
    (folder.parent / "evil").write_text("not to be read")
    change(folder)
    check_refused(folder, message, verified=False)


def fields(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a manifest; of equal ones only the first."""
    few = 10 if isinstance(data, dict) else 2
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(way for key, value in list(inner)[:few] for way in fields(value, (*path, key)))]


@pytest.mark.parametrize(
    "value",
    cases([None, -1, 10**30, True, "x", [], {}, [[]], {"x": 0}, 0.5], lambda value: value in ("x", 10**30)),
    ids=repr,
)
def test_replaced_field_gives_an_error_or_a_report(folder, value):
    """Any value in a manifest with a correct checksum gives one message or a report, never a traceback."""
    path = folder / "shardconv.json"
    original = path.read_text()
    for way in fields(json.loads(original))[1:]:
        if way[0] == "manifest_checksum":
            continue
        path.write_text(original)

        def change(data: dict[str, Any], way: tuple[Any, ...] = way) -> None:
            for key in way[:-1]:
                data = data[key]
            data[way[-1]] = value

        change_manifest(folder, change)
        for command in (["verify", folder], ["reshard", folder, "--tp", "2", "--dry-run", "-o", folder.parent / "x"]):
            result = call(*command)
            assert result.code in {0, 1, 3}, (way, result)
            assert "internal error" not in result.err, (way, result.err)
    assert [path.name for path in folder.parent.iterdir()] == ["split"]
