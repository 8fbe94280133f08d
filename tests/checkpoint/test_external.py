"""Rank files of other tools as a source: merge, split, reshard and verify, and refused folders.

All comparisons of tensors are exact. The rank files are written by tests/support/external.py with torch alone.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.checkpoint.engine import copy
from shardconv.checkpoint.sources.meta_params import head_sizes, params_of_config
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.source import Source
from shardconv.files.containers.torch_files import TorchArchive
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import OutputError, PlanError, ShardconvError, SourceError, UsageError
from tests.support.checkpoints import contents, safetensors_bytes
from tests.support.command import call
from tests.support.external import (
    Tensors,
    deepseek_ranks,
    meta_logits,
    meta_ranks,
    meta_tensors,
    write_deepseek,
    write_meta,
)
from tests.support.faults import before_copying
from tests.support.models import EXPERTS, GQA, LAYERS, MODELS, Model, change_config, change_tensors, read
from tests.support.tensors import check_equal, check_equal_files

#: The tensor parallel sizes of Meta's files, with the dim along which the embedding table is sharded.
META_TPS = {1: 0, 2: 1, 4: 0}
#: Those of DeepSeek's files, and of files that are written in Meta's layout.
DEEPSEEK_TPS, WRITTEN_TPS = (2, 4), (1, 2, 4)
#: Mistral's files are not sharded.
MISTRAL_TPS = (1,)
KEYS = "layers.1.attention.wk.weight"
HEADS, KV_HEADS, HIDDEN, VOCAB = 8, 2, 64, 128
LLAMA = Model("llama", {**GQA, "head_dim": 8, "vocab_size": VOCAB, "rms_norm_eps": 1e-5})
PARAMS = {
    "dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "norm_eps": 1e-5, "vocab_size": -1,
    "rope_theta": 10000.0, "multiple_of": 32, "ffn_dim_multiplier": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return LLAMA.write(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def in_meta_order(llama) -> Tensors:
    return meta_tensors(read(llama), HEADS, KV_HEADS)


def ranks_of(tensors: Tensors, tp: int, embedding_dim: int = 0) -> list[Tensors]:
    return meta_ranks(tensors, tp, kv_heads=KV_HEADS, embedding_dim=embedding_dim)


# --- Meta -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "embedding_dim"), META_TPS.items())
def test_merge_of_metas_files_has_the_tensors_of_the_checkpoint(llama, in_meta_order, tmp_path, tp, embedding_dim):
    source = write_meta(tmp_path / "meta", ranks_of(in_meta_order, tp, embedding_dim), PARAMS)
    report = shardconv.merge(source, tmp_path / "merged")
    assert report.derived == (f"converted from {tp} file{'s' * (tp > 1)} of Meta's layout",)
    check_equal(read(tmp_path / "merged"), read(llama))


def test_logits_of_a_merge_are_those_of_metas_model(in_meta_order, tmp_path):
    source = write_meta(tmp_path / "meta", ranks_of(in_meta_order, 2), PARAMS)
    shardconv.merge(source, tmp_path / "merged")
    tokens = torch.arange(1, 20) * 5 % VOCAB
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        got = model(tokens[None]).logits[0]
    # the two implementations sum in other orders, in float32
    torch.testing.assert_close(got, meta_logits(in_meta_order, PARAMS, tokens), rtol=1e-4, atol=1e-4)


def test_split_of_metas_files_equals_a_split_of_the_merged_checkpoint(in_meta_order, tmp_path):
    source = write_meta(tmp_path / "meta", ranks_of(in_meta_order, 4), PARAMS)
    shardconv.merge(source, tmp_path / "merged")
    shardconv.split(source, tmp_path / "from-meta", tp=2)
    shardconv.split(tmp_path / "merged", tmp_path / "from-merged", tp=2)
    check_equal_files(tmp_path / "from-meta", tmp_path / "from-merged")
    assert not shardconv.verify(tmp_path / "from-meta", against=source).differences


def test_reshard_of_metas_files_equals_a_split_of_them(in_meta_order, tmp_path):
    source = write_meta(tmp_path / "meta", ranks_of(in_meta_order, 2), PARAMS)
    report = shardconv.reshard(source, tmp_path / "resharded", tp=4)
    assert (report.old_tp, report.tp, report.old_layout) == (2, 4, "meta")
    shardconv.split(source, tmp_path / "split", tp=4)
    assert contents(tmp_path / "resharded") == contents(tmp_path / "split")


def test_a_difference_in_a_part_that_both_readers_keep_is_found(in_meta_order, tmp_path, monkeypatch):
    """The rows of a head, which are reordered together, are larger than a block."""
    for limit in ("BLOCK_BYTES", "BLOCK_BYTES_PER_SHARD"):
        monkeypatch.setattr(copy, limit, 512)
    changed = in_meta_order[KEYS].clone()
    changed[-1] += 1
    source = write_meta(tmp_path / "source", ranks_of(in_meta_order, 1), PARAMS)
    other = write_meta(tmp_path / "other", ranks_of({**in_meta_order, KEYS: changed}, 1), PARAMS)
    (found,) = shardconv.verify(source, against=other).differences
    assert re.fullmatch(r"model\.layers\.1\.self_attn\.k_proj\.weight: byte \d+ of the tensor differs .*", found)


@pytest.fixture
def both(llama, in_meta_order, tmp_path) -> Path:
    """A folder with a Hugging Face checkpoint, and Mistral's files with other values of the norm."""
    folder = shutil.copytree(llama, tmp_path / "both")
    save_file(in_meta_order | {"norm.weight": in_meta_order["norm.weight"] + 1}, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(PARAMS))
    return folder


