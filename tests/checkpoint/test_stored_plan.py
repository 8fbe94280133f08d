"""A split checkpoint runs, reshards and reports by the plan in its manifest, whatever families are installed.

Outputs are compared with the unsharded model, bytes with the source. Logits may differ by 1e-4 of the largest, as sums
over features are computed per rank.
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers

import shardconv
from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.split.manifest_file import read_manifest
from shardconv.checkpoint.split.manifest_format import CHECKSUM_KEY, checked, checksum
from shardconv.hf.inputs import example_inputs
from shardconv.plan import family_file
from shardconv.plan.family_file import family_for, family_names, load_family
from shardconv.plan.plan import TensorSpec
from shardconv.plan.request import PlanRequest, resolve
from shardconv.plan.resolver import Resolver
from shardconv.plan.rule_format import parse_module, parse_rule, parse_unit, to_table
from shardconv.plan.rule_set import RuleSet
from shardconv.plan.submodels import rules_for
from shardconv.proof.outputs import float_tensors
from tests.support.checkpoints import contents
from tests.support.command import call
from tests.support.manifests import change_manifest
from tests.support.matrix import cases
from tests.support.models import model_class
from tests.support.wrong_rules import KIND_OF, WRONG, WRONG_OVERRIDES
from tools.model_matrix.trial import small

DATA = Path(__file__).parents[1] / "data"


@contextmanager
def installed(folder):
    """Replace the installed families by those in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family_file, "FOLDER", folder)
        family_file.clear_cache()
        yield
    family_file.clear_cache()


def changed_families(folder, model_type, text):
    """Write the installed families, and add rules for a model type before those of its family."""
    shutil.copytree(family_file.FOLDER, folder)
    family = family_for(model_type)
    for path in folder.glob("*.toml"):  # no other family has the type
        lists = re.compile(r"^model_types = \[[^]]*\]", re.MULTILINE)
        path.write_text(lists.sub(lambda found: found[0].replace(f'"{model_type}"', '"none"'), path.read_text()))
    tables = re.sub(r"^\[(\w+)\]", r"[changed.\1]", text, flags=re.MULTILINE)
    heading = f'[changed]\nmodel_types = ["{model_type}"]\ninherits = "{family.name}"\n'
    (folder / "changed.toml").write_text(heading + tables)
    with installed(folder):
        assert family_for(model_type).name == "changed"
    return folder


# --- families that change after a split -----------------------------------------------------------------------------

#: A type, and a change of its family after which shapes stay the same.
CHANGED = {
    **{what: (kind, f"[units]\nelement = {{}}\n[rules]\n{rules}\n") for what, (kind, rules) in WRONG.items()},
    **{
        what: (kind, f"[units]\nreplicated = {{ count = 2, replicate = true }}\n[modules]\n{overrides}\n")
        for what, (kind, overrides) in WRONG_OVERRIDES.items()
    },
    "the order of heads in a submodel": (
        "qwen2_vl",
        '[units]\nelement = {}\n[rules]\n"**.attn.qkv" = { style = "colwise_gather_output", pad = true }\n',
    ),
    "channels of a convolution": ("mamba2", '[rules]\n"**.conv1d" = { style = "replicate" }\n'),
    "a family that says nothing": ("gpt2", '[rules]\n"**.*" = { style = "replicate" }\n'),
}


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
        assert (found[name] - value).abs().max() <= 1e-4 * value.abs().max(), name


def check_refused(axis, split, families, message):
    with installed(families), pytest.raises(shardconv.ShardconvError, match=message):
        shardconv.load(split, device="cpu", group=axis)


def check_warned(axis, split):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        shardconv.load(split, device="cpu", group=axis)
    found = [one for one in warned if one.category is shardconv.PlanWarning]
    assert axis.rank or "does not store module overrides: the installed ones are used" in str(found[0].message)
    assert [one.filename for one in found] == [__file__] * len(found)


