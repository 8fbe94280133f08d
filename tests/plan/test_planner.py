"""Rules applied to tensors: scales and their weights, patterns with numbers, invalid values."""

import json
import re
from pathlib import Path

import pytest

import shardconv
from shardconv.plan.families.loading import load_family, parse_plan_file
from shardconv.plan.plan import TensorSpec
from shardconv.plan.planner import Planner
from shardconv.plan.rule_set import rules_for
from shardconv.support.errors import PlanError
from tests.support.checkpoints import write_config, write_weights
from tests.support.plans import intervals, plan_of

# --- quantized weights ----------------------------------------------------------------------------------------------

SCALE = "down.weight_scale_inv"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def plan_fp8(
    folder: Path, tp: int = 2, *, settings: object = BLOCKS, pattern: str = "down", style: str = "rowwise", **options
):
    """The plan of an FP8 weight of 256 rows and 1024 columns with its block scales, by one rule."""
    source = write_weights(folder / "m.safetensors", {"down.weight": ("F8_E4M3", (256, 1024)), SCALE: ("F32", (2, 8))})
    (folder / "plan.toml").write_text(f'[rules]\n"{pattern}" = {{ style = "{style}" }}')
    (folder / "fp8.json").write_text(json.dumps({"quantization_config": settings}))
    options = {"rules": folder / "plan.toml", "config": folder / "fp8.json", **options}
    return shardconv.make_plan(source, tp=tp, **options)


@pytest.mark.parametrize("pattern", ["down", "down.*"])
def test_scale_is_sharded_like_its_weight(pattern, tmp_path):
    plan = plan_fp8(tmp_path, pattern=pattern)
    assert [plan.placement(name).ranks[1] for name in ("down.weight", SCALE)] == [((512, 1024),), ((4, 8),)]


@pytest.mark.parametrize("pattern", ["d*n", "down.weight"])
def test_a_rule_for_a_weight_applies_to_its_scale(tmp_path, pattern):
    plan = plan_fp8(tmp_path, rules="llama", replicate=pattern)
    assert [planned.placement.dim for planned in plan.tensors.values()] == [None, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 16}, r"1024 / 16 = 64 input features per rank is not a multiple of the 128-w"),
        (
            {"tp": 4, "style": "colwise"},
            r"256 / 4 = 64 output features per rank is not a multiple of the 128-wide scale",
        ),
        (
            {"settings": {**BLOCKS, "weight_block_size": [64, 64]}},
            r"has shape \[2, 8\] \(expected \[4, 16\] for a weight of \[256, 1024\]\)",
        ),
        (
            {"settings": {"quant_method": "hqq"}},
            "quantization 'hqq' is not supported, as with 4 bits, a byte has elements of groups",
        ),
        ({"replicate": (SCALE,)}, "add a rule for their module, 'down'"),
        ({"settings": {"quant_method": "fp8"}}, r"down.weight_scale_inv needs a block size.* pass config=FILE"),
        *(
            ({"settings": {**BLOCKS, "weight_block_size": block}}, r"weight_block_size is .* \(expected ")
            for block in ([0, 0], 128, ["a", "b"], [128], [128, 128, 128])
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(options, message, tmp_path):
    with pytest.raises(PlanError, match=message):
        plan_fp8(tmp_path, **options)


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "layers"), [("1*", [1]), ("*0", [0]), ("{0,1}", [0, 1]), ("1", [1]), ("*", [0, 1])]
)
def test_patterns_with_numbers_match_only_those_layers(pattern, layers, checkpoint):
    name = "model.layers.{}.mlp.down_proj"
    plan = shardconv.make_plan(checkpoint("llama"), tp=2, replicate=(name.format(pattern),))
    replicated = [layer for layer in (0, 1) if plan.placement(f"{name.format(layer)}.weight").dim is None]
    assert replicated == layers


#: Two towers with attention, of which a config can describe one.
TOWERS = [f"{tower}.layers.0.self_attn.{name}_proj.weight" for tower in ("text", "vision") for name in "qkvo"]