def test_the_hugging_face_set_of_a_mistral_folder_is_read_unless_the_other_is_asked_for(llama, both, tmp_path):
    folder = both
    source = open_source(folder)
    assert source.specs.keys() == read(llama).keys()
    assert source.left_out == {"consolidated.safetensors": "duplicate of the checkpoint in another format"}
    source = open_source(folder, source_layout="meta")
    assert source.left_out["model.safetensors"] == "not a file of --from meta"
    shardconv.merge(folder, tmp_path / "merged", source_layout="meta")
    merged = meta_tensors(read(tmp_path / "merged"), HEADS, KV_HEADS)
    check_equal(merged, load_file(folder / "consolidated.safetensors"))


def test_pad_of_rank_files_is_refused(both):
    (both / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="rank files of another tool: merge them first"):
        shardconv.pad(both, tp=3)


def test_weights_in_metas_layout_that_the_model_does_not_have_are_refused(both, in_meta_order):
    save_file(in_meta_order | {"vision.weight": torch.ones(2)}, both / "consolidated.safetensors")
    with pytest.raises(SourceError, match=r"consolidated\.safetensors \(has vision\.weight"):
        open_source(both)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda ranks: ranks[1].pop("norm.weight"), r"rank 1 does not have norm\.weight"),
        (lambda ranks: ranks[0].update({"norm.weight": torch.ones(7)}), r"norm\.weight: ranks have different shapes"),
        (lambda ranks: ranks[0].update({"norm.weight": torch.ones(HIDDEN).half()}), "several dtypes"),
        (lambda ranks: ranks[1].update({"output.weight": torch.ones(2, 2).T}), "not contiguous"),
        (
            lambda ranks: ranks[3].update({KEYS: ranks[3][KEYS] + 1}),
            r"consolidated\.03\.pth: .*wk.* again from its source",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(in_meta_order, tmp_path, change, text):
    ranks = ranks_of(in_meta_order, 4)
    change(ranks)
    source = write_meta(tmp_path / "meta", ranks, PARAMS)
    with pytest.raises(ShardconvError, match=text):
        shardconv.merge(source, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("names", ["output", "tok_embeddings", "wo", "w1", "feed_forward"])
def test_a_replicated_tensor_that_metas_files_shard_is_refused(in_meta_order, tmp_path, names):
    ranks = ranks_of(in_meta_order, 2)
    whole = {name: tensor for name, tensor in in_meta_order.items() if names in name}
    source = write_meta(tmp_path / "meta", [rank | whole for rank in ranks], PARAMS | {"vocab_size": VOCAB})
    for write in (shardconv.merge, partial(shardconv.split, tp=2), partial(shardconv.reshard, tp=4)):
        with pytest.raises(
            ShardconvError, match=r"dim \d has (256|192|128) elements \(expected (128|96|64 = 8 \* 8) by"
        ):
            write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("embedding_dim", [0, 1])
def test_missing_files_behind_the_last_one_are_named(in_meta_order, tmp_path, embedding_dim):
    """No name says how many there are, but the heads of a rank do, also where ranks have the same KV head."""
    source = write_meta(tmp_path / "meta", ranks_of(in_meta_order, 4, embedding_dim)[:2], PARAMS)
    message = r"consolidated\.02\.pth, the file of rank 2, is missing, and 1 more \(got .*, expected 4 ranks"
    with pytest.raises(SourceError, match=message):
        open_source(source)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "consolidated-00002-of-00002.safetensors",
            r"consolidated-00001-of-00002\.safetensors, the file of part 1, is",
        ),
        ("model0-mp2.safetensors", r"model1-mp2\.safetensors, the file of rank 1, is missing"),
    ],
)
def test_a_missing_file_is_named(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize("without", [(), ("head_dim", "num_key_value_heads")])
def test_a_config_replaces_params(llama, in_meta_order, tmp_path, without):
    """Without the fields of heads, they are those of the class: as many KV heads as heads."""
    tensors = in_meta_order
    if without:
        doubled = Model("llama", {**GQA, "num_key_value_heads": HEADS, "head_dim": 8, "vocab_size": VOCAB})
        llama = doubled.write(tmp_path / "llama")
        tensors = meta_tensors(read(llama), HEADS, HEADS)
    ranks = meta_ranks(tensors, 2, kv_heads=HEADS if without else KV_HEADS, embedding_dim=0)
    source = write_meta(tmp_path / "meta", ranks, PARAMS)
    (source / "params.json").unlink()
    config = json.loads((llama / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in without}))
    shardconv.merge(source, tmp_path / "merged", source_layout="meta")
    check_equal(read(tmp_path / "merged"), read(llama))


