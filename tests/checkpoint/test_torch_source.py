"""PyTorch files as sources: what is split has the tensors that torch loads, and a merge writes safetensors files."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardconv
from shardconv.checkpoint.sources.opening import open_source
from shardconv.support.errors import SourceError
from tests.support.checkpoints import llama_config, llama_specs, part_names, write_config
from tests.support.command import call
from tests.support.tensors import check_equal, check_equal_files, tensors_of
from tests.support.torch_files import INDEX, SINGLE, read_pytorch, replace_after_listing, write_pytorch

#: The tensor parallel sizes of the splits.
TPS = (1, 2, 4)
CONFIG = llama_config(layers=1)
QUANTIZED = Path(__file__).parents[1] / "data/quantized"
GATE, QUERY, HEAD, EMBEDDING = (
    "model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight",
    "model.embed_tokens.weight",
)  # fmt: skip


def random_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The tensors of a model: one is transposed, one is a part of another, and the head is tied."""
    torch.manual_seed(0)
    made = {name: torch.randn(shape).to(dtype) for name, (_, shape) in llama_specs(CONFIG).items()}
    made[GATE] = torch.randn(CONFIG["hidden_size"], CONFIG["intermediate_size"]).to(dtype).T
    made[QUERY] = torch.randn(100, 90).to(dtype)[5:69, 7:71]
    made[HEAD] = made[EMBEDDING]
    return made


@pytest.fixture(scope="module", params=[1, 3], ids=["single", "index"])
def folder(request, tmp_path_factory) -> Path:
    """A Hugging Face folder with PyTorch files; tests must not change it."""
    folder = write_pytorch(tmp_path_factory.mktemp("pytorch") / "model", random_tensors(), parts=request.param)
    write_config(folder, CONFIG)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"trainer state")
    return folder


@pytest.fixture
def single(tmp_path) -> Path:
    write_config(write_pytorch(tmp_path / "model", random_tensors()), CONFIG)
    return tmp_path / "model"


def pickled(folder: Path) -> dict[str, torch.Tensor]:
    return read_pytorch(list(folder.glob("pytorch_model*.bin")))


# --- split, merge, reshard, verify ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", TPS)
def test_merge_gives_equal_tensors_and_says_that_the_bytes_differ(folder, tmp_path, tp):
    shardconv.split(folder, tmp_path / "split", tp=tp)
    report = shardconv.merge(tmp_path / "split", tmp_path / "merged")
    check_equal(tensors_of(tmp_path / "merged"), pickled(folder))
    assert (report.derived, report.is_identical) == (("converted from PyTorch files",), False)
    written = {path.name for path in (tmp_path / "merged").iterdir()} - {"config.json", "tokenizer.json"}
    several = {*part_names(3), "model.safetensors.index.json"}
    assert written == (several if (folder / INDEX).exists() else {"model.safetensors"})


def test_rank_files_are_those_of_a_safetensors_source(folder, tmp_path):
    shardconv.split(folder, tmp_path / "split", tp=4)
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    shardconv.split(tmp_path / "merged", tmp_path / "again", tp=4)
    check_equal_files(tmp_path / "split", tmp_path / "again")
    report = shardconv.verify(tmp_path / "split", against=folder)
    assert (report.is_compared, report.differences) == (True, ())


@pytest.mark.parametrize("name", [GATE, QUERY, HEAD], ids=["transposed", "view", "tied"])
def test_verify_finds_a_changed_value(single, tmp_path, name):
    shardconv.split(single, tmp_path / "split", tp=2)
    changed = random_tensors()
    changed[name] = changed[name].clone()
    changed[name][3, 2] += 1
    torch.save(changed, single / SINGLE)
    (difference,) = [
        line for line in shardconv.verify(tmp_path / "split", against=single).differences if "header" not in line
    ]
    width = changed[name].shape[1]
    assert difference.startswith(f"{name}: byte {(3 * width + 2) * 2} ")


def test_padded_checkpoint_and_its_source(single, tmp_path):
    shardconv.pad(single, tmp_path / "padded", tp=16, check_model=False)
    padded = load_file(tmp_path / "padded" / "model.safetensors")
    assert torch.equal(padded[GATE][: CONFIG["intermediate_size"]], random_tensors()[GATE])
    report = shardconv.unpad(tmp_path / "padded", tmp_path / "unpadded")
    check_equal(load_file(tmp_path / "unpadded" / "model.safetensors"), random_tensors())
    assert report.derived == ("converted from PyTorch files",)


def test_quantized_checkpoint_has_the_rank_files_of_its_safetensors_file(tmp_path):
    """A checkpoint of gptqmodel as a PyTorch file with strides."""
    tensors = load_file(QUANTIZED / "gptq-3/model.safetensors")
    strided = {name: tensor.repeat_interleave(2, -1)[..., ::2] for name, tensor in tensors.items()}
    source = write_pytorch(tmp_path / "gptq", strided)
    shutil.copyfile(QUANTIZED / "gptq-3/config.json", source / "config.json")
    shardconv.split(source, tmp_path / "split", tp=2)
    shardconv.split(QUANTIZED / "gptq-3", tmp_path / "expected", tp=2)
    check_equal_files(tmp_path / "split", tmp_path / "expected")
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    check_equal_files(tmp_path / "merged", QUANTIZED / "gptq-3")


