"""Random inputs for small models: text, images, audio, and text with placeholder tokens for images or audio.

The config and the signature of ``forward`` determine most inputs. ``types.toml`` and ``special.toml`` hold the rest.
The number of placeholder tokens is the number of features that the model computes.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from shardconv.convert.protocols import PretrainedModel
from shardconv.hf.inputs.derived import audio_inputs, image_inputs, is_type, text_inputs
from shardconv.hf.inputs.special import diffusion_inputs, special_inputs


def example_inputs(model: PretrainedModel, seed: int = 1) -> dict[str, Any]:
    """Random inputs with which a model can be called, as ``model(**example_inputs(model))``.

    Args:
        model: a small model of transformers, whose inputs are tensors, or of diffusers.
        seed: of the random generator.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model.config, Mapping):
        return diffusion_inputs(model, generator)
    names = inspect.signature(model.forward).parameters
    kind = str(model.config.model_type)
    given = special_inputs(model, generator)
    has_both, has_own = is_type("images_and_audio", kind), bool(given) or is_type("text_only", kind)
    if not has_own and (has_both or "pixel_values" not in names):
        given |= audio_inputs(model, names, generator)
    if not has_own or has_both:
        given |= image_inputs(model, names, generator)
    if given.keys().isdisjoint({"input_ids", "decoder_input_ids"}):
        given |= text_inputs(model, names, given, generator)
    return given


def can_generate_text(model: PretrainedModel) -> bool:
    """Whether ``generate`` returns tokens of text for the inputs of :func:`example_inputs`."""
    can_generate = getattr(model, "can_generate", None)
    return bool(can_generate and can_generate()) and not is_type("no_generation", model.config.model_type)
