"""`shardconv plan --prove` and `--propose`, and plans from transformers' own tp_plan."""

import json
import random
import re
import resource
import shutil
import tomllib
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.hf.build import small_model
from shardconv.hf.small import SAME, default_config
from shardconv.plan.families.family import TRANSFORMERS, Family
from shardconv.plan.families.library_plans import library_family
from shardconv.plan.families.loading import expand_family, parse_plan_file
from shardconv.plan.request import PlanRequest
from shardconv.proof.compare import Reference, largest_difference
from shardconv.proof.prove import skipped_sizes
from shardconv.proof.ranks import REFERENCE, heads_for, write_small_model
from shardconv.support.errors import OutputError, RunError, UsageError
from tests.support.checkpoints import DEMO, llama_config, write_checkpoint
from tests.support.command import call
from tests.support.forked import run
from tests.support.matrix import MATRIX, cases
from tests.support.models import MODELS, model_class
from tests.support.verdicts import verdict
from tools.model_matrix.trial import small

CAUSAL = "text generation"
pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("forked_ranks")]


@pytest.fixture(scope="module")
def with_extra_tensor(tmp_path_factory):
    """A checkpoint with a tensor that its model does not have, and a plan file with a rule for it."""
    folder = tmp_path_factory.mktemp("extra")
    source, plan = shutil.copytree(DEMO, folder / "source"), folder / "plan.toml"
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.extra.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    plan.write_text('[rules]\n"**.extra" = { style = "replicate" }\n')
    return source, plan


@pytest.fixture(scope="module")
def proof_report(with_extra_tensor):
    """The proof of a correct plan, without a check of the model."""
    source, plan = with_extra_tensor
    result = run("plan", source, "--rules", plan, "--prove", "--no-check-model", "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_prove_checks_the_model_first(with_extra_tensor):
    source, plan = with_extra_tensor
    result = call("plan", source, "--rules", plan, "--prove")
    assert (result.code, "1 unused: model.layers.0.extra.weight" in result.err) == (1, True), result.err


def test_correct_plan_is_proven(proof_report):
    report = proof_report
    assert (report["is_proven"], report["model"], report["note"]) == (True, "LlamaForCausalLM", "")
    assert [proof["tp"] for proof in report["proofs"]] == [2, 4]
    assert all(
        proof["tokens"] and proof["output"] < 1e-4 and proof["sharded_fraction"] > 0.99 for proof in report["proofs"]
    )
    assert report["unreached"] == ["model.layers.*.extra.weight"]  # which the small model does not have
    assert report["supported_tp"][:4] == [1, 2, 4, 8]


def test_wrong_plan_is_not_proven(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        "[units]\nelement = {}\n[rules]\n"
        '"**.q_proj" = { style = "packed_colwise", segments = ["element", "element"] }\n'
    )
    result = run("plan", DEMO, "--rules", plan, "--prove", "--tp", "2")
    assert (result.code, "tp 2: failed" in result.out, "not proven" in result.out) == (3, True, True), result.err


#: Tensor parallel size at which a plan fails, to the plan; smaller heads or sizes would not show the mistake.
CORRECT_FOR_SMALLER_HEADS = {
    # half a head: correct while ranks hold two halves
    8: 'query_head = { count = "num_attention_heads * 2", size = "head_dim // 2", override = true }',
    # correct for heads of 8 features only
    4: 'kv_head = { count = "num_key_value_heads * head_dim // 8", size = 8, replicate = true, override = true }',
}


@pytest.mark.parametrize("fails_at", cases(CORRECT_FOR_SMALLER_HEADS, lambda fails_at: fails_at == 4))
def test_plans_that_are_correct_for_smaller_heads_only(ranks, tmp_path, fails_at):
    plan = tmp_path / "plan.toml"
    plan.write_text(f"[units]\n{CORRECT_FOR_SMALLER_HEADS[fails_at]}\n")
    config = json.loads((DEMO / "config.json").read_text())
    made = small_model(config)
    made.save_pretrained(tmp_path / "source")
    for tp, layout in {2: "pair", 4: "four"}.items():
        shardconv.split(tmp_path / "source", tmp_path / "split", tp=tp, rules=plan, overwrite=True)
        request = PlanRequest(plan_file=(plan.name, plan.read_text()))
        assert verdict(ranks, layout, type(made), tmp_path / "source", tmp_path / "split", request) == "passed"
    report = shardconv.prove(DEMO, rules=plan)
    assert not report.is_proven
    proof = report.proofs[-1]
    assert (proof.tp, proof.output, proof.has_passed) == (fails_at, None, False)
    assert re.search(r"fails to run: RuntimeError: shape '\[2, 7, -1, 32\]' is invalid", proof.note)
    assert all(other.has_passed for other in report.proofs[:-1])


def test_proof_names_heads_that_it_makes_smaller(tmp_path):
    """With xLSTM's head size the small model would be large."""
    architecture = model_class(CAUSAL, "xlstm")
    config = {**default_config(architecture.config_class), "architectures": [architecture.__name__]}
    assert write_small_model(config, tmp_path)[1] == "the small model has heads of 16 features instead of 512"


def write_small(folder):
    folder.mkdir()
    write_small_model(json.loads((DEMO / "config.json").read_text()), folder)
    return Reference(*torch.load(folder / REFERENCE))


def test_proof_does_not_depend_on_global_settings(tmp_path):
    usual = write_small(tmp_path / "as-usual")
    with ExitStack() as settings:
        settings.enter_context(torch.inference_mode())
        settings.enter_context(torch.device("meta"))
        settings.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        other = write_small(tmp_path / "otherwise")
    assert torch.equal(usual.output["logits"], other.output["logits"])
    assert usual.gradients
    assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in usual.gradients.items())


