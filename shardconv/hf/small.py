"""Configs of small models: the structure of a real model with small sizes, so that it is built in a moment.

Owns the fields that make a config small (``small.toml``). Reads configs only and does not import torch.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sized
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardconv.convert.protocols import ModelConfig

#: The number of heads of most small models.
HEADS = 4

#: The number of heads that stands for the real model's.
SAME = -1

#: The size of the vocabulary of a small model, by ``small.toml``.
_VOCABULARY = 99

#: Special tokens of text models: their ids become the first of the vocabulary. Other special tokens get the last ids.
_TEXT_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
_TOKEN = re.compile(r".*token(_id|_index|_idx)?|(image|audio|video|vision|speech|bo|eo)\w*_(id|index)")


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("small.toml").read_text("utf-8"))


def default_config(kind: "type[ModelConfig]") -> dict[str, Any]:
    """The default fields of a config class, with values for fields without a default.

    Args:
        kind: a subclass of ``PreTrainedConfig``.
    """
    return dict(kind(**_table()["complete"].get(kind.model_type, {})).to_dict())


def fields_of_type(model_type: object) -> dict[str, Any]:
    """The fields that small models of one type need beside the fields of all types."""
    found: dict[str, Any] = _table()["types"].get(model_type, {})
    return found


def small_fields(
    config: Mapping[str, object], own: Mapping[str, object] | None = None, tokens: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """The fields of a config to change so that its model is small, nested configs included.

    Args:
        config: the content of ``config.json``, or the result of ``PreTrainedConfig.to_dict``.
        own: further fields to set; a nested table applies to the nested config.
        tokens: the small id of every special token, for a nested config; by default of the tokens in the config.
    """
    model_type = config.get("model_type")
    own = {**_table()["complete"].get(model_type, {}), **fields_of_type(model_type), **(own or {})}
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


def is_submodel(name: str, value: object) -> bool:
    """Whether a field of a config is the config of a submodel."""
    if not isinstance(value, Mapping) or name == "per_layer_config":
        return False
    return name.endswith("_config") or isinstance(value.get("model_type"), str)


def submodels(config: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The configs of submodels, with the names of their fields."""
    for name, value in config.items():
        if isinstance(value, Mapping) and is_submodel(name, value):
            yield name, value


def _field(
    config: Mapping[str, Any], name: str, own: dict[str, Any], tokens: Mapping[int, int], layers: list[int]
) -> Any:
    """The small value of a field, or None to keep its value; removes the entries of ``own`` that it applies."""
    value = config[name]
    if name in _TEXT_TOKENS and (isinstance(value, list) or (isinstance(value, int) and value >= _VOCABULARY)):
        return _TEXT_TOKENS.index(name) % 3
    if _TOKEN.fullmatch(name) and type(value) is int and value in tokens:
        return tokens[value]
    if isinstance(value, Mapping):
        return _small_mapping(config, name, own, tokens, layers)
    if layers and isinstance(value, list) and _is_indices(name, value, _count(config)):
        return [index for index, layer in enumerate(layers) if layer in value]
    if layers and isinstance(value, list) and len(value) == _count(config):
        chosen = [value[layer] for layer in layers]
        return chosen if (small := small_value(name, chosen)) is None else small
    return small_value(name, value)


def _small_mapping(
    config: Mapping[str, Any], name: str, own: dict[str, Any], tokens: Mapping[int, int], layers: list[int]
) -> dict[Any, Any] | None:
    value = config[name]
    if name == "per_layer_config":
        return _small_per_layer(config, own, layers) if value else None
    if is_submodel(name, value):
        nested = own.pop(name, {})
        return {**value, **small_fields(value, nested if isinstance(nested, Mapping) else {}, tokens)}
    if name in ("rope_parameters", "rope_scaling"):
        head_dim = own.get("head_dim", 8 if config.get("head_dim") else own.get("hidden_size", 64) // 4)
        return _small_rope({**value, **own.pop(name, {})}, head_dim)
    return None


def _small_tokens(config: Mapping[str, object]) -> dict[int, int]:
    """Map the ids of special tokens that a small vocabulary does not have to the last ids that it has."""
    large: set[int] = set()
    configs = [config]
    for one in configs:
        configs.extend(value for value in one.values() if isinstance(value, Mapping))
        for name, value in one.items():
            if isinstance(name, str) and _TOKEN.fullmatch(name) and name not in _TEXT_TOKENS and type(value) is int:
                large |= {value} if value >= _VOCABULARY else set()
    return {value: _VOCABULARY - 1 - index for index, value in enumerate(sorted(large))}


def _count_name(config: Mapping[str, object]) -> str:
    """The name of the field with the number of layers."""
    names = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")
    return next((name for name in names if type(config.get(name)) is int), names[0])


def _count(config: Mapping[str, object]) -> int:
    """The number of layers; 0 if the config does not have it."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    count = config.get(_count_name(config))
    return count if type(count) is int and count else len(kinds) if isinstance(kinds, Sized) else 0


def _is_indices(name: str, value: list[object], count: int) -> bool:
    """Whether a field lists layers by their indices."""
    named = re.fullmatch(r"(?!.*feature).*(layers?|layer_(ids|ind.*)|idxs?|ind(ic|ex)es)|hybrid_layer_ids", name)
    numbers = [item for item in value if isinstance(item, int) and type(item) is int and 0 <= item < count]
    return bool(named) and bool(value) and len(numbers) == len(value) and sorted(set(numbers)) == value


def _layers(config: Mapping[str, object]) -> list[int]:
    """The layers to keep: one of each kind, at least two; none if the config does not list kinds of layers."""
    count = _count(config)
    if not count:
        return []
    kinds: list[list[object]] = []
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
    """Fields of single layers, in the same ratio to the fields of all layers as in the real model."""
    indices = {layer: index for index, layer in enumerate(layers or range(2))}
    fields: dict[int, dict[str, Any]] = {}
    for key, values in config["per_layer_config"].items():
        if int(key) in indices:
            of_layer = fields.setdefault(indices[int(key)], {})
            for name, value in values.items():
                small, of_all = own.get(name, small_value(name, config.get(name))), config.get(name)
                scales = type(value) is int and type(small) is int and of_all
                of_layer[name] = max(1, small * value // of_all) if scales else value
    return fields


def _small_rope(rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary parameters with sections that fill a small head, in the same ratio as in the real model."""
    fields: dict[str, Any] = {
        name: _small_rope(value, head_dim) if isinstance(value, Mapping) else value for name, value in rope.items()
    }
    if sections := fields.get("mrope_section"):
        pairs = int(head_dim * (fields.get("partial_rotary_factor") or 1)) // 2
        small = [max(1, pairs * section // sum(sections)) for section in sections]
        fields["mrope_section"] = [small[0] + pairs - sum(small), *small[1:]]
    return fields


def matching_line(name: str) -> tuple[str, int] | None:
    """The first line of ``[fields]`` whose pattern matches a field: the pattern and the small value."""
    return next((line for line in _table()["fields"].items() if re.fullmatch(line[0], name)), None)


def small_value(name: str, value: Any) -> Any:
    """The small value of a field, by ``[fields]``; None if it stays as it is.

    Args:
        name: of the field.
        value: of the field: an int, or a list of ints, of which each is replaced.
    """
    is_number = type(value) is int
    if not is_number and not (isinstance(value, list) and value and all(type(item) is int for item in value)):
        return None
    if (line := matching_line(name)) is None:
        return None
    return line[1] if is_number else [line[1]] * len(value)
