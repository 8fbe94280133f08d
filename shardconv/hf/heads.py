"""Attention heads of small models: as many, or of the same size, as those of the real model.

Owns the fields of configs that set the number and size of heads.
"""

from collections.abc import Mapping

from shardconv.hf.small import HEADS, fields_of_type, matching_line, small_value, submodels

#: Fields whose lines of ``small.toml`` are those of the numbers of query heads and KV heads.
_HEADS = ("num_attention_heads", "num_key_value_heads")

#: Fields with the number of features of an attention head, with the number of heads, and with the width of the model.
_HEAD_FIELDS = ("head_dim", "qk_head_dim", "v_head_dim", "d_kv", "d_head", "kv_channels", "attention_head_size")
_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
_WIDTHS = ("embed_dim", "hidden_size", "d_model", "n_embd", "emb_dim", "dim")


def real_heads(config: Mapping[str, object], *, is_submodel: bool = False) -> dict[str, object]:
    """The fields that give a small model heads with as many features as the real model has.

    A rule can be right for small heads only, such as one with a number in it. If no field sets the size of heads, the
    model gets wider. A submodel keeps its width, to fit the other submodels, so its heads stay small;
    :func:`head_sizes` shows which.

    Args:
        config: of the real model.
        is_submodel: whether it is the config of a submodel.
    """
    numbers = {name: value for name, value in config.items() if type(value) is int}
    own: dict[str, object] = {}
    if any(name in numbers for name in _HEAD_FIELDS):
        kept = [name for name in numbers if _is_like(name, *_HEAD_FIELDS) and not name.startswith("mamba")]
        own = {name: numbers[name] for name in kept}
    elif not is_submodel and (size := _head_size(config)):
        heads = _first(numbers, _COUNTS)
        count = fields_of_type(config.get("model_type")).get(heads) or small_value(heads, numbers[heads])
        own = {name: size * (count or numbers[heads]) for name in numbers if _is_like(name, "hidden_size")}
        own |= {"head_dim": size} if "head_dim" in config else {}
    nested = {name: real_heads(value, is_submodel=True) for name, value in submodels(config)}
    return own | {name: fields for name, fields in nested.items() if fields}


def real_counts(config: Mapping[str, object], head_size: int = 0, *, is_submodel: bool = False) -> dict[str, object]:
    """The fields that give a small model as many query and KV heads as the real model has.

    The numbers of heads determine which heads are padded. The model gets wider if its width has to be a multiple of the
    number of heads. A submodel keeps its width, as in :func:`real_heads`, and its small numbers of heads if the width
    is not a multiple of the real ones.

    Args:
        config: of the real model.
        head_size: features per head if no field sets it; by default that of small models.
        is_submodel: whether it is the config of a submodel.
    """
    numbers = {name: value for name, value in config.items() if type(value) is int}
    own: dict[str, object] = {name: numbers[name] for name in numbers if _is_like(name, *_HEADS)}
    heads, width = numbers.get(_first(numbers, _COUNTS), 0), small_value("hidden_size", 0)
    has_head_size = any(name in numbers for name in _HEAD_FIELDS)
    if is_submodel and heads and width % heads and not has_head_size:
        own = {}
    elif not is_submodel and heads and (not has_head_size or width % heads):
        size = small_value("head_dim", 0) if has_head_size or not head_size else head_size
        own |= {name: size * heads for name in numbers if _is_like(name, "hidden_size")}
    nested = {name: real_counts(value, is_submodel=True) for name, value in submodels(config)}
    return own | {name: fields for name, fields in nested.items() if fields}


def merge_fields(own: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    """Merge two sets of fields, nested configs included; the second set wins."""
    nested = {
        name: merge_fields(fields, value)
        for name, value in more.items()
        if isinstance(value, Mapping) and isinstance(fields := own.get(name), Mapping)
    }
    return {**own, **more, **nested}


def with_heads(config: Mapping[str, object], heads: int) -> dict[str, object]:
    """The config of a small model with another number of heads of the same size, nested configs included.

    Args:
        config: the result of ``PreTrainedConfig.to_dict``, of a small model with a multiple of :data:`HEADS` heads.
        heads: replaces :data:`HEADS`. Other numbers of heads are multiplied by the same factor.
    """
    scaled = [*_HEADS]
    widths = [value for name, value in config.items() if type(value) is int and _is_like(name, "hidden_size")]
    has_head_size = any(type(config.get(name)) is int for name in _HEAD_FIELDS)
    if not has_head_size or any(width % heads for width in widths):  # heads divide the width
        scaled.append("hidden_size")
    fields: dict[str, object] = {name: with_heads(value, heads) for name, value in submodels(config)}
    for name, value in config.items():
        if type(value) is int and _is_like(name, *scaled):
            fields[name] = max(1, value * heads // HEADS)
    return {**config, **fields}


def _first(numbers: Mapping[str, int], names: tuple[str, ...]) -> str:
    """The first of some names whose number is not 0; "" if there is none."""
    return next((name for name in names if numbers.get(name)), "")


def _head_size(config: Mapping[str, object]) -> int:
    """Features per attention head by a config; 0 if the config does not determine it."""
    numbers = {name: value for name, value in config.items() if type(value) is int}
    if own := _first(numbers, _HEAD_FIELDS):
        return numbers[own]
    heads, width = _first(numbers, _COUNTS), _first(numbers, _WIDTHS)
    return numbers[width] // numbers[heads] if heads and width else 0


def head_sizes(config: Mapping[str, object]) -> dict[str, int]:
    """Features per head in the model (key ``""``) and in its submodels (key: name of the config's field)."""
    sizes = {"": size} if (size := _head_size(config)) else {}
    for name, value in submodels(config):
        sizes |= {f"{name}.{inner}".rstrip("."): size for inner, size in head_sizes(value).items()}
    return sizes


def _is_like(name: str, *others: str) -> bool:
    """Whether the line of ``small.toml`` for a field is that of one of some other fields."""
    return matching_line(name) in [matching_line(other) for other in others]
