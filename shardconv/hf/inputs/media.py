"""Images, audio and features of audio as inputs of small models, and the fields of configs that determine them."""

import math
import tomllib
from collections.abc import Container, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardconv.convert.protocols import ModelConfig, PretrainedModel

#: Sequences per batch, and tokens of text per sequence.
BATCH, LENGTH = 2, 7

#: Patches along each side of an image, for models that take patches.
GRID = 4


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("types.toml").read_text("utf-8"))


def is_type(entry: str, *model_types: str) -> bool:
    """Whether an entry of ``types.toml`` has one of some model types."""
    return any(model_type in _table()[entry] for model_type in model_types)


def type_number(entry: str, model_type: str, default: int) -> int:
    """The number of a model type in an entry of ``types.toml``."""
    return int(_table()[entry].get(model_type, default))


def submodel_config(config: ModelConfig, *names: str) -> ModelConfig:
    """The first submodel's config that exists among some names; the config itself if there is none."""
    thinker = getattr(config, "thinker_config", config)
    found = (getattr(thinker, name, None) for name in names)
    return next((one for one in found if one is not None and hasattr(one, "to_dict")), config)


def first_field(config: ModelConfig, names: Iterable[str], default: Any) -> Any:
    """The value of the first field among some names that is set, else the default."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def deep_field(config: ModelConfig, names: Iterable[str], default: Any) -> Any:
    """As :func:`first_field`, nested configs included."""
    if (found := first_field(config, names, None)) is not None:
        return found
    nested = (value for value in vars(config).values() if hasattr(value, "to_dict"))
    return next((found for one in nested if (found := deep_field(one, names, None)) is not None), default)


def pair_of(size: Any) -> tuple[int, int]:
    """Height and width, from a number, a pair or a mapping."""
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


#: Inputs of ``forward`` that belong to images.
IMAGE_INPUTS = {
    "pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "pixel_values_local",
    "num_local_patches", "high_res_pixel_values", "image_position_ids", "target_sizes", "image_merge_sizes",
    "image_grid_hw", "image_token_pooling", "image_grids", "image_num_crops", "patches_grid", "tile_fine_mask",
}  # fmt: skip


def image_inputs(model: PretrainedModel, names: Container[str], generator: torch.Generator) -> dict[str, Tensor]:
    """One image per sequence: as pixels, in crops, or as patches; none for models that take none."""
    if "pixel_values" not in names:
        return {}
    if getattr(model.config, "vision_config", model) is None:
        return {}
    vision = submodel_config(model.config, "vision_config", "encoder", "backbone_config")
    vision = submodel_config(vision, "vision_config")
    if "spatial_shapes" in names:
        return _patches_with_mask(vision, generator)
    if "image_grid_hw" in names:
        packed = _patches(model.config, vision, generator)
        return {"pixel_values": packed["pixel_values"], "image_grid_hw": packed["image_grid_thw"][:, 1:]}
    if "image_grid_thw" in names:
        merged = {"image_merge_sizes": torch.tensor([2] * BATCH)} if "image_merge_sizes" in names else {}
        return _patches(model.config, vision, generator) | merged
    kind = str(model.config.model_type)
    size = pair_of(first_field(vision, ("image_size", "img_size", "input_size"), 32))
    crops = (count,) if (count := type_number("image_crops", kind, 0)) else ()
    images = torch.rand(BATCH, *crops, _channels(vision), *size, generator=generator) * 2 - 1
    given = {"pixel_values": images}
    if "high_res_pixel_values" in names:
        high = pair_of(model.config.high_res_vision_config.image_size)
        given["high_res_pixel_values"] = torch.rand(BATCH, _channels(vision), *high, generator=generator) * 2 - 1
    if "image_sizes" in names and (crops or is_type("image_sizes", kind, getattr(vision, "model_type", ""))):
        given["image_sizes"] = torch.tensor([[side * (2 if crops else 1) for side in size]] * BATCH)
    return given


def _patches(config: ModelConfig, vision: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    side = pair_of(first_field(vision, ("patch_size",), 4))[0]
    times = first_field(vision, ("temporal_patch_size", "patch_temporal"), 1)
    shape: tuple[int, ...] = (_channels(vision) * times * side * side,)
    if is_type("image_patches", config.model_type):
        shape = (_channels(vision), side, side)
    patches = torch.rand(BATCH * GRID * GRID, *shape, generator=generator) * 2 - 1
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, GRID, GRID]] * BATCH)}


def _patches_with_mask(vision: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    width = _channels(vision) * pair_of(vision.patch_size)[0] ** 2
    return {
        "pixel_values": torch.rand(BATCH, GRID * GRID, width, generator=generator) * 2 - 1,
        "pixel_attention_mask": torch.ones(BATCH, GRID * GRID, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[GRID, GRID]] * BATCH),
    }


def _channels(vision: ModelConfig) -> int:
    return int(first_field(vision, ("num_channels", "in_channels", "in_chans", "num_input_channels"), 3))


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
    """One recording per sequence, for models that take audio."""
    audio = submodel_config(model.config, "audio_config", "encoder_config", "encoder")
    both = "input_features" in names and "input_values" in names
    if (
        "input_features" in names
        and not (both and hasattr(audio, "conv_stride"))
        and not is_type("no_audio_features", model.config.model_type)
    ):
        given = {"input_features": _audio_features(model.config, audio, generator)}
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


def _audio_features(config: ModelConfig, audio: ModelConfig, generator: torch.Generator) -> Tensor:
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
