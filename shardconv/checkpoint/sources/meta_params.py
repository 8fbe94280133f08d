"""The config of a Hugging Face checkpoint from params.json of Meta's and Mistral's checkpoints, and the way back."""

from collections.abc import Mapping
from typing import NamedTuple

from shardconv.files.containers.safetensors import FLOAT_NAMES
from shardconv.files.folder import AnyPath
from shardconv.layouts import META
from shardconv.layouts.layout_file import layout_file
from shardconv.plan.placement import round_up
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError, SourceError, option

PARAMS_NAME = "params.json"
#: Field of params.json, by field of config.json.
_FIELDS = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads", "head_dim": "head_dim", "rms_norm_eps": "norm_eps",
    "intermediate_size": "hidden_dim", "vocab_size": "vocab_size", "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
}  # fmt: skip
#: Fields of params.json that are accepted, but are not copied to a field of the config.
_OTHER_PARAMS = {
    "multiple_of", "ffn_dim_multiplier", "max_batch_size", "max_seq_len", "use_scaled_rope", "rope_scaling_factor",
    "model_type", "max_position_embeddings", "model_parallel_size", "causal",
}  # fmt: skip
_SCALED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: The vocabulary size of Llama 1 and 2, where Meta's code reads it from the tokenizer.
_UNKNOWN_VOCABULARY = -1
#: The factor of the scaled rotary embeddings of Llama 3.1, which its params.json does not have.
_LLAMA_31_FACTOR = 8
#: Positions of Llama 3.1 and 3.2, the models with scaled rotary embeddings.
_SCALED_POSITIONS = 131072
#: The base of rotary embeddings of Llama 1 and 2. Their params.json does not have it.
_DEFAULT_THETA = 10000.0
#: Fields of a config that are written, or compared with written values.
_EXPRESSED = {*_FIELDS, "model_type", "rope_scaling", "rope_parameters", "tie_word_embeddings"}
#: Fields of a config that do not change the output of the model.
_NOT_OF_THE_MODEL = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "id2label", "initializer_range", "is_decoder", "label2id", "max_position_embeddings",
    "pad_token_id", "pretraining_tp", "problem_type", "return_dict", "torch_dtype", "transformers_version",
    "tokenizer_class", "unk_token_id", "use_cache",
}  # fmt: skip
#: Defaults of Meta's code for fields that params.json omits.
_PARAM_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": _DEFAULT_THETA}


