"""Source checkpoints on disk: which files belong to one, and which folders are refused."""

import json
import os
import shutil
from pathlib import Path

import pytest

import shardconv
from shardconv.checkpoint.sources import source_files
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.source import Source
from shardconv.files.containers.safetensors import read_header
from shardconv.files.folder import Compressed
from shardconv.files.weight_formats import SAFETENSORS
from shardconv.support.errors import SourceError, SplitCheckpointError
from tests.support.checkpoints import (
    contents,
    llama_config,
    llama_specs,
    part_names,
    safetensors_bytes,
    stored,
    write_checkpoint,
    write_config,
    write_index,
    write_weights,
)
from tests.support.faults import refuse_to_list

INDEX = "model" + SAFETENSORS.index_suffix
PARTS = part_names(3)
FIRST_TENSOR = "model.embed_tokens.weight"  # it is in the first source file


@pytest.fixture
def single(tmp_path) -> Path:
    """A folder with one file."""
    return write_checkpoint(tmp_path / "single")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with three source files and their index."""
    return write_checkpoint(tmp_path / "folder", parts=3)


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def refuses(path: Path, match: str, **options) -> None:
    with pytest.raises(SourceError, match=match):
        open_source(path, **options)


# --- what is read ---------------------------------------------------------------------------------------------------


def test_file(tmp_path):
    specs = llama_specs(llama_config())
    path = write_weights(tmp_path / "weights.safetensors", specs, metadata={"format": "pt", "x": "y"})
    source = open_source(path)
    assert stored(source) == specs
    assert source.metadata == {"format": "pt", "x": "y"}
    assert (source.is_folder, source.config, source.index, source.auxiliary_files) == (False, None, None, {})


def test_file_has_the_config_next_to_it_and_no_other_auxiliary_file(single):
    source = open_source(single / "model.safetensors")
    assert source.config == llama_config()
    assert list(source.auxiliary_files) == ["config.json"]


@pytest.mark.parametrize("name", ["model.safetensors", "diffusion_pytorch_model.safetensors"])
def test_folder_with_one_file(single, name):
    (single / "model.safetensors").rename(single / name)
    source = open_source(single)
    assert [part.name for part in source.files] == [name]
    assert sorted(source.auxiliary_files) == ["config.json", "tokenizer.json"]
    assert source.is_folder
    assert source.config == llama_config()


def test_folder_with_several_files(folder):
    source = open_source(folder)
    assert [part.name for part in source.files] == PARTS
    assert list(source.specs) == list(weight_map(folder))
    assert stored(source) == llama_specs(llama_config())
    assert source.index == (INDEX, Compressed((folder / INDEX).read_bytes()))
    assert sorted(source.auxiliary_files) == ["config.json", "tokenizer.json"]
    assert source.left_out == {}
    assert source.num_bytes == sum(part.header.data_bytes for part in source.files)


def test_index_as_source(folder, monkeypatch):
    assert open_source(folder / INDEX) == open_source(folder)
    monkeypatch.chdir(folder)
    assert [part.name for part in open_source(Path(INDEX)).files] == PARTS


def test_config_option(single, tmp_path):
    other = write_config(tmp_path, {"model_type": "other"})
    source = open_source(single, config=other)
    assert source.config == {"model_type": "other"}
    assert source.auxiliary_files["config.json"] == other


def test_metadata_of_the_first_file_takes_precedence(folder):
    """Keys that only later files have are kept."""
    specs = open_source(folder).files
    for number, part in enumerate(specs[:2]):
        tensors = {name: (info.dtype, info.shape) for name, info in part.header.tensors().items()}
        write_weights(part.path, tensors, metadata={"both": str(number), f"only{number}": "x"})
    assert open_source(folder).metadata == {"both": "0", "only0": "x", "only1": "x", "format": "pt"}


def test_tensors_are_in_the_order_of_their_data(tmp_path):
    """The order in the header may differ."""
    entry = {"dtype": "U8", "shape": [1]}
    header = {"b": {**entry, "data_offsets": [1, 2]}, "a": {**entry, "data_offsets": [0, 1]}}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(header, b"ab"))
    assert list(open_source(path).specs) == ["a", "b"]


def test_auxiliary_files_include_subfolders_but_not_hidden_ones(single):
    for name in ("runs/a/log.txt", "1_Pooling/config.json", ".cache/secret.txt", "runs/.git/config", ".gitattributes"):
        path = single / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    source = open_source(single)
    expected = [".gitattributes", "1_Pooling/config.json", "config.json", "runs/a/log.txt", "tokenizer.json"]
    assert sorted(source.auxiliary_files) == expected
    assert source.left_out == {".cache/": "hidden folder", "runs/.git/": "hidden folder"}
    assert source.config == llama_config()


@pytest.mark.parametrize(("name", "is_needed"), [("", True), ("extra", True), ("extra/deep", True), (".cache", False)])
def test_folder_without_read_permission(single, monkeypatch, name, is_needed):
    """An error, as its files would be missing; but hidden folders are not read, and are reported as left out."""
    (single / name).mkdir(parents=True, exist_ok=True)
    refuse_to_list(monkeypatch, single / name)
    if is_needed:
        refuses(single, f"{name or 'single'}: cannot be read: Permission denied")
    else:
        assert open_source(single).left_out == {f"{name}/": "hidden folder"}


# --- the Hugging Face cache -----------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(folder, tmp_path) -> Path:
    """The folder as in the cache of huggingface_hub: links to a folder of blobs."""
    snapshot = tmp_path / "hub" / "models--org--tiny-llama" / "snapshots" / "0123abcd"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{number:064x}"
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs", blob.name))
    return snapshot


def without_place(source: Source) -> tuple:
    parts = tuple((part.name, part.header) for part in source.files)
    return parts, source.index, source.config, sorted(source.auxiliary_files), source.left_out


@pytest.mark.parametrize("named", ["", INDEX])
def test_snapshot(snapshot, folder, named):
    assert without_place(open_source(snapshot / named)) == without_place(open_source(folder))
    assert open_source(snapshot).name == "tiny-llama"
    (snapshot / "config.json").resolve().unlink()
    refuses(snapshot, "config.json: is not a regular file .*link")


# --- links out of the folder ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [PARTS[1], "tokenizer.json", "config.json", INDEX])
def test_link_out_of_the_folder(folder, tmp_path, name):
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    refuses(folder, f"{name}: is a link out of its folder: pass follow_links=True")
    source = open_source(folder, follow_links=True)
    assert stored(source) == llama_specs(llama_config())
    assert source.config == llama_config()


def test_config_that_is_a_link_out_of_the_folder(single, tmp_path):
    """Next to a file as the source."""
    (single / "config.json").rename(tmp_path / "elsewhere.json")
    (single / "config.json").symlink_to(tmp_path / "elsewhere.json")
    refuses(single / "model.safetensors", "config.json: is a link out of its folder")
    assert open_source(single / "model.safetensors", follow_links=True).config == llama_config()


def test_config_that_is_a_broken_link(single):
    """An error: otherwise the checkpoint would be planned without a config."""
    (single / "config.json").unlink()
    (single / "config.json").symlink_to("gone")
    refuses(single / "model.safetensors", "config.json: cannot be read: No such file")


def test_link_within_the_folder(folder):
    (folder / "tokenizer.json").rename(folder / "real.json")
    (folder / "tokenizer.json").symlink_to("real.json")
    assert sorted(open_source(folder).auxiliary_files) == ["config.json", "real.json", "tokenizer.json"]


def test_link_to_a_folder_whose_name_has_the_same_prefix(folder, tmp_path):
    """`folder-x` has the prefix `folder`, but is outside of it."""
    outside = tmp_path / "folder-x"
    outside.mkdir()
    (outside / "notes").write_text("secret")
    (folder / "notes").symlink_to("../folder-x/notes")
    refuses(folder, "link out of its folder")


@pytest.mark.parametrize("follow_links", [False, True])
def test_link_to_a_folder(folder, follow_links):
    """An error: it is not followed, as there may be cycles, and not ignored."""
    (folder / "sub").mkdir()
    (folder / "again").symlink_to("sub", target_is_directory=True)
    refuses(folder, "again: is not a regular file .*link", follow_links=follow_links)


# --- indexes that lie -----------------------------------------------------------------------------------------------

NO_NAMES = [
    "../evil.safetensors", "sub/../../evil.safetensors", "/etc/evil.safetensors", "sub/evil.safetensors",
    "./model.safetensors", "C:\\evil.safetensors", "C:evil.safetensors", "..\\evil.safetensors",
    "\\\\host\\share\\evil.safetensors", "", ".", "..", "evil\0.safetensors", "evil\n.safetensors",
    "evil\ud800.safetensors", "passwd", "pytorch_model.bin", "model.safetensors\0", None, 7, ["model.safetensors"], {},
]  # fmt: skip


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_index_with_an_invalid_file_name(folder, name):
    """Refused even if such a file exists and is valid."""
    write_weights(folder.parent / "evil.safetensors", {"x": ("U8", (1,))})
    write_index(folder, {**weight_map(folder), "x": name})
    refuses(folder, "'x' has an invalid file name .* in the same folder")


NO_OBJECTS = ["", "{", "[]", '"x"', "null", "\ufeff{}", "[" * 100_000]
NO_INDEXES = ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map"', '{"weight_map": "\udcff"}']


@pytest.mark.parametrize("text", [*NO_OBJECTS, *NO_INDEXES], ids=lambda text: repr(text)[:20])
def test_file_that_is_not_an_index(folder, text):
    (folder / INDEX).write_text(text, errors="surrogateescape")
    refuses(folder, f"{INDEX}: (is not JSON|is not a JSON object|does not have a weight_map|is not UTF-8)")


def test_index_lists_a_tensor_that_its_file_does_not_have(folder):
    for name in ("\ud800ghost", "ghost"):  # a name that is not UTF-8
        write_index(folder, {**weight_map(folder), name: PARTS[0]})
        refuses(folder, rf"{INDEX}: tensor \S*ghost is in no file .*expected {PARTS[0]}.: .*download both again")
    names = {name: file for name, file in weight_map(folder).items() if name != "ghost"}
    write_index(folder, {**names, FIRST_TENSOR: PARTS[1]})
    refuses(folder, f"{FIRST_TENSOR} is in {PARTS[0]} \\(expected {PARTS[1]}\\): .*download both again")


def test_index_that_changes_while_the_files_are_read(folder, monkeypatch):
    """The error is about the index that named the files."""
    write_index(folder, {**weight_map(folder), "ghost": PARTS[0]})

    def read_and_damage(path):
        (folder / INDEX).write_text("{}")
        return read_header(path)

    monkeypatch.setattr(source_files, "read_header", read_and_damage)
    refuses(folder, "tensor ghost is in no file of the index")


def test_index_lacks_a_tensor_of_a_file(folder):
    names = weight_map(folder)
    del names[FIRST_TENSOR]
    write_index(folder, names)
    refuses(folder, f"{FIRST_TENSOR} of {PARTS[0]} is not in the index: .*download both again")
    del names["model.norm.weight"]
    write_index(folder, names)
    refuses(folder, f"{FIRST_TENSOR} of {PARTS[0]} is not in the index, nor are 1 more tensors: ")
    refuses(folder / INDEX, f"{FIRST_TENSOR} of {PARTS[0]} is not in the index")


def test_index_lists_some_of_the_tensors_of_one_file(single):
    """The message proposes to pass the file, which has all tensors."""
    names = dict.fromkeys(list(open_source(single).specs)[1:], "model.safetensors")
    write_index(single, names)
    refuses(single, f"{FIRST_TENSOR} of model.safetensors is not in the index: .* or pass .*/model.safetensors instead")
    assert stored(open_source(single / "model.safetensors")) == llama_specs(llama_config())


def test_index_of_one_file_with_the_same_name(single):
    """There is only one checkpoint, so this is not ambiguous."""
    write_index(single, dict.fromkeys(open_source(single).specs, "model.safetensors"))
    source = open_source(single)
    assert stored(source) == llama_specs(llama_config())
    assert source.index is not None
    assert source.left_out == {}


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_missing_source_file(folder, part):
    (folder / part).unlink()
    refuses(folder, f"{part} is missing, but {INDEX} lists it: download the folder again")


def test_source_file_of_an_earlier_save(folder):
    """A file of an earlier, larger save: whether it belongs to the checkpoint is unknown."""
    stale = part_names(4)[3]
    shutil.copyfile(folder / PARTS[0], folder / stale)
    refuses(
        folder, f'holds weights that are not in {INDEX}: {stale}. .* pass ignore=."{stale}"., or pass .*{INDEX} instead'
    )
    assert open_source(folder / INDEX).left_out == {stale: "not in the given index"}
    assert open_source(folder, ignore=(stale,)).left_out == {stale: f"ignored by '{stale}'"}


def test_several_source_files_without_an_index(folder):
    (folder / INDEX).unlink()
    refuses(folder, "holds files of a checkpoint .* without their index .*: download the folder again")


def test_source_files_without_an_index_next_to_a_single_file(folder):
    """Whether the single file is complete or old is unknown."""
    (folder / INDEX).unlink()
    write_weights(folder / "model.safetensors", {"x": ("U8", (2,))})
    refuses(folder, r"not in model.safetensors: .*pass .*, or pass .*/model.safetensors instead of the folder")
    assert stored(open_source(folder, ignore=("model-*",))) == {"x": ("U8", (2,))}


def test_index_next_to_a_single_file_of_its_name(folder):
    specs = {"x": ("U8", (2,))}
    write_weights(folder / "model.safetensors", specs)
    refuses(folder, f"has both model.safetensors and {INDEX}: pass one of them")
    assert stored(open_source(folder / "model.safetensors")) == specs
    assert list(open_source(folder / INDEX).left_out) == ["model.safetensors"]
    assert stored(open_source(folder, ignore=("model.safetensors",))) == llama_specs(llama_config())


def write_variant(folder: Path, variant: str, *, index: bool, numbers_last: bool = False) -> list[str]:
    """Write a variant with the names of transformers, or of older versions of diffusers; returns its files."""
    (first,) = part_names(1, f"model{variant}") if not numbers_last else [f"model-00001-of-00001{variant}.safetensors"]
    names = [first, f"model.safetensors.index{variant}.json"] if index else [f"model{variant}.safetensors"]
    write_weights(folder / names[0], {"x": ("F16", (2,))})
    if index:
        write_index(folder, {"x": first}, names[1])
    return names


@pytest.mark.parametrize(("index", "numbers_last"), [(False, False), (True, False), (True, True)])
def test_the_only_variant_of_a_folder_is_read_and_merged_with_its_names(tmp_path, index, numbers_last):
    source = tmp_path / "source"
    source.mkdir()
    names = write_variant(source, ".fp16", index=index, numbers_last=numbers_last)
    (source / "config.json").write_text('{"model_type": "llama"}')
    assert list(open_source(source).auxiliary_files) == ["config.json"]
    shardconv.split(source, tmp_path / "split", tp=1, replicate="x")
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    assert contents(source).keys() == {*names, "config.json"}


def test_files_that_the_index_lists_are_not_variants(tmp_path):
    """As in checkpoints with multi-token prediction."""
    names = ["model-00001-of-00001.safetensors", "model.mtp.safetensors", "model.text.safetensors"]
    for number, name in enumerate(names):
        write_weights(tmp_path / name, {f"x{number}": ("F16", (2,))})
    write_index(tmp_path, {f"x{number}": name for number, name in enumerate(names)})
    assert [path.name for path in open_source(tmp_path).paths] == names


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("other_index", [False, True])
@pytest.mark.parametrize("other", ["", ".bf16", ".8bit", ".fp8-e4m3"])
def test_several_variants_are_listed_and_each_can_be_chosen(tmp_path, index, other_index, other):
    found = [write_variant(tmp_path, ".fp16", index=index), write_variant(tmp_path, other, index=other_index)]
    entries = sorted(names[-1] for names in found)
    refuses(tmp_path, rf"holds 2 variants of a checkpoint \({', '.join(entries)}\): pass one of these files")
    for (file, *_), others in zip(found, reversed(found), strict=True):
        assert open_source(tmp_path, ignore=tuple(others)).paths == (tmp_path / file,)
    for names in found:
        assert open_source(tmp_path / names[-1]).paths == (tmp_path / names[0],)


# --- auxiliary files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", NO_OBJECTS, ids=lambda text: repr(text)[:20])
@pytest.mark.parametrize("named", ["", "model.safetensors"])
def test_config_that_is_not_a_json_object(single, text, named):
    (single / "config.json").write_text(text)
    refuses(
        single / named, r"config.json: is not (JSON|a JSON object) \(.*\): correct it, or download or copy it again"
    )


def test_config_that_is_a_pointer_of_git_lfs(single):
    (single / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 700\n")
    refuses(single, "config.json: is a pointer of git LFS, not the file itself: run git lfs pull")


def test_config_option_with_a_missing_file(single, tmp_path):
    refuses(single, r"config=.*nowhere\.json.: does not exist: correct the path$", config=tmp_path / "nowhere.json")
    (tmp_path / "somewhere.json").write_text("{}")
    similar = r"does not exist \(similar: .*somewhere\.json\): correct the path"
    refuses(single, similar, config=tmp_path / "nowhere.json")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["pipe", "config.json", INDEX, "sub/pipe"])
def test_pipe(folder, name):
    """An error: opening it would block forever, and ignoring it would be silent."""
    path = folder / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    refuses(folder, f"{path.name}: is not a regular file")


@pytest.mark.parametrize("name", ["a:b.txt", "a\\b.txt", "a\nb.txt", "sub\\x/b.txt", os.fsdecode(b"\xff.txt")])
def test_auxiliary_file_with_a_name_that_a_manifest_may_not_have(single, name):
    """The manifest could not be read, so the split is refused."""
    path = single / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    refuses(single, "rename it")


# --- not a source ---------------------------------------------------------------------------------------------------


def test_empty_folder(tmp_path):
    problem = "holds no .safetensors or PyTorch file and no weights in another known format"
    refuses(tmp_path, f"{problem}: pass the folder of a model, or one of its weight files$")


def test_folder_with_checkpoints_in_subfolders(tmp_path):
    write_checkpoint(tmp_path / "unet")
    write_checkpoint(tmp_path / "text_encoder")
    refuses(tmp_path, r"its subfolders do \(text_encoder, unet\): pass one of them")


def test_folder_with_many_checkpoints_names_five_and_sources_first(tmp_path):
    for number in range(8):
        write_checkpoint(tmp_path / f"model-{number}")
    for name in ("model-0", "model-1", "model-2", "model-3"):
        (tmp_path / name / "shardconv.json").write_text("{}")
    refuses(tmp_path, r"\(model-4, model-5, model-6, model-7, model-0 and 3 more\): pass one of them")


@pytest.mark.parametrize(
    ("name", "problem"), [("", "holds a config without weights"), ("config.json", "is a config, not a file of weights")]
)
def test_config_without_weights(tmp_path, name, problem):
    path = tmp_path / name
    write_config(tmp_path, {"model_type": "llama"})
    remedy = f"pass a folder with weights, or plan the config alone with shardconv plan {path} --cost"
    refuses(path, f"{path}: {problem}: {remedy}$")


def test_split_checkpoint_as_source(single):
    (single / "shardconv.json").write_text("{}")
    refuses(single, "is a split checkpoint: pass the source that was split, merge it .*, or change its size")


@pytest.mark.parametrize("name", ["rank-0-of-2.safetensors", "shardconv.json"])
def test_file_of_a_split_checkpoint_as_source(single, tmp_path, name):
    """A rank file has shards, whose plan would be another one; the remedy is the folder."""
    shardconv.split(single, tmp_path / "split", tp=2)
    refuses(
        tmp_path / "split" / name, f"belongs to a split checkpoint: pass its folder {tmp_path / 'split'}, or the source"
    )
    with pytest.raises(SplitCheckpointError, match=f"pass its folder {tmp_path / 'split'}$"):
        shardconv.verify(tmp_path / "split" / name)


@pytest.mark.parametrize("max_file_size", [None, "20KB"], ids=["one file", "several files"])
def test_rank_files_without_their_manifest(single, tmp_path, max_file_size):
    split = tmp_path / "split"
    shardconv.split(single, split, tp=2, max_file_size=max_file_size)
    (split / "shardconv.json").unlink()
    message = rf"{split}: holds rank-0-of-2\S*, a rank file of shardconv, without its manifest .*: restore shardconv"
    refuses(split, message)
    for path in split.glob("rank-0-of-2*"):
        refuses(path, message)
        with pytest.raises(SplitCheckpointError, match=message):
            shardconv.verify(path)
    with pytest.raises(SplitCheckpointError, match=message):
        shardconv.merge(split, tmp_path / "merged")


def test_one_of_several_files_as_source(tmp_path):
    folder = write_checkpoint(tmp_path / "model", parts=3)
    refuses(folder / part_names(3)[0], "is one of 3 files of a checkpoint: pass their folder")
    single = (folder / part_names(3)[0]).rename(tmp_path / part_names(1)[0])
    assert len(open_source(single).files) == 1


def test_folder_of_a_model_in_the_cache_as_source(tmp_path):
    (tmp_path / "models--a--b" / "snapshots" / ("0" * 40)).mkdir(parents=True)
    refuses(tmp_path / "models--a--b", "pass a folder in its snapshots/")
