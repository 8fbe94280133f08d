"""Names and shapes of a checkpoint, compared with those of the model class in its config.

Checkpoints of transformers and of the Hub pass; every other difference is an error with the tensor's name.
"""

import re

import pytest
import torch
from safetensors.torch import save_file

import shardconv
from shardconv.checkpoint.sources.opening import open_source
from shardconv.formats.detect import with_grids
from shardconv.plan.plan import logical_tensors
from shardconv.plan.unused import known_unused
from shardconv.proof.model_check import check_model
from shardconv.support.errors import RunError
from tests.support.command import call
from tests.support.matrix import each_once
from tests.support.models import MODELS, change_config, model_class, pack_experts, read
from tests.support.mtp import HUB, KIND_OF, with_mtp
from tools.model_matrix.trial import KINDS, small

#: Types with special differences between names on disk and in memory.
RENAMED = [
    "bamba", "dbrx", "ernie4_5_vl_moe", "gemma3", "gpt_oss", "idefics3", "jamba", "llama4", "llava", "minimax_m2",
    "mllama", "nemotron_h", "paligemma", "phimoe", "qwen2_vl", "qwen3_5_moe", "qwen3_vl_moe", "qwen4_exp", "siglip",
    "whisper",
]  # fmt: skip


def checked(folder):
    source = open_source(folder)
    return check_model(source.config, logical_tensors(with_grids(source.specs, source.config)))


def rewritten(folder, change):
    """A checkpoint with changed tensors."""
    tensors = read(folder)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def llama(tmp_path):
    return MODELS["llama"].write(tmp_path / "llama")


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_of_the_hub_pass(checkpoint, name):
    found = checked(checkpoint(name))
    assert found.differences() == ""
    assert found.is_match


@pytest.mark.parametrize("model_type", RENAMED)
def test_names_on_disk_may_differ_from_those_in_memory(tmp_path, model_type):
    kind = next(kind for kind, names in KINDS.items() if model_type in names)
    made = small(model_class(kind, model_type))
    made.save_pretrained(tmp_path)
    found = checked(tmp_path)
    assert (found.differences(), found.ignored, found.model) == ("", (), type(made).__name__)


@pytest.mark.parametrize("model_type", HUB)
def test_mtp_layers_are_not_needed(tmp_path, model_type):
    made = small(model_class(KIND_OF[model_type], model_type))
    made.save_pretrained(tmp_path)
    of_layer, drawn = with_mtp(tmp_path, model_type)
    found = checked(tmp_path)
    assert found.differences() == ""
    used = set(made.state_dict())
    assert set(found.ignored) >= {name for name in (*of_layer, *drawn) if name.startswith("mtp.")} - used


def test_additional_layers_that_are_not_mtp_layers_are_unused(llama):
    change_config(llama, {"num_hidden_layers": 1})
    found = checked(llama)
    assert (len(found.unused), found.missing) == (9, ())
    assert all(name.startswith("model.layers.1.") for name in found.unused)


def drop(name):
    return lambda tensors: tensors.pop(name)