@pytest.mark.parametrize("config", [{"model_type": "my_vlm", "hidden_size": 64, "num_attention_heads": 8}, None])
def test_config_that_describes_one_of_two_towers(config):
    """Its head counts are not used for the other tower, where boundaries would be inside of heads."""
    shapes = dict.fromkeys(TOWERS, (64, 64))
    with pytest.raises(PlanError, match=r"1 is not a multiple of 2.*pass head_dim$"):
        plan_of(shapes, config=config)
    plan = plan_of(shapes, config=config, head_dim=32)
    assert plan.placement(TOWERS[4]).shard_shape((64, 64), 0) == (32, 64)


@pytest.mark.parametrize("config", [{"num_attention_heads": 8, "head_dim": 16}, None])
def test_heads_of_a_tower_with_rules_of_the_user_are_not_those_of_the_other(config):
    """Neither its part of the config nor the shape of its norms."""
    shapes = {**dict.fromkeys(TOWERS, (128, 128)), "vision.layers.0.self_attn.q_norm.weight": (16,)}
    with pytest.raises(PlanError, match=r"head_dim is unknown \(it may differ between"):
        plan_of(shapes, 'inherits = "by_name"\n[rules]\n"vision.**.*" = { style = "replicate" }\n', config, tp=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f'[rules]\n"{pattern}" = {{ style = "replicate" }}', "braces are unbalanced")
            for pattern in ("{a", "a}", "a.{b,{c}}")
        ),
        *(
            (f'[units]\nu = {{ count = "{expression}" }}', "is not an expression")
            for expression in ("a.b()", "a[0].b", "(a + b).c", "1 .real", "a..b", "a ** b")
        ),
        (f'[units]\nu = {{ count = "{"+".join("1" * 5000)}" }}', "is not an expression, or too long"),
        *(
            (f"[submodels]\ntext = {submodel}\n", "submodel 'text': .* expected a config field, or config and family")
            for submodel in (
                "3",
                '["a", "b"]',
                "{ config = 'text_config' }",
                "{ config = 'text_config', kind = 'llama' }",
            )
        ),
        *((f"[units]\nu = {unit}", "unit 'u': .* is not a table") for unit in ("[]", "[{ count = 1 }, { count = 2 }]")),
        *((f"prefix = {prefix}", "prefix") for prefix in ("[1]", '[""]', "1")),
        ('prefix = "model"', "prefix 'model' does not end with a dot: add it"),
    ],
)
def test_invalid_plan_files_are_refused(text, message):
    with pytest.raises(PlanError, match=message):
        parse_plan_file("plan.toml", text)


@pytest.mark.parametrize(
    ("text", "prefix"),
    [('"model."', ("model.",)), ('["model.", "mtp."]', ("model.", "mtp.")), ('""', ()), ("[]", ())],
)
def test_prefix_of_a_plan_file(text, prefix):
    assert parse_plan_file("plan.toml", f"prefix = {text}").prefix == prefix


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_config_of_another_checkpoint_is_named_with_the_sizes_first(checkpoint, tmp_path):
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    size = config["intermediate_size"]
    other = write_config(tmp_path, config | {"intermediate_size": 2 * size})
    with pytest.raises(PlanError) as caught:
        shardconv.make_plan(checkpoint("llama"), tp=2, config=other)
    assert re.match(
        rf"model\.layers\.0\.mlp\.\w+_proj\.weight: dim \d has {size} elements \(expected {2 * size} by "
        rf"intermediate_size={2 * size} of the config\): the config is of another checkpoint, or ",
        str(caught.value),
    )


def test_sizes_of_segments_per_group_are_explained():
    """Without a hint at the config, of which nothing was read."""
    rule = '"qkv" = { style = "packed_colwise", groups = 8, segments = ["head", "head", "head"] }'
    with pytest.raises(PlanError) as caught:
        plan_of({"qkv": (768, 4)}, f"[units]\nhead = {{ count = 8, size = 32 }}\n[rules]\n{rule}\n")
    assert str(caught.value) == (
        "qkv: dim 0 has 768 elements (expected 6144 = 8 * (8 * 32 + 8 * 32 + 8 * 32); counts of segments are per "
        "group, of which there are 8): the family or plan file does not fit: pass other rules (now plan file "
        "plan.toml, rule 'qkv')"
    )


