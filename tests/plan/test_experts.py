"""Whole experts on each rank, on disk and in memory."""

import re
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import shardconv
from shardconv.plan.experts import Expert, place_expert
from shardconv.plan.request import PlanRequest
from shardconv.support.errors import PlanError, UsageError
from tests.support.adapters import write_adapter
from tests.support.checkpoints import contents
from tests.support.command import call
from tests.support.matrix import cases
from tests.support.models import model_class
from tests.support.verdicts import verdict
from tools.model_matrix.trial import small

#: A row of the table of a plan.
EXPERT_ROW = re.compile(r"layers\.0\..*experts\.(\d)\.w1\.weight .* expert on rank (\d) ")
CAUSAL = "text generation"
#: One by one on the hub; packed with biases; packed with shared experts beside them; two names on disk and in memory.
TYPES = cases(
    ["mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3", "nemotron_h"],
    lambda model_type: model_type in {"mixtral", "gpt_oss", "deepseek_v3"},
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    @cache
    def make(model_type):
        folder = tmp_path_factory.mktemp(model_type)
        model = small(model_class(CAUSAL, model_type))
        model.save_pretrained(folder / "source")
        return type(model).__name__, folder

    return make


@given(st.integers(1, 70), st.integers(1, 70), st.data())
def test_ranks_have_consecutive_experts(total, ep, data):
    """As NumPy divides an array into sections that differ by at most one element."""
    total = max(total, ep)
    number = data.draw(st.integers(0, total - 1))
    tp = data.draw(st.sampled_from([size for size in range(1, ep + 1) if ep % size == 0]))
    sections = np.array_split(np.arange(total), ep)
    packed = place_expert(Expert(None, total), (total, 3), tp, ep)
    assert [packed.ranks[rank] for rank in range(ep)] == [((one[0], one[-1] + 1),) for one in sections]
    single = place_expert(Expert(number, total), (5, 3), tp, ep)
    assert [single.local_size(rank) for rank in range(ep)] == [5 * (number in one) for one in sections]


@pytest.mark.parametrize("model_type", TYPES)
def test_ranks_have_whole_experts(made, ranks, model_type):
    kind, folder = made(model_type)
    shardconv.split(folder / "source", folder / "split", tp=2, ep=2)
    request = PlanRequest(ep=2)
    assert verdict(ranks, "pair", getattr(transformers, kind), folder / "source", folder / "split", request) == "passed"
    assert shardconv.verify(folder / "split", against=folder / "source").differences == ()
    shardconv.merge(folder / "split", folder / "back")
    assert contents(folder / "back") == contents(folder / "source")


#: The experts of each rank of a Mixtral with 6 experts, by tensor and expert parallel size.
HELD = {
    (2, 2): ({0, 1, 2}, {3, 4, 5}),
    (1, 4): ({0, 1}, {2, 3}, {4}, {5}),
    (2, 4): ({0, 1}, {2, 3}, {4}, {5}),
    (1, 5): ({0, 1}, {2}, {3}, {4}, {5}),
}


@pytest.mark.parametrize(("tp", "ep"), HELD)
def test_a_rank_file_has_its_experts_and_its_shards_of_other_tensors(mixtral, tmp_path, tp, ep):
    shardconv.split(mixtral, tmp_path / "whole", tp=tp, ep=ep)
    shardconv.split(mixtral, tmp_path / "sharded", tp=tp)
    full = load_file(mixtral / "model.safetensors")
    for rank, experts in enumerate(HELD[tp, ep]):
        own = load_file(tmp_path / "whole" / f"rank-{rank}-of-{ep}.safetensors")
        dense = load_file(tmp_path / "sharded" / f"rank-{rank % tp}-of-{tp}.safetensors")
        for name, tensor in own.items():
            match = re.search(r"\.experts\.(\d)\.", name)
            expected = dense[name] if match is None else full[name][: None if int(match[1]) in experts else 0]
            assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("old", [{"tp": 2, "ep": 4}, {"tp": 1, "ep": 5, "pp": 2}, {"tp": 4}])
@pytest.mark.parametrize("new", [{"tp": 2, "ep": 4, "pp": 2}, {"tp": 1, "ep": 3}, {"tp": 2, "ep": 1}])
def test_reshards_and_merges(mixtral, tmp_path, old, new):
    shardconv.split(mixtral, tmp_path / "old", **old)
    shardconv.reshard(tmp_path / "old", tmp_path / "resharded", **{"pp": 1, **new})
    shardconv.split(mixtral, tmp_path / "direct", **new)
    assert contents(tmp_path / "resharded") == contents(tmp_path / "direct")
    assert shardconv.verify(tmp_path / "resharded", against=mixtral).differences == ()
    shardconv.merge(tmp_path / "resharded", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(mixtral)


def test_a_reshard_keeps_the_expert_parallel_size(mixtral, tmp_path):
    shardconv.split(mixtral, tmp_path / "old", tp=2, ep=4)
    report = shardconv.reshard(tmp_path / "old", tmp_path / "new", tp=1)
    assert (report.tp, report.ep, len(report.rank_bytes)) == (1, 4, 4)
    with pytest.raises(UsageError, match=r"ep=4 is not a multiple of tp=3: pass ep=1, or a multiple such as ep=3"):
        shardconv.reshard(tmp_path / "old", tmp_path / "three", tp=3)


def test_some_ranks_are_resumed_and_joined(mixtral, tmp_path):
    shardconv.split(mixtral, tmp_path / "all", tp=2, ep=4)
    for ranks in ("0,3", "1-2"):
        shardconv.split(mixtral, tmp_path / ranks, tp=2, ep=4, ranks=ranks)
        shardconv.split(mixtral, tmp_path / ranks, tp=2, ep=4, ranks=ranks, overwrite=True, resume=True)
    shardconv.merge([tmp_path / "0,3", tmp_path / "1-2"], tmp_path / "back")
    assert contents(tmp_path / "back") == contents(mixtral)


def test_adapters_of_other_layers(mixtral, tmp_path):
    """An adapter without tensors of experts has as many ranks as its base model."""
    write_adapter(tmp_path / "lora", mixtral, target_modules=["q_proj"])
    shardconv.split(mixtral, tmp_path / "split", tp=2, ep=4, adapters=[tmp_path / "lora"])
    shardconv.merge(tmp_path / "split" / "adapters" / "lora", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "lora")


@pytest.fixture(scope="module")
def mixtral(made):
    return made("mixtral")[1] / "source"


def test_plan_shows_the_rank_of_each_expert(mixtral):
    lines = call("plan", mixtral, "--ep", 2, "--tp", 2, "--all").out.splitlines()
    named = {match[1]: match[2] for line in lines if (match := EXPERT_ROW.search(line))}
    assert named == {"0": "0", "1": "0", "2": "0", "3": "1", "4": "1", "5": "1"}


def test_a_proof_has_one_data_group(mixtral):
    shown = call("plan", mixtral, "--prove", "--tp", 2, "--ep", 4).out
    assert "a proof has one data group: pass --ep 2\n" in shown
    assert "not proven" in shown


@pytest.mark.parametrize(
    ("model_type", "options", "error", "message"),
    [
        (
            "mixtral",
            {"ep": 7, "tp": 1},
            UsageError,
            "ep=7 is more than the 6 experts of the checkpoint: pass ep=1, or a multiple of tp that is at most 6",
        ),
        ("mixtral", {"tp": 4}, UsageError, "ep=2 is not a multiple of tp=4: pass ep=1, or a multiple such as ep=4"),
        ("mixtral", {"tp": 8}, UsageError, "ep=2 is not a multiple of tp=8: pass ep=1$"),
        ("mixtral", {"ep": 3}, UsageError, "ep=3 is not a multiple of tp=2: pass ep=1, or a multiple such as ep=2"),
        ("mixtral", {"ep": 0}, UsageError, r"ep is 0 \(expected a positive integer\)"),
        ("mixtral", {"ep": "2"}, UsageError, "ep is '2'"),
        (
            "mixtral",
            {"replicate": ("**.experts.*.w2",)},
            PlanError,
            "shards this expert, and with ep=2 ranks have whole experts",
        ),
        ("mixtral", {"layout": "megatron"}, UsageError, "ep does not apply to layout megatron"),
        ("llama", {}, UsageError, "ep=2: no tensor is known to be of an expert"),
    ],
)
def test_sizes_that_are_not_possible_are_refused(made, model_type, options, error, message):
    _, folder = made(model_type)
    with pytest.raises(error, match=message):
        shardconv.split(folder / "source", folder / "refused", **{"tp": 2, "ep": 2, **options})


@pytest.mark.parametrize(
    ("model_type", "ep", "message"),
    [
        ("llama", 2, "ep=2: no tensor is known to be of an expert"),
        ("mixtral", 7, "ep=7 is more than the 6 ex"),
    ],
)
def test_a_reshard_to_such_sizes_is_refused(made, tmp_path, model_type, ep, message):
    _, folder = made(model_type)
    shardconv.split(folder / "source", tmp_path / "split", tp=1)
    with pytest.raises(UsageError, match=message):
        shardconv.reshard(tmp_path / "split", tmp_path / "refused", tp=1, ep=ep)


def check_refused(axis, model_type, message):
    model = small(model_class(CAUSAL, model_type))
    with pytest.raises(PlanError, match=message):
        shardconv.convert_model(model, ep=2, group=axis)


@pytest.mark.parametrize("model_type", ["llama4_text", "longcat_flash"])
def test_modules_that_cannot_have_whole_experts_are_refused(ranks, model_type):
    ranks("pair", check_refused, model_type, "cannot keep whole experts on each rank")
