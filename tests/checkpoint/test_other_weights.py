"""Weights in a source's folder that are not part of the checkpoint, which are left out only if that is safe."""

import ast
import os
import shlex
from pathlib import Path

import pytest
import torch

import shardconv
from shardconv.checkpoint.sources.folder_files import matches
from shardconv.checkpoint.sources.opening import open_source
from shardconv.files.containers import torch_files
from shardconv.support.errors import SourceError, UsageError
from tests.support.checkpoints import llama_config, llama_specs, stored, write_checkpoint, write_index, write_weights

INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"
SPECS = llama_specs(llama_config(layers=1))


@pytest.fixture(params=[1, 3], ids=["single", "index"])
def folder(tmp_path, request) -> Path:
    return write_checkpoint(tmp_path / "model", parts=request.param, config=llama_config(layers=1))


@pytest.fixture
def single(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "model", config=llama_config(layers=1))


def put(folder: Path, name: str, data: bytes = b"never read") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def put_adapter(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    write_weights(folder / "adapter_model.safetensors", {"base_model.model.x.lora_A.weight": ("BF16", (2, 2))})
    (folder / "adapter_config.json").write_text('{"task_type": "CAUSAL_LM", "base_model_name_or_path": "org/base"}')


def refusal(path: Path, **options) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(path, **options)
    return caught.value.with_options()


def ignore_options(message: str) -> list[str]:
    """The patterns of the options in a message, parsed as by a shell."""
    words = shlex.split(message[message.index("--ignore") :].partition(", or pass")[0].partition(" to split")[0])
    assert words[::2] == ["--ignore"] * (len(words) // 2)
    return words[1::2]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "consolidated.safetensors", "adapter/adapter_model.safetensors", "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json", "original/consolidated.00.pth", "model.gguf", "onnx/model.onnx_data",
        "a folder/it's.ckpt", "step/[1].pt",
    ],
)  # fmt: skip
def test_unknown_weights_are_refused_with_the_options_that_leave_them_out(folder, name):
    put(folder, name)
    own = INDEX if (folder / INDEX).exists() else "model.safetensors"
    message = refusal(folder)
    assert f"model: holds weights that are not in {own}: {name}" in message
    assert message.endswith(f", or pass {folder / own} instead of the folder")
    source = open_source(folder, ignore=tuple(ignore_options(message)))
    assert list(source.left_out) == [name]
    assert name not in source.auxiliary_files
    assert stored(source) == SPECS


def test_message_for_many_weights(folder):
    """The message names some of them, and its options match all of them and no other file."""
    names = [f"original/consolidated.{number:02}.pth" for number in range(8)] + ["a.gguf", "sub/b.gguf", "c.h5"]
    for name in names:
        put(folder, name)
    put(folder, "original/params.json")
    message = refusal(folder)
    assert "and 6 more. " in message
    patterns = ignore_options(message)
    assert patterns == ["*.gguf", "c.h5", "original/*.pth"]
    source = open_source(folder, ignore=tuple(patterns))
    assert sorted(source.left_out) == sorted(names)
    assert "original/params.json" in source.auxiliary_files


def test_proposed_options_do_not_match_files_of_the_checkpoint(folder):
    for name in ("a.safetensors", "b.safetensors"):
        write_weights(folder / name, {"x": ("U8", (1,))})
    assert ignore_options(refusal(folder)) == ["a.safetensors", "b.safetensors"]


# --- what is left out without asking --------------------------------------------------------------------------------

TRAINER_STATE = [
    "optimizer.pt", "scheduler.pt", "scaler.pt", "training_args.bin", "rng_state.pth", "rng_state_0.pth",
    "optimizer.bin", "scheduler.bin", "random/sampler.bin",
    "global_step10/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
]  # fmt: skip


def test_trainer_state(folder):
    for name in TRAINER_STATE:
        put(folder, name)
    assert open_source(folder).left_out == dict.fromkeys(sorted(TRAINER_STATE), "trainer state")


def test_states_of_the_model_are_not_trainer_state(folder):
    put(folder, "global_step10/mp_rank_00_model_states.pt")
    assert "global_step10/mp_rank_00_model_states.pt" in refusal(folder)


