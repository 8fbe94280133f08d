"""Pipeline stages: numbers of layers, and the stages of tensors. Expected values are vLLM's, or enumerated."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardconv.plan.placement import Interval
from shardconv.plan.plan import TensorSpec
from shardconv.plan.request import PlanRequest, planner_for
from shardconv.plan.stages import (
    StageChoice,
    StageFinder,
    Stages,
    chosen_stages,
    divide_layers,
    even_stages,
    place_layers,
)
from shardconv.support.errors import PlanError, UsageError
from tests.support.checkpoints import llama_config, llama_specs

#: Number of layers and stages to vLLM's numbers of layers: docstring and code of its get_pp_indices.
OF_VLLM = {
    (32, 2): (16, 16),
    (61, 4): (15, 15, 16, 15),
    (80, 3): (27, 27, 26),
    (10, 4): (2, 3, 3, 2),
    (7, 4): (2, 2, 2, 1),
    (5, 5): (1, 1, 1, 1, 1),
}


@pytest.mark.parametrize(("layers", "pp"), OF_VLLM)
def test_layers_are_divided_as_by_vllm(layers, pp):
    assert divide_layers(layers, pp) == OF_VLLM[layers, pp]


@given(st.integers(1, 200), st.integers(1, 32))
def test_division_is_even(layers, pp):
    numbers = divide_layers(layers, pp)
    assert sum(numbers) == layers
    assert max(numbers) - min(numbers) <= 1
    assert numbers[-1] == min(numbers)


def splits(count, pp):
    """All divisions of ``count`` layers over ``pp`` stages."""
    if pp == 1:
        yield (count,)
        return
    for first in range(1, count - pp + 2):
        for others in splits(count - first, pp - 1):
            yield first, *others


def largest(sizes, numbers):
    bounds = [sum(numbers[:at]) for at in range(len(numbers) + 1)]
    return max(sum(sizes[start:stop]) for start, stop in pairwise(bounds))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_even_stages_are_the_best_of_all(sizes, data):
    pp = data.draw(st.integers(1, len(sizes)))
    least = data.draw(st.integers(1, len(sizes) - pp + 1))
    numbers = even_stages(sizes, pp, least)
    assert (sum(numbers), len(numbers), min(numbers) > 0, numbers[0] >= least) == (len(sizes), pp, True, True)
    possible = [one for one in splits(len(sizes), pp) if one[0] >= least]
    assert largest(sizes, numbers) == min(largest(sizes, one) for one in possible)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_layer_axis_is_a_placement(numbers):
    placement = place_layers(numbers)
    assert placement.size == sum(numbers)
    assert [placement.local_size(stage) for stage in range(len(numbers))] == numbers
    stages = Stages(placement)
    owners = [stages.of_layer(layer) for layer in range(sum(numbers))]
    assert owners == [(stage,) for stage, number in enumerate(numbers) for _ in range(number)]
    assert stages.of_layer(sum(numbers)) == (len(numbers) - 1,)  # an MTP layer


def test_other_placements_are_refused():
    ranks = ((Interval(2, 4),), (Interval(0, 2),))
    with pytest.raises(ValueError, match="not consecutive intervals"):
        Stages(type(place_layers((2, 2)))(0, 4, ranks))


CHOSEN = {
    (None, ""): StageChoice(),
    (1, ""): StageChoice(),
    (2, ""): StageChoice(2),
    (None, "20,20"): StageChoice(2, (20, 20)),
    (2, (20, 21)): StageChoice(2, (20, 21)),
}
WRONG = {
    (1, "2,2"): r'stages="2,2" is for 2 stages \(expected 1, for pp=1\)',
    (0, ""): r"pp is 0 \(expected an integer from 1 to 4096\)",
    (True, ""): r"pp is True",
    (4097, ""): r"pp is 4097",
    (1, "2,a"): 'stages="2,a" is wrong',
    (1, "2,,3"): 'stages="2,,3" is wrong',
    (1, (2, 0)): 'stages="2,0" is wrong',
    (3, "2,2"): r'stages="2,2" is for 2 stages \(expected 3, for pp=3\)',
    (1, "4"): r"stages=4 is for 1 stage \(expected at least 2\)",
}


@pytest.mark.parametrize(("pp", "stages"), CHOSEN)
def test_chosen(pp, stages):
    assert chosen_stages(pp, stages) == CHOSEN[pp, stages]


@pytest.mark.parametrize(("pp", "stages"), WRONG)
def test_wrong_choice(pp, stages):
    with pytest.raises(UsageError, match=WRONG[pp, stages]):
        chosen_stages(pp, stages)


def planner(config, names=None, extra=()):
    specs = {name: TensorSpec(*spec) for name, spec in llama_specs(config).items() if names is None or name in names}
    specs |= {name: TensorSpec("F32", shape) for name, shape in extra}
    return planner_for(specs, config, PlanRequest())


@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_embedding_is_on_both_ends(is_tied):
    config = {**llama_config(), "num_hidden_layers": 2, "tie_word_embeddings": is_tied}
    made = planner(config, {name for name in llama_specs(config) if not (is_tied and name == "lm_head.weight")})
    plan = made.plan(1, made.stages(StageChoice(2)))
    assert plan.tensors["model.embed_tokens.weight"].stages == ((0, 1) if is_tied else (0,))
    assert plan.tensors["model.norm.weight"].stages == (1,)
    assert [plan.tensors[f"model.layers.{layer}.mlp.up_proj.weight"].stages for layer in (0, 1)] == [(0,), (1,)]


@pytest.mark.parametrize(("flag", "is_tied"), [({}, True), ({"tie_word_embeddings": False}, False)])
def test_head_that_is_missing_may_be_the_embedding(flag, is_tied):
    """Without the field, a class of transformers may tie by default; with it, this is a model without a head."""
    config = llama_config()
    made = planner({**config, **flag}, {*llama_specs(config)} - {"lm_head.weight"})
    assert made.stages(StageChoice(2)).is_tied == is_tied


@pytest.mark.parametrize("layers", [8, 10**15])
def test_layers_that_are_missing_are_refused(layers):
    config = {**llama_config(layers=4), "num_hidden_layers": layers}
    specs = {name: TensorSpec(*spec) for name, spec in llama_specs(llama_config(layers=4)).items()}
    made = planner_for(specs, config, PlanRequest())
    with pytest.raises(PlanError, match=rf"model\.layers\.4 is missing \(expected {layers} layers, by num_hidden_la"):
        made.stages(StageChoice(2))


def test_as_many_ranks_as_a_manifest_may_have():
    made = planner(llama_config(layers=2, heads=4096, kv_heads=4096, hidden=4096))
    with pytest.raises(UsageError, match=r"tp=4096 and pp=2 have 8192 ranks \(expected at most 4096\)"):
        made.plan(4096, made.stages(StageChoice(2)))


def test_old_buffers_are_on_all_stages():
    made = planner(llama_config(), extra=[("model.rotary_emb.inv_freq", (4,))])
    plan = made.plan(1, made.stages(StageChoice(2)))
    assert plan.tensors["model.rotary_emb.inv_freq"].stages == (0, 1)
    assert all(plan.holds(rank, "model.rotary_emb.inv_freq") for rank in (0, 1))


def test_mtp_layers_are_on_the_last_stage():
    made = planner(llama_config(), extra=[("model.layers.2.eh_proj.weight", (64, 128)), ("mtp.fc.weight", (64, 128))])
    plan = made.plan(1, made.stages(StageChoice(2)))
    assert plan.tensors["model.layers.2.eh_proj.weight"].stages == plan.tensors["mtp.fc.weight"].stages == (1,)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UsageError, match=r"pp=3 is more than the 2 layers of model.layers: pass at most 2"):
        planner(llama_config()).stages(StageChoice(3))


REFUSED = {
    "encoder-decoder": ({"model_type": "t5", "num_heads": 2, "d_kv": 2, "d_ff": 4}, "shared.weight", (8, 4)),
    "encoder": ({"model_type": "vit"}, "vit.layernorm.weight", (4,)),
    "no family": ({}, "model.norm.weight", (4,)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_without_known_stages_are_refused(case):
    config, name, shape = REFUSED[case]
    made = planner_for({name: TensorSpec("F32", shape)}, config, PlanRequest())
    with pytest.raises(PlanError, match=rf"pp is not supported for family \w+: the stage of {name} is unknown"):
        made.stages(StageChoice(2))


def test_several_sequences_of_layers_are_refused():
    text = '[stages]\n"a" = "layers"\n"b" = "layers"\n[rules]\n"{a,b}.*" = { style = "replicate" }\n'
    specs = {f"{name}.0.weight": TensorSpec("F32", (4,)) for name in "ab"}
    made = planner_for(specs, None, PlanRequest(plan_file=("net.toml", text)))
    with pytest.raises(PlanError, match=r"it has 2 sequences of layers \(a, b\)"):
        made.stages(StageChoice(2, (1, 1)))


def test_plan_file_has_stages():
    text = """
        [stages]
        "first" = "first"
        "blocks" = "layers"
        "out" = "head"
        [rules]
        "{first,out,blocks.*}" = { style = "replicate" }
        """
    names = ("first.weight", *(f"blocks.{number}.weight" for number in range(3)), "out.bias")
    made = planner_for(dict.fromkeys(names, TensorSpec("F32", (4,))), None, PlanRequest(plan_file=("net.toml", text)))
    plan = made.plan(2, made.stages(StageChoice(2, (1, 2))))
    assert [plan.tensors[name].stages for name in names] == [(0,), (0,), (1,), (1,), (1,)]
    assert plan.num_ranks == 4


def test_plan_file_replaces_the_stages_of_a_family():
    text = 'inherits = "llama"\n[stages]\n"{lm_head,embed_out,output_projection,proj_out}" = "first"\n'
    config = llama_config()
    specs = {name: TensorSpec(*spec) for name, spec in llama_specs(config).items()}
    made = planner_for(specs, config, PlanRequest(plan_file=("net.toml", text)))
    assert made.plan(1, made.stages(StageChoice(2))).tensors["lm_head.weight"].stages == (0,)


def test_unknown_kind_in_a_plan_file():
    with pytest.raises(PlanError, match="stages 'a': 'middle' is unknown"):
        planner_for({}, None, PlanRequest(plan_file=("net.toml", '[stages]\na = "middle"\n')))


def test_number_of_layers_has_to_be_known():
    config = llama_config()
    specs = {name: TensorSpec(*spec) for name, spec in llama_specs(config).items()}
    made = planner_for(specs, None, PlanRequest(family="llama", head_dim=config["head_dim"]))
    with pytest.raises(PlanError, match=r"number of layers is unknown .*: pass stages"):
        made.stages(StageChoice(2))
    assert made.stages(StageChoice(2, (1, 1))).num_layers == (1, 1)


@pytest.mark.parametrize("chosen", [StageChoice(2), StageChoice(2, (1, 10**9 - 1))])
def test_absurd_number_of_layers_is_refused(chosen):
    """Of an adapter, which may lack layers."""
    specs = {name: TensorSpec(*spec) for name, spec in llama_specs(llama_config()).items()}
    made = planner_for(specs, {**llama_config(), "num_hidden_layers": 10**9}, PlanRequest())
    with pytest.raises(UsageError, match=r"model.layers has 1000000000 layers \(expected at most 10000\)"):
        StageFinder(made.rules).divide(chosen, [*made.group_of], is_adapter=True)


def test_absurd_number_of_layers_of_a_plan_is_refused():
    with pytest.raises(ValueError, match=r"its stages have 1000000000 layers \(expected at most 10000\)"):
        Stages(place_layers((1, 10**9 - 1)))


def test_wrong_sum_is_refused():
    made = planner(llama_config())
    with pytest.raises(UsageError, match=r'stages="1,2" has 3 layers \(expected 2, of model.layers\)'):
        made.stages(StageChoice(2, (1, 2)))


def planner_of_images(vision, engine="vllm"):
    """The planner of a Qwen3-VL with 8 layers."""
    text = {**llama_config(layers=8), "model_type": "qwen3_vl_text"}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    names = {name: TensorSpec(*spec) for name, spec in llama_specs(text).items()}
    specs = {name.replace("model.", "model.language_model."): spec for name, spec in names.items()}
    return planner_for(specs, config, PlanRequest(engine=engine))


#: Config of the image encoder and stages, to the least number of layers and the stages to pass instead.
FEW_LAYERS = {
    "by the config": ({"deepstack_visual_indexes": [1, 3, 5, 6]}, StageChoice(2, (3, 5)), 4, "4,4"),
    "by default": ({}, StageChoice(4), 3, "3,2,2,1"),
    "too many stages": ({}, StageChoice(7), 3, "3,1,1,1,1,1"),
    "layers for one stage": ({"deepstack_visual_indexes": [*range(8)]}, StageChoice(2), 8, ""),
    "too few layers": ({"deepstack_visual_indexes": [*range(9)]}, StageChoice(2), 9, ""),
}


@pytest.mark.parametrize("case", FEW_LAYERS)
def test_first_stage_has_the_layers_after_which_vllm_adds_features_of_images(case):
    vision, chosen, least, remedy = FEW_LAYERS[case]
    option = f'stages="{remedy}"' if remedy else "pp=1"
    message = rf"first stage \(expected at least {least}, .* vllm adds .*: pass {option} instead$"
    with pytest.raises(UsageError, match=message):
        planner_of_images(vision).stages(chosen)
    accepted = planner_of_images(vision).stages(chosen_stages(None if remedy else 1, remedy))
    assert (",".join(map(str, accepted.num_layers)) if accepted else "") == remedy
    assert planner_of_images(vision, engine=None).stages(chosen).count == chosen.count


def test_first_stage_is_also_checked_by_stored_rules():
    made = planner_of_images({"deepstack_visual_indexes": [0]})
    assert made.stages(StageChoice(8)).num_layers == (1,) * 8
    assert StageFinder(made.rules.stored()).divide(StageChoice(8), [*made.group_of]).num_layers == (1,) * 8
    stored = StageFinder(planner_of_images({"deepstack_visual_indexes": [0, 1]}).rules.stored())
    with pytest.raises(UsageError, match=r"expected at least 2"):
        stored.divide(StageChoice(8), [*made.group_of])
