"""Checkpoints in layout megatron, loaded by Megatron-Core, and what it saves merged back: make test-megatron.

Logits are compared with those of transformers, with a tolerance; tensors are compared exactly.
"""

import json
import multiprocessing
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from megatron.core import dist_checkpointing

import shardconv
from tests.megatron.gpt import FACTOR, Sizes, Work, serve
from tests.support.megatron import KINDS
from tests.support.models import Tensors, read

pytestmark = pytest.mark.timeout(400)
TOLERANCE = 1e-4
DENSE = ["llama", "llama, tied", "mistral", "qwen2", "qwen3"]
MOE = ["mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"]
WITH_MTP = {"glm4_moe", "deepseek_v3"}
SIZES = [Sizes(), Sizes(2), Sizes(4), Sizes(1, 2), Sizes(2, 2)]
CASES = [
    *((kind, sizes) for kind in DENSE for sizes in SIZES),
    *((kind, sizes) for kind in MOE for sizes in [*SIZES, Sizes(1, 1, 2), Sizes(2, 1, 2)]),
]


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    return cache(lambda kind: KINDS[kind].write(tmp_path_factory.mktemp("sources") / "source"))


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
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(ids).logits


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert ((got - expected).abs().max() / expected.abs().max()).item() < TOLERANCE


def changed(tensors: Tensors) -> Tensors:
    """The tensors after the change; biases of experts are not parameters."""
    return {name: one if name.endswith("e_score_correction_bias") else one * FACTOR for name, one in tensors.items()}


def assert_same(source: Path, work: Work, tmp_path: Path) -> None:
    """Compare logits and tensors on the way there and back."""
    found = run(work)
    assert_close(found["before"], logits_of(source, found["ids"]))
    shardconv.merge(work.results / "run", tmp_path / "merged", config=source / "config.json")
    got, expected = read(tmp_path / "merged"), changed(read(source))
    kept = {name for name in expected if work.with_mtp or not name.startswith("model.layers.2.")}
    assert got.keys() == kept
    assert [name for name in kept if not torch.equal(got[name], expected[name])] == []
    assert_close(found["after"], logits_of(tmp_path / "merged", found["ids"]))


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