def test_projection_per_head_is_sharded_as_groups_and_as_units_of_q_k_and_v():
    """Both plan files of docs/plan-files.md: [heads, 3, head_dim], with all rows of a head on one rank."""
    page = (Path(__file__).parents[2] / "docs" / "plan-files.md").read_text("utf-8")
    texts = re.findall(r"```toml\n((?:(?!```).)*interleaved.*?)```", page, re.DOTALL)
    assert len(texts) == 2
    for text in texts:
        found = intervals(plan_of({"qkv": (768, 4)}, text, tp=4), "qkv")
        assert found == tuple(((192 * rank, 192 * rank + 192),) for rank in range(4))


def test_checkpoint_without_tensors(tmp_path):
    report = shardconv.report_plan(write_weights(tmp_path / "m.safetensors", {}), tp=2)
    assert (report.rank_bytes, report.tensors) == ((0, 0), ())


#: Experts concatenated in one matrix, whose sizes a nested config has.
EXPERTS = """[units]
ffn = { count = "ffn.width" }
[rules]
"w1" = { style = "packed_colwise", segments = ["ffn"], repeats = "ffn.moe.experts" }"""
#: A default of a field of a nested config, and the rules of ``w1``.
NESTED = '[config]\n"ffn.width" = 8\n[units]\nffn = {{ count = "ffn.width" }}\n[rules]\n"w1" = {}'
FFN = {"ffn": {"moe": {"experts": 3}, "width": 8, "kind": "glu"}}
WHEN = """[
    {{ style = "replicate", when = {{ "ffn.kind" = "{}" }}, optional = true }},
    {{ style = "colwise", unit = "ffn", optional = true }}]"""
HALVES = (((0, 4),), ((4, 8),))
#: Case to shape, plan file, config, and the intervals of each rank.
PLACED = {
    "segments by rows": (
        (12, 1, 3),
        '[units]\na = { count = 4 }\nb = { count = 8 }\n[rules]\n"w1" = { style = "by_rows", segments = ["a", "b"] }',
        None,
        (((0, 2), (4, 8)), ((2, 4), (8, 12))),
    ),
    "repeated segments": ((24, 4), EXPERTS, FFN, (((0, 4), (8, 12), (16, 20)), ((4, 8), (12, 16), (20, 24)))),
    "default of a nested field": (
        (8, 4), NESTED.format('{ style = "colwise", unit = "ffn" }'), {"ffn": {"kind": "glu"}}, HALVES,
    ),
    "another value of a nested field": ((8, 4), NESTED.format(WHEN.format("mlp")), FFN, HALVES),
    "value of a nested field": ((8, 4), NESTED.format(WHEN.format("glu")), FFN, ((), ())),
}  # fmt: skip


@pytest.mark.parametrize("what", PLACED)
def test_intervals_of_plan_files(what):
    shape, rules, config, expected = PLACED[what]
    config = None if config is None else {"model_type": "mine", **config}
    assert intervals(plan_of({"w1": shape}, rules, config), "w1") == expected