def config_of_params(path: object, params: Mapping[str, object]) -> dict[str, object]:
    """The fields of a config that params.json has; ``path`` is for messages.

    Raises:
        SourceError: if a value is missing or not valid, or the model is not one of Llama 1 to 3 or a dense Mistral.
    """
    if unknown := sorted(params.keys() - set(_FIELDS.values()) - _OTHER_PARAMS):
        raise SourceError(
            f"{path}: {unknown[0]} is not supported (expected a dense Llama 1 to 3 or Mistral model): pass the Hugging "
            f"Face checkpoint of this model instead"
        )
    if params.get("causal", True) is not True:
        raise SourceError(
            f"{path}: causal is {params['causal']!r:.40} (expected true): only causal models are supported"
        )
    config = {field: params[name] for field, name in _FIELDS.items() if params.get(name) is not None}
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        if type(config.get(field)) is not int:
            raise SourceError(f"{path}: {_FIELDS[field]} is {config.get(field)!r:.40} (expected an integer)")
    hidden, heads = params["dim"], params["n_heads"]
    assert isinstance(hidden, int)
    assert isinstance(heads, int)
    if "head_dim" not in config and (heads < 1 or hidden % heads):
        raise SourceError(f"{path}: dim {hidden} is not a multiple of n_heads {heads}: correct it, or add head_dim")
    if config.get("vocab_size") == _UNKNOWN_VOCABULARY:
        del config["vocab_size"]
    if type(multiple := params.get("multiple_of")) is int and multiple > 0:
        config = {"intermediate_size": _width(hidden, multiple, params.get("ffn_dim_multiplier"))} | config
    return {"num_key_value_heads": heads, "head_dim": hidden // max(heads, 1), **_PARAM_DEFAULTS} | config


def known_config(
    folder: AnyPath, params: Mapping[str, object] | None, config: Mapping[str, object] | None
) -> dict[str, object]:
    """A config with the values of params.json; null in the config states nothing.

    Without params.json, a Llama or Mistral has the heads that its class has by default.

    Raises:
        SourceError: if the two differ.
    """
    stated = {field: value for field, value in (config or {}).items() if value is not None}
    if params is None:
        if stated.get("model_type") not in layout_file(META).types:
            return stated
        try:
            sizes = head_sizes(stated)
        except PlanError as error:
            raise SourceError(f"{folder}: {error.message}") from error
        return {"num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim} | stated
    expected = config_of_params(folder / PARAMS_NAME, params)
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
        if field in stated and stated[field] != expected[field]:
            raise SourceError(
                f"{folder}: {field} is {stated[field]!r:.40} in the config (expected {expected[field]!r:.40} by "
                f"{PARAMS_NAME}): pass the config of this model"
            )
    return expected | stated


def _width(hidden: int, multiple: int, factor: object) -> int:
    """The width of the MLP, as Meta's code computes it."""
    width = 8 * hidden // 3
    return round_up(int(factor * width) if isinstance(factor, int | float) else width, multiple)


def complete_config(
    path: object, params: Mapping[str, object], tensors: Mapping[str, TensorSpec]
) -> tuple[dict[str, object], tuple[str, ...]]:
    """The config of the Hugging Face checkpoint with these tensors, and the assumptions that it is based on.

    Args:
        path: of params.json, for messages.
        params: its contents.
        tensors: name to dtype and full shape.

    Raises:
        SourceError: as :func:`config_of_params`, or if the scaling of rotary embeddings is unknown.
    """
    config = config_of_params(path, params)
    is_mistral = "hidden_dim" in params
    assumed: dict[str, object] = {
        name: value for name, value in _PARAM_DEFAULTS.items() if params.get(_FIELDS[name]) is None
    }
    positions = params.get("max_position_embeddings") or params.get("max_seq_len")
    if not positions:
        assumed["max_position_embeddings"] = positions = _positions(config, params, is_mistral=is_mistral)
    sizes = {
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
    }
    assumed |= {name: size for name, size in sizes.items() if name not in config}
    is_tied = "lm_head.weight" not in tensors
    if is_tied:
        assumed["tie_word_embeddings"] = True
    assumed["hidden_act"] = "silu"
    config |= assumed
    config |= {
        "architectures": ["MistralForCausalLM" if is_mistral else "LlamaForCausalLM"],
        "model_type": "mistral" if is_mistral else "llama",
        "max_position_embeddings": positions,
        "tie_word_embeddings": is_tied,
        "dtype": FLOAT_NAMES.get(tensors["model.embed_tokens.weight"].dtype, "float32"),
        "rope_scaling": _rope_scaling(path, params),
    }
    if is_mistral:
        config["sliding_window"] = config.get("sliding_window")
    values = ", ".join(f"{name} = {value}" for name, value in assumed.items())
    tokens = "no token ids (bos_token_id, eos_token_id)"
    return config, (f"config.json is made from {PARAMS_NAME}; assumed: {values}; {tokens}",)


def params_of_config(config: Mapping[str, object], intermediate: int, *, tp: int = 1) -> dict[str, object]:
    """The params.json of a config; the inverse of :func:`config_of_params`.

    Args:
        config: of a Hugging Face checkpoint.
        intermediate: the width of the MLP. Meta's code rounds 8 * dim / 3 up to a multiple of ``multiple_of``, so that
            the width itself is written as ``multiple_of``.
        tp: the number of files.

    Raises:
        PlanError: if the config has values that params.json cannot express.
    """
    _check_expressible(config)
    dim, sizes = _integer(config, "hidden_size"), head_sizes(config)
    params = {name: config[field] for field, name in _FIELDS.items() if config.get(field) is not None}
    params |= {"n_layers": _integer(config, "num_hidden_layers"), "n_heads": sizes.heads, "n_kv_heads": sizes.kv_heads}
    params |= {"norm_eps": config.get("rms_norm_eps", 1e-6)} | _rope_params(config)  # without it, the class's default
    if config.get("model_type") == "mistral":
        window = config.get("sliding_window", 4096)  # without the field, the default of the class
        params |= {"head_dim": sizes.head_dim, "hidden_dim": intermediate}
        return params | ({} if window is None else {"sliding_window": window})
    if sizes.head_dim * sizes.heads != dim:
        raise _inexpressible("head_dim", sizes.head_dim, f"hidden_size / num_attention_heads = {dim / sizes.heads:g}")
    if tp == 1 and params["rope_theta"] == _DEFAULT_THETA:
        params.pop("rope_theta")  # Llama 2 does not have it; it cannot load several files, see the layout
    params = {name: value for name, value in params.items() if name not in {"head_dim", "hidden_dim"}}
    expected = 8 * dim // 3
    params |= {"multiple_of": intermediate}
    return params | ({"ffn_dim_multiplier": intermediate / expected} if intermediate < expected else {})


class HeadSizes(NamedTuple):
    """Numbers of heads of a config, and their size."""

    heads: int
    kv_heads: int
    head_dim: int


def head_sizes(config: Mapping[str, object]) -> HeadSizes:
    """The heads of the config of a Llama or Mistral; missing fields have the defaults of its class.

    Raises:
        PlanError: if one is not a positive integer.
    """
    dim, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    of_class = {"num_key_value_heads": 8} if config.get("model_type") == "mistral" else {}
    kv_heads = _integer(of_class | dict(config), "num_key_value_heads", heads)
    return HeadSizes(heads, kv_heads, _integer(config, "head_dim", dim // heads))


def _integer(config: Mapping[str, object], field: str, default: int | None = None) -> int:
    value = default if config.get(field) is None else config[field]
    if type(value) is not int or value < 1:
        raise PlanError(f"config.json: {field} is {value!r:.40} (expected a positive integer): correct the config")
    return value


def _inexpressible(field: str, got: object, expected: str) -> PlanError:
    return PlanError(
        f"layout meta cannot express {field} = {got!r:.60} (expected {expected}): use {option(layout='native')}"
    )


def _check_expressible(config: Mapping[str, object]) -> None:
    """Check that no field changes the model in a way that params.json does not have."""
    for field, value in config.items():
        if field == "hidden_act":
            if value not in {"silu", "swish"}:
                raise _inexpressible(field, value, "silu")
        elif field == "sliding_window" and config.get("model_type") == "llama":
            if value is not None:
                raise _inexpressible(field, value, "null")
        elif field not in _EXPRESSED and field not in _NOT_OF_THE_MODEL and value not in (None, False):
            raise _inexpressible(field, value, "a config without it")


def _rope_params(config: Mapping[str, object]) -> dict[str, object]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise _inexpressible("rope_scaling", rope, "an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    params: dict[str, object] = {"rope_theta": rope.get("rope_theta", config.get("rope_theta", _DEFAULT_THETA))}
    if unknown := sorted(rope.keys() - _SCALED.keys() - {"rope_theta", "type", "factor"}):
        raise _inexpressible(unknown[0], rope[unknown[0]], "rotary embeddings without it")
    if kind == "llama3" and config.get("model_type") == "llama":
        if any(rope.get(name) != value for name, value in _SCALED.items() if name != "rope_type"):
            raise _inexpressible("rope_scaling", rope, f"the values of Llama 3.1: {_SCALED}")
        if not isinstance(factor := rope.get("factor"), int | float):
            raise _inexpressible("the factor of rope_scaling", factor, "a number")
        # Llama 3.1 has a fixed factor and no field for it; it refuses the field, so that it does not load another one
        return (
            params | {"use_scaled_rope": True} | ({} if factor == _LLAMA_31_FACTOR else {"rope_scaling_factor": factor})
        )
    if kind != "default":
        raise PlanError(
            f"layout meta does not support rotary embeddings of type {kind!r:.40}: use {option(layout='native')}"
        )
    return params


def _positions(config: Mapping[str, object], params: Mapping[str, object], *, is_mistral: bool) -> int:
    if is_mistral:
        return 32768
    if params.get("use_scaled_rope"):
        return _SCALED_POSITIONS
    theta = config["rope_theta"]
    return 8192 if isinstance(theta, (int, float)) and theta > _DEFAULT_THETA else 4096


def _rope_scaling(path: object, params: Mapping[str, object]) -> dict[str, object] | None:
    if not params.get("use_scaled_rope"):
        return None
    if not isinstance(factor := params.get("rope_scaling_factor"), int | float):
        raise SourceError(
            f"{path}: has use_scaled_rope, but not its factor (8 in Llama 3.1, 32 in Llama 3.2): add "
            f"rope_scaling_factor to it, or pass the model's config.json ({option('config')})"
        )
    return {**_SCALED, "factor": float(factor)}