def test_one_of_the_rank_files_is_refused(in_meta_order, tmp_path):
    source = write_meta(tmp_path / "meta", ranks_of(in_meta_order, 2), PARAMS)
    with pytest.raises(SourceError, match=r"consolidated\.01\.pth: is a rank file of Meta's layout: pass its folder"):
        open_source(source / "consolidated.01.pth")


def test_merged_files_are_those_of_the_reference_library(tmp_path, deepseek):
    """Tensors of several dtypes are in its order, in which each is aligned to its dtype."""
    source = write_deepseek(
        tmp_path / "ranks", deepseek_ranks(read(deepseek), 2, LAYERS, EXPERTS), deepseek / "config.json"
    )
    shardconv.merge(source, tmp_path / "merged")
    found = tmp_path / "merged" / "model.safetensors"
    save_file(load_file(found), tmp_path / "expected.safetensors", metadata={"format": "pt"})
    assert found.read_bytes() == (tmp_path / "expected.safetensors").read_bytes()


def open_params(folder: Path, tensors: Tensors, params: Mapping[str, object], config: str | None = None) -> Source:
    """Open a folder with one file, params.json, and perhaps a config."""
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(params))
    if config is not None:
        (folder / "config.json").write_text(config)
    return open_source(folder)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"moe": {"num_experts": 8}}, "moe is not supported"),
        ({"use_scaled_rope": True}, "use_scaled_rope, but not its factor"),
        ({"dim": "64"}, "dim is '64'"),
        ({"causal": False}, "causal is False"),
    ],
)
def test_params_that_do_not_fit_are_refused(in_meta_order, tmp_path, params, text):
    with pytest.raises(SourceError, match=text):
        open_params(tmp_path / "meta", in_meta_order, PARAMS | params)


