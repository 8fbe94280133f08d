"""Small models: the structure of a real one, built in a moment, with random numbers.

Owns which fields of a config make a model small (``small.toml``). Nothing of a checkpoint is read but its config.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardconv.proof.alone import alone

#: More parameters than this are no small model: some field that makes it large is not known.
MAX_NUMEL = 20_000_000

#: The heads of a small model, of most types.
HEADS = 4

#: Special tokens of any text model: they become the first of the vocabulary. The others become its last.
_TEXT_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
_TOKEN = re.compile(r".*token(_id|_index|_idx)?|(image|audio|video|vision|speech|bo|eo)\w*_(id|index)")


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("small.toml").read_text("utf-8"))


def default_config(kind: Any) -> dict[str, Any]:
    """What the config of a class of configs holds if nothing is said, with what it must be told to be one."""
    more = _table()["complete"].get(kind.model_type, {})
    return dict(kind(**more).to_dict())


def small_fields(
    config: Mapping[str, Any], own: Mapping[str, Any] | None = None, tokens: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """The fields of a config that a small model has otherwise, in nested configs, too.

    Args:
        config: what ``config.json`` holds, or ``PreTrainedConfig.to_dict`` gives.
        own: further fields that the type is to have; a nested table goes into the nested config.
        tokens: the small id of every special token, for a nested config; from all that the config names if not given.
    """
    own = {**(own or {})}
    for table in ("types", "complete"):
        own = {**_table()[table].get(config.get("model_type"), {}), **own}
    tokens = _small_tokens(config) if tokens is None else tokens
    layers = _layers(config)
    fields: dict[str, Any] = {}
    for name in config:
        if (small := _field(config, name, own, tokens, layers)) is not None:
            fields[name] = small
    if layers and _count_name(config) in config:
        fields[_count_name(config)] = len(layers)
    if config.get("out_features"):  # the last stage, however many there are
        fields |= {"out_features": None, "out_indices": None}
    for name, more in _table()["having"].items():
        fields |= more if config.get(name) is not None else {}
    return {**fields, **own}


def real_heads(config: Mapping[str, Any], *, is_whole: bool = True) -> dict[str, Any]:
    """The further fields of a small model whose heads have as many features as those of the real one.

    A rule may be right for the heads that small models have and wrong for others, as one with a number in it. Where no
    field says how large heads are, all that is as wide as the model gets wider; but not in a model in the model, which
    would not fit the others then: its heads stay small, as :func:`head_sizes` tells.
    """
    numbers = {name: value for name, value in config.items() if type(value) is int}
    own: dict[str, Any] = {}
    if any(name in numbers for name in _HEAD_FIELDS):
        kept = [name for name in numbers if _is_like(name, *_HEAD_FIELDS) and not name.startswith("mamba")]
        own = {name: numbers[name] for name in kept}
    elif is_whole and (size := _head_size(config)):
        heads = _first(numbers, _COUNTS)
        count = _table()["types"].get(config.get("model_type"), {}).get(heads) or _small(heads, numbers[heads])
        own = {name: size * (count or numbers[heads]) for name in numbers if _is_like(name, "hidden_size")}
        own |= {"head_dim": size} if "head_dim" in config else {}
    nested = {name: real_heads(value, is_whole=False) for name, value in config.items() if _is_config(name, value)}
    return own | {name: fields for name, fields in nested.items() if fields}


def real_counts(config: Mapping[str, Any], head_size: int = 0, *, is_whole: bool = True) -> dict[str, Any]:
    """The further fields of a small model that has as many query and KV heads as the real one.

    Which places have padding depends on how many heads there are. The model gets wider where its width has to be a
    multiple of the heads. A nested config keeps its width, as in :func:`real_heads`, and then its small counts, too.

    Args:
        config: of the real model.
        head_size: how many features a head has where no field says it; by default that of small models.
        is_whole: whether it is the config of the whole model.
    """
    numbers = {name: value for name, value in config.items() if type(value) is int}
    own: dict[str, Any] = {name: numbers[name] for name in numbers if _is_like(name, *_HEADS)}
    heads, width = numbers.get(_first(numbers, _COUNTS), 0), _small("hidden_size", 0)
    has_head_size = any(name in numbers for name in _HEAD_FIELDS)
    if not is_whole and heads and width % heads and not has_head_size:
        own = {}
    elif is_whole and heads and (not has_head_size or width % heads):
        size = _small("head_dim", 0) if has_head_size or not head_size else head_size
        own |= {name: size * heads for name in numbers if _is_like(name, "hidden_size")}
    nested = {name: real_counts(value, is_whole=False) for name, value in config.items() if _is_config(name, value)}
    return own | {name: fields for name, fields in nested.items() if fields}


def joined(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Further fields of a small model, with more of them; those of nested configs are joined, too."""
    nested = {name: joined(own[name], more[name]) for name in own.keys() & more.keys() if isinstance(more[name], dict)}
    return {**own, **more, **nested}