def to_format_1(folder):
    """Convert a manifest to version 1, which has placements and reasons but no rules."""

    def change(data):
        plan = data["plan"]
        reasons = [(one["reason"], one["style"]) for one in plan.pop("placements")]
        placements = read_manifest(folder).plan.to_json()["placements"]
        plan["rules"] = [
            {
                "placement": one["placement"],
                "reason": [reason["origin"], reason["rule"], style, reason["fields"]],
            }
            for one, (reason, style) in zip(placements, reasons, strict=True)
        ]
        data["format_version"] = 1
        data["side_files"] = data.pop("auxiliary_files")
        data["source"]["parts"] = data["source"].pop("files")
        del data["layout"]

    change_manifest(folder, change)


#: Changes that run by default: of a rule, and of a module override.
CHANGED_BY_DEFAULT = {"gate and up sharded as one segment", "norm over all heads as a norm per head", "full width"}


@pytest.mark.parametrize("what", cases(CHANGED, lambda what: what in CHANGED_BY_DEFAULT))
def test_family_that_changed_after_the_split(ranks, tmp_path, what):
    """With the present format outputs stay equal; with format 1 a changed placement or style is refused.

    Format 1 does not store module overrides: a warning says that the installed ones are used.
    """
    model_type, text = CHANGED[what]
    model = small(model_class(KIND_OF[model_type], model_type))
    model.save_pretrained(tmp_path / "source")
    shardconv.split(tmp_path / "source", tmp_path / "split", tp=2)
    families = changed_families(tmp_path / "families", model_type, text)
    ranks("pair", check_equal, type(model).__name__, tmp_path / "source", tmp_path / "split", families)
    if what not in WRONG_OVERRIDES:
        to_format_1(tmp_path / "split")
        ranks("pair", check_refused, tmp_path / "split", families, "does not store rules, .* was split as .*Merge it")
    else:
        shardconv.split(tmp_path / "source", tmp_path / "old", tp=2, checksums=False)  # rank files as format 1 has them
        to_format_1(tmp_path / "old")
        ranks("pair", check_warned, tmp_path / "old")


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
def test_verify_reads_no_family(splits):
    assert shardconv.verify(splits / "four", against=splits / "source").differences == ()


