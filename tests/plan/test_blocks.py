"""Blocks of modules, and families that mount them."""

from contextlib import contextmanager

import msgspec
import pytest

from shardconv.plan.families import loading
from shardconv.plan.families.family import Family
from shardconv.plan.families.loading import (
    expand_family,
    family_for,
    family_names,
    load_block,
    load_family,
    parse_block,
    parse_entry,
    parse_family,
)
from shardconv.plan.families.rule import ModuleRule, Named
from shardconv.plan.plan import TensorSpec
from shardconv.plan.planner import Planner
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.plan.rule_set import RuleSet
from shardconv.support.errors import PlanError
from tests.support.plans import plan_of

LLAMA_LIKE = '[blocks]\n"model" = "decoder"\n"" = "heads"\n'
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, "intermediate_size": 12}
LAYER = {
    "self_attn.q_proj.weight": ((8, 8), "colwise"),
    "self_attn.k_proj.weight": ((4, 8), "colwise"),
    "self_attn.v_proj.bias": ((4,), "colwise"),
    "self_attn.o_proj.weight": ((8, 8), "rowwise"),
    "mlp.gate_proj.weight": ((12, 8), "colwise"),
    "mlp.down_proj.weight": ((8, 12), "rowwise"),
    "input_layernorm.weight": ((8,), "replicate"),
}


def family(data, base=None):
    return expand_family(parse_family("mine", data, "family mine"), base or Family("mine"))


def styles(specs, config, text):
    """The style of each tensor by a plan file."""
    return {name: planned.style for name, planned in plan_of(specs, text, config).tensors.items()}


def test_a_plan_file_mounts_blocks():
    """A Llama with an unknown model type needs two lines."""
    specs = {"model.embed_tokens.weight": (10, 8), "lm_head.weight": (10, 8), "model.norm.weight": (8,)}
    specs |= {f"model.layers.0.{name}": shape for name, (shape, _) in LAYER.items()}
    found = styles(specs, {**CONFIG, "model_type": "new"}, LLAMA_LIKE)
    assert {name: found[f"model.layers.0.{name}"] for name in LAYER} == {
        name: style for name, (_, style) in LAYER.items()
    }
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == "embedding_rowwise"


OTHER_LAYER = '[blocks]\n"model" = "decoder"\n"model.layer.*" = {}\n'


def test_block_of_a_plan_file_must_match_a_tensor():
    """Unless its entry is optional; a block of a family may match none."""
    specs = {f"model.layers.0.{name}": shape for name, (shape, _) in LAYER.items()}
    with pytest.raises(PlanError, match=r"blocks 'model.layer.\*' = 'layer': none of its rules applies"):
        styles(specs, CONFIG, OTHER_LAYER.format('"layer"'))
    may_miss = OTHER_LAYER.format('{ block = "layer", optional = true }')
    assert styles(specs, CONFIG, may_miss) == styles(specs, CONFIG, LLAMA_LIKE.replace('"" = "heads"', ""))


def test_block_of_a_stored_plan_must_match_a_tensor():
    """Otherwise a model in memory with other names would be sharded by other rules."""
    specs = {f"model.layers.0.{name}": TensorSpec("F32", shape) for name, (shape, _) in LAYER.items()}
    request = PlanRequest(plan_file=("mine.toml", '[blocks]\n"model" = "decoder"\n'))
    stored = planner_for(specs, CONFIG, request).rules.stored()
    rules = msgspec.json.decode(msgspec.json.encode(stored), type=RuleSet)
    assert Planner(specs, rules).plan(2)
    others = {name.removeprefix("model."): spec for name, spec in specs.items()}
    with pytest.raises(PlanError, match="blocks 'model' = 'decoder': none of its rules applies"):
        Planner(others, rules, where="the model")


def test_fields_are_replaced_where_a_block_is_mounted():
    """Encoder and decoder have different head counts; defaults of the block follow."""
    mounts = {
        "encoder": {"block": "attention", "num_attention_heads": "encoder_heads"},
        "decoder": {"block": "attention", "num_attention_heads": "n + 1"},
    }
    made = family({"blocks": mounts})
    rules = {rule.pattern.partition(".")[0]: rule for rule in made.rules if "q_proj" in rule.pattern}
    units = {name: made.units[rule.unit] for name, rule in rules.items()}
    assert (units["encoder"].count, units["encoder"].size) == ("encoder_heads", "hidden_size // encoder_heads")
    assert (units["decoder"].count, units["decoder"].size) == ("n + 1", "hidden_size // (n + 1)")
    (encoder,) = [rule for rule in made.modules if rule.pattern == "encoder"]
    assert encoder.attributes["num_heads"] == rules["encoder"].unit