@pytest.mark.parametrize(
    ("params", "expected", "assumed"),
    [
        (
            {"head_dim": 8, "hidden_dim": 96, "vocab_size": VOCAB}, {"model_type": "mistral", "intermediate_size": 96},
            "max_position_embeddings = 32768",
        ),
        (
            {"norm_eps": None, "rope_theta": None}, {"rms_norm_eps": 1e-5, "rope_theta": 10000.0},
            "rms_norm_eps = 1e-05, rope_theta = 10000.0",
        ),
        ({"multiple_of": None}, {}, f"intermediate_size = 96, vocab_size = {VOCAB}"),
        ({"max_seq_len": 512}, {"max_position_embeddings": 512}, f"assumed: vocab_size = {VOCAB}, hidden_act"),
        (
            {"max_seq_len": 512, "max_position_embeddings": 1024}, {"max_position_embeddings": 1024},
            f"assumed: vocab_size = {VOCAB}, hidden_act",
        ),
        ({"use_scaled_rope": True, "rope_scaling_factor": 8}, {"max_position_embeddings": 131072}, "131072"),
    ],
)  # fmt: skip
def test_the_config_is_made_from_params_and_says_what_it_assumes(in_meta_order, tmp_path, params, expected, assumed):
    changed = {name: value for name, value in {**PARAMS, **params}.items() if value is not None}
    source = open_params(tmp_path / "meta", in_meta_order, changed)
    assert source.config is not None
    assert expected.items() <= source.config.items()
    assert assumed in source.assumed[0]


# --- DeepSeek -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    """DeepSeek-V3's form on the Hub, with fp8 weights, scales, and an MTP layer."""
    model = MODELS["deepseek_v3-hub"]
    folder = tmp_path_factory.mktemp("deepseek")
    return Model("deepseek_v3", {**model.config, "vocab_size": VOCAB}, rewrite=model.rewrite, extra=model.extra).write(
        folder
    )


@pytest.mark.parametrize("tp", DEEPSEEK_TPS)
def test_merge_of_deepseeks_files_has_the_tensors_of_the_checkpoint(deepseek, tmp_path, tp):
    expected = {name: tensor for name, tensor in read(deepseek).items() if f"layers.{LAYERS}." not in name}
    source = write_deepseek(tmp_path / "ranks", deepseek_ranks(expected, tp, LAYERS, EXPERTS), deepseek / "config.json")
    report = shardconv.merge(source, tmp_path / "merged")
    assert "without the MTP layers" in report.derived[0]
    check_equal(read(tmp_path / "merged"), expected)


def test_a_shard_that_ends_inside_of_a_byte_is_an_error(tmp_path):
    source = write_deepseek(tmp_path / "ranks", [{}, {}])
    entry = {"layers.0.attn.wo.weight": {"dtype": "F4", "shape": [2, 1], "data_offsets": [0, 1]}}
    for path in source.glob("model*"):
        path.write_bytes(safetensors_bytes(entry, b"\0"))
    with pytest.raises(SourceError, match=r"wo\.weight cannot be merged: a shard begins or ends inside a byte"):
        open_source(source)


def test_deepseeks_files_that_do_not_fit_are_refused(deepseek, tmp_path):
    ranks = deepseek_ranks(read(deepseek), 2, LAYERS, EXPERTS)
    source = write_deepseek(tmp_path / "ranks", ranks)
    (source / "model0-mp4.safetensors").write_bytes((source / "model0-mp2.safetensors").read_bytes())
    with pytest.raises(SourceError, match="rank files of several checkpoints"):
        open_source(source)
    ranks[1].pop(f"layers.1.ffn.experts.{EXPERTS - 1}.w2.weight")
    with pytest.raises(SourceError, match="different numbers of experts' tensors"):
        open_source(write_deepseek(tmp_path / "without an expert", ranks))


@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "layers.0.ffn.w1.weight", "layers.1.attn.wo.weight"])
def test_a_replicated_tensor_that_deepseeks_files_shard_is_refused(deepseek, tmp_path, name):
    whole = deepseek_ranks(read(deepseek), 1, LAYERS, EXPERTS)[0][name]
    ranks = [rank | {name: whole} for rank in deepseek_ranks(read(deepseek), 2, LAYERS, EXPERTS)]
    source = write_deepseek(tmp_path / "ranks", ranks, deepseek / "config.json")
    result = call("merge", source, "-o", tmp_path / "merged")
    assert re.search(r"weight: dim \d has \d+ elements \(expected|has shape .* does not fit the tensors", result.err)
    assert result.err.endswith("correct config.json, or remove it to merge without this comparison\n")
    assert not (tmp_path / "merged").exists()


