"""Checkpoints in layout megatron, loaded by Megatron-Core, and what it saves merged back: make test-megatron.

Logits are compared with those of transformers, with a tolerance, before and after a backward pass that changes
all parameters; tensors exactly.
"""

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from megatron.core import dist_checkpointing

import shardconv
from tests.megatron.gpt import Sizes, Work, serve
from tests.support.megatron import KINDS, load_dcp
from tests.support.models import change_config, read

pytestmark = pytest.mark.timeout(400)
TOLERANCE = 1e-4
DENSE = ["gemma", "gemma2", "gemma3", "llama", "llama, tied", "mistral", "olmo", "qwen2", "qwen3"]
MOE = ["gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2"]
WITH_MTP = ("glm4_moe", "deepseek_v3")
assert {*MOE, *DENSE} <= KINDS.keys()  # which the fixture source_of writes
SIZES = [Sizes(), Sizes(2), Sizes(4), Sizes(1, 2), Sizes(2, 2)]
CASES = [
    *((kind, sizes) for kind in DENSE for sizes in SIZES),
    *((kind, sizes) for kind in MOE for sizes in [*SIZES, Sizes(1, 1, 2), Sizes(2, 1, 2)]),
]


def run(work: Work) -> dict[str, torch.Tensor]:
    """Run the work on its processes; returns the logits."""
    work.results.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.megatron.gpt"])
    processes = [context.Process(target=serve, args=(rank, work)) for rank in range(work.sizes.world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    return torch.load(work.results / "logits.pt")


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits of transformers, which has the model of Kimi K2 as DeepSeek-V3."""
    if json.loads((folder / "config.json").read_text())["model_type"] == "kimi_k2":
        folder = shutil.copytree(folder, folder.with_name(f"{folder.name}-v3"), dirs_exist_ok=True)
        change_config(folder, {"model_type": "deepseek_v3"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(ids).logits


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert ((got - expected).abs().max() / expected.abs().max()).item() < TOLERANCE


def assert_same(source: Path, work: Work, tmp_path: Path) -> None:
    """Compare logits and tensors on the way there and back, with a change of all parameters between."""
    found, merged = run(work), tmp_path / "merged"
    assert_close(found["before"], logits_of(source, found["ids"]))
    shardconv.merge(work.results / "run", merged, config=source / "config.json")
    is_stacked = not dist_checkpointing.load_content_metadata(str(work.folder))["non_homogeneous_layers"]
    shardconv.split(merged, tmp_path / "again", layout="megatron", stacked_layers=is_stacked)
    got, expected = load_dcp(tmp_path / "again" / "release"), load_dcp(work.results / "run" / "iter_0000001")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):  # without padding of the vocabulary
        expected |= {name: expected[name][: len(got[name])]} if name in expected else {}
    assert [name for name, one in expected.items() if not torch.equal(got[name], one)] == []
    before, after = read(source), read(merged)
    assert after.keys() == {name for name in before if work.with_mtp or not name.startswith("model.layers.2.")}
    assert all(not torch.equal(after[name], before[name]) for name in after if not name.endswith("correction_bias"))
    assert_close(found["after"], logits_of(merged, found["ids"]))


@pytest.mark.parametrize(("kind", "sizes"), CASES)
def test_logits_and_tensors(source_of, tmp_path, kind, sizes):
    source = source_of(kind)
    shardconv.split(source, tmp_path / "megatron", layout="megatron", tp=2)
    assert_same(source, Work(sizes, source, tmp_path / "megatron" / "release", tmp_path / "results"), tmp_path)


@pytest.mark.parametrize("kind", WITH_MTP)
def test_mtp_layers(source_of, tmp_path, kind):
    source = source_of(kind)
    shardconv.split(source, tmp_path / "megatron", layout="megatron")
    work = Work(Sizes(), source, tmp_path / "megatron" / "release", tmp_path / "results", with_mtp=True)
    assert_same(source, work, tmp_path)


@pytest.mark.parametrize(("kind", "sizes"), [("llama", Sizes(2, 2)), ("qwen3", Sizes(4)), ("llama, tied", Sizes(1, 2))])
def test_stacked_layers(source_of, tmp_path, kind, sizes):
    source = source_of(kind)
    shardconv.split(source, tmp_path / "megatron", layout="megatron", stacked_layers=True)
    work = Work(sizes, source, tmp_path / "megatron" / "release", tmp_path / "results")
    assert dist_checkpointing.load_content_metadata(str(work.folder))["non_homogeneous_layers"] is False
    assert_same(source, work, tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
def test_padded_vocabulary(source_of, tmp_path, tp):
    source = source_of("llama")
    shardconv.split(source, tmp_path / "megatron", layout="megatron", tp=tp, make_vocab_size_divisible_by=16)
    assert json.loads((source / "config.json").read_text())["vocab_size"] % (16 * tp)
    assert_same(source, Work(Sizes(tp), source, tmp_path / "megatron" / "release", tmp_path / "results"), tmp_path)