# --- duplicates -----------------------------------------------------------------------------------------------------


def tensors(specs=SPECS) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, (_, shape) in specs.items()}


REASON = "duplicate of the checkpoint in another format"


def test_index_over_files_of_the_same_tensors(folder, monkeypatch):
    """Only the index is read."""
    monkeypatch.setattr(
        torch_files, "list_torch_files", lambda paths: [] if not paths else pytest.fail("torch is not needed")
    )
    files = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for name in files:
        put(folder, name)
    write_index(folder, {name: files[number % 2] for number, name in enumerate(SPECS)}, BIN_INDEX)
    assert open_source(folder).left_out == dict.fromkeys([*files, BIN_INDEX], REASON)


@pytest.mark.parametrize(
    "names",
    [[*SPECS, "model.extra.weight"], list(SPECS)[1:], [name for name in SPECS if "lm_head" not in name] + ["other"]],
    ids=["more", "fewer", "other"],
)
def test_index_over_files_of_other_tensors(folder, names):
    put(folder, "pytorch_model-00001-of-00001.bin")
    write_index(folder, dict.fromkeys(names, "pytorch_model-00001-of-00001.bin"), BIN_INDEX)
    message = refusal(folder)
    assert "pytorch_model-00001-of-00001.bin (is not a file of torch.save, or it is damaged)" in message
    assert f"{BIN_INDEX} (lists tensors that the checkpoint does not have)" in message


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 1}', '{"weight_map": {"x": 1}}', "{}"])
def test_index_that_is_damaged(folder, text):
    put(folder, BIN_INDEX, text.encode())
    assert f"{BIN_INDEX} (" in refusal(folder)


def test_files_of_the_same_tensors(single):
    """Duplicates of all tensors, or of some."""
    held = tensors()
    torch.save(held, single / "pytorch_model.bin")
    del held["lm_head.weight"]
    torch.save(held, put(single, "sub/some.pth"))
    assert open_source(single).left_out == dict.fromkeys(["pytorch_model.bin", "sub/some.pth"], REASON)


def test_files_of_the_same_tensors_under_an_index_with_a_tied_one(tmp_path):
    """lm_head is the embedding: files of PyTorch store it, and safetensors files do not."""
    specs = {name: spec for name, spec in SPECS.items() if name != "lm_head.weight"}
    folder = tmp_path / "model"
    folder.mkdir()
    write_weights(folder / "model.safetensors", specs)
    held = tensors(specs)
    held["lm_head.weight"] = held["model.embed_tokens.weight"]
    torch.save(held, folder / "pytorch_model-00001-of-00001.bin")
    write_index(folder, dict.fromkeys(held, "pytorch_model-00001-of-00001.bin"), BIN_INDEX)
    assert open_source(folder).left_out == dict.fromkeys(["pytorch_model-00001-of-00001.bin", BIN_INDEX], REASON)


def changed(change) -> dict[str, torch.Tensor]:
    held = tensors()
    change(held)
    return held


EMBEDDING = "model.embed_tokens.weight"


def test_files_of_other_tensors(single):
    files = {
        "extra.bin": changed(lambda held: held.update(extra=torch.zeros(2))),
        "part.bin": changed(lambda held: held.update(tied=held[EMBEDDING][1:])),
        "shape.bin": changed(lambda held: held.update({EMBEDDING: torch.zeros(132, 64)})),
        "list.pth": [1, 2],
    }
    for name, held in files.items():
        torch.save(held, single / name)
    torch.save(tensors(), single / "same.bin")
    message = refusal(single)
    for why in (
        "extra.bin (has extra, which the checkpoint does not have)",
        "part.bin (has tied, which the checkpoint does not have)",
        f"shape.bin (has {EMBEDDING} of shape [132, 64], expected [131, 64] as in the checkpoint)",
        "list.pth (holds a list (expected a dict of tensors))",
    ):
        assert why in message
    assert "same.bin" not in message
    assert set(ignore_options(message)) == set(files)