def test_fields_of_nested_blocks_are_replaced():
    """Also if only the default of a field of the inner block reads them."""
    made = family({"blocks": {"x": {"block": "layer", "hidden_size": "d", "n_shared_experts": 3}}})
    sizes = {unit.size for unit in made.units.values()}
    counts = {unit.count for unit in made.units.values()}
    assert "d // num_attention_heads" in sizes
    assert "moe_intermediate_size * 3" in counts


def overrides(specs, text, config=CONFIG):
    """The attributes that a plan file over Llama sets on an attention module."""
    tensors = {name: TensorSpec("F32", shape) for name, shape in specs.items()}
    request = PlanRequest(plan_file=("mine.toml", text))
    (scope,) = planner_for(tensors, config | {"model_type": "llama"}, request).rules.models
    found = [rule for regex, rule in scope.modules() if regex.fullmatch("model.layers.0.self_attn")]
    return {name for rule in found for name in rule.attributes}


def test_overrides_of_a_replaced_block_are_not_set():
    """They are set if the block still matches some tensors."""
    specs = {f"model.layers.0.{name}": shape for name, (shape, _) in LAYER.items()}
    gathered = '[blocks]\n"model.layers.*.self_attn" = "gathered_attention"\n'
    assert "num_key_value_groups" in overrides(specs, "[rules]\n")
    assert overrides(specs, gathered) == set()
    rules = "".join(f'"**.{name}_proj" = {{ style = "colwise_gather_output" }}\n' for name in "qkvo")
    assert "num_key_value_groups" in overrides(specs, f"[rules]\n{rules}")
    some = '[rules]\n"model.layers.*.self_attn.q_proj" = { style = "colwise", unit = "query_head" }\n'
    assert "num_key_value_groups" in overrides(specs, gathered + some)


def test_empty_sections_are_not_inherited():
    """Missing sections are."""
    base = family({"prefix": "model.", "submodels": {"vision": "vision_config"}, "gathered": "one head"})
    names = ("prefix", "submodels", "gathered")
    left_out, empty = family({}, base), family({"prefix": [], "submodels": {}, "gathered": ""}, base)
    assert [getattr(left_out, name) for name in names] == [getattr(base, name) for name in names]
    assert [getattr(empty, name) for name in names] == [(), {}, ""]


def test_override_that_is_false_replaces_one_that_is_true():
    keys = ("allreduce_input_grad", "gathered_output", "allreduce_output")
    said = [parse_entry(ModuleRule, "x", dict.fromkeys(keys, value), pattern="x") for value in (True, False)]
    assert not any(getattr(ModuleRule.joined(said), key) for key in keys)
    silent = parse_entry(ModuleRule, "x", {"attributes": {"a": 1}}, pattern="x")
    assert all(getattr(ModuleRule.joined([said[0], silent]), key) for key in keys)
    assert all(msgspec.convert(msgspec.to_builtins(one), ModuleRule) == one for one in said)


@pytest.fixture
def _own_blocks(monkeypatch):
    """Blocks ``when``, with a rule that depends on the field ``kind``, and ``one`` and ``two`` with other defaults."""
    tables = {name: {"config": {"size": size}, "units": {"x": {"count": "size"}}} for name, size in SIZES.items()}
    tables["when"] = {"rules": {"x": {"style": "replicate", "when": {"kind": 3}}}}
    tables["circle"] = {"blocks": {"x": "circle"}}
    monkeypatch.setattr(loading, "load_block", {name: parse_block(name, data) for name, data in tables.items()}.get)


@pytest.mark.usefixtures("_own_blocks")
def test_condition_on_a_field_that_is_replaced_by_another():
    (found,) = family({"blocks": {"y": {"block": "when", "kind": "encoder.kind"}}}).rules
    assert found.when == {"encoder.kind": 3}


