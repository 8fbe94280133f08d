"""Build models from configs: without values on the meta device, and small ones with random values."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import nn

from shardconv.convert.protocols import ModelConfig, PretrainedModel
from shardconv.hf.classes import model_class
from shardconv.hf.diffusion import DiffusersConfig, small_config
from shardconv.hf.package import isolated
from shardconv.hf.small import HEADS, SAME, fields_of_type, matching_line, small_fields, small_value, submodels
from shardconv.support.errors import RunError

#: Fields whose lines of ``small.toml`` have the numbers of query heads and KV heads.
_HEADS = ("num_attention_heads", "num_key_value_heads")

#: Fields with the number of features of an attention head, with the number of heads, and with the width of the model.
_HEAD_FIELDS = (
    "head_dim", "qk_head_dim", "v_head_dim", "d_kv", "d_head", "kv_channels", "attention_head_size",
    "attention_head_dim",
)  # fmt: skip
_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
_WIDTHS = ("embed_dim", "hidden_size", "d_model", "n_embd", "emb_dim", "dim")


def real_heads(
    config: Mapping[str, object], *, has_sizes: bool, has_counts: bool = False, is_submodel: bool = False
) -> dict[str, object]:
    """The fields that give a small model heads like the real model's.

    A rule can be correct for small heads only, for example if it has a number, and the numbers of heads determine which
    heads are padded. Where the config determines the size of heads by the width of the model, the model gets wider. A
    submodel keeps its width, to fit the other submodels, so its heads may stay small; :func:`head_sizes` shows which.

    Args:
        config: of the real model.
        has_sizes: whether heads get as many features as in the real model.
        has_counts: whether there are as many query and KV heads.
        is_submodel: whether it is the config of a submodel.
    """
    numbers = {name: value for name, value in config.items() if type(value) is int}
    has_size_field, size = any(name in numbers for name in _HEAD_FIELDS), _head_size(config) if has_sizes else 0
    field, width = _first(numbers, _COUNTS), small_value("hidden_size", 0)
    heads, kept = numbers.get(field, 0), []
    if has_counts and not (is_submodel and heads and width % heads and not has_size_field):
        kept += [name for name in numbers if _is_like(name, *_HEADS)]
    if has_sizes and has_size_field:
        kept += [name for name in numbers if _is_like(name, *_HEAD_FIELDS) and not name.startswith("mamba")]
    own: dict[str, object] = {name: numbers[name] for name in kept}
    if size and not has_size_field and not is_submodel and "head_dim" in config:
        own["head_dim"] = size
    small_size = size if size and not has_size_field else small_value("head_dim", 0)
    if has_counts:
        is_wider = bool(heads) and (not has_size_field or width % heads)
    else:
        is_wider = bool(size) and not has_size_field
        heads = fields_of_type(config.get("model_type")).get(field) or small_value(field, heads) or heads
    if is_wider and not is_submodel:
        own |= {name: small_size * heads for name in numbers if _is_like(name, "hidden_size")}
    for name, value in submodels(config):
        if fields := real_heads(value, has_sizes=has_sizes, has_counts=has_counts, is_submodel=True):
            own[name] = fields
    return own


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
    """Whether a field shares its line of ``small.toml`` with one of some other fields."""
    return matching_line(name) in [matching_line(other) for other in others]


#: The most parameters of a small model. A larger one has a config field that small.toml does not cover.
MAX_NUMEL = 20_000_000

#: Ends of the names of classes that generate text with a decoder.
_DECODERS = ("CausalLM", "LMHeadModel", "WithLMHead")


def from_config(
    kind: type[PretrainedModel], config: ModelConfig, *, dtype: torch.dtype | None = None
) -> PretrainedModel:
    """Build a model from a copy of its config.

    Args:
        kind: a model class of transformers or diffusers.
        config: its config, which the model may change.
        dtype: of the parameters; by default the config's.
    """
    if isinstance(config, DiffusersConfig):
        model = kind.from_config(config.to_dict())
        return model if dtype is None else nn.Module.to(model, dtype)
    return kind._from_config(copy.deepcopy(config), dtype=dtype)  # noqa: SLF001 - transformers does not have a public way


def build_on_meta(
    kind: type[PretrainedModel], config: ModelConfig, *, dtype: torch.dtype | None = None
) -> PretrainedModel:
    """Build a model on the meta device, in eval mode; see :func:`from_config`."""
    with torch.device("meta"):
        return from_config(kind, config, dtype=dtype).eval()


def small_model(
    config: Mapping[str, object], *, has_real_heads: bool = False, heads: int | None = None
) -> PretrainedModel:
    """Build a small, randomly initialized model of the class that a config names.

    Args:
        config: the content of ``config.json``.
        has_real_heads: whether its heads have as many features as in the config.
        heads: its number of heads, by default four; :data:`~shardconv.hf.small.SAME` for as many query and KV heads as
            in the config.

    Raises:
        RunError: if transformers does not have the class, or the class cannot be built small.
    """
    kind, full = model_class(config)
    try:
        if isinstance(full, DiffusersConfig):
            return build_small(kind, _small_diffuser(full, has_real_heads=has_real_heads, heads=heads))
        fields = full.to_dict()
        more = real_heads(fields, has_sizes=has_real_heads, has_counts=heads == SAME)
        small = {**fields, **small_fields(fields, more)}
        return build_small(kind, type(full).from_dict(with_heads(small, heads) if heads and heads != SAME else small))
    except Exception as error:
        raise RunError(f"a small {kind.__name__} cannot be built: {type(error).__name__}: {error}") from error


def _small_diffuser(config: DiffusersConfig, *, has_real_heads: bool, heads: int | None) -> DiffusersConfig:
    """The config of a small model of diffusers, with the arguments of :func:`small_model`."""
    numbers = {name: value for name, value in config.items() if type(value) is int}
    count = numbers.get(_first(numbers, _COUNTS), HEADS) if heads == SAME else heads or HEADS
    return small_config(config, heads=count, head_dim=_head_size(config) if has_real_heads else 0)


@isolated()
def build_small(kind: type[PretrainedModel], config: ModelConfig) -> PretrainedModel:
    """Build a randomly initialized model in float32.

    Args:
        kind: a model class of transformers or diffusers.
        config: its config, with the fields of a small model.

    Raises:
        ValueError: if the model is not small.
    """
    if getattr(config, "is_decoder", None) is False and kind.__name__.endswith(_DECODERS):
        config.is_decoder = not config.is_encoder_decoder
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in from_config(kind, config).parameters())
    if numel > MAX_NUMEL:
        raise ValueError(f"a small {kind.__name__} has {numel / 1e6:.0f} million parameters: it is not small")
    torch.manual_seed(0)
    model = from_config(kind, config).eval().float()
    initialize(model)
    return model


#: Standard deviation of the values of small models.
_STD = 0.2


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Set trainable parameters to random values that are large enough for each to affect the outputs.

    Vectors of about one, such as the weights of norms, stay about one. Matrices that are wide in both dims get smaller
    values, so that activations do not grow with the width. Also sets running means and variances of batch norms.
    """
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not parameter.requires_grad:  # constants such as sinusoidal positions, which checkpoints do not have
            continue
        is_scale = parameter.dim() < 2 and parameter.numel() and parameter.mean() > 0.5
        width = min(parameter.shape[-2:]) if parameter.dim() > 1 else 0
        noise = torch.randn(parameter.shape, generator=generator) * _STD * min(1, math.sqrt(64 / max(width, 1)))
        parameter.copy_(noise + 1 if is_scale else noise)
    for name, buffer in model.named_buffers():
        if name.endswith((".running_mean", ".running_var")):
            noise = torch.randn(buffer.shape, generator=generator) * _STD
            buffer.copy_(noise if name.endswith("mean") else noise.abs() + 1)
