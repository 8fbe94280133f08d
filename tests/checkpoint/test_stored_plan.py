"""A split checkpoint runs, reshards and reports by the plan in its manifest, whatever families are installed.

Outputs are compared with the unsharded model, bytes with the source. Logits may differ by 1e-4 of the largest, as sums
over features are computed per rank.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import transformers

import shardconv
from shardconv.hf.inputs import example_inputs
from shardconv.plan.families import loading
from shardconv.plan.families.family import Family
from shardconv.plan.families.loading import family_names, load_family
from shardconv.plan.plan import TensorSpec
from shardconv.plan.planner import Planner, tp_sizes
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.plan.rule_set import RuleSet, rules_for
from shardconv.proof.compare import float_tensors
from tests.support.checkpoints import DEMO, contents
from tests.support.command import call
from tests.support.manifests import change_manifest
from tests.support.matrix import cases
from tests.support.models import model_class
from tests.support.wrong_rules import KIND_OF, WRONG, WRONG_OVERRIDES
from tools.model_matrix.trial import small


@contextmanager
def installed(folder):
    """Replace the installed families by those in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "FOLDER", folder)
        loading.clear_cache()
        yield
    loading.clear_cache()


# --- without families -----------------------------------------------------------------------------------------------


def check_equal(axis, kind, source, split, families):
    """Check outputs on a rank whose installed families are those in a folder."""
    transformers.logging.set_verbosity_error()
    unsharded = getattr(transformers, kind).from_pretrained(source, dtype=torch.float32).eval()
    inputs = example_inputs(unsharded)
    with torch.no_grad():
        expected = float_tensors(unsharded(**{name: value.clone() for name, value in inputs.items()}))
        with installed(families):
            loaded = shardconv.load(split, device="cpu", dtype=torch.float32, group=axis)
        found = float_tensors(loaded(**inputs))
    for name, value in expected.items():
        if name.startswith("state."):  # of recurrent models, which is local
            continue
        assert (found[name] - value).abs().max() <= 1e-4 * value.abs().max(), name


#: Model types with every kind of rule and module override, a submodel, and a convolution.
TYPES = {*(model_type for model_type, _ in (WRONG | WRONG_OVERRIDES).values()), "qwen2_vl", "mamba2"}


@pytest.mark.parametrize("model_type", cases(sorted(TYPES), lambda name: name in {"gpt2", "olmo2", "phi3"}))
def test_load_of_any_model_type_reads_no_family(ranks, tmp_path, model_type):
    model = small(model_class(KIND_OF[model_type], model_type))
    model.save_pretrained(tmp_path / "source")
    shardconv.split(tmp_path / "source", tmp_path / "split", tp=2)
    (tmp_path / "none").mkdir()
    ranks("pair", check_equal, type(model).__name__, tmp_path / "source", tmp_path / "split", tmp_path / "none")


@pytest.fixture(scope="module")
def splits(tmp_path_factory) -> Path:
    """A source and its splits for four ranks, which replicates KV heads and pads the vocabulary, and for two."""
    folder = tmp_path_factory.mktemp("splits")
    model = small(model_class("text generation", "llama"))
    model.resize_token_embeddings(131)
    model.save_pretrained(folder / "source")
    shardconv.split(folder / "source", folder / "four", tp=4)
    shardconv.split(folder / "source", folder / "two", tp=2)
    return folder


@pytest.fixture
def no_families(tmp_path) -> Iterator[Path]:
    """An empty folder of families, installed during the test."""
    (tmp_path / "none").mkdir()
    with installed(tmp_path / "none"):
        assert family_names() == []
        yield tmp_path / "none"