SIZES = {"one": 1, "two": 2}
WHEN = r"when compares a config field, and an entry .* replaces it by"
TWO_DEFAULTS = "config field size has two defaults, 1, and 2 in block 'two'"


@pytest.mark.usefixtures("_own_blocks")
@pytest.mark.parametrize(
    ("blocks", "inherited", "message"),
    [
        *(({"y": {"block": "when", "kind": value}}, {}, WHEN) for value in ("kind + 1", 3)),  # cannot be compared
        ({"y": ["one", "two"]}, {}, TWO_DEFAULTS),
        ({"y": "two"}, {"y": "one"}, TWO_DEFAULTS),
        ({"": "circle"}, {}, "block 'circle' contains itself"),
    ],
)
def test_blocks_that_contradict_each_other_are_refused(blocks, inherited, message):
    with pytest.raises(PlanError, match=message):
        family({"blocks": blocks}, family({"blocks": inherited}))


@pytest.mark.usefixtures("_own_blocks")
def test_default_of_a_family_replaces_those_of_its_blocks():
    assert family({"blocks": {"y": ["one", "two"]}, "config": {"size": 3}}).config == {"size": 3}


def test_no_rule_names_a_unit_by_the_order_of_blocks():
    """Neither does an inheriting family; a unit with another name may have the same value."""
    mounts = {f"{name}.attn": {"block": "attention", "num_attention_heads": f"{name}_heads"} for name in ("a", "b")}
    made = family({"blocks": mounts})
    assert {"attn_query_head", "attn_query_head_2"} <= made.units.keys()
    rules = {"x": {"style": "colwise", "unit": "attn_query_head_2"}}
    for data, base in (({"blocks": mounts, "rules": rules}, None), ({"rules": rules}, made)):
        with pytest.raises(PlanError, match="the number in unit 'attn_query_head_2' depends on the order of"):
            family(data, base)
    own = {"count": "b_heads", "size": "hidden_size // b_heads"}
    other = {"x": {"style": "colwise", "unit": "of_b"}}
    assert (
        family({"blocks": mounts, "units": {"of_b": own}, "rules": other}).units["of_b"]
        == made.units["attn_query_head_2"]
    )


OTHER_HEADS = '[units]\nquery_head = { count = "num_attention_heads // 2", size = "head_dim * 2" }\n[rules]\n'


def test_a_unit_of_a_plan_file_does_not_change_the_rules_of_the_family():
    """Unless it has override = true; a unit with the same value is allowed."""
    specs = {f"model.layers.0.{name}": shape for name, (shape, _) in LAYER.items()} | {"lm_head.weight": (8, 8)}
    rule = '"lm_head" = { style = "colwise", unit = "query_head" }\n'
    with pytest.raises(PlanError, match=r"plan file plan.toml: unit 'query_head' is .*, but .* in family llama"):
        styles(specs, CONFIG | {"model_type": "llama"}, OTHER_HEADS + rule)
    same = OTHER_HEADS.replace(" // 2", "").replace(" * 2", "")
    override = OTHER_HEADS.replace(" }", ", override = true }")
    for text in (same, override):
        assert styles(specs, CONFIG | {"model_type": "llama"}, text + rule)["lm_head.weight"] == "colwise"


def test_units_of_families_that_override_others():
    """Each has override = true, and changes a unit."""
    tables = loading._index().tables
    found = {name: parse_family(name, table, name) for name, table in tables.items()}
    bases = {name: load_family(own.inherits).units if own.inherits else {} for name, own in found.items()}
    units = [(name, key, unit) for name, own in found.items() for key, unit in own.units.items()]
    assert [one for one in units if one[2].override != (bases[one[0]].get(one[1], one[2]) != one[2])] == []


def test_own_rules_come_first_and_then_blocks_in_their_order():
    own = {"x.q_proj": {"style": "replicate"}}
    made = family({"rules": own, "blocks": {"x": "attention", "**": "mlp"}})
    origins = [rule.origin for rule in made.rules]
    assert origins == sorted(
        origins, key=["family mine", "family mine, block attention", "family mine, block mlp"].index
    )


