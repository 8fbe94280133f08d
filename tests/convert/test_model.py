"""Converted models of every family, compared with unsharded models on two and four ranks.

In float32, as sums over features are computed per rank: outputs to 1e-5 of the largest, and gradients
to 1e-4 of the larger of the tensor's gradient and a thousandth of the largest one (a key's bias has only
rounding errors). All values of the models are random, including norms and biases, so each rule matters.
"""

import copy
import pickle
from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardconv
from shardconv.convert import gather_state_dict
from shardconv.convert.model import convert_with_request, sort_keys
from shardconv.convert.module_rules import slice_features, slice_items, slice_matrices
from shardconv.convert.modules import ForwardWithShards, ParallelExperts
from shardconv.distributed import Axis, reduce_from_tp
from shardconv.hf.inputs import example_inputs
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Unit, shard_dim
from shardconv.plan.request import PlanRequest
from shardconv.support.errors import PlanError
from tests.support.comparison import SCALE, check_gradients, check_refused, inputs_of, numbers
from tests.support.matrix import cases
from tests.support.models import GQA, MODELS, model_class
from tests.support.ranks import on_ranks
from tools.model_matrix.trial import small

#: Models that can be built from their config and weights.
NAMES = [name for name, model in MODELS.items() if not model.rewrite and not model.extra]
GENERATING = [name for name in NAMES if MODELS[name].auto in ("AutoModelForCausalLM", "T5ForConditionalGeneration")]

#: Models that run by default at a tensor parallel size at which KV heads are replicated.
ON_FOUR_RANKS = {"llama", "phi3", "mixtral", "gpt2", "falcon-7b"}
#: Models of other structures, which run by default on two ranks.
ON_TWO_RANKS = {
    "bert", "bloom", "cohere", "deepseek_v3", "falcon-40b", "gpt_bigcode", "gpt_neox", "gpt_oss", "mamba2", "olmo2",
    "qwen3", "t5",
}  # fmt: skip
#: Models that generate by default: grouped, fused, single, latent and cross attention, experts, and ALiBi.
GENERATING_BY_DEFAULT = {
    "llama",
    "gpt2",
    "mixtral",
    "bloom",
    "deepseek_v3",
    "falcon-40b",
    "gpt_bigcode",
    "mamba2",
    "t5",
}


def over_layouts(names, by_default=ON_FOUR_RANKS | ON_TWO_RANKS):
    """Each model on two and on four ranks, and by default on one of them."""
    pairs = [(layout, name) for layout in ("pair", "four") for name in names]
    return cases(pairs, lambda layout, name: name in by_default and (layout == "four") == (name in ON_FOUR_RANKS))


def models_of(model, axis):
    """The unsharded model, and the converted one."""
    made = model.build(SCALE).eval()
    return made, shardconv.convert_model(copy.deepcopy(made), group=axis)


def check_forward(axis, model):
    before, after = models_of(model, axis)
    expected, found = numbers(before(**inputs_of(model))), numbers(after(**inputs_of(model)))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert found[key].shape == value.shape
        assert (found[key] - value).abs().max() <= 1e-5 * value.abs().max()
    return before, after, expected, found


def check_model(axis, model):
    before, after, expected, found = check_forward(axis, model)
    generator = torch.Generator().manual_seed(2)
    weights = {key: torch.randn(value.shape, generator=generator) for key, value in expected.items()}
    for output in (expected, found):
        sum((output[key] * weight).sum() for key, weight in weights.items()).backward()
    check_gradients(before, after, axis)
    state = gather_state_dict(after)
    assert state.keys() == before.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in before.state_dict().items())


@pytest.mark.parametrize(("layout", "name"), over_layouts(NAMES))
def test_every_family(ranks, layout, name):
    if name == "t5-classifier":
        pytest.skip("needs a decoder_start_token_id, which configs of transformers 5.23 do not keep")
    ranks(layout, check_named, name)


def check_named(axis, name):
    check_model(axis, MODELS[name])


@pytest.mark.parametrize(("layout", "name"), over_layouts(GENERATING, GENERATING_BY_DEFAULT))
@on_ranks()
def test_generation(axis, name):
    """Check greedy tokens with a cache, for a padded and an unpadded prompt."""
    model = MODELS[name]
    if name.startswith("t5"):
        model = replace(model, config={**model.config, "decoder_start_token_id": 0})
    before, after = models_of(model, axis)
    ids = inputs_of(model)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "use_cache": True}
    assert torch.equal(after.generate(ids, **options), before.generate(ids, **options))


@on_ranks("four")
def test_tied_head(axis):
    """Check that a tied head stays tied, with a vocabulary that is padded."""
    model = replace(MODELS["llama"], config={**GQA, "tie_word_embeddings": True})
    _, after, *_ = check_forward(axis, model)
    assert after.lm_head.weight is after.model.embed_tokens.weight