@pytest.mark.timeout(60)
def test_what_is_not_a_regular_file_is_not_opened(single, tmp_path):
    os.mkfifo(single / "pytorch_model.bin")
    torch.save(tensors(), tmp_path / "outside.bin")
    (single / "link.bin").symlink_to(tmp_path / "outside.bin")
    assert ignore_options(refusal(single)) == ["*.bin"]
    (single / "pytorch_model.bin").unlink()
    assert list(open_source(single, follow_links=True).left_out) == ["link.bin"]


# --- adapters -------------------------------------------------------------------------------------------------------


def code_of(message: str) -> list[str]:
    """The lines of Python code at the end of a message."""
    lines = message.splitlines()[-2:]
    ast.parse("\n".join(lines))
    return lines


def test_adapter_is_identified_by_its_config(single):
    """transformers applies an adapter if its config exists."""
    (single / "adapter_config.json").write_text("{}")
    assert "holds a PEFT adapter (adapter_config.json) next to the base model" in refusal(single)


def test_adapter_next_to_an_index_as_source(tmp_path):
    """The index lists the weights of the model, but the adapter's config would be copied."""
    folder = write_checkpoint(tmp_path / "model", parts=3)
    put_adapter(folder)
    assert "holds a PEFT adapter" in refusal(folder / INDEX)
    assert open_source(folder / INDEX, ignore=("adapter_*",)).config == llama_config()


def test_file_of_an_adapter_as_source(tmp_path):
    put_adapter(tmp_path / "adapter")
    assert f"pass its folder {tmp_path / 'adapter'}" in refusal(tmp_path / "adapter" / "adapter_model.safetensors")


# --- --ignore -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("a.gguf", "*.gguf", True),
        ("a.gguf", "a.gguf", True),
        ("a.gguf", "*.bin", False),
        ("sub/a.gguf", "*.gguf", True),
        ("sub/a.gguf", "sub/*.gguf", True),
        ("sub/a.gguf", "sub/*", True),
        ("sub/a.gguf", "sub", True),
        ("sub/a.gguf", "sub/", True),
        ("sub/deep/a", "sub", True),
        ("sub/a.gguf", "a.gguf", False),
        ("subway/a", "sub", False),
        ("A.gguf", "a.gguf", False),
        (".git/", ".git", True),
        (".git/", ".git/", True),
        (".git/", ".git/*", True),
        (".github/", ".git", False),
    ],
)
def test_patterns(name, pattern, expected):
    assert matches(name, pattern) is expected


def test_ignore_leaves_out_weights_and_auxiliary_files_alike(folder):
    put(folder, "onnx/model.onnx")
    put(folder, "onnx/notes.txt")
    source = open_source(folder, ignore=("onnx", "tokenizer.json"))
    assert sorted(source.auxiliary_files) == ["config.json"]
    assert source.left_out == {
        "onnx/model.onnx": "ignored by 'onnx'",
        "onnx/notes.txt": "ignored by 'onnx'",
        "tokenizer.json": "ignored by 'tokenizer.json'",
    }


@pytest.mark.timeout(20)
def test_ignored_files_are_not_opened(single):
    os.mkfifo(single / "pipe")
    (single / "out").symlink_to("/etc/hostname")
    assert sorted(open_source(single, ignore=("pipe", "out")).left_out) == ["out", "pipe"]


@pytest.mark.parametrize("pattern", ["*.gguf", "model/*", "", "../*", "tokenizer"])
def test_pattern_that_matches_nothing(folder, pattern):
    with pytest.raises(UsageError, match=r"matches no file in .*: pass a pattern relative to that folder"):
        open_source(folder, ignore=(pattern,))


def test_pattern_that_matches_a_file_of_the_checkpoint_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", parts=3)
    with pytest.raises(UsageError, match=r"-00001-of-00003.safetensors: is ignored by '\*.safetensors', but is a "):
        open_source(folder, ignore=("*.safetensors",))
    with pytest.raises(UsageError, match=f"{INDEX}: is ignored by "):
        open_source(folder / INDEX, ignore=("*.index.json",))