@pytest.mark.usefixtures("no_families")
def test_commands_on_bytes_read_no_family(splits, tmp_path):
    assert shardconv.verify(splits / "four", against=splits / "source").differences == ()
    shardconv.merge(splits / "four", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(splits / "source")
    shardconv.reshard(splits / "four", tmp_path / "resharded", tp=2)
    assert contents(tmp_path / "resharded") == contents(splits / "two")


def test_plan_reads_no_family(splits, request):
    expected = call("plan", splits / "source", "--tp", 4).out.splitlines()[1:]
    request.getfixturevalue("no_families")
    assert call("plan", splits / "four").out.splitlines()[1:] == expected


@pytest.mark.parametrize(("layout", "name"), [("four", "four"), ("pairs", "resharded")])
def test_load_reads_no_family(ranks, splits, no_families, tmp_path, layout, name):
    if name == "resharded":
        shardconv.reshard(splits / "four", tmp_path / name, tp=2)
    split = tmp_path / name if name == "resharded" else splits / name
    ranks(layout, check_equal, "LlamaForCausalLM", splits / "source", split, no_families)


def check_planner_changed(axis, split):
    """Check that stored rules which give other placements than the stored ones are refused."""
    with pytest.raises(shardconv.SplitCheckpointError, match=r"planned differently: .*o_proj.* was split as rowwise"):
        shardconv.load(split, device="cpu", group=axis)


def test_planner_that_changed_after_the_split(ranks, tmp_path):
    model = small(model_class("text generation", "llama"))
    model.save_pretrained(tmp_path / "source")
    shardconv.split(tmp_path / "source", tmp_path / "split", tp=2)

    def change(data):
        rules = data["plan"]["rules"]["models"][0]["family"]["rules"]
        next(rule for rule in rules if "o_proj" in rule["pattern"])["style"] = "replicate"

    change_manifest(tmp_path / "split", change)
    ranks("pairs", check_planner_changed, tmp_path / "split")


# --- rules as data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", family_names())
def test_every_family_is_read_as_it_was_written(name):
    """Its units, rules and module overrides, with conditions."""
    family = load_family(name)
    stored = msgspec.json.encode(family, order="sorted")  # of sets
    assert msgspec.json.encode(msgspec.json.decode(stored, type=Family), order="sorted") == stored


def test_stored_rules_have_only_the_config_fields_that_they_read():
    config = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
    rules = rules_for(load_family("llama"), {**config, "secret": "x", "rope_theta": 1e6})
    stored = msgspec.json.encode(rules.stored())
    assert json.loads(stored)["models"][0]["config"].keys() <= config.keys()
    assert msgspec.json.encode(msgspec.json.decode(stored, type=RuleSet)) == stored


def test_assumed_head_dim_is_stored():
    """For a file without a config, stored rules support the same tp sizes, and refuse others for the same reason."""
    shapes = {"q_proj": (4096, 64), "k_proj": (1024, 64), "v_proj": (1024, 64), "o_proj": (64, 4096)}
    specs = {f"model.layers.0.self_attn.{name}.weight": TensorSpec("F32", shape) for name, shape in shapes.items()}
    planner = planner_for(specs, None, PlanRequest())
    again = Planner(specs, msgspec.json.decode(msgspec.json.encode(planner.rules.stored()), type=RuleSet))
    assert again.rules.uncertain
    assert tp_sizes(again) == tp_sizes(planner)
    assert tp_sizes(again).supported == (1, 2)


# --- shardconv plan of a split checkpoint ---------------------------------------------------------------------------


def test_plan_of_a_split_checkpoint(tmp_path):
    """The report has the form and the lines of a report on the source; with ``--tp``, of a reshard."""
    shardconv.split(DEMO, tmp_path / "split", tp=2)
    for tp in ([], ["--tp", 2], ["--tp", 4]):
        ours = call("plan", tmp_path / "split", *tp)
        theirs = call("plan", DEMO, *(tp or ["--tp", 2]))
        lines = [line for line in ours.out.splitlines()[1:] if "has 2 ranks: this is the plan of" not in line]
        assert (ours.code, lines) == (0, theirs.out.splitlines()[1:])
    result = call("plan", tmp_path / "split", "--rules", "gpt2")
    assert result.code == 2
    assert "which stores its plan: remove --rules" in result.err