def test_merged_index_lists_the_merged_files(tmp_path):
    folder = write_pytorch(tmp_path / "model", random_tensors(), parts=2)
    write_config(folder, CONFIG)
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_parameters"] = 5
    (folder / INDEX).write_text(json.dumps(index))
    shardconv.split(folder, tmp_path / "split", tp=2)
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    found = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    held = {name: path.name for path in (tmp_path / "merged").glob("*.safetensors") for name in load_file(path)}
    assert found["weight_map"] == held
    size = sum(tensor.nbytes for tensor in random_tensors().values())
    assert found["metadata"] == {"total_size": size, "total_parameters": 5}


@pytest.mark.parametrize("name", ["weights.bin", "model.pt", "model.pth", "model.ckpt", "pytorch_model.bin"])
def test_single_file(tmp_path, monkeypatch, name):
    torch.save({"state_dict": random_tensors(), "epoch": 3}, tmp_path / name)
    write_config(tmp_path, CONFIG)
    monkeypatch.chdir(tmp_path)
    report = shardconv.split(tmp_path / name, tp=2)
    assert report.path == f"{Path(name).stem}-tp2"
    assert report.left_out == {f"{name}[epoch]": "entry without weights"}
    shardconv.merge(report.path, "merged.safetensors")
    check_equal(load_file("merged.safetensors"), random_tensors())


def test_entries_that_are_left_out_are_reported(tmp_path):
    torch.save({"model": random_tensors(), "optimizer": {}, "epoch": 1}, tmp_path / "model.pt")
    write_config(tmp_path, CONFIG)
    shown = call("split", tmp_path / "model.pt", "--tp", "2", "-o", tmp_path / "split")
    assert "left out (entry without weights): model.pt[optimizer], model.pt[epoch]" in shown.out


# --- which files are the checkpoint ---------------------------------------------------------------------------------


REFUSED = {
    "several files": (
        lambda folder: torch.save({}, folder / "model.pt") or (folder / SINGLE).rename(folder / "a.bin"),
        r"holds several checkpoints \(a\.bin, model\.pt\): pass one of the files",
    ),
    "one of several without an index": (
        lambda folder: (folder / SINGLE).rename(folder / "pytorch_model-00001-of-00002.bin"),
        r"without their index \(\*\.bin\.index\*\.json\): download the folder again",
    ),
    "another format beside": (
        lambda folder: (folder / "model.gguf").write_bytes(b""),
        r"holds weights that are not in pytorch_model\.bin: model\.gguf",
    ),
    "another model beside": (
        lambda folder: torch.save({"x": torch.ones(2)}, folder / "consolidated.00.pth"),
        r"consolidated\.00\.pth \(has x, which the checkpoint does not have\)",
    ),
    "pipe": (
        lambda folder: (folder / SINGLE).unlink() or os.mkfifo(folder / SINGLE),
        r"pytorch_model\.bin: is not a regular file",
    ),
    "optimizer": (
        lambda folder: torch.save({"state": {0: {"x": torch.ones(2)}}, "param_groups": []}, folder / SINGLE),
        r"pytorch_model\.bin: does not hold one state dict \(got entries state, param_",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", REFUSED)
def test_folder_is_refused(single, tmp_path, name):
    change, message = REFUSED[name]
    change(single)
    with pytest.raises(shardconv.ShardconvError, match=message):
        shardconv.split(single, tmp_path / "split", tp=2)
    assert not (tmp_path / "split").exists()


def test_files_whose_new_names_are_equal_are_refused(tmp_path):
    folder = write_pytorch(tmp_path / "model", random_tensors(), parts=2)
    index = json.loads((folder / INDEX).read_text())
    names = dict(zip(sorted(set(index["weight_map"].values())), ("a.bin", "a.pt"), strict=True))
    for old, new in names.items():
        (folder / old).rename(folder / new)
    index["weight_map"] = {tensor: names[name] for tensor, name in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"a\.bin and a\.pt would both become a\.safetensors: rename one of them"):
        open_source(folder)


def test_file_that_is_truncated_after_the_plan_is_refused(single, tmp_path):
    source = open_source(single)
    os.truncate(single / SINGLE, 5000)
    with pytest.raises(SourceError, match="was modified or truncated"):
        shardconv.checkpoint.sources.stored_tensors.open_tensors(source, source.specs, None)


def test_file_that_is_replaced_after_it_is_listed_is_refused(single, tmp_path, monkeypatch):
    """By one of the same size, whose tensors are in another order."""
    write_pytorch(tmp_path / "other", dict(reversed(random_tensors().items())))
    replace_after_listing(monkeypatch, single / SINGLE, (tmp_path / "other" / SINGLE).read_bytes())
    with pytest.raises(
        SourceError, match=r"pytorch_model\.bin: was modified or replaced since its tensors were listed"
    ):
        shardconv.split(single, tmp_path / "split", tp=2)
    assert not (tmp_path / "split").exists()
