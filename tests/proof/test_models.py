"""Trials of tools/model_matrix: some model types of every family, and wrong rules, which it has to detect.

Outputs are compared within the limits of shardconv/proof/prove.py.
"""

from dataclasses import replace

import pytest
import transformers

from shardconv.checkpoint.operations.split import split
from shardconv.checkpoint.sources.opening import open_source
from shardconv.hf.build import build_small
from shardconv.hf.small import default_config, small_fields
from shardconv.plan.families.family import NAMES_FAMILY
from shardconv.plan.families.loading import family_names, load_family
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.proof.ranks import sharded_fraction
from tests.support.matrix import MATRIX
from tests.support.models import MODELS, model_class
from tests.support.ranks import ranks_in
from tests.support.verdicts import verdict
from tests.support.wrong_rules import KIND_OF, WRONG, WRONG_OVERRIDES
from tools import torchvision as vision
from tools.model_matrix.table import unexplained
from tools.model_matrix.trial import (
    NOT_ON_DEVICES,
    REASONS,
    Row,
    check_disguised,
    small,
    try_type,
)

pytestmark = MATRIX

#: One of this many types of a family is tried.
EVERY = 8


def tried_types(family):
    """Every EVERY-th type of a family, without submodel types and types that require missing packages."""
    left_out = {*REASONS, *vision.TYPES}
    return [kind for kind in load_family(family).model_types if kind in KIND_OF and kind not in left_out][::EVERY]


TRIED = [model_type for name in family_names() if name != NAMES_FAMILY for model_type in tried_types(name)]


@pytest.mark.parametrize("model_type", TRIED)
def test_types_of_every_family_are_right(ranks, tmp_path, model_type):
    row = try_type(ranks, tmp_path, KIND_OF[model_type], model_type, [2], at_default_size=False)
    assert row.verdicts == ("passed",), row


@pytest.fixture(scope="module")
def device_ranks(tmp_path_factory):
    """Processes of their own: autograd has threads for the devices that are registered when it runs first."""
    with ranks_in(tmp_path_factory.mktemp("devices")) as run:
        yield run


@pytest.mark.parametrize("model_type", TRIED[::4])
def test_types_do_not_mix_devices(device_ranks, tmp_path, model_type):
    """Forward and backward on a disguised CPU, where tensors of two devices are an error."""
    kind = KIND_OF[model_type]
    row = try_type(device_ranks, tmp_path, kind, model_type, [2], at_default_size=False, checking=check_disguised)
    assert row.has_passed != (model_type in NOT_ON_DEVICES), row


def test_models_are_right_on_eight_ranks(tmp_path):
    """With fewer KV heads than ranks, and with fewer query heads than ranks."""
    with ranks_in(tmp_path, 8) as eight_ranks:
        for name in ("llama", "falcon-7b"):
            folder = tmp_path / name
            made = MODELS[name].build(0.3)
            made.save_pretrained(folder / "source")
            split(folder / "source", folder / "split", tp=8)
            opened = open_source(folder / "source")
            plan = planner_for(opened.specs, opened.config, PlanRequest()).plan(8)
            assert any(planned.placement.has_replicas for planned in plan.tensors.values())
            assert sharded_fraction(opened.specs, plan) > 0.9
            assert (
                verdict(eight_ranks, "eight", type(made), folder / "source", folder / "split", PlanRequest())
                == "passed"
            )
        for model_type in ("mamba2", "swin"):  # with fewer heads than ranks
            row = try_type(eight_ranks, tmp_path, KIND_OF[model_type], model_type, [8], at_default_size=False)
            assert row.verdicts == ("passed",), row


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3n_text", "wav2vec2"])
def test_gradients_are_those_of_training(ranks, tmp_path, model_type):
    """A type without a training step would be compared in eval mode."""
    row = try_type(ranks, tmp_path, KIND_OF[model_type], model_type, [2], at_default_size=False)
    assert (row.verdicts, "gradients" in row.note) == (("passed",), False), row


@pytest.mark.parametrize(
    ("model_type", "attention", "cache"),
    [
        ("llama", "heads", 0.5),
        ("deepseek_v3", "latent", 1.0),
        ("xlstm", "state", 0.5),
        ("reformer", "gathered", 1.0),
    ],
)
def test_how_attention_is_sharded(ranks, tmp_path, model_type, attention, cache):
    row = try_type(ranks, tmp_path, KIND_OF[model_type], model_type, [2], at_default_size=False)
    assert (row.attention, bool(row.reasons)) == (attention, attention == "gathered")
    assert row.cache == pytest.approx(cache, abs=0.02)


def test_gathered_attention_has_a_reason():
    kind = "image classification"
    row = Row(kind, "swin", "swin", ("passed", "passed"), 1.0, attention="heads, gathered", reasons=("few heads",))
    assert not unexplained([row], is_all=False)
    problems = unexplained([replace(row, reasons=("few heads", ""))], is_all=False)
    assert problems == ["gathered, without a reason in the family file: swin"]


def test_linear_attention_of_default_sizes(ranks, tmp_path):
    """Values are twice as large as keys, but transformers writes the fused convolution in thirds, across heads."""
    config = transformers.OlmoHybridConfig
    fields = {name: value for name, value in small_fields(default_config(config)).items() if "linear" not in name}
    model = build_small(transformers.OlmoHybridForCausalLM, config(**fields))
    model.save_pretrained(tmp_path / "source")
    opened = open_source(tmp_path / "source")
    heads = [opened.config[f"linear_{which}_head_dim"] * 4 for which in ("key", "key", "value")]
    written = [opened.specs[f"model.layers.0.linear_attn.{which}_conv1d.weight"].shape[0] for which in "qkv"]
    assert (heads, written) == ([48, 48, 96], [64, 64, 64])
    for layout, tp in (("pair", 2), ("four", 4)):
        split(tmp_path / "source", tmp_path / "split", tp=tp, overwrite=True)
        paths = (tmp_path / "source", tmp_path / "split")
        assert verdict(ranks, layout, type(model), *paths, PlanRequest()) == "passed"


def verdict_on(ranks, folder, model_type, text):
    """The verdict on a model that is split with these additional rules."""
    plan = folder / "wrong.toml"
    plan.write_text(text)
    model = small(model_class(KIND_OF[model_type], model_type))
    model.save_pretrained(folder / "source")
    split(folder / "source", folder / "split", tp=2, rules=plan)
    request = PlanRequest(plan_file=(plan.name, text))
    return verdict(ranks, "pair", type(model), folder / "source", folder / "split", request)


@pytest.mark.parametrize(
    "model_type", sorted({model_type for model_type, _ in [*WRONG.values(), *WRONG_OVERRIDES.values()]})
)
def test_models_with_correct_rules_are_right(ranks, tmp_path, model_type):
    """The types of the next test."""
    assert verdict_on(ranks, tmp_path, model_type, "") == "passed"


@pytest.mark.parametrize("what", [*WRONG, *WRONG_OVERRIDES])
def test_wrong_rules_are_detected(ranks, tmp_path, what):
    """The model can be split with them, but its outputs differ."""
    model_type, lines = (WRONG | WRONG_OVERRIDES)[what]
    units = "[units]\nelement = {}\nreplicated = { count = 2, replicate = true }\n"
    text = f"{units}[{'rules' if what in WRONG else 'modules'}]\n{lines}\n"
    assert not verdict_on(ranks, tmp_path, model_type, text).startswith("passed")
