"""`shardconv plan --prove` and `--propose`, as users start them; and plans that are transformers' own."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from command import call, run
from matrix import check, model_class, small, worst
from safetensors.torch import load_file, save_file

import shardconv
from shardconv.errors import PlanError, RunError
from shardconv.plan.family_file import NAMES_FAMILY, parse_plan_file
from shardconv.plan.foreign import FOREIGN, foreign_family
from shardconv.plan.request import PlanRequest
from shardconv.proof.compare import _difference, write_reference
from shardconv.proof.prove import REFERENCE

CAUSAL = "causal language models"
DEMO = Path(__file__).parent.parent / "examples" / "demo-model"
pytestmark = pytest.mark.timeout(200)


def test_a_right_plan_is_proven():
    result = run("plan", DEMO, "--prove", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert (report["is_proven"], report["model"], report["unreached"]) == (True, "LlamaForCausalLM", [])
    assert [proof["tp"] for proof in report["proofs"]] == [2, 4]
    assert all(proof["tokens"] and proof["output"] < 1e-4 and proof["cut"] > 0.99 for proof in report["proofs"])


def test_a_wrong_plan_is_not(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[units]\npart = {}\n[rules]\n"**.q_proj" = { style = "packed_colwise", parts = ["part", "part"] }\n'
    )
    result = run("plan", DEMO, "--plan", plan, "--prove", "--tp", "2")
    assert (result.code, "tp 2: DIFFERENT" in result.out, "not proven" in result.out) == (3, True, True), result.err


def test_what_the_proof_does_not_reach_is_said(tmp_path):
    source = shutil.copytree(DEMO, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.extra.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    plan = tmp_path / "plan.toml"
    plan.write_text('[rules]\n"**.extra" = { style = "replicate", optional = true }\n')
    report = shardconv.prove(source, tps=(2,), plan=plan)
    assert report.is_proven
    assert report.unreached == ("model.layers.*.extra.weight",)


def test_what_cannot_be_proven(tmp_path):
    source = shutil.copytree(DEMO, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    with pytest.raises(RunError, match="has no model type 'llama' with a class 'NoSuchModel'"):
        shardconv.prove(source)
    report = shardconv.prove(DEMO, tps=(3,))
    assert (report.is_proven, report.proofs) == (False, ())
    assert "tp 3: " in report.skipped[0]


#: Attention by heads; a state space model, whose layers give whole outputs; experts; fused and interleaved projections.
@pytest.mark.parametrize("model_type", ["gptj", "mamba", "qwen3_moe", "codegen"])
def test_a_proposal_is_right(tmp_path, model_type):
    source = tmp_path / "source"
    small(model_class(CAUSAL, model_type)).save_pretrained(source)
    result = call("plan", source, "--propose")
    assert result.code == 0, result.err
    # names that are on disk only, as those of single experts, are the user's to say
    more = '"**.experts.*.{gate_proj,up_proj}" = { style = "colwise", optional = true }\n'
    more += '"**.experts.*.down_proj" = { style = "rowwise", optional = true }\n'
    plan = tmp_path / "plan.toml"
    plan.write_text(result.out.replace("[rules]\n", f"[rules]\n{more}"))
    assert shardconv.prove(source, tps=(2,), plan=plan, family=NAMES_FAMILY).is_proven


def test_a_proposal_as_json():
    """It is a plan file, too, with the same rules."""
    text, data = (call("plan", DEMO, "--propose", *options).out for options in ([], ["--json"]))
    assert json.loads(data) == tomllib.loads(text)
    assert parse_plan_file("plan.json", data).rules


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "qwen2_moe", "deepseek_v3", "llama4_text"])
def test_plans_of_transformers(ranks, tmp_path, model_type):
    model = small(model_class(CAUSAL, model_type))
    model.save_pretrained(tmp_path / "source")
    report = shardconv.split(tmp_path / "source", tmp_path / "split", tp=2, family=FOREIGN)
    assert (report.family, "transformers' own plan" in report.assumed[0]) == (FOREIGN, True)
    reference = tmp_path / REFERENCE
    write_reference(type(model), tmp_path / "source", reference)
    source, place, request = tmp_path / "source", tmp_path / "split", PlanRequest(FOREIGN)
    found = worst(ranks("pair", check, type(model).__name__, source, place, request, reference))
    assert not isinstance(found, str), found
    assert (found[0] < 1e-4, found[1], found[2] < 1e-3) == (True, True, True)


def test_no_plan_of_transformers(tmp_path):
    assert foreign_family("gpt2") is None
    assert foreign_family("no such type") is None
    small(model_class(CAUSAL, "gpt2")).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="there is no family 'transformers'"):
        shardconv.make_plan(tmp_path, tp=2, family=FOREIGN)


def test_what_is_barred_is_no_measure():
    expected = torch.tensor([1.0, 2.0, torch.finfo(torch.float32).min])
    assert _difference(expected + torch.tensor([0.5, 0.0, 0.0]), expected) == 0.25
    assert _difference(torch.tensor([1.0, 2.0, 3.0]), expected) == float("inf")