def test_proof_does_not_change_the_state_of_random_generators(tmp_path):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    write_small(tmp_path / "small")
    assert (torch.get_rng_state().equal(states[0]), random.getstate() == states[1]) == (True, True)
    assert np.random.get_state()[1].tolist() == states[2]


def test_unsupported_tp_is_skipped():
    report = shardconv.prove(DEMO, tps=(3,))
    assert (report.is_proven, report.proofs) == (False, ())
    assert report.skipped[0].startswith(f"tp 3: {DEMO} cannot be sharded for it: ")
    assert "expected one of 1, 2, 4, 8" in report.skipped[0]


@pytest.mark.parametrize("option", ["--prove", "--propose"])
def test_single_file_requires_a_config(tmp_path, option):
    bare = shutil.copyfile(DEMO / "model.safetensors", tmp_path / "bare.safetensors")
    result = call("plan", bare, option)
    message = "a proof builds a small model from config.json, and this source does not have one: pass --config FILE"
    assert (result.code, result.err) == (1, f"shardconv: {bare}: {message}\n")


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 2), (4, 4, 2), (3, 6, 3), (8, 8, 4), (16, 16, 8)]
)
def test_small_model_has_enough_heads_for_tp(tp, heads, kv_heads):
    """The head size stays; without a field for it, the model is wider."""
    count = heads_for([tp])
    config = json.loads((DEMO / "config.json").read_text())
    attention = small_model(config, has_real_heads=True, heads=count).model.layers[0].self_attn
    width = 96 if tp == 3 else 64  # a multiple of the number of heads
    assert attention.q_proj.weight.shape == (heads * 32, width)
    assert attention.k_proj.weight.shape == (kv_heads * 32, width)
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32 * 32, "n_head": 32}
    model = small_model(config, has_real_heads=True, heads=count)
    assert (model.config.n_head, model.config.n_embd) == (heads, heads * 32)


