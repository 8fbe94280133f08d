"""Inputs for a small model of any kind: text, images, sound, and text with places for either.

Owns what a model has to be called with. Its config and the signature of its ``forward`` tell nearly all of it; how many
places of the text an image or a sound takes is asked of the model itself.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from shardconv.hf.inputs.audio import sound_inputs
from shardconv.hf.inputs.images import image_inputs
from shardconv.hf.inputs.special import SPECIAL
from shardconv.hf.inputs.text import text_inputs

#: Types that generate no text, whatever their class says.
_NO_GENERATION = {
    "blt", "diffusion_gemma", "kyutai_speech_to_text", "musicgen", "musicgen_decoder", "musicgen_melody",
    "musicgen_melody_decoder", "pop2piano", "vibevoice", "voxtral_realtime",
}  # fmt: skip
#: Types that are called with text alone: what else they take is not made here.
_TEXT_ONLY = {"fuyu", "musicflamingo", "neomme"}


def example_inputs(model: Any, seed: int = 1) -> dict[str, Tensor]:
    """What a model can be called with: ``model(**example_inputs(model))``.

    Args:
        model: a small model of transformers.
        seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    names = inspect.signature(model.forward).parameters
    kind = str(model.config.model_type)
    given: dict[str, Tensor] = {}
    if (special := SPECIAL.get(type(model).__name__) or SPECIAL.get(kind)) is not None:
        given = special(model, generator)
        if not given.keys() & {"input_ids", "decoder_input_ids"}:
            given |= text_inputs(model, names, given, generator)
        return given
    if kind in _TEXT_ONLY:
        return text_inputs(model, names, given, generator)
    given |= image_inputs(model, names, generator)
    given |= sound_inputs(model, names, generator)
    return given | text_inputs(model, names, given, generator)


def can_generate_text(model: Any) -> bool:
    """Whether ``generate`` gives tokens of text for what ``example_inputs`` gives."""
    can = getattr(model, "can_generate", None)
    return bool(can and can()) and model.config.model_type not in _NO_GENERATION
