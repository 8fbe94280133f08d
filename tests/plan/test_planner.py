"""Rules applied to tensors: scales and their weights, patterns with numbers, invalid values."""

import json
import re
from pathlib import Path

import pytest

import shardconv
from shardconv.files.containers.safetensors import num_bytes
from shardconv.plan.families.loading import load_family, parse_plan_file
from shardconv.plan.plan import TensorSpec
from shardconv.plan.planner import Planner
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.plan.rule_set import rules_for
from shardconv.support.errors import PlanError
from tests.support.checkpoints import safetensors_bytes, write_config, write_weights


def fp8(path, plan: str, tmp_path, *, rows: int = 256, columns: int = 1024) -> dict[str, object]:
    """Write an FP8 weight with its block scales, without a config, and a plan file for it."""
    specs = {
        "down.weight": ("F8_E4M3", (rows, columns)),
        "down.weight_scale_inv": ("F32", (-(-rows // 128), -(-columns // 128))),
    }
    header, end = {}, 0
    for name, (dtype, shape) in specs.items():
        start, end = end, end + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    path.write_bytes(safetensors_bytes(header, bytes(end)))
    (tmp_path / "plan.toml").write_text(plan)
    (tmp_path / "fp8.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    )
    return {"rules": tmp_path / "plan.toml", "config": tmp_path / "fp8.json"}


@pytest.mark.parametrize("pattern", ["down", "down.*"])
def test_scale_is_sharded_like_its_weight(pattern, tmp_path):
    source = tmp_path / "m.safetensors"
    options = fp8(source, f'[rules]\n"{pattern}" = {{ style = "rowwise" }}', tmp_path)
    plan = shardconv.make_plan(source, tp=2, **options)
    assert [plan.placement(name).ranks[1] for name in ("down.weight", "down.weight_scale_inv")] == [
        ((512, 1024),),
        ((4, 8),),
    ]
    with pytest.raises(
        shardconv.PlanError, match=r"1024 / 16 = 64 input features per rank is not a multiple of the 128-w"
    ):
        shardconv.make_plan(source, tp=16, **options)


def test_a_rule_for_a_scale_alone_is_refused(tmp_path):
    source = tmp_path / "m.safetensors"
    options = fp8(source, '[rules]\n"down" = { style = "rowwise" }', tmp_path)
    with pytest.raises(shardconv.PlanError, match="add a rule for their module, 'down'"):
        shardconv.make_plan(source, tp=2, replicate=("down.weight_scale_inv",), **options)


@pytest.mark.parametrize("pattern", ["d*n", "down.weight"])
def test_a_rule_for_a_weight_applies_to_its_scale(tmp_path, pattern):
    source = tmp_path / "m.safetensors"
    options = fp8(source, '[rules]\n"down" = { style = "rowwise" }', tmp_path)
    plan = shardconv.make_plan(source, tp=2, replicate=pattern, rules="llama", config=options["config"])
    assert [planned.placement.dim for planned in plan.tensors.values()] == [None, None]


@pytest.mark.parametrize(
    ("pattern", "layers"), [("1*", [1]), ("*0", [0]), ("{0,1}", [0, 1]), ("1", [1]), ("*", [0, 1])]
)
def test_patterns_with_numbers_match_only_those_layers(pattern, layers, checkpoint):
    name = "model.layers.{}.mlp.down_proj"
    plan = shardconv.make_plan(checkpoint("llama"), tp=2, replicate=(name.format(pattern),))
    replicated = [layer for layer in (0, 1) if plan.placement(f"{name.format(layer)}.weight").dim is None]
    assert replicated == layers


def test_rule_whose_condition_is_false_matches_no_tensor(checkpoint, tmp_path):
    """The family has a rule with the same pattern, which matches; the rule of the plan file is an error."""
    plan = tmp_path / "plan.toml"
    plan.write_text('[rules]\n"model.layers.*.mlp.down_proj" = { style = "replicate", when = { foo = true } }')
    with pytest.raises(shardconv.PlanError, match="down_proj' matches no tensor"):
        shardconv.make_plan(checkpoint("llama"), tp=2, rules=plan)


@pytest.mark.parametrize("tp", [0, -1, 2.0, True, 10**9])
def test_invalid_tp_is_refused(tp, checkpoint):
    with pytest.raises(shardconv.support.errors.UsageError, match="an integer from 1"):
        shardconv.make_plan(checkpoint("llama"), tp=tp)


@pytest.mark.parametrize("block", [[0, 0], 128, ["a", "b"], [128], [128, 128, 128]])
def test_invalid_block_sizes_are_refused(block, tmp_path):
    source = tmp_path / "m.safetensors"
    options = fp8(source, '[rules]\n"down" = { style = "rowwise" }', tmp_path)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    options["config"].write_text(json.dumps(config))
    with pytest.raises(shardconv.PlanError, match=r"weight_block_size is .* \(expected "):
        shardconv.make_plan(source, tp=2, **options)


def test_block_scale_without_a_block_size_is_refused(tmp_path):
    source = tmp_path / "m.safetensors"
    options = fp8(source, '[rules]\n"down" = { style = "rowwise" }', tmp_path)
    options["config"].write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(shardconv.PlanError, match=r"down.weight_scale_inv needs a block size.* pass config=FILE"):
        shardconv.make_plan(source, tp=2, **options)


def test_packed_experts_are_not_planned_by_name(tmp_path):
    """The name does not determine which of three dims is the output."""
    source = tmp_path / "m.safetensors"
    header = {"experts.down_proj": {"dtype": "U8", "shape": [4, 8, 6], "data_offsets": [0, 192]}}
    source.write_bytes(safetensors_bytes(header, bytes(192)))
    with pytest.raises(shardconv.PlanError, match="does not determine which dim to shard"):
        shardconv.make_plan(source, tp=2)


@pytest.mark.parametrize("config", [{"model_type": "my_vlm", "hidden_size": 64, "num_attention_heads": 8}, None])
def test_config_that_describes_one_of_two_towers(tmp_path, config):
    """Its head counts are not used for the other tower, where boundaries would be inside of heads."""
    names = [f"{tower}.layers.0.self_attn.{name}_proj.weight" for tower in ("text", "vision") for name in "qkvo"]
    write_weights(tmp_path / "model.safetensors", dict.fromkeys(names, ("BF16", (64, 64))))
    if config is not None:
        write_config(tmp_path, config)
    with pytest.raises(shardconv.PlanError, match=r"1 is not a multiple of 2.*pass head_dim$"):
        shardconv.make_plan(tmp_path, tp=2)
    plan = shardconv.make_plan(tmp_path, tp=2, head_dim=32)
    assert plan.placement(names[4]).shard_shape((64, 64), 0) == (32, 64)


@pytest.mark.parametrize("config", [{"num_attention_heads": 8, "head_dim": 16}, None])
def test_heads_of_a_tower_with_rules_of_the_user_are_not_those_of_the_other(tmp_path, config):
    """Neither its part of the config nor the shape of its norms."""
    names = [f"{tower}.layers.0.self_attn.{name}_proj.weight" for tower in ("audio", "text") for name in "qkvo"]
    norms = dict.fromkeys(["audio.layers.0.self_attn.q_norm.weight"], ("BF16", (16,)))
    write_weights(tmp_path / "model.safetensors", {**dict.fromkeys(names, ("BF16", (128, 128))), **norms})
    if config is not None:
        write_config(tmp_path, config)
    (tmp_path / "mine.toml").write_text('inherits = "by_name"\n[rules]\n"audio.**.*" = { style = "replicate" }\n')
    with pytest.raises(shardconv.PlanError, match=r"head_dim is unknown \(it may differ between"):
        shardconv.make_plan(tmp_path, tp=8, rules=tmp_path / "mine.toml")


PATTERNS = ["{model.normX", "model.norm}", "model.{norm,{a}}"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_unbalanced_braces_in_an_option_are_refused(checkpoint, pattern):
    with pytest.raises(shardconv.support.errors.UsageError, match=r"replicate=.*braces are unbalanced"):
        shardconv.make_plan(checkpoint("llama"), tp=2, replicate=[pattern])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f'[rules]\n"{pattern}" = {{ style = "replicate" }}', "braces are unbalanced") for pattern in PATTERNS),
        *(
            (f'[units]\nu = {{ count = "{expression}" }}', "is not an expression")
            for expression in ("a.b()", "a[0].b", "(a + b).c", "1 .real", "a..b")
        ),
        (f'[units]\nu = {{ count = "{"+".join("1" * 5000)}" }}', "is not an expression, or too long"),
    ],
)
def test_invalid_patterns_and_expressions_are_refused(text, message):
    with pytest.raises(PlanError, match=message):
        parse_plan_file("plan.toml", text)


def test_config_of_another_checkpoint_is_named_with_the_sizes_first(checkpoint, tmp_path):
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    size = config["intermediate_size"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(config | {"intermediate_size": 2 * size}))
    with pytest.raises(shardconv.PlanError) as caught:
        shardconv.make_plan(checkpoint("llama"), tp=2, config=other)
    assert re.match(
        rf"model\.layers\.0\.mlp\.\w+_proj\.weight: dim \d has {size} elements \(expected {2 * size} by "
        rf"intermediate_size={2 * size} of the config\): the config is of another checkpoint, or ",
        str(caught.value),
    )


def write_qkv(folder, style):
    """A projection of 8 heads of 32, each with q, k and v, and its plan file; returns both paths."""
    (folder / "own.toml").write_text(f'[units]\nhead = {{ count = 8, size = 32 }}\n[rules]\n"qkv" = {{ {style} }}\n')
    return write_weights(folder / "model.safetensors", {"qkv": ("F32", (768, 4))}), folder / "own.toml"


def test_sizes_of_segments_per_group_are_explained(tmp_path):
    """Without a hint at the config, of which nothing was read."""
    source, rules = write_qkv(tmp_path, 'style = "packed_colwise", groups = 8, segments = ["head", "head", "head"]')
    with pytest.raises(shardconv.PlanError) as caught:
        shardconv.make_plan(source, tp=2, rules=rules)
    assert str(caught.value) == (
        "qkv: dim 0 has 768 elements (expected 6144 = 8 * (8 * 32 + 8 * 32 + 8 * 32); counts of segments are those of "
        "one of the 8 groups): the family or plan file does not fit: pass other rules (now plan file own.toml, rule "
        "'qkv')"
    )


def test_projection_per_head_is_sharded_as_groups_and_as_units_of_q_k_and_v(tmp_path):
    """Both plan files of docs/plan-files.md: [heads, 3, head_dim], with all rows of a head on one rank."""
    page = (Path(__file__).parents[2] / "docs" / "plan-files.md").read_text("utf-8")
    texts = re.findall(r"```toml\n((?:(?!```).)*interleaved.*?)```", page, re.DOTALL)
    source = write_weights(tmp_path / "model.safetensors", {"qkv": ("F32", (768, 4))})
    assert len(texts) == 2
    for text in texts:
        (tmp_path / "own.toml").write_text(text)
        entries = shardconv.make_plan(source, tp=4, rules=tmp_path / "own.toml").placement("qkv").ranks
        assert [[(one.start, one.stop) for one in rank] for rank in entries] == [
            [(192 * rank, 192 * rank + 192)] for rank in range(4)
        ]


def test_checkpoint_without_tensors(tmp_path):
    report = shardconv.report_plan(write_weights(tmp_path / "m.safetensors", {}), tp=2)
    assert (report.rank_bytes, report.tensors) == ((0, 0), ())


def test_defaults_are_evaluated_once(checkpoint, tmp_path):
    """Otherwise the time would double with each level."""
    plan = tmp_path / "plan.toml"
    levels = "".join(f'a{n} = "a{n + 1} + a{n + 1}"\n' for n in range(200))
    rules = '[units]\nu = { count = "a0" }\n[rules]\n"lm_head" = { style = "colwise", unit = "u" }'
    plan.write_text(f"[config]\n{levels}a200 = 1\n{rules}")
    with pytest.raises(shardconv.PlanError, match=r"elements \(expected \d+.*rule 'lm_head'"):
        shardconv.make_plan(checkpoint("llama"), tp=2, rules=plan)


def test_segments_of_a_convolution_are_sharded_by_rows(tmp_path):
    write_weights(tmp_path / "model.safetensors", {"conv": ("F32", (12, 1, 3))})
    plan = tmp_path / "plan.toml"
    rule = '"conv" = { style = "by_rows", segments = ["a", "b"] }'
    plan.write_text(f"[units]\na = {{ count = 4 }}\nb = {{ count = 8 }}\n[rules]\n{rule}")
    placement = shardconv.make_plan(tmp_path / "model.safetensors", tp=4, rules=plan).placement("conv")
    assert [(entry.start, entry.stop) for entry in placement.ranks[1]] == [(1, 2), (6, 8)]


@pytest.fixture
def heads_of_two_sizes(tmp_path):
    """The plan of layers whose heads have 4 and 8 rows; the rows of q_proj decide."""
    weights = {}
    for layer, size in enumerate((4, 8)):
        weights[f"layers.{layer}.q_proj.weight"] = ("F32", (4 * size, 6))
        weights[f"layers.{layer}.k_proj.weight"] = ("F32", (2 * size, 6))
    write_weights(tmp_path / "model.safetensors", weights)
    write_config(tmp_path, {"hidden_size": 16, "num_attention_heads": 4})
    plan = tmp_path / "plan.toml"
    plan.write_text(
        """[units]
        query = { count = 4, size = "rows // 4" }
        key = { size = "rows // 4", replicate = true }
        [rules]
        "layers.*.q_proj" = { style = "colwise", unit = "query", beside = "q_proj" }
        "layers.*.k_proj" = { style = "colwise", unit = "key", beside = "q_proj" }
        """
    )
    return shardconv.make_plan(tmp_path, tp=4, rules=plan)


@pytest.mark.parametrize(("layer", "size"), [(0, 4), (1, 8)])
def test_heads_by_the_rows_of_a_layer(heads_of_two_sizes, layer, size):
    """The size of query heads, and the number of KV heads: two, each on two ranks."""
    queries, keys = (heads_of_two_sizes.placement(f"layers.{layer}.{name}_proj.weight") for name in "qk")
    assert queries.shard_shape((4 * size, 6), 3) == (size, 6)
    assert [entries[0].start for entries in keys.ranks] == [0, 0, size, size]


def test_depth_of_nested_configs_is_limited():
    """Otherwise the work would double with each level."""
    config = {"model_type": "llava"}
    for level in range(40):  # alternating types, as a nested config of the same type is the text model
        config = {"model_type": "llava" if level % 2 else "llava_next", "text_config": config}
    with pytest.raises(PlanError, match="submodels are nested too deep"):
        planner_for({"lm_head.weight": TensorSpec("F32", (8, 8))}, config, PlanRequest())


def test_submodel_may_name_its_family():
    text = {"model_type": "another", "num_attention_heads": 4, "v_head_dim": 8}
    tensors = {
        "language_model.model.blocks.0.self_attn.o_proj.weight": TensorSpec("F32", (64, 32)),
        "lm_head.weight": TensorSpec("F32", (96, 64)),
    }
    plan = Planner(tensors, rules_for(load_family("kimi_k25"), {"text_config": text})).plan(2)
    assert [planned.placement.dim for planned in plan.tensors.values()] == [1, 0]


@pytest.mark.parametrize("submodel", ["3", "{ config = 'text_config' }", "{ config = 'text_config', kind = 'llama' }"])
def test_invalid_submodels_are_refused(submodel):
    with pytest.raises(PlanError, match=r"submodel 'text': .* expected a config field, or config and family"):
        parse_plan_file("plan.toml", f"[submodels]\ntext = {submodel}\n")


def test_norms_with_a_row_for_each_head_are_sharded_by_rows():
    config = {"model_type": "chameleon", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    names = ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias")
    tensors = {
        f"model.layers.0.self_attn.{name}": TensorSpec("F32", (4 if name[0] == "q" else 2, 16)) for name in names
    }
    plan = Planner(tensors, rules_for(load_family("chameleon"), config)).plan(4)
    held = [(planned.placement.dim, planned.placement.local_size(0)) for planned in plan.tensors.values()]
    assert held == [(0, 1)] * 4


@pytest.fixture
def experts_in_one_matrix(tmp_path):
    """A checkpoint with 3 experts concatenated in one matrix, whose sizes a nested config has, and a plan file."""
    write_weights(tmp_path / "model.safetensors", {"w1": ("F32", (3 * 8, 4))})
    write_config(tmp_path, {"model_type": "mine", "ffn": {"moe": {"experts": 3}, "width": 8}})
    plan = tmp_path / "plan.toml"
    rule = '"w1" = { style = "packed_colwise", segments = ["ffn"], repeats = "ffn.moe.experts" }'
    plan.write_text(f'[units]\nffn = {{ count = "ffn.width" }}\n[rules]\n{rule}')
    return tmp_path, plan


def test_repeated_segments_are_sharded_one_by_one(experts_in_one_matrix):
    folder, plan = experts_in_one_matrix
    placement = shardconv.make_plan(folder, tp=2, rules=plan).placement("w1")
    assert placement.ranks == (((0, 4), (8, 12), (16, 20)), ((4, 8), (12, 16), (20, 24)))


def test_boundary_across_repeated_segments_is_refused(experts_in_one_matrix):
    folder, plan = experts_in_one_matrix
    with pytest.raises(shardconv.PlanError, match="8 is not a multiple of 3"):
        shardconv.make_plan(folder, tp=3, rules=plan)


def test_missing_field_of_a_nested_config_is_an_error(experts_in_one_matrix):
    folder, plan = experts_in_one_matrix
    plan.write_text(plan.read_text().replace("ffn.width", "ffn.height"))
    with pytest.raises(shardconv.PlanError, match=r"config field ffn\.height is missing"):
        shardconv.make_plan(folder, tp=2, rules=plan)


def ranks_by_nested_config(folder, rules):
    """The intervals of ``w1``, of 8 rows, on two ranks; ``ffn.kind`` is in the config, ``ffn.width`` is a default."""
    write_weights(folder / "model.safetensors", {"w1": ("F32", (8, 4))})
    write_config(folder, {"model_type": "mine", "ffn": {"kind": "glu"}})
    plan = folder / "plan.toml"
    plan.write_text(f'[config]\n"ffn.width" = 8\n[units]\nffn = {{ count = "ffn.width" }}\n[rules]\n"w1" = {rules}')
    return shardconv.make_plan(folder, tp=2, rules=plan).placement("w1").ranks


def test_field_of_a_nested_config_has_a_default(tmp_path):
    found = ranks_by_nested_config(tmp_path, '{ style = "colwise", unit = "ffn" }')
    assert found == (((0, 4),), ((4, 8),))


@pytest.mark.parametrize(
    ("kind", "expected"), [("mlp", (((0, 4),), ((4, 8),))), ("glu", ((), ()))], ids=["other value", "same value"]
)
def test_condition_on_a_field_of_a_nested_config(tmp_path, kind, expected):
    whole = f'{{ style = "replicate", when = {{ "ffn.kind" = "{kind}" }}, optional = true }}'
    sharded = '{ style = "colwise", unit = "ffn", optional = true }'
    found = ranks_by_nested_config(tmp_path, f"[{whole}, {sharded}]")
    assert found == expected


def test_rule_with_dims_replicates_tensors_with_fewer_dims():
    shapes = {"kernel": (6, 3, 3, 3), "matrix": (5, 4), "token": (1, 4, 6), "scale": (6,), "count": ()}
    specs = {name: TensorSpec("F32", shape) for name, shape in shapes.items()}
    rule = '[rules]\n"**.*" = { style = "gathered", pad = true, dims = 2 }'
    plan = planner_for(specs, None, PlanRequest(plan_file=("plan.toml", rule))).plan(2)
    dims = {name: plan.tensors[name].placement.dim for name in shapes}
    assert dims == {"kernel": 0, "matrix": 0, "token": None, "scale": None, "count": None}


#: Configs of checkpoints on the Hub, which differ from those that save_pretrained writes, and some tensor names.
_TEXT = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
_HUB = {
    "qwen2_vl": ({**_TEXT, "vision_config": {"num_heads": 4, "embed_dim": 64}}, ("model.", "visual.")),
    "qwen2_5_vl": ({**_TEXT, "vision_config": {"num_heads": 4, "hidden_size": 64}}, ("model.", "visual.")),
    "qwen3_vl": (
        {
            "text_config": {**_TEXT, "model_type": "qwen3_vl_text"},
            "vision_config": {"model_type": "qwen3_vl", "num_heads": 4},
        },
        ("model.language_model.", "model.visual."),
    ),
    "qwen3_5": (
        {
            "text_config": {**_TEXT, "model_type": "qwen3_5_text"},
            "vision_config": {"model_type": "qwen3_5", "num_heads": 4},
        },
        ("model.language_model.", "model.visual."),
    ),
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
    specs = {name: TensorSpec("BF16", shape) for name, shape in shapes.items()}
    plan = planner_for(specs, {"model_type": model_type, **config}, PlanRequest()).plan(2)
    assert [planned.placement.dim for planned in plan.tensors.values()] == [0, 1, 0, 1, None]


STAGES = """
[units]
head = { count = "num_heads[stage]", size = "features // num_heads[stage]", shard_if_divisible = true }
[rules]
"encoder.stages.*.layers.*.q" = { style = "colwise", unit = "head", otherwise = "colwise_gather_output" }
"encoder.stages.*.layers.*.o" = { style = "rowwise", unit = "head", otherwise = "colwise_gather_output" }
"""


def stages(heads, tp, *, config=None, plan=STAGES, pad=0):
    """The style and placement of the layers of each stage."""
    names = [f"encoder.stages.{stage}.layers.5.{layer}.weight" for stage in range(len(heads)) for layer in "qo"]
    specs = {name: TensorSpec("F32", (16, 24)) for name in names}
    request = PlanRequest(plan_file=("mine.toml", plan), pad=pad)
    found = planner_for(specs, config or {"model_type": "new", "num_heads": heads}, request).plan(tp)
    return [(found.tensors[name].style, found.placement(name)) for name in names]


def test_stage_whose_heads_do_not_divide_is_sharded_evenly():
    """Stages with 1, 2 and 8 heads on 4 ranks: only the last is sharded by heads, the others evenly."""
    found = stages([1, 2, 8], 4)
    assert [style for style, _ in found] == ["colwise_gather_output"] * 4 + ["colwise", "rowwise"]
    assert [placement.dim for _, placement in found] == [0, 0, 0, 0, 0, 1]
    assert [style for style, _ in stages((1, 2, 8), 2)][2:] == ["colwise", "rowwise"] * 2


def test_units_with_whole_are_not_padded():
    found = stages([2, 8], 3, config={"model_type": "new", "num_heads": [2, 8]})
    assert [style for style, _ in found] == ["colwise_gather_output"] * 4
    assert all(placement.is_padded for _, placement in found)  # 16 rows over 3 ranks


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config field num_heads is missing"),
        ({"num_heads": 4}, r"num_heads is 4 \(expected a list with an integer at index 0\)"),
        ({"num_heads": [4]}, "expected a list with an integer at index 1"),
        ({"num_heads": ["4", 4]}, "expected a list with an integer at index 0"),
    ],
)
def test_list_without_an_integer_for_a_stage_is_refused(config, message):
    with pytest.raises(PlanError, match=message):
        stages([4, 4], 2, config={"model_type": "new", **config})


def test_name_without_a_stage_is_refused():
    plan = STAGES.replace('"encoder.stages.*.layers.*.q"', '"q"')
    request = PlanRequest(plan_file=("mine.toml", plan.rpartition('"encoder')[0]))
    specs = {"q.weight": TensorSpec("F32", (16, 24))}
    with pytest.raises(PlanError, match="does not contain the number of a stage"):
        planner_for(specs, {"model_type": "new", "num_heads": [4]}, request).plan(2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            ', otherwise = "colwise_gather_output"',
            "",
            "set otherwise for the rule and shard_if_divisible = true for all of its units",
        ),
        (
            ", shard_if_divisible = true",
            "",
            "set otherwise for the rule and shard_if_divisible = true for all of its units",
        ),
        ('count = "num_heads[stage]", ', "", "shard_if_divisible = true needs a count"),
        ('"colwise_gather_output"', '"packed_colwise"', "is not a style without segments"),
        ("num_heads[stage]", "num_heads[layer]", "is not an expression of config fields"),
    ],
)
def test_units_with_whole_need_another_style(old, new, message):
    with pytest.raises(PlanError, match=message):
        stages([4, 4], 2, plan=STAGES.replace(old, new))