#: Refused case to the tensors, plan file, config, tensor parallel size and message.
REFUSED = {
    "packed experts by name": ({"experts.down_proj": (4, 8, 6)}, "", None, 2, "does not determine which dim to shard"),
    "boundary across repeated segments": ({"w1": (24, 4)}, EXPERTS, FFN, 3, "8 is not a multiple of 3"),
    "missing field of a nested config": (
        {"w1": (24, 4)}, EXPERTS.replace("width", "height"), FFN, 2, r"config field ffn\.height is missing",
    ),
    # Otherwise the time would double with each level.
    "defaults are evaluated once": (
        {"lm_head.weight": (8, 8)},
        "[config]\na200 = 1\n" + "".join(f'a{n} = "a{n + 1} + a{n + 1}"\n' for n in range(200))
        + '[units]\nu = { count = "a0" }\n[rules]\n"lm_head" = { style = "colwise", unit = "u" }',
        None, 2, r"elements \(expected \d+.*rule 'lm_head'",
    ),
    # The family has a rule with the same pattern, which matches.
    "rule whose condition is false": (
        {"model.layers.0.mlp.down_proj.weight": (8, 12)},
        '[rules]\n"model.layers.*.mlp.down_proj" = { style = "replicate", when = { foo = true } }',
        {"model_type": "llama", "intermediate_size": 12}, 2, "down_proj' matches no tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_rules_that_do_not_apply_are_refused(what):
    shapes, rules, config, tp, message = REFUSED[what]
    config = config and {"model_type": "mine", **config}
    with pytest.raises(PlanError, match=message):
        plan_of(shapes, rules, config, tp=tp)


def test_heads_by_the_rows_of_a_layer():
    """The rows of q_proj give the size of query heads, and the number of KV heads: two, each on two ranks."""
    rules = """[units]
        query = { count = 4, size = "rows // 4" }
        key = { size = "rows // 4", replicate = true }
        [rules]
        "layers.*.q_proj" = { style = "colwise", unit = "query", beside = "q_proj" }
        "layers.*.k_proj" = { style = "colwise", unit = "key", beside = "q_proj" }"""
    sizes = (4, 8)
    shapes = {f"layers.{layer}.q_proj.weight": (4 * size, 6) for layer, size in enumerate(sizes)}
    shapes |= {f"layers.{layer}.k_proj.weight": (2 * size, 6) for layer, size in enumerate(sizes)}
    plan = plan_of(shapes, rules, {"hidden_size": 16, "num_attention_heads": 4}, tp=4)
    for layer, size in enumerate(sizes):
        queries, keys = (plan.placement(f"layers.{layer}.{name}_proj.weight") for name in "qk")
        assert queries.shard_shape((4 * size, 6), 3) == (size, 6)
        assert [entries[0].start for entries in keys.ranks] == [0, 0, size, size]


def test_rule_with_dims_replicates_tensors_with_fewer_dims():
    shapes = {"kernel": (6, 3, 3, 3), "matrix": (5, 4), "token": (1, 4, 6), "scale": (6,), "count": ()}
    plan = plan_of(shapes, '[rules]\n"**.*" = { style = "gathered", pad = true, dims = 2 }')
    dims = {name: plan.tensors[name].placement.dim for name in shapes}
    assert dims == {"kernel": 0, "matrix": 0, "token": None, "scale": None, "count": None}


# --- submodels ------------------------------------------------------------------------------------------------------


def test_depth_of_nested_configs_is_limited():
    """Otherwise the work would double with each level."""
    config = {"model_type": "llava"}
    for level in range(40):  # alternating types, as a nested config of the same type is the text model
        config = {"model_type": "llava" if level % 2 else "llava_next", "text_config": config}
    with pytest.raises(PlanError, match="submodels are nested too deep"):
        plan_of({"lm_head.weight": (8, 8)}, config=config)


def test_submodel_may_name_its_family():
    text = {"model_type": "another", "num_attention_heads": 4, "v_head_dim": 8}
    tensors = {
        "language_model.model.blocks.0.self_attn.o_proj.weight": TensorSpec("F32", (64, 32)),
        "lm_head.weight": TensorSpec("F32", (96, 64)),
    }
    plan = Planner(tensors, rules_for(load_family("kimi_k25"), {"text_config": text})).plan(2)
    assert [planned.placement.dim for planned in plan.tensors.values()] == [1, 0]


def test_norms_with_a_row_for_each_head_are_sharded_by_rows():
    config = {"model_type": "chameleon", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    names = ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias")
    tensors = {
        f"model.layers.0.self_attn.{name}": TensorSpec("F32", (4 if name[0] == "q" else 2, 16)) for name in names
    }
    plan = Planner(tensors, rules_for(load_family("chameleon"), config)).plan(4)
    held = [(planned.placement.dim, planned.placement.local_size(0)) for planned in plan.tensors.values()]
    assert held == [(0, 1)] * 4


#: Configs of checkpoints on the Hub, which differ from those that save_pretrained writes, and some tensor names.
_TEXT = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
_HUB = {
    "qwen2_vl": ({**_TEXT, "vision_config": {"num_heads": 4, "embed_dim": 64}}, ("model.", "visual.")),
    "qwen2_5_vl": ({**_TEXT, "vision_config": {"num_heads": 4, "hidden_size": 64}}, ("model.", "visual.")),
    **{
        model_type: (
            {
                "text_config": {**_TEXT, "model_type": f"{model_type}_text"},
                "vision_config": {"model_type": model_type, "num_heads": 4},
            },
            ("model.language_model.", "model.visual."),
        )
        for model_type in ("qwen3_vl", "qwen3_5")
    },
}


@pytest.mark.parametrize("model_type", _HUB)
def test_configs_of_checkpoints_on_the_hub(model_type):
    config, (text, vision) = _HUB[model_type]
    shapes = {
        f"{text}layers.0.mlp.up_proj.weight": (96, 64),
        f"{text}layers.0.self_attn.o_proj.weight": (64, 64),
        f"{vision}blocks.0.attn.qkv.weight": (192, 64),
        f"{vision}blocks.0.attn.proj.weight": (64, 64),
        f"{vision}blocks.0.norm1.weight": (64,),
    }
    plan = plan_of(shapes, config={"model_type": model_type, **config})
    assert [planned.placement.dim for planned in plan.tensors.values()] == [0, 1, 0, 1, None]


# --- stages ---------------------------------------------------------------------------------------------------------

STAGES = """
[units]
head = { count = "num_heads[stage]", size = "features // num_heads[stage]", shard_if_divisible = true }
[rules]
"encoder.stages.*.layers.*.q" = { style = "colwise", unit = "head", otherwise = "colwise_gather_output" }
"encoder.stages.*.layers.*.o" = { style = "rowwise", unit = "head", otherwise = "colwise_gather_output" }
"""


def stages(heads: object, tp: int, rules: str = STAGES):
    """The style and placement of the layers of each of some stages."""
    number = len(heads) if isinstance(heads, list | tuple) else 1
    names = [f"encoder.stages.{stage}.layers.5.{layer}.weight" for stage in range(max(number, 2)) for layer in "qo"]
    found = plan_of(dict.fromkeys(names, (16, 24)), rules, {"model_type": "new", "num_heads": heads}, tp=tp)
    return [(found.tensors[name].style, found.placement(name)) for name in names]


def test_stage_whose_heads_do_not_divide_is_sharded_evenly():
    """Stages with 1, 2 and 8 heads on 4 ranks: only the last is sharded by heads, the others evenly."""
    found = stages([1, 2, 8], 4)
    assert [style for style, _ in found] == ["colwise_gather_output"] * 4 + ["colwise", "rowwise"]
    assert [placement.dim for _, placement in found] == [0, 0, 0, 0, 0, 1]
    assert [style for style, _ in stages((1, 2, 8), 2)][2:] == ["colwise", "rowwise"] * 2


def test_units_with_whole_are_not_padded():
    found = stages([2, 8], 3)
    assert [style for style, _ in found] == ["colwise_gather_output"] * 4
    assert all(placement.is_padded for _, placement in found)  # 16 rows over 3 ranks


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (None, "config field num_heads is missing"),
        (4, r"num_heads is 4 \(expected a list with an integer at index 0\)"),
        ([4], "expected a list with an integer at index 1"),
        (["4", 4], "expected a list with an integer at index 0"),
    ],
)
def test_list_without_an_integer_for_a_stage_is_refused(heads, message):
    with pytest.raises(PlanError, match=message):
        stages(heads, 2)


def test_name_without_a_stage_is_refused():
    rules = STAGES.replace('"encoder.stages.*.layers.*.q"', '"q"').rpartition('"encoder')[0]
    with pytest.raises(PlanError, match="does not contain the number of a stage"):
        plan_of({"q.weight": (16, 24)}, rules, {"model_type": "new", "num_heads": [4]})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (', otherwise = "colwise_gather_output"', "", "set otherwise for the rule and shard_if_divisible = true for"),
        (", shard_if_divisible = true", "", "set otherwise for the rule and shard_if_divisible = true for all of its"),
        ('count = "num_heads[stage]", ', "", "shard_if_divisible = true needs a count"),
        ('"colwise_gather_output"', '"packed_colwise"', "is not a style without segments"),
        ("num_heads[stage]", "num_heads[layer]", "is not an expression of config fields"),
    ],
)
def test_units_with_whole_need_another_style(old, new, message):
    with pytest.raises(PlanError, match=message):
        stages([4, 4], 2, STAGES.replace(old, new))