def with_heads(config: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """The config of a small model with as many heads, all of the same size as before, nested configs included.

    Args:
        config: what ``PreTrainedConfig.to_dict`` gives, small: with :data:`HEADS` heads, or a multiple of it.
        heads: instead of :data:`HEADS`; whatever is counted like heads is multiplied accordingly.
    """
    scaled = [*_HEADS]
    widths = [value for name, value in config.items() if type(value) is int and _is_like(name, "hidden_size")]
    has_head_size = any(type(config.get(name)) is int for name in _HEAD_FIELDS)
    if not has_head_size or any(width % heads for width in widths):  # a part of the width, or a divisor
        scaled.append("hidden_size")
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if _is_config(name, value):
            fields[name] = with_heads(value, heads)
        elif type(value) is int and _is_like(name, *scaled):
            fields[name] = max(1, value * heads // HEADS)
    return {**config, **fields}


#: Fields on the lines of the table that say how many query heads and KV heads there are.
_HEADS = ("num_attention_heads", "num_key_value_heads")

#: Fields that say how many features a head of attention has; how many heads there are; and how wide the model is.
_HEAD_FIELDS = ("head_dim", "qk_head_dim", "v_head_dim", "d_kv", "d_head", "kv_channels", "attention_head_size")
_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
_WIDTHS = ("embed_dim", "hidden_size", "d_model", "n_embd", "emb_dim", "dim")


def _first(numbers: Mapping[str, int], names: tuple[str, ...]) -> str:
    """The first field of these that there is, or ""."""
    return next((name for name in names if numbers.get(name)), "")


def _head_size(config: Mapping[str, Any]) -> int:
    """How many features a head of attention has, by a config; 0 if it has none, or does not say."""
    numbers = {name: value for name, value in config.items() if type(value) is int}
    if own := _first(numbers, _HEAD_FIELDS):
        return numbers[own]
    heads, width = _first(numbers, _COUNTS), _first(numbers, _WIDTHS)
    return numbers[width] // numbers[heads] if heads and width else 0


def head_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """How many features heads have, in a model (``""``) and in the models in it, by the fields of their configs."""
    sizes = {"": size} if (size := _head_size(config)) else {}
    for name, value in config.items():
        if _is_config(name, value):
            sizes |= {f"{name}.{inner}".rstrip("."): size for inner, size in head_sizes(value).items()}
    return sizes


def _is_config(name: str, value: Any) -> bool:
    """Whether a field of a config is the config of a model in the model."""
    if not isinstance(value, Mapping) or name == "per_layer_config":
        return False
    return name.endswith("_config") or isinstance(value.get("model_type"), str)


def _is_like(name: str, *others: str) -> bool:
    """Whether a field is made small by the same line of the table as one of others."""
    return _line(name) in [_line(other) for other in others]


def _field(
    config: Mapping[str, Any], name: str, own: dict[str, Any], tokens: Mapping[int, int], layers: list[int]
) -> Any:
    """One field of a small model, or None if it is what it was; what it takes of ``own`` is no longer there."""
    value = config[name]
    if name in _TEXT_TOKENS and (isinstance(value, list) or (isinstance(value, int) and value >= 99)):
        return _TEXT_TOKENS.index(name) % 3
    if _TOKEN.fullmatch(name) and type(value) is int and value in tokens:
        return tokens[value]
    if isinstance(value, Mapping):
        return _small_mapping(config, name, own, tokens, layers)
    if layers and isinstance(value, list) and _is_indices(name, value, _count(config)):
        return [place for place, layer in enumerate(layers) if layer in value]
    if layers and isinstance(value, list) and len(value) == _count(config):
        chosen = [value[layer] for layer in layers]
        return chosen if (small := _small(name, chosen)) is None else small
    return _small(name, value)


def _small_mapping(
    config: Mapping[str, Any], name: str, own: dict[str, Any], tokens: Mapping[int, int], layers: list[int]
) -> dict[Any, Any] | None:
    value = config[name]
    if name == "per_layer_config":
        return _small_per_layer(config, own, layers) if value else None
    if _is_config(name, value):
        nested = own.pop(name, {})
        return {**value, **small_fields(value, nested if isinstance(nested, Mapping) else {}, tokens)}
    if name in ("rope_parameters", "rope_scaling"):
        head_dim = own.get("head_dim", 8 if config.get("head_dim") else own.get("hidden_size", 64) // 4)
        return _small_rope({**value, **own.pop(name, {})}, head_dim)
    return None


def _small_tokens(config: Mapping[str, Any]) -> dict[int, int]:
    """From the id of every special token that is none of a small vocabulary to one of its last."""
    large: set[int] = set()
    configs = [config]
    for one in configs:
        configs.extend(value for value in one.values() if isinstance(value, Mapping))
        for name, value in one.items():
            if isinstance(name, str) and _TOKEN.fullmatch(name) and name not in _TEXT_TOKENS and type(value) is int:
                large |= {value} if value >= 99 else set()
    return {value: 98 - place for place, value in enumerate(sorted(large))}


def _count_name(config: Mapping[str, Any]) -> str:
    names = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")
    return next((name for name in names if type(config.get(name)) is int), names[0])


def _count(config: Mapping[str, Any]) -> int:
    kinds = config.get("layers_block_type") or config.get("layer_types") or []
    count = config.get(_count_name(config))
    return count if type(count) is int and count else len(kinds)


def _is_indices(name: str, value: list[Any], count: int) -> bool:
    """Whether a list says which layers are something."""
    named = re.fullmatch(r"(?!.*feature).*(layers?|layer_(ids|ind.*)|idxs?|ind(ic|ex)es)|hybrid_layer_ids", name)
    numbers = bool(value) and all(type(item) is int and 0 <= item < count for item in value)
    return bool(named) and numbers and sorted(set(value)) == value


def _layers(config: Mapping[str, Any]) -> list[int]:
    """One layer of each kind, where there are lists of what the layers are; at least two."""
    count = _count(config)
    if not count:
        return []
    kinds: list[list[Any]] = []
    for name, value in config.items():
        if isinstance(value, list) and _is_indices(name, value, count):
            kinds.append([layer in value for layer in range(count)])
        elif isinstance(value, list) and len(value) == count and isinstance(value[0], str):
            kinds.append(value)
    if not kinds:
        return []
    layers = list(zip(*kinds, strict=True))
    first = [layers.index(kind) for kind in dict.fromkeys(layers)]
    return sorted(first if len(first) > 1 else [*first, *([1] if len(layers) > 1 else [])])


def _small_per_layer(config: Mapping[str, Any], own: Mapping[str, Any], layers: list[int]) -> dict[int, dict[str, Any]]:
    """What single layers have otherwise: by the same factor as in the large model."""
    places = {layer: place for place, layer in enumerate(layers or range(2))}
    fields: dict[int, dict[str, Any]] = {}
    for key, values in config["per_layer_config"].items():
        if int(key) in places:
            of_layer = fields.setdefault(places[int(key)], {})
            for name, value in values.items():
                small, whole = own.get(name, _small(name, config.get(name))), config.get(name)
                scales = type(value) is int and type(small) is int and whole
                of_layer[name] = max(1, small * value // whole) if scales else value
    return fields


def _small_rope(rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Sections of a rotary embedding that fill a small head, in the same proportion."""
    fields: dict[str, Any] = {
        name: _small_rope(value, head_dim) if isinstance(value, Mapping) else value for name, value in rope.items()
    }
    if sections := fields.get("mrope_section"):
        pairs = int(head_dim * (fields.get("partial_rotary_factor") or 1)) // 2
        small = [max(1, pairs * section // sum(sections)) for section in sections]
        fields["mrope_section"] = [small[0] + pairs - sum(small), *small[1:]]
    return fields


def _line(name: str) -> tuple[str, int] | None:
    """The line of the table that makes a field small: a pattern and a number."""
    return next((line for line in _table()["fields"].items() if re.fullmatch(line[0], name)), None)


def _small(name: str, value: Any) -> Any:
    is_number = type(value) is int
    if not is_number and not (isinstance(value, list) and value and all(type(item) is int for item in value)):
        return None
    if (line := _line(name)) is None:
        return None
    return line[1] if is_number else [line[1]] * len(value)


@alone()
def build_small(kind: Any, config: Any) -> Any:
    """A small model of a class of transformers, in float32, with random numbers everywhere.

    Args:
        kind: the class.
        config: its config, small.

    Raises:
        ValueError: if it is not small.
    """
    if getattr(config, "is_decoder", None) is False and kind.__name__.endswith(
        ("CausalLM", "LMHeadModel", "WithLMHead")
    ):
        config.is_decoder = not config.is_encoder_decoder
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in kind(config).parameters())
    if numel > MAX_NUMEL:
        raise ValueError(f"a small {kind.__name__} has {numel / 1e6:.0f} million parameters: it is not small")
    torch.manual_seed(0)
    model = kind._from_config(config).eval().float()  # noqa: SLF001 - what from_config of the auto classes calls
    fill(model)
    return model


@torch.no_grad()
def fill(model: torch.nn.Module, *, std: float = 0.2) -> None:
    """Random numbers for what trains: large enough that each matters, around one where they were about one.

    Those of matrices that are wide both ways are smaller, so that what goes through several stays as large as in narrow
    ones. Beside it for the means and variances of batch norms, which were learnt, too.
    """
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not parameter.requires_grad:  # computed, as sines are, and not of a checkpoint
            continue
        is_scale = parameter.dim() < 2 and parameter.numel() and parameter.mean() > 0.5
        width = min(parameter.shape[-2:]) if parameter.dim() > 1 else 0
        noise = torch.randn(parameter.shape, generator=generator) * std * min(1, math.sqrt(64 / max(width, 1)))
        parameter.copy_(noise + 1 if is_scale else noise)
    for name, buffer in model.named_buffers():
        if name.endswith((".running_mean", ".running_var")):
            noise = torch.randn(buffer.shape, generator=generator) * std
            buffer.copy_(noise if name.endswith("mean") else noise.abs() + 1)