def test_message_blames_the_plan_file_only_with_one():
    blame = "If the plan file has numbers of the large model, write fields of its config instead."
    skipped = skipped_sizes("SRC", {3: "no"}, {7: "reason."}, has_plan_file=False)
    assert list(skipped) == [
        "tp 3: SRC cannot be sharded for it: no",
        "tp 7: the small model cannot be sharded for it, though SRC may be: reason.",
    ]
    assert next(skipped_sizes("SRC", {}, {7: "reason."}, has_plan_file=True)).endswith(f"reason. {blame}")


#: With gates per head, and layers in separate modules.
@pytest.mark.parametrize("model_type", cases(["beam", "moshi"], lambda name: name == "beam"))
def test_proposal_shards_by_heads(model_type, tmp_path):
    small(model_class(CAUSAL, model_type)).save_pretrained(tmp_path)
    result = call("plan", tmp_path, "--propose")
    assert result.code == 0, result.err
    rules = expand_family(parse_plan_file("plan.toml", result.out), Family("plan")).rules
    queries = [rule for rule in rules if re.search(r"q_proj|query_proj", rule.pattern)]
    assert queries
    assert {(rule.style, rule.unit) for rule in queries} >= {("colwise", "query_head")}, queries


#: With attention, a state space, overrides of the family, experts, fused projections and interleaved projections.
PROPOSED = cases(["gptj", "mamba", "phi3", "qwen3_moe", "codegen", "trocr"], lambda name: name in {"gptj", "phi3"})


@pytest.mark.parametrize("model_type", PROPOSED)
def test_proposal_is_proven(ranks, tmp_path, model_type):
    model, source = small(model_class(CAUSAL, model_type)), tmp_path / "source"
    model.save_pretrained(source)
    result = call("plan", source, "--propose")
    assert result.code == 0, result.err
    plan = tmp_path / "plan.toml"
    plan.write_text(result.out)
    shardconv.split(source, tmp_path / "split", tp=2, rules=plan)
    request = PlanRequest(plan_file=(plan.name, plan.read_text()))
    assert verdict(ranks, "pair", type(model), tmp_path / "source", tmp_path / "split", request) == "passed"


def test_remedy_where_overrides_of_the_family_do_not_fit_the_plan_file(tmp_path):
    """They set the local number of heads, but the layers of the plan file gather all heads."""
    small(model_class(CAUSAL, "phi3")).save_pretrained(tmp_path)
    plan = tmp_path / "plan.toml"
    plan.write_text('[rules]\n"**.{qkv_proj,o_proj}" = { style = "colwise_gather_output" }\n')
    report = shardconv.prove(tmp_path, rules=plan, tps=(2,), ignore=(plan.name,))
    assert not report.is_proven
    assert report.proofs[0].note.endswith(
        ". The module overrides of family phi3 apply, too: if they do not fit the rules of plan.toml, begin it with "
        'inherits = "by_name", and add rules for the other tensors'
    )


def test_proposal_as_json():
    """It is a plan file with the same rules."""
    text, data = (call("plan", DEMO, "--propose", *options).out for options in ([], ["--json"]))
    assert json.loads(data) == tomllib.loads(text)
    assert parse_plan_file("plan.json", data).rules


@pytest.mark.parametrize(
    "model_type",
    cases(
        ["llama", "gemma2", "phi3", "qwen2_moe", "deepseek_v3", "llama4_text"], lambda name: name in {"llama", "phi3"}
    ),
)
def test_tp_plan_of_transformers_is_right(ranks, tmp_path, model_type):
    model = small(model_class(CAUSAL, model_type))
    model.save_pretrained(tmp_path / "source")
    report = shardconv.split(tmp_path / "source", tmp_path / "split", tp=2, rules=TRANSFORMERS)
    assert (report.family, "transformers' own plan" in report.assumed[0]) == (TRANSFORMERS, True)
    assert (
        verdict(ranks, "pair", type(model), tmp_path / "source", tmp_path / "split", PlanRequest(TRANSFORMERS))
        == "passed"
    )


