"""Sound, as waves or as features of them, likewise."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardconv.hf.inputs.configs import BATCH, deep_field, first_field, part_of

#: Types that take sound in channels.
_CHANNELED = {"vibevoice", "vibevoice_asr"}
#: Types whose mask is one of features, not of frames.
_UNMASKED = {"granite_speech", "granite_speech_plus"}
#: Types whose sound is made from the text.
_DEAF = {"pop2piano"}
#: Types with features of a sound by number and time; all others have time first.
_MEL_FIRST = {
    "whisper", "voxtral_encoder", "voxtral_realtime_encoder", "qwen2_audio_encoder", "qwen3_asr_encoder",
    "audioflamingo3_encoder", "glmasr_encoder", "musicflamingo_encoder", "qwen2_5_omni_audio_encoder",
    "qwen3_omni_moe_audio_encoder",
}  # fmt: skip
AUDIO_INPUTS = {
    "input_features",
    "input_values",
    "input_features_mask",
    "feature_attention_mask",
    "padding_mask",
    "sample",
    "chunk_sample_lengths",
}


def sound_inputs(model: Any, names: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """One sound an example, where it is all that the model hears, or what the text has places for."""
    if "pixel_values" in names:
        return {}
    audio = part_of(model.config, "audio_config", "encoder_config", "encoder")
    both = {"input_features", "input_values"} <= names.keys()
    if (
        "input_features" in names
        and not (both and hasattr(audio, "conv_stride"))
        and model.config.model_type not in _DEAF
    ):
        given = {"input_features": sound_features(model.config, audio, generator)}
        frames = given["input_features"].shape[1 if _frames_first(model.config, audio) else 2]
        masks = () if model.config.model_type in _UNMASKED else ("input_features_mask", "feature_attention_mask")
        for mask in masks:
            if mask in names:
                given[mask] = torch.ones(BATCH, frames, dtype=torch.int64)
        return given
    if "input_values" in names:
        step = math.prod(deep_field(audio, ("conv_stride", "downsampling_ratios"), (320,)))
        channels = (1,) if model.config.model_type in _CHANNELED else ()
        given = {"input_values": torch.randn(BATCH, *channels, 16 * step, generator=generator)}
        if "padding_mask" in names:
            given["padding_mask"] = torch.ones(BATCH, 16 * step, dtype=torch.bool)
        if "sample" in names:  # no noise
            given["sample"] = torch.tensor(data=False)
        return given
    return {}


#: Types of encoders that hear several frames at once, where their config does not say how many.
_STACKED = {"granite_speech5_encoder": 4}


def sound_features(config: Any, audio: Any, generator: torch.Generator) -> Tensor:
    """Features of a sound, [batch, frames, features] or with features before frames."""
    width = deep_field(
        audio, ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim"), 80
    )
    nested = part_of(audio, "encoder_config")
    width *= first_field(audio, ("num_stacked_frames",), _STACKED.get(nested.model_type, 1))
    frames = 2 * first_field(audio, ("max_source_positions", "n_window"), 24)
    shape = (BATCH, frames, width) if _frames_first(config, audio) else (BATCH, width, frames)
    return torch.randn(*shape, generator=generator)


def _frames_first(config: Any, audio: Any) -> bool:
    return not {config.model_type, getattr(audio, "model_type", "")} & _MEL_FIRST