def test_overrides_of_the_first_block_take_precedence():
    made = family({"blocks": {"x": ["mamba2", "attention"]}})
    values = {}
    for rule in made.modules:
        values |= rule.attributes
    assert values["num_heads"] == "ssm_head"
    assert values["num_key_value_heads"] == "kv_head"


def test_inherited_units_stay():
    """The same block with another field does not change the inherited rules."""
    base = family({"blocks": {"x": "attention"}})
    made = family({"blocks": {"y": {"block": "attention", "num_attention_heads": "other"}}}, base)
    assert {rule.unit for rule in made.rules if rule.pattern.startswith("x.{q_proj")} == {"query_head"}
    assert made.units["query_head"].count == "num_attention_heads"


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"x": "attentoin"}, "block 'attentoin' is unknown"),
        ({"x": "../families/llama"}, "block '../families/llama' is unknown"),
        *(
            ({"x": [block]}, "blocks 'x': .* is not a block's name, or a table with block = NAME")
            for block in (3, {}, {"block": 3}, {"block": "mlp", "optional": 2})
        ),
        *(
            ({"x": {"block": "attention", "num_attention_heads": value}}, f"{value!r} is not an expression of config")
            for value in (True, 1.5)
        ),
        ({"x": {"block": "attention", "num_attention_heads": "a.b()"}}, "is not an expression"),
        (
            {"x": {"block": "mlp", "intermediate_sise": "moe_intermediate_size"}},
            r"blocks 'x' = 'mlp' with intermediate_sise = 'moe_intermediate_size': block 'mlp' does not read "
            r"'intermediate_sise' \(it reads intermediate_size\)",
        ),
        ({"x": {"block": "mlp", "intermediate": 3}}, r"does not read 'intermediate' \(it reads intermediate_size\)"),
        ({"x": {"block": "norms", "hidden_size": "d"}}, r"does not read 'hidden_size' \(it reads no field\)"),
        ({"x": {"block": "moe", "shared_intermediate_size": "d"}}, "does not read 'shared_intermediate_size'"),
    ],
)
def test_invalid_blocks_are_refused(blocks, message):
    with pytest.raises(PlanError, match=message):
        family({"blocks": blocks})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rules": {"q_proj": {"style": "colwise", "unit": "head"}}}, "unit 'head' is unknown"),
        ({"units": {"x": {"override": True}}}, "unit x: override = true is not for blocks"),
        ({"model_types": ["x"]}, "key 'model_types' is unknown"),
    ],
)
def test_tables_that_are_not_blocks_are_refused(table, message):
    with pytest.raises(PlanError, match=message):
        parse_block("wrong", table)


def test_every_block_is_mounted_somewhere():
    folder = loading._BLOCKS
    texts = [path.read_text() for root in (folder, loading.FOLDER) for path in root.glob("*.toml")]
    unused = [path.stem for path in folder.glob("*.toml") if not any(f'"{path.stem}"' in text for text in texts)]
    assert unused == []
    assert all(load_block(path.stem) for path in folder.glob("*.toml"))


@contextmanager
def folder_of(folder, **texts):
    """Replace the installed families by these files."""
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "FOLDER", folder)
        loading.clear_cache()
        yield
    loading.clear_cache()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("[one]\n", "[one]\n", "family one is defined twice, also in second.toml"),
        ('[one]\nmodel_types = ["a", "b"]\n', '[two]\nmodel_types = ["b"]\n', "type 'b' is in families one and two"),
        ('[one]\nmodel_types = ["a", "a"]\n', "", "type 'a' is in families one and one"),
    ],
)
def test_families_that_contradict_each_other(tmp_path, first, second, message):
    with folder_of(tmp_path, first=first, second=second), pytest.raises(PlanError, match=message):
        loading.list_families()


def test_a_heading_of_a_family_may_have_a_comment(tmp_path):
    with folder_of(tmp_path, first='[one] # a comment\nmodel_types = ["a"]\n[one.units] # another\nx = {}\n'):
        assert family_names() == ["one"]
        assert family_for("a").units.keys() == {"x"}


def test_names_of_fields_are_checked_when_a_class_is_made():
    with pytest.raises(TypeError, match=r"Gate: .* \(got untis\)"):

        class Gate(Named, frozen=True):
            UNITS = ("unit", "untis")
            unit: str = ""
