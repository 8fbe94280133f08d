"""Models in pipeline stages: outputs and greedy tokens equal those of the unsharded model.

Logits are compared to 1e-4 of the largest, as sums over features are computed per rank; where nothing is summed over
ranks, with one rank per stage, they are equal.
"""

from dataclasses import replace

import pytest
import torch
import transformers

import shardconv
from shardconv.support.errors import PeerError
from tests.support.adapters import ADAPTERS, adapted, write_adapter
from tests.support.command import call
from tests.support.disguised import ACCELERATOR, with_accelerator
from tests.support.matrix import MATRIX, cases, each_once
from tests.support.models import GQA, MODELS, MOE, VOCAB, Model

LAYERS, TOKENS = 4, 8
#: Of attention with windows, the first layer has one: positions of all stages follow from its cache.
GEMMA = {**GQA, "sliding_window": 6, "tie_word_embeddings": True, "query_pre_attn_scalar": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 8, "linear_num_key_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "intermediate_size": 64,
}  # fmt: skip
KINDS = {
    "llama": MODELS["llama"],
    "qwen3_moe": MODELS["qwen3_moe"],
    "gemma3": Model("gemma3_text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "deepseek_v3": MODELS["deepseek_v3"],
    "llama-base": MODELS["llama-base"],
    "olmo": Model("olmo", GQA),  # a norm without parameters
    "qwen3_next": Model("qwen3_next", {**GQA, **MOE, **LINEAR}),  # layers with a state in place of a cache
    "granite": Model("granite", {**GQA, "embedding_multiplier": 3.0}),  # multiplies the output of the embedding
}
#: Other types that run in stages.
TYPES = (
    "cohere", "deepseek_v2", "glm4", "glm4_moe", "llama-biases", "mixtral", "olmo2", "olmoe", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "stablelm", "starcoder2",
)  # fmt: skip
OTHERS = {
    **{name: MODELS[name] for name in ("llama-classifier", "bert", *TYPES)},
    "llama-tied": Model("llama", {**GQA, "tie_word_embeddings": True}),
    "nanochat": Model("nanochat", GQA),
    "flint": Model("flint", GQA),
    "recurrent_gemma": Model("recurrent_gemma", {**GQA, "lru_width": 64, "attention_window_size": 8}),
    "llama4_text": Model("llama4_text", {**GQA, **MOE, "intermediate_size_mlp": 64}),
    "zamba2": Model("zamba2", {**GQA, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8}),
}
SIZES = [(2, 2), (1, 4)]


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """Write the checkpoint of a kind of model."""
    home = tmp_path_factory.mktemp("stages")

    def write(name):
        if not (home / name).exists():
            model = {**KINDS, **OTHERS}[name]
            replace(model, config={**model.config, "num_hidden_layers": LAYERS}).build(0.3).save_pretrained(home / name)
        return home / name

    return write


def check_outputs(axis, source, path, options):
    kind = transformers.AutoModel if "base" in source.name else transformers.AutoModelForCausalLM
    unsharded = kind.from_pretrained(source).eval()
    model = shardconv.load(path, device="cpu", **options)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padding before the second prompt
    with torch.inference_mode():
        expected, found = (one(input_ids=ids, attention_mask=mask) for one in (unsharded, model))
        name = "logits" if "logits" in expected else "last_hidden_state"
        difference = (found[name] - expected[name])[mask.bool()].abs().max()
        assert difference <= (1e-4 if options.get("tp", 2) > 1 else 0) * expected[name].abs().max()
        if name == "logits":
            given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": TOKENS, "do_sample": False}
            assert torch.equal(model.generate(**given), unsharded.generate(**given))
    own, full = (sum(one.numel() for one in each.parameters()) for each in (model, unsharded))
    return own / full


@pytest.mark.parametrize(("name", "tp", "pp"), each_once(KINDS, SIZES))
def test_outputs_equal_those_of_the_unsharded_model(ranks, source_of, tmp_path, name, tp, pp):
    source = source_of(name)
    shardconv.split(source, tmp_path / "split", tp=tp, pp=pp)
    held = ranks("four", check_outputs, source, tmp_path / "split", {})
    assert max(held) < 0.6
    assert ranks("four", check_outputs, source, source, {"tp": tp, "pp": pp}) == held


@pytest.mark.parametrize("name", ["llama", "flint"])
def test_hidden_states_in_half_precision(ranks, source_of, tmp_path, name):
    """The first parameter of a layer of flint stays in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source_of(name), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    ranks("four", check_outputs, tmp_path / "source", tmp_path / "source", {"tp": 1, "pp": 4})


def check_on_device(axis, source):
    unsharded, ids = transformers.AutoModelForCausalLM.from_pretrained(source).eval(), torch.arange(3, 12)[None]
    with with_accelerator(), torch.no_grad():
        model = shardconv.load(source, device=ACCELERATOR, tp=2, pp=2)
        found, expected = model(ids.to(model.device)).logits.cpu(), unsharded(ids).logits
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        options = {"max_new_tokens": TOKENS, "do_sample": False}
        tokens = model.generate(ids.to(model.device), **options)
        assert torch.equal(tokens.cpu(), unsharded.generate(ids, **options))
    return str(model.device)


def test_on_a_device(ranks, source_of):
    """Ranks that share it send hidden states by gloo, which does not send tensors of devices."""
    for device in ranks("four", check_on_device, source_of("llama")):
        assert device.startswith(ACCELERATOR)


def test_split_for_an_engine(ranks, source_of, tmp_path):
    """Its files have the embedding, the norm and the head on all stages."""
    source = source_of("qwen3_moe")
    shardconv.split(source, tmp_path / "split", tp=2, pp=2, engine="vllm")
    assert max(ranks("four", check_outputs, source, tmp_path / "split", {})) < 0.6


@pytest.mark.parametrize("name", [pytest.param(name, marks=MATRIX) for name in TYPES])
def test_other_types(ranks, source_of, name):
    assert max(ranks("four", check_outputs, source_of(name), source_of(name), {"tp": 2, "pp": 2})) < 0.6


#: Adapters of all layers and the head, of the embedding, of a model with biases, of fused layers, and of one layer.
ADAPTED = cases(
    ["llama", "llama-dora", "llama-regex", "phi3", "deepseek"],
    lambda name: name in {"llama", "deepseek"},
)


def check_adapter(axis, source, adapter, path, names):
    expected, ids = adapted(source, adapter), torch.arange(3, 12)[None]
    for name in names:
        model = shardconv.load(path, device="cpu", adapter=name)
        with torch.inference_mode():
            wanted, found = (one(input_ids=ids).logits for one in (expected, model))
            assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
            given = {"input_ids": ids, "max_new_tokens": TOKENS, "do_sample": False}
            assert torch.equal(model.generate(**given), expected.generate(**given))


@pytest.mark.parametrize("name", ADAPTED)
def test_adapter(ranks, source_of, tmp_path, name):
    """An adapter that is split with the model, and one that is split alone."""
    base, settings = ADAPTERS[name]
    source = source_of(base)
    adapter = write_adapter(tmp_path / "lora", source, **settings)
    shardconv.split(source, tmp_path / "split", tp=2, pp=2, adapters=[adapter])
    shardconv.split(adapter, tmp_path / "alone", base=tmp_path / "split", tp=2, pp=2)
    ranks("four", check_adapter, source, adapter, tmp_path / "split", ["lora", tmp_path / "alone"])


def test_adapter_of_a_tied_embedding(ranks, source_of, tmp_path):
    source = source_of("llama-tied")
    adapter = write_adapter(tmp_path / "lora", source, target_modules=["embed_tokens", "down_proj"])
    shardconv.split(source, tmp_path / "split", tp=1, pp=4, adapters=[adapter])
    ranks("four", check_adapter, source, adapter, tmp_path / "split", ["lora"])


def test_adapter_of_other_stages_is_refused(ranks, source_of, tmp_path):
    source = source_of("llama")
    adapter = write_adapter(tmp_path / "lora", source, target_modules=["q_proj"])
    shardconv.split(source, tmp_path / "split", tp=2, pp=2)
    shardconv.split(adapter, tmp_path / "alone", base=source, tp=2, stages="1,3")
    message = r'is split for tp=2 stages="1,3" \(expected tp=2 stages="2,2".*run .*reshard \S+ --tp 2 --stages 2,2$'
    ranks("four", check_refused, tmp_path / "split", {"adapter": tmp_path / "alone"}, message)


def check_refused(axis, path, options, message):
    with pytest.raises(shardconv.ShardconvError, match=message):
        shardconv.load(path, device="cpu", **options)


REFUSED = {
    "classifier": ("llama-classifier", {"tp": 2, "pp": 2}, "modules of kind 'last' are not connected"),
    "a module": ("llama", {"tp": 2, "pp": 2, "model": torch.nn.Identity}, "model= is not supported with pipeline stag"),
    "number of processes": ("llama", {"tp": 1, "pp": 2}, "would be loaded for 2 ranks, and there are 4 processes"),
    "a norm before the layers, too": (
        "nanochat",
        {"tp": 2, "pp": 2},
        "does not call the embedding, each layer and the",
    ),
    "the device of the embedding": ("llama4_text", {"tp": 2, "pp": 2}, "a dry run raises AttributeError"),
    "the embedding in each layer": ("zamba2", {"tp": 2, "pp": 2}, "gets more than one input from other stages"),
    "states in the layers": ("recurrent_gemma", {"tp": 2, "pp": 2}, "a dry run raises AttributeError"),
    "encoder": ("bert", {"tp": 2, "pp": 2}, "pp is not supported for family bert"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(ranks, source_of, case):
    name, options, message = REFUSED[case]
    ranks("four", check_refused, source_of(name), options, message)


def check_gradients(axis, path):
    model = shardconv.load(path, device="cpu", tp=1, pp=4)
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"does not compute gradients: call it in torch.no_grad\(\)"):
        model(ids)
    for part in (model, model.model):
        with pytest.raises(ValueError, match="each rank has the layers of its stage"):
            part.save_pretrained("anywhere")
        with pytest.raises(ValueError, match="each rank has the layers of its stage"):
            shardconv.gather_state_dict(part)
    with torch.no_grad():
        for options in ({"output_hidden_states": True}, {"inputs_embeds": torch.zeros(1, 2, 64)}):
            with pytest.raises(ValueError, match=next(iter(options))):
                model(**{"input_ids": ids, **options})
        with pytest.raises(RuntimeError, match="call the model itself"):
            model.model(ids)


#: Stage and module that raises an error there, of a model with one layer per stage.
FAILING = {
    "first": (0, "model.layers.0"),
    "in the middle": (1, "model.layers.1"),
    "last": (3, "model.layers.3"),
    "before it receives": (2, "model.embed_tokens"),
    "after it has sent": (0, "model.norm"),
    "output": (3, "lm_head"),
}


def check_error(axis, source, stage, name):
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    model = shardconv.load(source, device="cpu", tp=1, pp=4)

    def fail(*_):
        raise torch.OutOfMemoryError("no memory\nis left")

    if is_failing := axis.rank == stage:
        hook = model.get_submodule(name).register_forward_pre_hook(fail)
    kind, message = (torch.OutOfMemoryError, "^no memory") if is_failing else (
        PeerError, f"^pipeline stage {stage}: OutOfMemoryError: no memory is left$"
    )  # fmt: skip
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        with pytest.raises(kind, match=message):
            model.generate(ids, max_new_tokens=TOKENS)
        if is_failing:
            hook.remove()
        assert torch.equal(model(ids).logits, unsharded(ids).logits)


@pytest.mark.parametrize("case", FAILING)
def test_error_on_one_stage_is_raised_on_all(ranks, source_of, case):
    """They do not wait until the timeout, and the model runs afterward."""
    ranks("four", check_error, source_of("llama"), *FAILING[case])


def check_positional(axis, path):
    model, ids = shardconv.load(path, device="cpu", tp=1, pp=4), torch.arange(3, 12)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, model(input_ids=ids).logits)
        with pytest.raises(TypeError, match=r"got None as input_ids \(expected a tensor\)"):
            model(attention_mask=torch.ones_like(ids))


def test_input_ids_are_required(ranks, source_of):
    ranks("four", check_positional, source_of("llama"))


def test_command_for_another_number_of_processes(ranks, source_of, tmp_path):
    """It removes the stages, which a checkpoint keeps by default."""
    shardconv.split(source_of("llama"), tmp_path / "split", tp=1, pp=2)
    ranks("four", check_refused, tmp_path / "split", {}, r"or make one for 4 by shardconv reshard .* --tp 4 --pp 1")


def test_gradients_and_full_tensors_are_refused(ranks, source_of):
    ranks("four", check_gradients, source_of("llama"))


def test_run(source_of, tmp_path, forked_ranks, capfd):
    source = source_of("llama")
    assert call("split", source, "--tp", 2, "--pp", 2, "-o", tmp_path / "split").code == 0
    result = call("run", tmp_path / "split", "--token-ids", "5 6 7", "--max-new-tokens", 4, "--check", source)
    assert result.code == 0
    printed = capfd.readouterr().err
    assert "4 ranks on cpu, 2 stages of 2, 2 layers" in printed
    assert "greedy tokens are equal" in printed
    other = call("run", tmp_path / "split", "--pp", 4, "--token-ids", "5")
    assert (other.code, "is split for --tp 2 --stages 2,2 (got --pp 4)" in other.err) == (2, True)


def test_run_with_an_adapter_is_compared_with_peft(source_of, tmp_path, forked_ranks, capfd):
    source = source_of("llama")
    adapter = write_adapter(tmp_path / "lora", source, target_modules=["q_proj", "lm_head"])
    shardconv.split(source, tmp_path / "split", tp=2, pp=2, adapters=[adapter])
    arguments = ["--adapter", "lora", "--token-ids", "5 6 7", "--max-new-tokens", 4, "--check", source]
    assert call("run", tmp_path / "split", *arguments).code == 0
    assert "equal to the unsharded model with the adapter lora, by PEFT" in capfd.readouterr().err
