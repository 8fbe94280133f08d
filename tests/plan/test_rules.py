"""The ``rules`` argument: a family, a plan file, a Plan or policies, for every function that takes it."""

import copy
from pathlib import Path

import msgspec
import pytest
import torch

import shardconv
from shardconv.checkpoint.operations.plan_report import report_plan
from shardconv.support.errors import PlanError, UsageError
from tests.support.models import MODELS
from tests.support.policies import MlpPolicy
from tests.support.ranks import on_ranks

PLAN_FILE = 'inherits = "llama"\n[rules]\n"lm_head" = { style = "replicate" }\n'


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(PLAN_FILE)
    return path


@pytest.mark.parametrize("name", [Path, str, lambda path: path.name], ids=["path", "text", "in the current folder"])
def test_plan_file_by_its_path(checkpoint, plan_file, monkeypatch, name):
    source = checkpoint("llama")
    monkeypatch.chdir(plan_file.parent)
    assert shardconv.make_plan(source, tp=2, rules=name(plan_file)).placement("lm_head.weight").dim is None


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ("mine.tml", PlanError, r"^mine\.tml: does not exist \(similar: mine\.toml\): correct the path$"),
        ("nowhere/my.tml", PlanError, r"^nowhere/my\.tml: does not exist: correct the path$"),  # not a model of the Hub
        (MlpPolicy, UsageError, "a policy matches modules by class"),
    ],
)
def test_rules_that_do_not_exist_are_refused(checkpoint, plan_file, monkeypatch, rules, error, message):
    source = checkpoint("llama")
    monkeypatch.chdir(plan_file.parent)
    with pytest.raises(error, match=message):
        shardconv.make_plan(source, tp=2, rules=rules)


def test_plan_is_executed_as_it_was_made(checkpoint, plan_file, tmp_path):
    """The files are those that the options of the plan give."""
    source = checkpoint("llama")
    options = {"rules": plan_file, "replicate": "model.embed_tokens.weight"}
    shardconv.split(source, tmp_path / "expected", tp=2, **options)
    shardconv.split(source, tmp_path / "made", tp=2, rules=shardconv.make_plan(source, tp=2, **options))
    for rank in range(2):
        name = f"rank-{rank}-of-2.safetensors"
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_plan_gives_its_rules_for_another_tp(checkpoint, plan_file):
    source = checkpoint("llama")
    made = shardconv.make_plan(source, tp=2, rules=plan_file)
    again, expected = (shardconv.make_plan(source, tp=1, rules=rules) for rules in (made, plan_file))
    assert msgspec.json.encode(again.stored()) == msgspec.json.encode(expected.stored())
    assert report_plan(source, tp=2, rules=made) == report_plan(source, tp=2, rules=plan_file)


def test_plan_for_an_engine_stays_one_for_it(checkpoint, tmp_path):
    source = checkpoint("llama")
    made = shardconv.make_plan(source, tp=2, engine="vllm")
    shardconv.split(source, tmp_path / "split", tp=2, rules=made)
    shardconv.split(source, tmp_path / "expected", tp=2, engine="vllm")
    stored, expected = [(tmp_path / name / "shardconv.json").read_text() for name in ("split", "expected")]
    assert '"engine":"vllm"' in stored
    assert [stored.count(part) for part in ('"engine":"vllm"', '"vocab_multiple":64')] == [
        expected.count(part) for part in ('"engine":"vllm"', '"vocab_multiple":64')
    ]


def test_changed_plan_is_refused(checkpoint, tmp_path):
    source = checkpoint("llama")
    plan = shardconv.make_plan(source, tp=2)
    replicated = shardconv.make_plan(source, tp=2, replicate="lm_head.weight")
    tensors = {**plan.tensors, "lm_head.weight": replicated.tensors["lm_head.weight"]}
    changed = type(plan).of_tensors(plan.tp, plan.family, tensors, plan.rules)
    with pytest.raises(shardconv.PlanError, match=r"lm_head.weight: the plan was made for another checkpoint"):
        shardconv.split(source, tmp_path / "split", tp=2, rules=changed)


def test_plan_of_another_checkpoint_is_refused(checkpoint):
    plan = shardconv.make_plan(checkpoint("gpt2"), tp=2)
    with pytest.raises(shardconv.PlanError):
        shardconv.make_plan(checkpoint("llama"), tp=2, rules=plan)


@pytest.mark.parametrize("option", [{"pad": True}, {"replicate": "lm_head"}, {"ep": 2}, {"head_dim": 8}])
def test_options_that_change_a_plan_are_refused(checkpoint, option):
    plan = shardconv.make_plan(checkpoint("llama"), tp=2)
    with pytest.raises(UsageError, match=f"{next(iter(option))} cannot change a plan") as raised:
        shardconv.make_plan(checkpoint("llama"), tp=2, rules=plan, **option)
    flag = next(iter(option)).replace("_", "-")
    assert raised.value.with_options().startswith(f"--{flag} cannot change a plan (--rules is a Plan)")


@pytest.fixture
def source(checkpoint):
    return checkpoint("llama")


@on_ranks("pair")
def test_models_in_memory(axis, source, plan_file):
    """Check the same model by every way to name the same rules."""
    before = MODELS["llama"].build()
    inputs = torch.tensor([[1, 2, 3, 4]])
    expected = before(inputs).logits
    for rules in ("auto", "llama", shardconv.make_plan(source, tp=axis.size), plan_file):
        model = shardconv.convert_model(copy.deepcopy(before), rules=rules, group=axis)
        # sums of two partial products, in another order
        assert (model(inputs).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert model.model.layers[0].mlp.up_proj.weight.shape[0] * axis.size == before.config.intermediate_size


@pytest.mark.parametrize(("tp", "pad", "message"), [(1, False, "is for 1 ranks"), (2, True, "pad is True with a plan")])
@on_ranks("pair")
def test_model_in_memory_refuses_another_plan(axis, source, tp, pad, message):
    plan = shardconv.make_plan(source, tp=tp)
    with pytest.raises((ValueError, PlanError), match=message):
        shardconv.convert_model(MODELS["llama"].build(), rules=plan, pad=pad, group=axis)