def test_model_without_a_tp_plan(tmp_path):
    assert library_family("gpt2") is None
    assert library_family("no such type") is None
    small(model_class(CAUSAL, "gpt2")).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="does not have a tensor parallel plan for model type 'gpt2' whose styles"):
        shardconv.make_plan(tmp_path, tp=2, rules=TRANSFORMERS)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match="does not have a tensor parallel plan for a checkpoint without a config"):
        shardconv.make_plan(tmp_path, tp=2, rules=TRANSFORMERS)


def test_masked_logits_are_not_compared():
    expected = torch.tensor([1.0, 2.0, torch.finfo(torch.float32).min])
    assert largest_difference(expected + torch.tensor([0.5, 0.0, 0.0]), expected) == 0.25
    assert largest_difference(torch.tensor([1.0, 2.0, 3.0]), expected) == float("inf")


#: Model type and config fields.
COUNTS = {
    "llama": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 3072, "head_dim": 512}),
    "llama of many heads": ("llama", {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}),
    "no field for heads": ("gpt_neox", {"num_attention_heads": 12, "hidden_size": 768}),
    "KV heads of latent attention": ("deepseek_v3", {"num_attention_heads": 128, "num_key_value_heads": 128}),
    "minimax": ("minimax", {"num_attention_heads": 64, "num_key_value_heads": 8}),
    "a nested config": ("gemma3", {"text_config": {"num_attention_heads": 16, "num_key_value_heads": 8}}),
}


@pytest.mark.parametrize("case", COUNTS)
def test_small_model_with_padding_has_the_head_counts_of_the_source(case, tmp_path):
    """The counts determine whether full groups are appended or each group is padded."""
    model_type, fields = COUNTS[case]
    kind = model_class("image-text-to-text" if "text_config" in fields else CAUSAL, model_type)
    config = {**kind.config_class(**fields).to_dict(), "architectures": [kind.__name__]}
    small = write_small_model(config, tmp_path, has_real_counts=True)[0].config.to_dict()
    for path, value in fields.items():
        for name, number in value.items() if isinstance(value, dict) else [(path, value)]:
            if "heads" in name:
                assert (small[path] if isinstance(value, dict) else small)[name] == number


def test_padding_is_not_proven_with_other_head_counts(tmp_path, monkeypatch):
    """If a small model with the source's head counts cannot be built."""
    source = write_checkpoint(tmp_path / "source", config=llama_config(layers=1, hidden=96, heads=6, kv_heads=2))

    def without_counts(config: dict[str, Any], *, heads: int | None = None, **options: Any) -> Any:
        if heads == SAME:
            raise RunError("it cannot be built")
        return small_model(config, heads=heads, **options)

    monkeypatch.setattr("shardconv.proof.ranks.small_model", without_counts)
    report = shardconv.prove(source, tps=(4, 2), pad=True, check_model=False)
    assert [proof.tp for proof in report.proofs] == [2]
    assert report.skipped == (
        "tp 4: the positions of padding depend on the numbers of query and KV heads, which are 6/2 in the source and "
        "none that are padded in the small model",
    )


@MATRIX
def test_padding_is_proven(tmp_path):
    """The small model has the head counts of the source, so it is padded in the same way."""
    source = MODELS["llama"].write(tmp_path / "source")
    report = shardconv.prove(source, tps=(3,), pad=True)
    assert report.is_proven
    assert {3, 5, 6} < set(report.supported_tp)
    assert not shardconv.prove(source, tps=(3,)).is_proven


@pytest.mark.parametrize(("largest", "file"), [(20_000, "small"), (200_000, REFERENCE)])
def test_full_disk_is_one_message(tmp_path, largest, file):
    """A limit of the sizes of files stands for a full disk; /dev/full for one that only the reference results fill."""
    (tmp_path / REFERENCE).symlink_to("/dev/full")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        with pytest.raises(OutputError, match=f"^{re.escape(str(tmp_path / file))}: cannot be written: .*: free space"):
            write_small_model(llama_config(layers=1), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
