"""Full experts distributed over ranks, on disk and in memory."""

import re
from functools import cache

import pytest
import torch
import transformers
from safetensors.torch import load_file

import shardconv
from shardconv.plan.request import PlanRequest
from shardconv.support.errors import PlanError, UsageError
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


@pytest.mark.parametrize("model_type", TYPES)
def test_experts_are_distributed_over_ranks(made, ranks, model_type):
    kind, folder = made(model_type)
    shardconv.split(folder / "source", folder / "split", tp=2, experts="expert")
    request = PlanRequest(experts="expert")
    assert verdict(ranks, "pair", getattr(transformers, kind), folder / "source", folder / "split", request) == "passed"
    assert shardconv.verify(folder / "split", against=folder / "source").differences == ()
    shardconv.merge(folder / "split", folder / "back")
    assert contents(folder / "back") == contents(folder / "source")


def test_rank_file_has_only_its_experts(made):
    _, folder = made("mixtral")
    shardconv.split(folder / "source", folder / "own", tp=2, experts="expert")
    full = load_file(folder / "source" / "model.safetensors")
    for rank in range(2):
        own = load_file(folder / "own" / f"rank-{rank}-of-2.safetensors")
        for name, tensor in own.items():
            if ".experts." in name:
                number = int(name.split(".experts.")[1].split(".")[0])
                expected = full[name] if number // 3 == rank else full[name][:0]
                assert torch.equal(tensor, expected), name
    shardconv.reshard(folder / "own", folder / "resharded", tp=1)
    shardconv.split(folder / "source", folder / "direct", tp=1, experts="expert")
    assert contents(folder / "resharded") == contents(folder / "direct")


@pytest.fixture(scope="module")
def mixtral(made):
    return made("mixtral")[1] / "source"


def test_plan_shows_the_rank_of_each_expert(mixtral):
    lines = call("plan", mixtral, "--experts", "expert", "--tp", 2, "--all").out.splitlines()
    named = {match[1]: match[2] for line in lines if (match := EXPERT_ROW.search(line))}
    assert named == {"0": "0", "1": "0", "2": "0", "3": "1", "4": "1", "5": "1"}


@pytest.mark.parametrize(
    ("model_type", "options", "error", "message"),
    [
        ("mixtral", {"tp": 4}, PlanError, "the number of experts, 6, is not a multiple of 4"),
        ("mixtral", {"experts": "experts"}, PlanError, "expected one of tensor, expert"),
        (
            "mixtral",
            {"replicate": ("**.experts.*.w2",)},
            PlanError,
            'shards this expert, and experts="expert" distributes full experts',
        ),
        ("llama", {}, UsageError, "the checkpoint does not have tensors of experts"),
    ],
)
def test_distributions_that_are_not_possible_are_refused(made, model_type, options, error, message):
    _, folder = made(model_type)
    with pytest.raises(error, match=message):
        shardconv.make_plan(folder / "source", **{"tp": 2, "experts": "expert", **options})


def check_refused(axis, model_type, message):
    model = small(model_class(CAUSAL, model_type))
    with pytest.raises(PlanError, match=message):
        shardconv.convert_model(model, experts="expert", group=axis)


@pytest.mark.parametrize("model_type", ["llama4_text", "longcat_flash"])
def test_experts_that_do_not_divide_are_refused(ranks, model_type):
    ranks("pair", check_refused, model_type, "cannot keep whole experts on each rank")
