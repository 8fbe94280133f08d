"""The file ``common.pt`` of a checkpoint of Megatron-Core, with arguments of the training program.

They follow from the config of the source and from the tensors.
"""

from argparse import Namespace
from collections.abc import Mapping

from shardconv.checkpoint.sources.megatron_ranks import EMBEDDING
from shardconv.checkpoint.sources.megatron_source import SIZES, known_sizes
from shardconv.layouts.layout_file import ChosenRules
from shardconv.plan.plan import TensorSpec

#: Further arguments of Megatron-LM with the value of a config field.
_SETTINGS = {
    "ffn_hidden_size": "intermediate_size", "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}  # fmt: skip
#: Arguments that are true if a layer has a tensor whose name ends with one of these.
_BY_TENSOR = {
    "add_bias_linear": ("linear_proj.bias",), "add_qkv_bias": ("linear_qkv.bias",),
    "qk_layernorm": (".k_layernorm.weight", ".kv_layernorm.weight"),
    "moe_router_enable_expert_bias": ("router.expert_bias",),
    "moe_shared_expert_gate": ("shared_experts.gate_weight",),
}  # fmt: skip
_EXPERTS, _SHARED = "experts.experts.linear_fc1.weight", "shared_experts.linear_fc2.weight"
#: Arguments for rotary embeddings to fields of the config.
_ROTARY = {"rotary_base": "rope_theta", "rotary_percent": "partial_rotary_factor"}
#: Version of the state dict in ``common.pt``.
_CHECKPOINT_VERSION = 3.0


def common_state(
    rules: ChosenRules, tensors: Mapping[str, TensorSpec], *, stacks_layers: bool, is_padded: bool
) -> dict[str, object]:
    """The contents of ``common.pt``, which loaders read before they ask for tensors.

    Args:
        rules: of the layout.
        tensors: name to dtype and shape of the tensors in the files.
        stacks_layers: whether a tensor has a dim of layers.
        is_padded: whether the vocabulary is padded.
    """
    content = {"non_homogeneous_layers": not stacks_layers, "singleton_local_shards": False}
    common = {"checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0, "content_metadata": content}
    arguments = _arguments(rules, tensors)
    if is_padded:  # otherwise, Megatron-LM pads for its tensor parallel size
        arguments["padded_vocab_size"] = tensors[EMBEDDING].shape[0]
    return {**common, "args": Namespace(**arguments)}


def _arguments(rules: ChosenRules, tensors: Mapping[str, TensorSpec]) -> dict[str, object]:
    """The arguments of Megatron-LM that follow from the config, the tensors and the kinds of modules."""
    config, groups = known_sizes(rules.config), rules.groups
    layers = range(config["num_hidden_layers"])
    settings = SIZES | _SETTINGS | {name: field for group in groups for name, field in group.settings.items()}
    found = {name: config[field] for name, field in settings.items() if field in config}
    found |= {name: any(tensor.endswith(end) for tensor in tensors) for name, end in _BY_TENSOR.items()}
    found |= {name: value for group in groups for name, value in group.args.items()}
    experts = next((one.shape for name, one in tensors.items() if name.endswith(_EXPERTS)), None)
    if experts is not None:
        names = [(f"decoder.layers.{layer}.mlp.{_EXPERTS}", f"decoder.layers.mlp.{_EXPERTS}") for layer in layers]
        shared = (one.shape[-1] for name, one in tensors.items() if name.endswith(_SHARED))
        found |= {
            "num_experts": experts[-3], "moe_layer_freq": [int(any(one in tensors for one in each)) for each in names],
            "moe_shared_expert_intermediate_size": next(shared, None),
        }  # fmt: skip
    found["mtp_num_layers"] = len({name.split(".")[2] for name in tensors if name.startswith("mtp.layers.")}) or None
    return found | _rotary(config) | {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "no_save_optim": True, "no_save_rng": True,
        "group_query_attention": config["num_key_value_heads"] != config["num_attention_heads"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
    }  # fmt: skip


def _rotary(config: Mapping[str, object]) -> dict[str, object]:
    """The arguments for rotary embeddings that the config states, unless they are scaled, or differ between layers."""
    held = config.get("rope_parameters") or config.get("rope_scaling")
    stated = held if isinstance(held, dict) else {}
    is_plain = stated.get("rope_type", stated.get("type", "default")) == "default"
    if not is_plain or any(isinstance(value, dict) for value in stated.values()):
        return {}
    fields = {**config, **stated}
    found = {name: fields[field] for name, field in _ROTARY.items() if fields.get(field) is not None}
    return {"position_embedding_type": "rope", **found}
