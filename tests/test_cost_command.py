"""shardconv plan --cost and --measure-link, as commands; that what is counted is right, test_estimate.py shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo-model"


def run(*arguments, launcher=()):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    command = [sys.executable, *launcher, "-m", "shardconv", "plan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)  # noqa: PLW1510


def test_a_table_of_all_legal_sizes():
    result = run(DEMO, "--cost", "--batch", 2, "--seq", 16)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines() if line[:1].isdigit()]
    assert [line[0] for line in lines] == ["1", "2", "4", "8"]
    assert "2 prompts of 16 tokens" in result.stdout


def test_as_json():
    """Times are the collectives' own, by the formulas; twice the alpha and beta are twice the time."""
    seconds = []
    for factor in (1, 2):
        link = ("--alpha", 1e-5 * factor, "--beta", 1e-10 * factor)
        result = run(DEMO, "--cost", "--tp", 2, "--seq", 8, *link, "--json")
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["link"] == {"alpha": 1e-5 * factor, "beta": 1e-10 * factor}
        (cost,) = report["costs"]
        sent = sum(  # on two ranks an all-gather sends half, and an all-reduce twice that
            one["num_bytes"] * one["count"] * (0.5 if one["collective"] == "all_gather" else 1)
            for one in cost["decode"]["collectives"]
        )
        assert cost["decode"]["sent_bytes"] == sent > 0
        assert cost["memory_bytes"] == cost["weight_bytes"] + cost["cache_bytes"] + cost["activation_bytes"]
        seconds.append(cost["decode"]["seconds"])
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_a_checkpoint_whose_model_is_not_known(tmp_path):
    """Its weights are counted, and no other number is made up."""
    import numpy  # noqa: PLC0415 - for one tensor

    save_file({"model.layers.0.mlp.down_proj.weight": numpy.zeros((8, 8), "float32")}, tmp_path / "model.safetensors")
    result = run(tmp_path / "model.safetensors", "--cost", "--tp", 2, "--json")
    assert result.returncode == 0, result.stderr
    (cost,) = json.loads(result.stdout)["costs"]
    assert cost["weight_bytes"] == 8 * 8 * 4 // 2
    assert (cost["cache_bytes"], cost["prefill"]) == (None, None)
    assert "config" in cost["not_counted"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((DEMO, "--cost", "--alpha", "nan"), "is no number"),
        ((DEMO, "--cost", "--beta", "-1"), "not in the range"),
        ((DEMO, "--cost", "--batch", "0"), "not in the range"),
        ((DEMO, "--alpha", "1"), "--alpha is for --cost"),
        ((DEMO, "--cost", "--prove"), "not for --cost"),
        (("--cost",), "SRC"),
        (("--measure-link",), "torchrun --nproc-per-node N"),
        ((DEMO, "--cost", "--measure-link", "--beta", "1"), "give one or the other"),
    ],
)
def test_what_is_refused(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_link_is_measured():
    """By processes of torchrun; and the model is priced by it in the same call."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = run("--measure-link", "--json", launcher=launcher)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["num_ranks"], report["backend"], report["device"]) == (2, "gloo", "cpu")
    assert report["link"]["alpha"] >= 0
    assert report["link"]["beta"] >= 0
    assert max(report["link"].values()) > 0
    result = run(DEMO, "--cost", "--tp", 2, "--seq", 8, "--measure-link", launcher=launcher)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("LlamaForCausalLM") == 1