def add(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def transpose(name):
    return lambda tensors: tensors.update({name: tensors[name].T})


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


LAYER = "model.layers.0"
#: Name to the change and the expected message.
WRONG = {
    "bias": (add(f"{LAYER}.self_attn.q_proj.bias", 128), f"1 unused: {LAYER}.self_attn.q_proj.bias"),
    "norm": (drop(f"{LAYER}.input_layernorm.weight"), f"1 missing: {LAYER}.input_layernorm.weight"),
    "head": (drop("lm_head.weight"), "1 missing: lm_head.weight"),
    "transposed": (
        transpose(f"{LAYER}.mlp.up_proj.weight"),
        rf"1 of another shape: {LAYER}.mlp.up_proj.weight (got [64, 96], expected [96, 64])",
    ),
    "scale": (add(f"{LAYER}.mlp.up_proj.weight_scale"), f"1 unused: {LAYER}.mlp.up_proj.weight_scale"),
    "block scale": (
        add(f"{LAYER}.mlp.up_proj.weight_scale_inv", 1, 1), f"1 unused: {LAYER}.mlp.up_proj.weight_scale_inv",
    ),
    "zeros": (add(f"{LAYER}.mlp.up_proj.qzeros", 8, 12), f"1 unused: {LAYER}.mlp.up_proj.qzeros"),
    "renamed": (
        rename(f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.mlp.up.weight"),
        f"1 unused: {LAYER}.mlp.up.weight; 1 missing: {LAYER}.mlp.up_proj.weight",
    ),
    "with and without a prefix": (
        add("layers.0.mlp.up_proj.weight", 96, 64),
        f"1 not loadable: {LAYER}.mlp.up_proj.weight (stored as layers.0.mlp.up_proj.weight and as "
        f"{LAYER}.mlp.up_proj.weight)",
    ),
}  # fmt: skip


#: Name to the message of the plan, for changes that a plan refuses.
BY_PLAN = {
    "renamed": "no rule of family llama matches it",
    "with and without a prefix": "with and without the prefix",
    **dict.fromkeys(("scale", "block scale", "zeros"), "no quantization_config describes it"),
}


@pytest.mark.parametrize(("what", "command"), each_once(WRONG, ["split", "plan", "plan --prove", "plan --propose"]))
def test_differences_are_errors_and_nothing_is_written(llama, tmp_path, command, what):
    change, message = WRONG[what]
    rewritten(llama, change)
    name, *more = command.split()
    more += ["--tp", "2", "-o", tmp_path / "split"] if name == "split" else []
    result = call(name, llama, "--check-model", *more)
    assert result.code == 1, result.out
    if command == "plan --prove":  # makes a plan first
        message = BY_PLAN.get(what, message)
    assert (message in result.err, "Traceback" in result.err) == (True, False)
    assert result.err.count("\n") == 1
    assert (result.out, (tmp_path / "split").exists()) == ("", False)


def test_messages_name_experts_on_disk_or_in_memory(tmp_path):
    """Names on disk for unused tensors; names in memory, of all experts, for missing ones."""
    folder = MODELS["mixtral"].write(tmp_path / "mixtral")
    expert = "model.layers.0.block_sparse_moe.experts"
    rewritten(folder, add(f"{expert}.0.w1.bias", 64))
    assert checked(folder).unused == (f"{expert}.0.w1.bias",)
    rewritten(folder, drop(f"{expert}.0.w1.bias"))
    rewritten(folder, drop(f"{expert}.3.w2.weight"))
    assert [name for name, *_ in checked(folder).mismatched] == ["model.layers.0.mlp.experts.down_proj"]
    change_config(folder, {"num_local_experts": 8})
    assert {name for name, *_ in checked(folder).mismatched} >= {"model.layers.1.mlp.experts.down_proj"}
    save_file(pack_experts(read(MODELS["mixtral"].write(tmp_path / "packed"))), folder / "model.safetensors")
    change_config(folder, {"num_local_experts": 3})
    assert re.search(r"expected \[3, ", checked(folder).differences())


@pytest.mark.parametrize(("fields", "kind", "count"), [
    ({"num_attention_heads": 4}, "mismatched", 4),
    ({"num_key_value_heads": 4}, "mismatched", 4),
    ({"vocab_size": 130}, "mismatched", 2),
    ({"num_hidden_layers": 3}, "missing", 9),
    ({"num_hidden_layers": 1}, "unused", 9),
    ({"attention_bias": True}, "missing", 8),
])  # fmt: skip
def test_configs_of_other_models(llama, fields, kind, count):
    change_config(llama, fields)
    found = checked(llama)
    assert len(getattr(found, kind)) == count
    assert found.differences().startswith(f"{count} ")


def test_stored_or_missing_heads_of_tied_embeddings_pass(llama):
    """transformers loads both."""
    change_config(llama, {"tie_word_embeddings": True})
    assert checked(llama).is_match
    rewritten(llama, drop("lm_head.weight"))
    assert checked(llama).is_match


@pytest.mark.parametrize("function", [shardconv.check_source, shardconv.prove])
def test_missing_tensor_is_an_error_of_functions(llama, function):
    rewritten(llama, drop("model.norm.weight"))
    with pytest.raises(shardconv.SourceError, match=r"1 missing: model.norm.weight"):
        function(llama)


def test_matching_checkpoint_is_reported(llama, tmp_path):
    found = shardconv.check_source(llama)
    assert (found.model, found.is_match) == ("LlamaForCausalLM", True)
    line = "names and shapes match LlamaForCausalLM"
    for arguments in (["plan", llama], ["split", llama, "--tp", "2", "-o", tmp_path / "split"]):
        result = call(*arguments, "--check-model")
        assert (result.code, line in result.out) == (0, True), result.err
    result = call("plan", MODELS["llama-old"].write(tmp_path / "old"), "--check-model")
    assert f"{line}; not used by it: 1, as model.layers.0.self_attn.rotary_emb.inv_freq" in result.out


def test_unknown_model_class_is_an_error(llama):
    change_config(llama, {"model_type": "mine"})
    result = call("split", llama, "--tp", "2", "--check-model", "--rules", "llama")
    assert (result.code, "(got model_type 'mine'" in result.err) == (1, True)
    with pytest.raises(RunError, match="does not name a model class of transformers"):
        check_model({}, {})


def test_known_unused_names():
    names = {
        "mtp.fc.weight", "model.mtp.layers.0.norm.weight", "model.mtp_block.0.mlp.up_proj.weight",
        "model.layers.61.eh_proj.weight", "model.layers.61.mlp.up_proj.weight", "h.0.attn.masked_bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    }  # fmt: skip
    others = {
        "model.layers.6.mlp.up_proj.weight", "model.layers.610.mlp.up_proj.weight", "model.layers.60.norm.weight",
        "smtp.fc.weight", "h.0.attn.bias", "mtp", "rotary.inv_freq.weight",
    }  # fmt: skip
    assert known_unused(names | others) == names