@pytest.mark.usefixtures("no_families")
def test_merge_reads_no_family(splits, tmp_path):
    shardconv.merge(splits / "four", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(splits / "source")


@pytest.mark.usefixtures("no_families")
def test_reshard_reads_no_family(splits, tmp_path):
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
        rules = data["plan"]["rules"]["models"][0]["rules"]
        next(rule for rule in rules if "o_proj" in rule["pattern"])["style"] = "replicate"

    change_manifest(tmp_path / "split", change)
    ranks("pairs", check_planner_changed, tmp_path / "split")


# --- manifests of older formats --------------------------------------------------------------------------------------


OLD_FORMATS = pytest.mark.parametrize(
    "split", [DATA / f"format-{version}" for version in (1, 2, 3, 4)], ids=lambda path: path.name
)


@OLD_FORMATS
def test_older_formats_are_verified(split):
    assert shardconv.verify(split, against=DATA / "source").differences == ()


@OLD_FORMATS
def test_older_formats_are_merged(split, tmp_path):
    assert shardconv.merge(split, tmp_path / "back").is_identical
    assert contents(tmp_path / "back") == contents(DATA / "source")


@OLD_FORMATS
def test_reshard_of_older_formats_writes_the_current_one(split, tmp_path):
    shardconv.reshard(split, tmp_path / "four", tp=4)
    assert shardconv.verify(tmp_path / "four", against=DATA / "source").differences == ()
    assert json.loads((tmp_path / "four" / "shardconv.json").read_text())["format_version"] == 5


@OLD_FORMATS
def test_older_formats_are_reported(split):
    assert "tp 2:" in call("plan", split).out


@OLD_FORMATS
def test_models_in_older_formats_run(ranks, split):
    ranks("pairs", check_equal, "LlamaForCausalLM", DATA / "source", split, family_file.FOLDER)


def test_keys_of_format_3_are_upgraded():
    """Keys of units, rules and slices are renamed; names of the model that equal old keys stay."""
    data = json.loads((DATA / "format-3" / MANIFEST_NAME).read_text())
    body = {key: value for key, value in data.items() if key != CHECKSUM_KEY}
    slices, others = {"part": {"dim": 0, "parts": ["head"]}}, {"attributes": {"parts": "head"}, "when": {"whole": 1}}
    old = {"copied_input": True, "summed_output": True}
    body["plan"]["rules"]["scopes"][0]["modules"] = [{"pattern": "x", "slices": slices, **old, **others}]
    (model,) = checked({**body, CHECKSUM_KEY: checksum(body)})["plan"]["rules"]["models"]
    (module,) = model["modules"]
    assert module["slices"] == {"part": {"dim": 0, "segments": ["head"]}}
    assert {"allreduce_input_grad": True, "allreduce_output": True, **others}.items() <= module.items()
    assert not old.keys() & module.keys()
    assert model["units"]["kv_head"] == {"count": "num_key_value_heads", "size": "head_dim", "replicate": True}
    assert model["units"]["half"] == {"count": "intermediate_size // 2", "shard_if_divisible": True}
    assert (model["rules"][2]["segments"], model["rules"][2]["segment"]) == (["kv_head", "kv_head"], 0)


# --- rules as data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", family_names())
def test_every_rule_equals_its_parsed_table(name):
    """Parsing is the inverse of writing, for every unit, rule and module override of every family."""
    family = load_family(name)
    for own, unit in family.units.items():
        assert parse_unit(own, json.loads(json.dumps(to_table(unit)))) == unit
    for rules, parse in ((family.rules, parse_rule), (family.modules, parse_module)):
        for rule in rules:
            table = json.loads(json.dumps(to_table(rule, without=("pattern", "origin", "when", "block"))))
            again = parse(rule.pattern, {**table, "when": dict(rule.when)}, rule.origin)
            assert to_table(again) == to_table(rule, without=("block",))


def test_stored_rules_have_only_the_config_fields_that_they_read():
    config = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
    rules = rules_for(load_family("llama"), {**config, "secret": "x", "rope_theta": 1e6})
    stored = json.loads(json.dumps(rules.to_json()))
    assert stored["models"][0]["config"].keys() <= config.keys()
    assert RuleSet.from_json(stored).to_json() == stored


def test_assumed_head_dim_is_stored():
    """For a file without a config, stored rules support the same tp sizes, and refuse others for the same reason."""
    shapes = {"q_proj": (4096, 64), "k_proj": (1024, 64), "v_proj": (1024, 64), "o_proj": (64, 4096)}
    specs = {f"model.layers.0.self_attn.{name}.weight": TensorSpec("F32", shape) for name, shape in shapes.items()}
    resolver = resolve(specs, None, PlanRequest()).resolver
    again = Resolver(specs, RuleSet.from_json(json.loads(json.dumps(resolver.rules.to_json()))))
    assert again.rules.uncertain
    assert again.tp_sizes() == resolver.tp_sizes()
    assert again.tp_sizes().supported == (1, 2)


# --- shardconv plan of a split checkpoint ---------------------------------------------------------------------------


def test_plan_of_a_split_checkpoint(tmp_path):
    """The report has the form and the lines of that for the source; with ``--tp`` it is that of a reshard."""
    shardconv.split(DATA / "source", tmp_path / "split", tp=2)
    for tp in ([], ["--tp", 2], ["--tp", 4]):
        ours = call("plan", tmp_path / "split", *tp)
        theirs = call("plan", DATA / "source", *(tp or ["--tp", 2]))
        lines = [line for line in ours.out.splitlines()[1:] if "has 2 ranks: this is the plan of" not in line]
        assert (ours.code, lines) == (0, theirs.out.splitlines()[1:])
    result = call("plan", tmp_path / "split", "--rules", "gpt2")
    assert result.code == 2
    assert "which stores its plan: remove --rules" in result.err