def test_a_merge_without_a_config_says_that_shapes_are_not_compared(deepseek, tmp_path):
    source = write_deepseek(tmp_path / "ranks", deepseek_ranks(read(deepseek), 2, LAYERS, EXPERTS))
    assert "shapes are not compared with a config" in shardconv.merge(source, tmp_path / "merged").notes[0]


# --- DeepSpeed ------------------------------------------------------------------------------------------------------

DEEPSPEED = Path(__file__).parents[1] / "data" / "deepspeed"
#: The tensor parallel size of the files that DeepSpeed wrote.
DEEPSPEED_TPS = (2,)


@pytest.fixture
def deepspeed(tmp_path) -> Path:
    """Rank files that DeepSpeed wrote, and the config of the model."""
    folder = shutil.copytree(DEEPSPEED / "ranks", tmp_path / "ranks")
    (folder / "config.json").write_bytes((DEEPSPEED / "source" / "config.json").read_bytes())
    return folder


def test_merge_of_deepspeeds_files_has_the_tensors_of_the_model(deepspeed, tmp_path):
    report = shardconv.merge(deepspeed, tmp_path / "merged")
    assert report.derived == ("converted from 17 files of DeepSpeed's layout",)
    check_equal(read(tmp_path / "merged"), read(DEEPSPEED / "source"))
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {"config.json", "model.safetensors"}
    shardconv.split(deepspeed, tmp_path / "split", tp=1)
    assert not shardconv.verify(tmp_path / "split", against=DEEPSPEED / "source").differences


def test_an_adapter_next_to_rank_files_is_left_out_by_from(deepspeed, tmp_path):
    """Of the settings alone, transformers would make an adapter with random weights of a merge."""
    for name in ("adapter_config.json", "adapter_model.bin"):
        (deepspeed / name).write_text("{}")
    with pytest.raises(SourceError, match=r"adapter besides the files of .*: adapter_config\.json, adapter_model\.bin"):
        open_source(deepspeed)
    source = open_source(deepspeed, source_layout="deepspeed")
    assert {*source.left_out} == {"adapter_config.json", "adapter_model.bin", "ds_inference_config.json"}
    assert {*source.auxiliary_files} == {"config.json"}


def change_file(name: str, change) -> Callable[[Path], object]:
    """Change the tensors of a file."""

    def apply(folder: Path) -> None:
        found = torch.load(folder / name, weights_only=True)
        change(found)
        torch.save(found, folder / name)

    return apply


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: (folder / "tp_01_03.pt").unlink(), r"rank 1 of 2 has 7 files .*expected 8"),
        (
            lambda folder: [path.unlink() for path in folder.glob("tp_01*")],
            r"tp_01_00\.pt, the file of rank 1, is missing",
        ),
        (lambda folder: (folder / "config.json").unlink(), r"does not have config\.json"),
        (
            change_file("non-tp.pt", lambda found: found.update({"model.extra.weight": torch.ones(2)})),
            r"model\.extra\.weight is unknown in DeepSpeed's layout",
        ),
        (
            lambda folder: (
                [change_file(f"tp_0{rank}_06.pt", lambda found: found.pop("lm_head.weight"))(folder) for rank in (0, 1)]
                and change_file("non-tp.pt", lambda found: found.update({"lm_head.weight": torch.ones(64, 16)}))(folder)
            ),
            r"rank 1 does not have lm_head\.weight, which other ranks have: .*or pass the checkpoint",
        ),
    ],
)
def test_deepspeeds_files_that_do_not_fit_are_refused(deepspeed, change, text):
    change(deepspeed)
    with pytest.raises(SourceError, match=text):
        open_source(deepspeed)


