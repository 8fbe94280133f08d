"""Checkpoints padded for engines that read config.json: outputs stay equal, and unpad restores the source."""

import json
import shutil
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import shardconv
from shardconv.errors import IntegrityError, PlanError, SourceError, SplitCheckpointError, UsageError
from shardconv.proof.model_check import require_padded
from tests.support.checkpoints import contents, write_index
from tests.support.command import call
from tests.support.models import GQA, MODELS, MOE, Model, read

SCALE = 0.3  # so that attention is neither uniform nor on one token

OTHERS = {
    "gpt_oss": Model("gpt_oss", {**GQA, **MOE, "sliding_window": 8}),
    "mistral": Model("mistral", GQA),
    "granite": Model("granite", GQA),
    "ernie4_5": Model("ernie4_5", GQA),
}

#: Models whose config has a field for every padded count.
PADDED = (
    "cohere", "deepseek_v3", "ernie4_5", "glm4", "glm4_moe", "gpt_oss", "granite", "mistral", "mixtral", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2", "t5-gated", "t5-untied",
)  # fmt: skip

#: Models that are not padded, and the message.
REFUSED = {
    "olmo2": "q_norm.weight is a norm over all heads",
    "stablelm": "q_layernorm have a value for each query_head that depends on their number",
    "falcon-rw": "self_attention have a value for each query_head that depends on their number",
    "gpt2": r"n_embd // n_head would be 5 instead of 8",
    "bert": "transformers cannot build BertForPreTraining by this config",
    "phi": "PhiForCausalLM does not have the padded tensors",
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


@pytest.mark.parametrize("name", PADDED)
def test_transformers_computes_the_same(name, tmp_path):
    kind, source = written(name, tmp_path / "source")
    expected = logits(kind, source)
    for tp in (3, 12):
        report = shardconv.pad(source, tmp_path / f"pad{tp}", tp=tp, check=require_padded)
        assert report.num_bytes > report.source_bytes
        assert torch.allclose(logits(kind, tmp_path / f"pad{tp}"), expected, atol=1e-5 * float(expected.abs().max()))
        assert tp in shardconv.report_plan(tmp_path / f"pad{tp}").supported_tp
        shardconv.unpad(tmp_path / f"pad{tp}", tmp_path / f"unpad{tp}")
        assert contents(tmp_path / f"unpad{tp}") == contents(source)


@pytest.mark.parametrize("name", REFUSED)
def test_padding_that_a_config_cannot_express_is_refused(name, tmp_path):
    _, source = written(name, tmp_path / "source")
    with pytest.raises(PlanError, match=REFUSED[name]) as error:
        shardconv.pad(source, tmp_path / "padded", tp=12, check=require_padded)
    assert "use shardconv split --pad" in str(error.value)
    assert not (tmp_path / "padded").exists()


@pytest.fixture
def source(tmp_path) -> Path:
    """A checkpoint with two files, an index, a tokenizer, and a config that json.dumps would format differently."""
    _, folder = written("qwen3", tmp_path / "source")
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


def test_padded_files_have_the_names_of_the_source_files(source, tmp_path):
    report = shardconv.pad(source, tmp_path / "padded", tp=3)
    assert [astuple(change) for change in report.config] == [
        ("num_key_value_heads", 2, 3), ("num_attention_heads", 8, 12),
    ]  # fmt: skip
    found = contents(tmp_path / "padded")
    assert sorted(found) == sorted([*contents(source), "shardconv-padding.json"])
    assert found["tokenizer.json"] == (source / "tokenizer.json").read_bytes()
    index = json.loads(found["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == report.num_bytes
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "padded"))
    assert after == {**before, "num_attention_heads": 12, "num_key_value_heads": 3}
    shardconv.unpad(tmp_path / "padded", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(source)


def test_padded_checkpoint_is_a_source(source, tmp_path):
    shardconv.pad(source, tmp_path / "padded", tp=3)
    shardconv.split(tmp_path / "padded", tmp_path / "split", tp=3)
    shardconv.merge(tmp_path / "split", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "padded")
    with pytest.raises(UsageError, match=r"is already padded .*shardconv unpad"):
        shardconv.pad(tmp_path / "padded", tmp_path / "twice", tp=5)


def test_unpad_refuses_a_changed_checkpoint(source, tmp_path):
    shardconv.pad(source, tmp_path / "padded", tp=3)
    for change, error in ((flip_a_bit, IntegrityError), (truncate_the_manifest, SplitCheckpointError)):
        shutil.copytree(tmp_path / "padded", tmp_path / "changed", dirs_exist_ok=True)
        change(tmp_path / "changed")
        with pytest.raises(error):
            shardconv.unpad(tmp_path / "changed", tmp_path / "again")
        assert not (tmp_path / "again").exists()
    with pytest.raises(SplitCheckpointError, match="is not a padded checkpoint"):
        shardconv.unpad(source, tmp_path / "again")


def flip_a_bit(folder: Path) -> None:
    with (folder / "a-1.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


def truncate_the_manifest(folder: Path) -> None:
    path = folder / "shardconv-padding.json"
    path.write_bytes(path.read_bytes()[:-9])


def test_pad_refuses_sources_that_need_no_padding_or_have_no_config(source, tmp_path):
    with pytest.raises(UsageError, match="does not need padding for tp 4"):
        shardconv.pad(source, tmp_path / "padded", tp=4)
    with pytest.raises(SourceError, match=r"is not a folder with config\.json"):
        shardconv.pad(source / "a-1.safetensors", tmp_path / "padded", tp=3)


def test_commands(source, tmp_path):
    dry = call("pad", source, "--multiple-of", "tp=3", "-o", tmp_path / "padded", "--dry-run")
    assert "would be written" in dry.out
    assert not (tmp_path / "padded").exists()
    done = call("pad", source, "--multiple-of", "tp=3", "-o", tmp_path / "padded")
    assert "config.json: num_key_value_heads from 2 to 3, num_attention_heads from 8 to 12" in done.out
    assert "padded with zeros: kv_head from 2 to 3, query_head from 8 to 12" in done.out
    call("unpad", tmp_path / "padded", "-o", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(source)
    wrong = call("pad", source, "--multiple-of", "3")
    assert wrong.code == 2
    assert "is not tp=N" in wrong.err


def test_vocabulary_is_padded_on_request(source, tmp_path):
    """For engines that cannot shard it otherwise: the logits of tokens stay equal, those of padding are zero."""
    expected = logits(transformers.Qwen3ForCausalLM, source)
    report = shardconv.pad(source, tmp_path / "padded", tp=3, vocab_multiple=192, check=require_padded)
    assert ("vocab_size", 131, 192) in [astuple(change) for change in report.config]
    assert ["logits of tokens from 131 on are zero" in note for note in report.notes] == [True]
    found = logits(transformers.Qwen3ForCausalLM, tmp_path / "padded")
    assert torch.allclose(found[..., :131], expected, atol=1e-5 * float(expected.abs().max()))
    assert not found[..., 131:].any()
    shardconv.unpad(tmp_path / "padded", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(source)
    printed = call("pad", source, "--multiple-of", "tp=3,vocab=192", "-o", tmp_path / "other", "-q", "--no-check-model")
    assert "logits of tokens from 131 on are zero" in printed.err
