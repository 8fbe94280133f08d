"""Build models from configs: without values on the meta device, and small ones with random values."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import nn

from shardconv.convert.protocols import ModelConfig, PretrainedModel
from shardconv.hf.classes import model_class
from shardconv.hf.heads import head_sizes, merge_fields, real_counts, real_heads, with_heads
from shardconv.hf.isolation import isolated
from shardconv.hf.small import SAME, small_fields
from shardconv.support.errors import RunError

#: The most parameters of a small model. A larger one has a config field that small.toml does not cover.
MAX_NUMEL = 20_000_000

#: Ends of the names of classes that generate text with a decoder.
_DECODERS = ("CausalLM", "LMHeadModel", "WithLMHead")


def build_on_meta(
    kind: type[PretrainedModel], config: ModelConfig, *, dtype: torch.dtype | None = None
) -> PretrainedModel:
    """Build a model on the meta device, in eval mode, from a copy of the config.

    Args:
        kind: a model class of transformers.
        config: its config, which the model may change.
        dtype: of the parameters; by default that of the config.
    """
    with torch.device("meta"):
        model = kind._from_config(copy.deepcopy(config), dtype=dtype)  # noqa: SLF001 - transformers does not have a public way
    return model.eval()


def small_model(
    config: Mapping[str, object], *, has_real_heads: bool = False, heads: int | None = None
) -> PretrainedModel:
    """Build a small, randomly initialized model of the class that a config names.

    Args:
        config: the content of ``config.json``.
        has_real_heads: whether its heads have as many features as by the config.
        heads: its number of heads, by default four; :data:`~shardconv.hf.small.SAME` for as many query and KV heads as
            by the config.

    Raises:
        RunError: if transformers does not have the class, or the class cannot be built small.
    """
    kind, full = model_class(config)
    try:
        fields = full.to_dict()
        more = real_heads(fields) if has_real_heads else {}
        if heads == SAME:
            more = merge_fields(more, real_counts(fields, head_sizes(fields).get("", 0) if has_real_heads else 0))
        small = {**fields, **small_fields(fields, more)}
        return build_small(kind, type(full).from_dict(with_heads(small, heads) if heads and heads != SAME else small))
    except Exception as error:
        raise RunError(f"a small {kind.__name__} cannot be built: {type(error).__name__}: {error}") from error


@isolated()
def build_small(kind: type[PretrainedModel], config: ModelConfig) -> PretrainedModel:
    """Build a randomly initialized model in float32.

    Args:
        kind: a model class of transformers.
        config: its config, with the fields of a small model.

    Raises:
        ValueError: if the model is not small.
    """
    if getattr(config, "is_decoder", None) is False and kind.__name__.endswith(_DECODERS):
        config.is_decoder = not config.is_encoder_decoder
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in kind(config).parameters())
    if numel > MAX_NUMEL:
        raise ValueError(f"a small {kind.__name__} has {numel / 1e6:.0f} million parameters: it is not small")
    torch.manual_seed(0)
    model = kind._from_config(config).eval().float()  # noqa: SLF001 - transformers does not have a public way
    initialize(model)
    return model


@torch.no_grad()
def initialize(model: nn.Module, *, std: float = 0.2) -> None:
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
        noise = torch.randn(parameter.shape, generator=generator) * std * min(1, math.sqrt(64 / max(width, 1)))
        parameter.copy_(noise + 1 if is_scale else noise)
    for name, buffer in model.named_buffers():
        if name.endswith((".running_mean", ".running_var")):
            noise = torch.randn(buffer.shape, generator=generator) * std
            buffer.copy_(noise if name.endswith("mean") else noise.abs() + 1)