# --- written in Meta's layout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", WRITTEN_TPS)
@pytest.mark.parametrize("mmap", [False, True])
def test_metas_files_are_those_of_torch_for_each_rank(llama, in_meta_order, tmp_path, tp, mmap):
    shardconv.split(llama, tmp_path / "meta", tp=tp, layout="meta")
    for rank, expected in enumerate(ranks_of(in_meta_order, tp)):
        path = tmp_path / "meta" / f"consolidated.{rank:02}.pth"
        check_equal(torch.load(path, weights_only=True, mmap=mmap), expected)


@pytest.mark.parametrize("tp", [2, 4])
def test_merge_verify_and_reshard_read_what_was_written_in_metas_layout(llama, tmp_path, tp):
    shardconv.split(llama, tmp_path / "meta", tp=tp, layout="meta")
    assert not shardconv.verify(tmp_path / "meta", against=llama).differences
    shardconv.merge(tmp_path / "meta", tmp_path / "merged")
    check_equal(read(tmp_path / "merged"), read(llama))
    shardconv.reshard(tmp_path / "meta", tmp_path / "other", tp=6 - tp, layout="meta")
    shardconv.split(llama, tmp_path / "expected", tp=6 - tp, layout="meta")
    assert contents(tmp_path / "other") == contents(tmp_path / "expected")


def test_tied_embeddings_are_written_as_the_output_too(tmp_path):
    source = Model("llama", {**GQA, "head_dim": 8, "vocab_size": VOCAB, "tie_word_embeddings": True}).write(
        tmp_path / "tied"
    )
    shardconv.split(source, tmp_path / "meta", tp=2, layout="meta")
    found = torch.load(tmp_path / "meta" / "consolidated.01.pth", weights_only=True)
    assert torch.equal(found["output.weight"], found["tok_embeddings.weight"])
    assert torch.equal(found["output.weight"], read(source)["model.embed_tokens.weight"][VOCAB // 2 :])
    report = shardconv.verify(tmp_path / "meta", against=source)
    assert (report.is_compared, report.differences) == (True, ())
    shardconv.reshard(tmp_path / "meta", tmp_path / "other", tp=4, layout="meta")
    shardconv.split(tmp_path / "other", tmp_path / "vllm", tp=2, layout="vllm")
    shardconv.merge(tmp_path / "vllm", tmp_path / "merged")
    check_equal(read(tmp_path / "merged"), read(source))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Model("qwen2", {"num_key_value_heads": 2, "vocab_size": VOCAB}), "model type 'qwen2'"),
        (
            Model("llama", {**GQA, "vocab_size": VOCAB, "attention_bias": True}),
            r"proj\.bias: layout meta does not have",
        ),
        (
            Model("llama", {**GQA, "num_attention_heads": 6, "vocab_size": 192, "hidden_size": 48}),
            r"q_proj\.weight: 6 heads \(num_attention_heads\) do not divide over 8 ranks \(6 = 8 \* 0 \+ 6\), .*"
            r"\(tp sizes that divide: 1, 2, 6\)",
        ),
    ],
)
def test_models_that_metas_layout_cannot_express_are_refused(tmp_path, model, text):
    source = model.write(tmp_path / "source")
    with pytest.raises(ShardconvError, match=text):
        shardconv.split(source, tmp_path / "meta", tp=8, layout="meta")
    assert not (tmp_path / "meta").exists()


#: The names of the arguments of Meta's models, which refuse all others.
LLAMA2 = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "max_batch_size", "max_seq_len",
}  # fmt: skip
LLAMA3, LLAMA31 = LLAMA2 | {"rope_theta"}, LLAMA2 | {"rope_theta", "use_scaled_rope"}
SCALED = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def changed(llama: Path, folder: Path, **fields: object) -> Path:
    """A checkpoint with other fields in its config."""
    shutil.copytree(llama, folder)
    change_config(folder, fields)
    return folder


