"""Random audio, as waveforms or features, by the signature of ``forward`` and the config."""

import math
from collections.abc import Container

import torch
from torch import Tensor

from shardconv.convert.protocols import ModelConfig, PretrainedModel
from shardconv.hf.inputs.configs import BATCH, deep_field, first_field, is_type, submodel_config, type_number

#: Inputs of ``forward`` that belong to audio.
AUDIO_INPUTS = {
    "input_features",
    "input_values",
    "input_features_mask",
    "feature_attention_mask",
    "padding_mask",
    "sample",
    "chunk_sample_lengths",
}


def audio_inputs(model: PretrainedModel, names: Container[str], generator: torch.Generator) -> dict[str, Tensor]:
    """One recording per sequence, for models that take audio and no images."""
    if "pixel_values" in names:
        return {}
    audio = submodel_config(model.config, "audio_config", "encoder_config", "encoder")
    both = "input_features" in names and "input_values" in names
    if (
        "input_features" in names
        and not (both and hasattr(audio, "conv_stride"))
        and not is_type("no_audio_features", model.config.model_type)
    ):
        given = {"input_features": audio_features(model.config, audio, generator)}
        frames = given["input_features"].shape[1 if _frames_first(model.config, audio) else 2]
        has_mask = not is_type("no_audio_mask", model.config.model_type)
        masks = ("input_features_mask", "feature_attention_mask") if has_mask else ()
        for mask in masks:
            if mask in names:
                given[mask] = torch.ones(BATCH, frames, dtype=torch.int64)
        return given
    if "input_values" in names:
        step = math.prod(deep_field(audio, ("conv_stride", "downsampling_ratios"), (320,)))
        channels = (1,) if is_type("audio_channels", model.config.model_type) else ()
        given = {"input_values": torch.randn(BATCH, *channels, 16 * step, generator=generator)}
        if "padding_mask" in names:
            given["padding_mask"] = torch.ones(BATCH, 16 * step, dtype=torch.bool)
        if "sample" in names:  # no noise
            given["sample"] = torch.tensor(data=False)
        return given
    return {}


def audio_features(config: ModelConfig, audio: ModelConfig, generator: torch.Generator) -> Tensor:
    """Random audio features, (batch, frames, features) or (batch, features, frames)."""
    width = deep_field(
        audio, ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim"), 80
    )
    nested = submodel_config(audio, "encoder_config")
    width *= first_field(audio, ("num_stacked_frames",), type_number("audio_stacked_frames", nested.model_type, 1))
    frames = 2 * first_field(audio, ("max_source_positions", "n_window"), 24)
    shape = (BATCH, frames, width) if _frames_first(config, audio) else (BATCH, width, frames)
    return torch.randn(*shape, generator=generator)


def _frames_first(config: ModelConfig, audio: ModelConfig) -> bool:
    return not is_type("audio_features_first", config.model_type, getattr(audio, "model_type", ""))