class _Doubled:
    class Linear(nn.Linear):
        """Another class with the name of torch's Linear."""

        def forward(self, x):
            return 2 * super().forward(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def llama():
    return MODELS["llama"].build()


def with_class(kind):
    """A llama whose second ``up_proj`` is of another class."""
    model = llama()
    model.model.layers[1].mlp.up_proj.__class__ = kind
    return model


def with_different_values(name, rank):
    """A llama whose module ``name`` has other values on each rank."""
    model = llama()
    model.model.layers[0].get_submodule(name).weight.data.add_(rank)
    return model


def with_scalar():
    model = llama()
    model.model.layers[0].mlp.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return model


def with_complex_values():
    model = llama()
    model.lm_head.weight.data = model.lm_head.weight.data.to(torch.complex128)
    return model


#: The model of a rank, the arguments of the conversion to four ranks, and the error.
REFUSED = {
    "no config": (lambda _: nn.Linear(2, 2), "auto", ValueError, "Linear does not have a config.* pass rules=FILE"),
    "tp": (
        lambda _: replace(MODELS["llama"], config={"num_attention_heads": 2, "num_key_value_heads": 2}).build(),
        "auto", shardconv.PlanError, "tp=4 is unsupported.*2 is not a multiple of 4",
    ),
    "by_name": (
        lambda _: llama(), "by_name", shardconv.PlanError,
        "no family is known for model type 'llama'.*Pass rules=FILE with a plan file, for a split checkpoint to",
    ),
    "derived class": (
        lambda _: with_class(Doubled), "auto", ValueError, "layers.1.mlp.up_proj: a Doubled may compute something else",
    ),
    "derived class of the same name": (
        lambda _: with_class(_Doubled.Linear),
        "auto", ValueError, "layers.1.mlp.up_proj: a Linear may compute something else",
    ),
    **{
        f"different values in {name}": (
            partial(with_different_values, name), "auto", ValueError, f"hold different values in model.layers.0.{name}",
        )
        for name in ("mlp.up_proj", "input_layernorm")
    },
    "scalar": (lambda _: with_scalar(), "auto", ValueError, "mlp.scale: is a trainable scalar that no rule"),
    "complex values": (
        lambda _: with_complex_values(), "auto", ValueError, "values of torch.complex128 cannot be sharded",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@on_ranks("four")
def test_refused_model_stays_unchanged(axis, name):
    build, rules, error, message = REFUSED[name]
    check_refused(build(axis.rank), partial(shardconv.convert_model, rules=rules, group=axis), message, error)


# --- converted models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["phi3", "llama"])
@on_ranks("pair")
def test_attention_switched(axis, name):
    """Check that later changes of the config apply to modules with overrides."""
    for first, second in (("eager", "sdpa"), ("sdpa", "eager")):
        model = replace(MODELS[name], config={**MODELS[name].config, "attn_implementation": first})
        before, after = models_of(model, axis)
        for one in (before, after):
            one.set_attn_implementation(second)
        expected, found = (one(**inputs_of(model)).logits for one in (before, after))
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@on_ranks("four")
def test_sampling(axis):
    """Check that all ranks sample the tokens of the first rank, whatever their seeds are."""
    before, after = models_of(MODELS["llama"], axis)
    options = {"max_new_tokens": 8, "do_sample": True, "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    ids = inputs_of(MODELS["llama"])["input_ids"]
    torch.manual_seed(100)
    expected = before.generate(ids, **options)
    torch.manual_seed(100 + axis.rank)
    assert torch.equal(after.generate(ids, **options), expected)


@pytest.mark.parametrize(
    ("kind", "model_type", "message"),
    [
        ("image-text-to-text", "llava", "are seeded differently"),  # of a submodel
        ("automatic speech recognition (CTC)", "wav2vec2", r"numpy\.random\.seed"),
    ],
)
@on_ranks("pair")
def test_dropout_with_different_seeds(axis, kind, model_type, message):
    small_one = small(model_class(kind, model_type))
    if model_type == "llava":
        small_one.config.text_config.attention_dropout = 0.5
    inputs = example_inputs(small_one)
    after = shardconv.convert_model(small_one, group=axis).train()
    torch.manual_seed(axis.rank if model_type == "llava" else 0)
    numpy.random.seed(axis.rank)
    with pytest.raises(RuntimeError, match=message):
        after(**inputs)


@on_ranks("pair")
def test_unfused(axis):
    """Check that only modules with a fused kernel lose it; attention keeps its dropout."""
    after = shardconv.convert_model(small(model_class("text generation", "nemotron_h")), group=axis).train()
    mixers = [module for name, module in after.named_modules() if name.endswith(".mixer")]
    assert {hasattr(module, "conv1d"): module.training for module in mixers} == {True: False, False: True}
    assert all(layer.training for module in mixers for layer in module.children())


@on_ranks("pair")
def test_training(axis):
    """Check that different seeds are refused with dropout, and permitted without."""
    inputs = inputs_of(MODELS["gpt2"])
    after = models_of(replace(MODELS["gpt2"], config={**MODELS["gpt2"].config, "resid_pdrop": 0.5}), axis)[1].train()
    torch.manual_seed(axis.rank)
    with pytest.raises(RuntimeError, match="are seeded differently"):
        after(**inputs)
    torch.manual_seed(0)
    hidden = after.transformer(**inputs).last_hidden_state
    assert torch.equal(reduce_from_tp(hidden.detach(), op=dist.ReduceOp.MAX, group=axis), hidden)
    after(**inputs)
    after = models_of(MODELS["llama"], axis)[1].train()
    torch.manual_seed(axis.rank)
    after(**inputs)


@on_ranks("four")
def test_saved(axis, tmp_path):
    """Check that save_pretrained writes the unsharded model, not one rank's shards."""
    before, after = models_of(MODELS["mixtral"], axis)
    after.save_pretrained(tmp_path)
    dist.barrier(axis.group)
    state = type(before).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(state[key], value) for key, value in before.state_dict().items())
    with pytest.raises(
        ValueError, match=r"^model \(MixtralModel\): save_pretrained would write the shards of one rank"
    ):
        after.model.save_pretrained(tmp_path)


@on_ranks("four")
def test_calls_that_a_converted_model_refuses(axis):
    """Check sizes of the vocabulary, and attention weights by an argument or the config, also of a copy."""
    after, inputs = models_of(MODELS["mixtral"], axis)[1], inputs_of(MODELS["mixtral"])
    assert after.get_input_embeddings() is after.resize_token_embeddings()
    with pytest.raises(ValueError, match="resize the embeddings before the model is converted"):
        after.resize_token_embeddings(50)
    for one in (after, copy.deepcopy(after)):
        with pytest.raises(ValueError, match="output_attentions"):
            one(**inputs, output_attentions=True)
    after.set_attn_implementation("eager")
    after.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions"):
        after(**inputs, output_attentions=None)


#: Model types with each kind of class that is created at run time.
PICKLED = {
    "mixtral": ("text generation", ParallelExperts),
    "mobilebert": ("fill-mask", ForwardWithShards),
}


@pytest.mark.parametrize("model_type", PICKLED)
def test_pickled(model_type):
    """The unpickled model has the same classes."""
    task, kind = PICKLED[model_type]
    model = small(model_class(task, model_type)).eval()
    inputs = example_inputs(model)
    model = shardconv.convert_model(model, group=Axis("tensor", 0, 1, (0,), None))
    assert any(isinstance(module, kind) for module in model.modules())
    loaded = pickle.loads(pickle.dumps(model))
    assert [type(module) for module in loaded.modules()] == [type(module) for module in model.modules()]
    expected, found = numbers(model(**inputs)), numbers(loaded(**inputs))
    assert expected
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_arguments_for_each_head():
    """An argument without a dim of heads is not sliced, whatever its shape is."""
    rows, of_examples = (shard_dim(dim, [Unit(8)], 2) for dim in (1, 2))
    mask = torch.ones(2, 16)
    assert slice_matrices(1, of_examples, 1, mask) is mask
    alibi = torch.arange(8.0).view(1, 8, 1, 1).expand(2, 8, 1, 3)
    assert torch.equal(slice_matrices(1, of_examples, 1, alibi), alibi[:, 4:])
    assert torch.equal(slice_matrices(0, rows, 1, alibi.reshape(16, 1, 3)), alibi[:, 4:].reshape(8, 1, 3))
    assert slice_matrices(1, of_examples, 1, None) is None


#: Module overrides in plan files that do not fit LLaMA, with the error message of each.
WRONG_OVERRIDES = {
    "wrong path": (
        '"model.layer.*.self_attn" = { attributes = { num_heads = 1 } }',
        "match no module of the model",
    ),
    "unknown attribute": ('"**.mlp" = { attributes = { num_heads = 1 } }', "a LlamaMLP does not have 'num_heads'"),
    "module without norms": ('"**.mlp" = { norms = "query_head" }', "a LlamaMLP does not have 'norms'"),
    "unknown tensor": ('"**.mlp" = { slices = { x = { dim = 0, unit = "single" } } }', "a LlamaMLP does not have 'x'"),
    "attribute to limit": (
        '"**.mlp" = { at_most = { x = ["up_proj", "hidden_size"] } }',
        "a LlamaMLP does not have 'x'",
    ),
    "unknown layer": ('"**.mlp" = { unfused = "conv1d" }', "a LlamaMLP does not have 'conv1d'"),
    "unknown field of its config": (
        '"**.mlp" = { attributes = { "config.x" = 1 } }',
        "LlamaMLP does not have 'config.x'",
    ),
    "unknown unit": ('"**.mlp" = { norms = "heads" }', "unit 'heads' is unknown"),
    "unit of an input": (
        '"**.mlp" = { inputs = { x = { dim = 0, unit = "heads" } } }',
        "unit 'heads' is unknown",
    ),
    "unknown field": ('"**.mlp" = { attributes = { hidden_size = "no_such_field" } }', "no_such_field"),
    "no tensor": (
        '"**.self_attn" = { slices = { head_dim = { dim = 0, unit = "query_head" } } }',
        "can be sliced",
    ),
    "unit without a count": ('"**.self_attn" = { attributes = { head_dim = "single" } }', "follows from a tensor"),
}


#: Styles that do not fit a module: a model, the rule, and the error message.
WRONG_STYLES = {
    "router with a weight that is not a linear layer": (
        "mixtral", '"**.gate" = { style = "colwise_gather_output" }', "is not a linear layer",
    ),
    "linear layer as an embedding": (
        "llama", '"**.up_proj" = { style = "embedding_colwise_gather_output" }', "is not an embedding",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "plan_file", "message"),
    [
        *(("llama", f"[units]\nsingle = {{}}\n[modules]\n{each}\n", text) for each, text in WRONG_OVERRIDES.values()),
        *((name, f"[rules]\n{rule}\n", text) for name, rule, text in WRONG_STYLES.values()),
    ],
    ids=[*WRONG_OVERRIDES, *WRONG_STYLES],
)
def test_plan_file_that_does_not_fit_is_refused(name, plan_file, message):
    model = MODELS[name].build()
    request, axis = PlanRequest(plan_file=("plan.toml", plan_file)), Axis("tensor", 0, 1, (0,), None)
    check_refused(
        model,
        lambda one: convert_with_request(one, one.config.to_dict(), request, axis),
        message,
        (ValueError, PlanError),
    )


def test_overrides_that_are_optional_and_inputs_in_options():
    """Overrides of modules that only other models have, and of an argument that is not in the signature."""
    model = MODELS["llama"].build()
    plan_file = (
        '[modules]\n"encoder.*" = { attributes = { num_heads = 1 }, optional = true }\n'
        '"**.self_attn" = { inputs = { alibi = { dim = 0, unit = "query_head" } } }\n'
    )
    request, axis = PlanRequest(plan_file=("plan.toml", plan_file)), Axis("tensor", 0, 1, (0,), None)
    convert_with_request(model, model.config.to_dict(), request, axis)
    assert model.model.layers[0].self_attn._forward_pre_hooks


@on_ranks("pair")
def test_arguments_with_features_per_head(axis):
    values = torch.arange(24.0).view(1, 2, 12).requires_grad_()
    three = shard_dim(0, [Unit(3, 4, pad=True)], 2)
    local = slice_features(2, three, axis, values)
    expected = (values[..., :8], torch.cat([values[..., 8:], torch.zeros(1, 2, 4)], -1))[axis.rank]
    assert torch.equal(local, expected)
    (local * (axis.rank + 1)).sum().backward()
    assert torch.equal(values.grad[0, 0], torch.tensor([1.0] * 8 + [2.0] * 4))
    assert slice_features(2, three, axis, None) is None


@on_ranks("pair")
def test_states_with_features(axis):
    """Check that two of three states are sharded once, and do not keep the full ones alive."""
    states = [torch.arange(6.0).view(1, 6, 1) + 10 * place for place in range(3)]
    three = shard_dim(1, [Unit(3, 2, pad=True)], 2)
    found = slice_items((1, 2), 1, three, axis, states)
    assert found[0] is states[0]
    for place in (1, 2):
        assert torch.equal(found[place], take_shard(states[place], three, axis.rank))
        assert found[place].untyped_storage().nbytes() == found[place].nbytes
    assert all(one is other for one, other in zip(slice_items((1, 2), 1, three, axis, found), found, strict=True))
    assert slice_items((1, 2), 1, three, axis, None) is None


def test_config_keys_in_another_order_are_equal():
    """Keys in the order of a set differ between ranks."""
    one, other = {"rope": {"full": 1, "sliding": [{"a": 1, 0: 2}]}}, {"rope": {"sliding": [{0: 2, "a": 1}], "full": 1}}
    assert repr(one) != repr(other)
    assert repr(sort_keys(one)) == repr(sort_keys(other))
    assert repr(sort_keys(one)) != repr(sort_keys({"rope": {"full": 1, "sliding": [{"a": 1, 0: 3}]}}))
