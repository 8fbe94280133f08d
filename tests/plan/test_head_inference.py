"""Plans of tensors with Llama's names without a config: assumed, inferred and given head sizes."""

import re

import pytest

from shardconv.plan.plan import TensorSpec
from shardconv.plan.planner import TpSizes, tp_sizes
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.support.errors import PlanError
from tests.support.plans import plan_of

LAYER = "model.layers.0"
HEAD_DIM_IS_UNKNOWN = "head_dim is unknown (no config.json): assuming it is at most 512."
HINT = "compare the outputs of shardconv.load(DIR, model=MODULE) with the unsharded module's"


def bare(*, heads: int, kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Name to shape of the tensors of one layer."""
    return {
        f"{LAYER}.self_attn.q_proj.weight": (heads * head_dim, 64),
        f"{LAYER}.self_attn.k_proj.weight": (kv_heads * head_dim, 64),
        f"{LAYER}.self_attn.v_proj.weight": (kv_heads * head_dim, 64),
        f"{LAYER}.self_attn.o_proj.weight": (64, heads * head_dim),
        f"{LAYER}.mlp.up_proj.weight": (96, 64),
        f"{LAYER}.mlp.down_proj.weight": (64, 96),
        f"{LAYER}.input_layernorm.weight": (64,),
        "model.embed_tokens.weight": (131, 64),
    }


#: 8 KV heads of 128 elements, which by the shapes may be 2 of 512.
EIGHT = bare(heads=32, kv_heads=8, head_dim=128)
#: 24 heads of 128 elements, 8 of them KV heads.
OF_THREE = bare(heads=24, kv_heads=8, head_dim=128)


def sizes(shapes: dict[str, tuple[int, ...]], head_dim: int | None = None) -> TpSizes:
    """The supported tensor parallel sizes, and what blocks the others."""
    specs = {name: TensorSpec("F32", shape) for name, shape in shapes.items()}
    return tp_sizes(planner_for(specs, None, PlanRequest(head_dim=head_dim)))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "largest"), [(32, 8, 128, 512), (8, 1, 256, 256)])
def test_error_without_a_config_begins_with_the_cause_and_marks_assumptions(heads, kv_heads, head_dim, largest):
    """The assumed head size divides the rows of keys: 8 KV heads of 128 may be 2 of 512, and one of 256 is 256."""
    count = kv_heads * head_dim // largest
    with pytest.raises(PlanError) as caught:
        plan_of(bare(heads=heads, kv_heads=kv_heads, head_dim=head_dim), tp=8)
    assert str(caught.value) == (
        f"{HEAD_DIM_IS_UNKNOWN.replace('512', str(largest))} With this assumption, tp=8 is unsupported "
        f"(expected one of {', '.join(map(str, range(1, count + 1)))}) because of {LAYER}.self_attn.k_proj."
        f"weight: {count} is not a multiple of 8 (head_dim={largest} assumed, num_key_value_heads={count} "
        "assumed): put the config.json of the model beside its weights, or pass config=FILE, or pass head_dim"
    )


@pytest.mark.parametrize(
    ("tp", "head_dim", "read"),
    [
        (2, None, "(head_dim=512 assumed, num_key_value_heads=2 assumed)"),
        (8, 128, "head_dim=128, num_key_value_heads=8"),
    ],
)
def test_reasons_mark_what_is_assumed(tp, head_dim, read):
    planned = plan_of(EIGHT, tp=tp, head_dim=head_dim).tensors
    assert read in planned[f"{LAYER}.self_attn.k_proj.weight"].describe()
    fields = re.findall(r"head_dim=\d+( assumed)?", "".join(one.describe() for one in planned.values()))
    assert set(fields) == {"" if head_dim else " assumed"}


def test_error_without_a_config_does_not_propose_head_dim_if_it_would_not_help():
    with pytest.raises(PlanError) as caught:
        plan_of(bare(heads=8, kv_heads=8, head_dim=512), tp=64, replicate=("**.self_attn.*",))
    assert "head_dim" not in str(caught.value)
    assert "(expected one of 1-4, 6, 8, 12, 16, 24, 32, 48, 96)" in str(caught.value)  # head sizes do not matter


def test_sizes_without_a_config():
    """Powers of two are supported, as long as no boundary is inside the largest head."""
    found = sizes(OF_THREE)
    blocked = {entry.tp: entry.reason for entry in found.blocked}
    assert found.supported == (1, 2)
    assert blocked[3] == "only powers of two are supported while head_dim is unknown"
    assert blocked[4].startswith("6 is not a multiple of 4 (head_dim=512 assumed")
    assert {1, 2, 4} < set(sizes(OF_THREE, 128).supported)
    assert 8 not in sizes(OF_THREE, 256).supported


@pytest.mark.parametrize(
    ("rules", "replicate", "assumed"),
    [
        (
            "",
            (),
            [f"{HEAD_DIM_IS_UNKNOWN} Pass --head-dim or --config.", "a checkpoint without a config does not have"],
        ),
        # A proof needs a config.
        (
            '[rules]\n"**.k_proj" = { style = "replicate" }\n',
            ("*.*.*.*.q_proj",),
            [f"rules of plan.toml are tried first; {HINT}", "*.*.*.*.q_proj is replicated as requested"],
        ),
        # The family by_name stands for a model without a family, of which no rules are replaced.
        *(
            (f'{inherits}[rules]\n"**.up_proj" = {{ style = "colwise_gather_output" }}\n', (), ["rules of plan.toml"])
            for inherits in ("", 'inherits = "by_name"\n')
        ),
    ],
)
def test_assumptions_without_a_config(rules, replicate, assumed):
    found = plan_of(OF_THREE, rules, replicate=replicate).assumed
    assert all(any(text.startswith(start) for text in found) for start in assumed)
    assert all(text.endswith(HINT) for text in found if "can change outputs" in text)
    assert not any("--prove" in text or "replaces rules" in text for text in found)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(8, 2, 64), (12, 4, 96), (6, 6, 80), (8, 1, 32), (16, 8, 256), (4, 2, 512)]
)
def test_without_a_config_no_boundary_is_inside_a_head(heads, kv_heads, head_dim):
    shapes = bare(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    guessed = sizes(shapes).supported
    assert 1 in guessed
    assert set(guessed) <= set(sizes(shapes, head_dim).supported)
    for tp in guessed:
        ours, theirs = plan_of(shapes, tp=tp), plan_of(shapes, tp=tp, head_dim=head_dim)
        assert all(ours.placement(name) == theirs.placement(name) for name in ours.tensors)


def test_head_dim_is_inferred_from_a_norm_over_each_head():
    shapes = {**bare(heads=8, kv_heads=2, head_dim=16), f"{LAYER}.self_attn.q_norm.weight": (16,)}
    assert plan_of(shapes, tp=8).assumed[0].startswith(f"head_dim = 16, from the shape of {LAYER}.self_attn.q_norm.")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        # Whether the weight of a norm is sharded depends on its input, which the name does not determine.
        *(
            (name, (96,), rf"{name}.weight .* its name alone does not determine how to shard it")
            for name in ("self_attn.attn_sub_norm", "mlp.ffn_sub_norm", "self_attn.norm", "mlp.ffn_layernorm")
        ),
        # It has the name of a norm over one head, which is replicated; only their sizes differ.
        ("self_attn.q_norm", (512,), r"q_norm\.weight: shape .* does not end in head_dim"),
        ("mlp.up_proj", (64, 96), "its output features are not the input features of"),  # stored (in, out)
    ],
)
def test_names_that_do_not_determine_the_sharding_are_refused(name, shape, message):
    shapes = {**bare(heads=8, kv_heads=2, head_dim=64), f"{LAYER}.{name}.weight": shape}
    with pytest.raises(PlanError, match=message):
        plan_of(shapes, tp=1)


@pytest.mark.parametrize("config", [None, {}, {"model_type": "unheard_of"}])
def test_missing_config_is_part_of_the_remedy(config):
    with pytest.raises(PlanError) as caught:
        plan_of({f"{LAYER}.self_attn.norm.weight": (96,)}, tp=1, config=config)
    remedy = "put the config.json of the model beside its weights, or pass config=FILE, or pass rules with a family"
    assert (remedy in str(caught.value)) == (not config)