@pytest.mark.parametrize(
    ("arguments", "tp", "rope"),
    [
        (LLAMA2, 1, {"rope_type": "default", "rope_theta": 10000.0}),
        (LLAMA3, 2, {"rope_type": "default", "rope_theta": 10000.0}),
        (LLAMA3, 1, {"rope_type": "default", "rope_theta": 500000.0}),
        (LLAMA31, 1, SCALED),
    ],
)
def test_params_are_arguments_of_metas_models(llama, tmp_path, arguments, tp, rope):
    source = changed(llama, tmp_path / "source", rope_parameters=rope)
    shardconv.split(source, tmp_path / "meta", tp=tp, layout="meta")
    found = json.loads((tmp_path / "meta" / "params.json").read_text())
    assert found.keys() <= arguments
    of_config = {"dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps"}
    assert {name: found[name] for name in of_config} == {name: PARAMS[name] for name in of_config}
    assert found["vocab_size"] == VOCAB
    width = int(found.get("ffn_dim_multiplier", 1) * int(2 * 4 * found["dim"] / 3))  # of Meta's MLP, by its formula
    multiple = found["multiple_of"]
    assert multiple * -(-width // multiple) == read(llama)["model.layers.0.mlp.up_proj.weight"].shape[0]
    assert found.get("rope_theta", 500000.0 if arguments is LLAMA3 else 10000.0) == rope["rope_theta"]
    assert found.get("use_scaled_rope", False) == (rope is SCALED)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"sliding_window": 16}, "sliding_window = 16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config|quantiz"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"rope_parameters": {**SCALED, "low_freq_factor": 2.0}}, "the values of Llama 3.1"),
    ],
)
def test_fields_that_metas_params_cannot_express_are_refused(llama, tmp_path, fields, text):
    source = changed(llama, tmp_path / "source", **fields)
    with pytest.raises(ShardconvError, match=text):
        shardconv.split(source, tmp_path / "meta", tp=1, layout="meta")
    assert not (tmp_path / "meta").exists()


@pytest.mark.parametrize("heads", ["8", None, 0, True])
def test_heads_that_are_not_a_number_are_an_error_of_the_config(heads):
    with pytest.raises(PlanError, match="num_attention_heads is"):
        head_sizes({"hidden_size": 64, "num_attention_heads": heads})


SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}


def test_params_of_mistral_have_its_heads_and_window():
    config = {"model_type": "mistral", **SIZES, "head_dim": 16}
    params = params_of_config(config | {"sliding_window": None}, 96)
    assert (params["head_dim"], params["n_kv_heads"], params["hidden_dim"]) == (16, 8, 96)
    assert (params["rope_theta"], "sliding_window" in params) == (10000.0, False)
    assert params_of_config(config, 96)["sliding_window"] == 4096  # of transformers' class


def test_a_missing_head_is_only_made_of_tied_embeddings(llama, tmp_path):
    source = change_tensors(changed(llama, tmp_path / "source"), lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(PlanError, match=r"lm_head\.weight is missing"):
        shardconv.split(source, tmp_path / "meta", tp=1, layout="meta")


def test_overwrite_replaces_metas_files_and_nothing_else(llama, tmp_path):
    shardconv.split(llama, tmp_path / "meta", tp=2, layout="meta")
    shardconv.split(llama, tmp_path / "meta", tp=1, layout="meta", overwrite=True)
    assert [path.name for path in (tmp_path / "meta").glob("*.pth")] == ["consolidated.00.pth"]
    shardconv.reshard(tmp_path / "meta", tmp_path / "other", tp=2, layout="meta")
    shardconv.reshard(tmp_path / "meta", tmp_path / "other", tp=4, layout="meta", overwrite=True)
    assert len([*(tmp_path / "other").glob("*.pth")]) == 4
    (tmp_path / "meta" / "notes.txt").write_text("")
    with pytest.raises(OutputError, match=r"holds notes\.txt"):
        shardconv.split(llama, tmp_path / "meta", tp=1, layout="meta", overwrite=True)


def test_metas_files_have_the_permissions_of_their_source(llama, tmp_path):
    source = changed(llama, tmp_path / "source")
    source.chmod(0o700)
    (source / "config.json").chmod(0o600)
    shardconv.split(source, tmp_path / "meta", tp=1, layout="meta")
    assert (tmp_path / "meta").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "meta" / "params.json").stat().st_mode & 0o777 == 0o600