def test_ignore_requires_a_folder(single):
    with pytest.raises(UsageError, match=r'ignore=\["x"\]: only applies to folders'):
        open_source(single / "model.safetensors", ignore=("x",))


@pytest.mark.parametrize(
    "options", [{"config": "x"}, {"follow_links": True}, {"ignore": "x"}, {"source_layout": "meta"}], ids=str
)
def test_options_to_open_a_source_that_is_open(single, tmp_path, options):
    with pytest.raises(UsageError, match=f"^{next(iter(options))}: only applies when a source is opened"):
        shardconv.split(open_source(single), tmp_path / "out", tp=2, **options)


def test_ignore_accepts_a_single_pattern(single, tmp_path):
    put(single, "model.gguf")
    assert "[rules]" in shardconv.propose_plan(single, ignore="model.gguf")
    assert list(shardconv.split(single, tmp_path / "out", tp=2, ignore="model.gguf").left_out) == ["model.gguf"]
    put(single, "another.h5")
    assert shardconv.verify(tmp_path / "out", against=single, ignore="another.h5").differences == ()


# --- verify --against -----------------------------------------------------------------------------------------------


@pytest.fixture
def split_with_patterns(folder, tmp_path) -> Path:
    """A split that ignored files of the source by two patterns."""
    put(folder, "model.gguf")
    put(folder, "notes/a.txt")
    shardconv.split(folder, tmp_path / "out", tp=2, ignore=("*.gguf", "notes"))
    return tmp_path / "out"


@pytest.mark.parametrize("is_resharded", [False, True], ids=["split", "resharded"])
def test_verify_leaves_out_later_files_that_match_the_patterns_of_the_split(
    folder, split_with_patterns, tmp_path, is_resharded
):
    path = split_with_patterns
    if is_resharded:
        path = tmp_path / "again"
        shardconv.reshard(split_with_patterns, path, tp=1)
    put(folder, "newer.gguf")
    report = shardconv.verify(path, against=folder)
    assert report.differences == ()
    assert sorted(report.left_out) == ["model.gguf", "newer.gguf", "notes/a.txt"]


def test_verify_of_later_files_that_match_no_pattern(folder, split_with_patterns):
    later = put(folder, "newer.txt")
    assert shardconv.verify(split_with_patterns, against=folder).differences == (f"newer.txt: differs from {folder}",)
    later.unlink()
    put(folder, "newer.h5")
    with pytest.raises(SourceError, match=r"newer\.h5"):
        shardconv.verify(split_with_patterns, against=folder)
    assert shardconv.verify(split_with_patterns, against=folder, ignore=("newer.h5",)).differences == ()


def test_verify_accepts_patterns_of_the_split_that_match_nothing_any_more(folder, split_with_patterns):
    for name in ("model.gguf", "notes/a.txt"):
        (folder / name).unlink()
    assert shardconv.verify(split_with_patterns, against=folder).left_out == {}


def test_verify_against_a_file_after_a_split_that_ignored_something(single, tmp_path):
    put(single, "model.gguf")
    shardconv.split(single, tmp_path / "out", tp=2, ignore=("model.gguf",))
    report = shardconv.verify(tmp_path / "out", against=single / "model.safetensors")
    assert report.is_compared


def test_verify_requires_a_source_for_patterns(single, tmp_path):
    shardconv.split(single, tmp_path / "out", tp=2)
    with pytest.raises(UsageError, match="ignore requires against"):
        shardconv.verify(tmp_path / "out", ignore=("x",))


# --- other formats as sources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_named", [False, True])
def test_gguf(tmp_path, is_named):
    put(tmp_path, "model-q4.gguf")
    message = refusal(tmp_path / "model-q4.gguf" if is_named else tmp_path)
    assert code_of(message) == [
        "from transformers import AutoModelForCausalLM",
        f"AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, gguf_file='model-q4.gguf')"
        f".save_pretrained('{tmp_path.name}-safetensors')",
    ]


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "model.onnx", "model"])
def test_formats_that_need_their_own_library(tmp_path, name):
    put(tmp_path, name)
    assert refusal(tmp_path / name).endswith("Convert it to safetensors first, with the library that wrote it.")
