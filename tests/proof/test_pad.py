"""Checkpoints padded for engines that read config.json: outputs stay equal, and unpad restores the source."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from msgspec.structs import astuple
from safetensors.torch import save_file

import shardconv
from shardconv.proof.pad import PadReport
from shardconv.support.errors import IntegrityError, PlanError, SourceError, SplitCheckpointError, UsageError
from tests.support.checkpoints import contents, write_index
from tests.support.command import call
from tests.support.damage import flip
from tests.support.manifests import change_manifest
from tests.support.matrix import cases
from tests.support.models import GQA, MODELS, MOE, Model, read

SCALE = 0.3  # so that attention is neither uniform nor on one token

OTHERS = {
    "gpt_oss": Model("gpt_oss", {**GQA, **MOE, "sliding_window": 8}),
    "mistral": Model("mistral", GQA),
    "granite": Model("granite", GQA),
    "ernie4_5": Model("ernie4_5", GQA),
    "moshi": Model("moshi", {**GQA, "ffn_dim": 192}, "AutoModelForCausalLM"),
}

#: Models whose config has a field for every padded count.
PADDED = (
    "cohere", "deepseek_v3", "ernie4_5", "glm4", "glm4_moe", "gpt_oss", "granite", "mistral", "mixtral", "moshi",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2", "t5-gated", "t5-untied",
)  # fmt: skip

#: Models that are not padded, and the message.
REFUSED = {
    "olmo2": "q_norm.weight is a norm over all heads",
    "stablelm": "q_layernorm have a value for each query_head that depends on their number",
    "falcon-rw": "self_attention have a value for each query_head that depends on their number",
    "gpt2": r"n_embd // n_head would be 5 instead of 8",
    "bert": "transformers cannot build BertForPreTraining from this config",
    "phi": "PhiForCausalLM built from it does not have the padded tensors",
    "llama": r"LlamaConfig of transformers [0-9.]+ refuses config.json: .*'validate_architecture': "
    r"ValueError: The hidden size \(64\) is not a multiple of the number of attention heads \(12\)",
}


def written(name: str, folder: Path) -> tuple[type, Path]:
    """The class of a model, and its checkpoint."""
    transformers.logging.disable_progress_bar()
    model = (MODELS | OTHERS)[name].build(SCALE)
    model.save_pretrained(folder)
    return type(model), folder


def logits(kind: type, folder: Path) -> torch.Tensor:
    model = kind.from_pretrained(folder).eval()
    ids = torch.arange(20).view(2, 10) + 3
    others = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **others).logits


#: Tensor parallel sizes. At 16 the heads are doubled, within groups of query heads where there are such.
SIZES = {
    "moshi": (16,),  # its width has to be a multiple of the number of heads
    "t5-gated": (3, 12),  # one field has the number of query and of KV heads
    "t5-untied": (3, 12),
}


@pytest.mark.parametrize(
    "name", cases(PADDED, lambda name: name in {"mistral", "phi3", "mixtral", "t5-gated", "deepseek_v3", "moshi"})
)
def test_transformers_computes_the_same(name, tmp_path):
    kind, source = written(name, tmp_path / "source")
    expected = logits(kind, source)
    for tp in SIZES.get(name, (3, 12, 16)):
        report = shardconv.pad(source, tmp_path / f"pad{tp}", tp=tp)
        assert report.num_bytes > report.source_bytes
        assert torch.allclose(logits(kind, tmp_path / f"pad{tp}"), expected, atol=1e-5 * float(expected.abs().max()))
        assert tp in shardconv.report_plan(tmp_path / f"pad{tp}").supported_tp
        shardconv.unpad(tmp_path / f"pad{tp}", tmp_path / f"unpad{tp}")
        assert contents(tmp_path / f"unpad{tp}") == contents(source)


@pytest.mark.parametrize("name", REFUSED)
def test_padding_that_a_config_cannot_express_is_refused(name, tmp_path):
    _, source = written(name, tmp_path / "source")
    with pytest.raises(PlanError, match=REFUSED[name]) as error:
        shardconv.pad(source, tmp_path / "padded", tp=12)
    assert "use shardconv split --pad" in str(error.value)
    assert not (tmp_path / "padded").exists()


def test_config_with_a_derived_count_that_is_unchanged_is_refused(tmp_path, monkeypatch):
    """All tensors have the shapes of the config's model, whose attention repeats KV heads."""
    monkeypatch.setattr("shardconv.plan.padded_config._equal_counts", lambda _: ())
    _, source = written("deepseek_v3", tmp_path / "source")
    with pytest.raises(PlanError, match=r"a small DeepseekV3ForCausalLM with its numbers of heads fails .*must match"):
        shardconv.pad(source, tmp_path / "padded", tp=16)
    assert not (tmp_path / "padded").exists()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint with two files, an index, a tokenizer, and a config that json.dumps would format differently."""
    _, folder = written("qwen3", tmp_path_factory.mktemp("source") / "source")
    tensors = read(folder)
    (folder / "model.safetensors").unlink()
    half = len(tensors) // 2
    files = {"a-1.safetensors": list(tensors)[:half], "a-2.safetensors": list(tensors)[half:]}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt", "file": file})
    write_index(folder, {name: file for file, names in files.items() for name in names})
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "config.json").write_text((folder / "config.json").read_text().replace(",", " ,\n") + "\n\n")
    return folder


@pytest.fixture
def padded(source, tmp_path) -> Path:
    shardconv.pad(source, tmp_path / "padded", tp=3)
    return tmp_path / "padded"


def test_files_of_a_padded_checkpoint(source, tmp_path):
    """Those of the source, with other counts in the config, and the size of the padded tensors in the index."""
    report = shardconv.pad(source, tmp_path / "padded", tp=3)
    found, expected = contents(tmp_path / "padded"), contents(source)
    assert sorted(found) == sorted([*expected, "shardconv-padding.json"])
    assert found["tokenizer.json"] == expected["tokenizer.json"]
    counts = {"num_key_value_heads": (2, 3), "num_attention_heads": (8, 12)}
    assert [astuple(change) for change in report.config] == [(name, *count) for name, count in counts.items()]
    after = {name: count for name, (_, count) in counts.items()}
    assert json.loads(found["config.json"]) == json.loads(expected["config.json"]) | after
    index = json.loads(found["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == report.num_bytes


def test_unpad_restores_the_source(source, padded, tmp_path):
    shardconv.unpad(padded, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(source)


def test_padded_checkpoint_is_a_source(padded, tmp_path):
    shardconv.split(padded, tmp_path / "split", tp=3)
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(padded)


def test_pad_refuses_a_padded_checkpoint(padded, tmp_path):
    with pytest.raises(UsageError, match=r"is already padded .*shardconv unpad"):
        shardconv.pad(padded, tmp_path / "twice", tp=5)


NAME, AGAIN = "shardconv-padding.json", ": copy it again, or run shardconv pad again$"
change_padding = partial(change_manifest, name=NAME)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda folder: flip(folder / "a-1.safetensors"), IntegrityError, "bytes of"),
        (lambda folder: os.truncate(folder / NAME, 1000), SplitCheckpointError, rf"is truncated or damaged .*{AGAIN}"),
        (lambda folder: (folder / NAME).unlink(), SplitCheckpointError, "is not a padded checkpoint"),
        (
            lambda folder: change_padding(folder, lambda data: data.update(format_version=2)), SplitCheckpointError,
            r"is too new \(got 2, expected at most 1\): update shardconv$",
        ),
        (
            lambda folder: change_padding(folder, lambda data: data["auxiliary_files"].update({NAME: "0" * 32})),
            SplitCheckpointError, f"two of its files have the same name{AGAIN}",
        ),
    ],
    ids=["flipped bit", "truncated manifest", "no manifest", "newer manifest", "a file of the manifest's name"],
)  # fmt: skip
def test_unpad_refuses_a_changed_checkpoint(padded, tmp_path, change, error, message):
    change(padded)
    with pytest.raises(error, match=message):
        shardconv.unpad(padded, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [("", 4, "does not need padding for tp 4"), ("a-1.safetensors", 3, "is not a folder with")],
)
def test_pad_refuses_other_sources(source, tmp_path, name, tp, message):
    with pytest.raises((UsageError, SourceError), match=message):
        shardconv.pad(source / name, tmp_path / "padded", tp=tp)


def test_command_prints_the_changes(source, tmp_path):
    arguments = ["pad", source, "--multiple-of", "tp=3", "-o", tmp_path / "padded"]
    assert "would be written" in call(*arguments, "--dry-run").out
    assert not (tmp_path / "padded").exists()
    done = call(*arguments)
    assert "config.json: num_key_value_heads from 2 to 3, num_attention_heads from 8 to 12" in done.out
    assert "padded with zeros: kv_head from 2 to 3, query_head from 8 to 12" in done.out


def test_command_refuses_a_multiple_without_a_name(source):
    wrong = call("pad", source, "--multiple-of", "3")
    assert wrong.code == 2
    assert "expected tp=N or tp=N,vocab=M, such as tp=3" in wrong.err
    assert "such as tp=8 or" in call("pad", source, "--multiple-of", "0").err
    assert "'--tp'. Did you mean '--multiple-of'" in call("pad", source, "--tp", "3").err


@pytest.fixture
def wide(source, tmp_path) -> tuple[Path, PadReport]:
    """A checkpoint whose vocabulary of 131 is padded to 192, for engines that cannot shard it otherwise."""
    report = shardconv.pad(source, tmp_path / "padded", tp=3, vocab_multiple=192)
    return tmp_path / "padded", report


def test_report_has_the_padded_vocabulary(source, wide, tmp_path):
    _, report = wide
    assert ("vocab_size", 131, 192) in [astuple(change) for change in report.config]
    warning = "logits of tokens from 131 on are zero"
    assert [warning in note for note in report.notes] == [True]
    arguments = ["pad", source, "--multiple-of", "tp=3,vocab=192", "-o", tmp_path / "other", "-q", "--no-check-model"]
    assert warning in call(*arguments).err


def test_padding_of_the_vocabulary_adds_logits_of_zero(source, wide):
    expected = logits(transformers.Qwen3ForCausalLM, source)
    found = logits(transformers.Qwen3ForCausalLM, wide[0])
    assert torch.allclose(found[..., :131], expected, atol=1e-5 * float(expected.abs().max()))
    assert not found[..., 131:].any()