def test_a_config_that_changes_after_the_plan_is_an_error(llama, tmp_path, monkeypatch):
    source = changed(llama, tmp_path / "source")
    before_copying(monkeypatch, lambda: (source / "config.json").write_text("{}"))
    with pytest.raises(SourceError, match="changed after the plan was made"):
        shardconv.split(source, tmp_path / "meta", tp=1, layout="meta")
    assert not (tmp_path / "meta").exists()


@pytest.mark.parametrize("tp", [1, 4])
def test_a_split_checkpoint_is_not_resharded_to_metas_files_but_the_commands_are_named(llama, tmp_path, tp):
    shardconv.split(llama, tmp_path / "split", tp=2)
    with pytest.raises(UsageError) as caught:
        shardconv.reshard(tmp_path / "split", tmp_path / "meta", tp=tp, layout="meta")
    steps = [line.split() for line in str(caught.value).partition("split checkpoint: ")[2].split(", then ")]
    for words in steps:
        named = [word.replace(f"{llama.name}-merged", str(tmp_path / "merged")) for word in words[1:]]
        assert call(*named, *(["-o", tmp_path / "meta"] if "--layout" in named else [])).code == 0
    shardconv.split(llama, tmp_path / "expected", tp=tp, layout="meta")
    assert contents(tmp_path / "meta") == contents(tmp_path / "expected")


def test_verify_reads_the_layout_that_is_asked_for(llama, both, tmp_path):
    report = shardconv.verify(both, source_layout="meta")
    assert (report.layout, report.checked, report.differences) == ("meta", ("names and shapes", "replicas"), ())
    (difference,) = shardconv.verify(both, source_layout="meta", against=llama).differences
    assert difference.startswith("model.norm.weight")
    shardconv.split(llama, tmp_path / "split", tp=2)
    with pytest.raises(UsageError, match="is a split checkpoint, and source_layout is for rank files of other tools"):
        shardconv.verify(tmp_path / "split", source_layout="meta")
    with pytest.raises(UsageError, match='does not hold files of source_layout="deepseek"'):
        shardconv.verify(both, source_layout="deepseek")


def test_verify_counts_a_source_with_other_tensors_as_not_compared(llama, in_meta_order, tmp_path):
    source = write_meta(tmp_path / "meta", ranks_of(in_meta_order, 2), PARAMS)
    compared = f"every tensor of {llama}"
    report = shardconv.verify(source, against=llama)
    assert (report.is_compared, compared in report.checked, report.differences) == (True, True, ())
    tensors = {f"other.{name}": tensor for name, tensor in read(llama).items()}
    (other := tmp_path / "other").mkdir()
    save_file(tensors, other / "model.safetensors")
    report = shardconv.verify(source, against=other)
    assert (report.is_compared, report.checked) == (False, ("names and shapes", "replicas"))
    (difference,) = report.differences
    assert f"{other}: is another model" in difference


# --- what params.json does not state --------------------------------------------------------------------------------


def test_null_in_a_config_does_not_replace_values_of_params(llama, in_meta_order, tmp_path):
    config = json.loads((llama / "config.json").read_text()) | {"head_dim": None, "num_key_value_heads": None}
    source = open_params(tmp_path / "meta", in_meta_order, PARAMS, json.dumps(config))
    assert source.specs.keys() == read(llama).keys()


def test_an_archive_of_more_than_4_gib_is_read_by_torch(tmp_path):
    specs = {"a": TensorSpec("BF16", (3, 2**30)), "b": TensorSpec("F32", (2, 3))}
    archive, path = TorchArchive("consolidated.00", specs), tmp_path / "large.pth"
    with path.open("wb") as file:
        file.truncate(archive.file_bytes)  # sparse
        for at, data in [*archive.pieces.items(), (archive.offsets["b"], bytes(range(24)))]:
            file.seek(at)
            file.write(data)
    found = torch.load(path, weights_only=True, mmap=True)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"a": (3, 2**30), "b": (2, 3)}
    assert found["b"].numpy().tobytes() == bytes(range(24))
