"""Inputs of small models that follow from config and signature: images, audio, and text with placeholder tokens."""

import inspect
import math
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping
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
    "input_features", "input_values", "input_features_mask", "feature_attention_mask", "padding_mask", "sample",
    "chunk_sample_lengths",
}  # fmt: skip


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


def text_inputs(
    model: PretrainedModel, names: Iterable[str], given: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Random tokens for the encoder, the decoder or both, with placeholder tokens for the other inputs."""
    names, config = set(names), model.config
    both = bool(getattr(config, "is_encoder_decoder", False)) and "decoder_input_ids" in names
    if "input_ids" not in names:
        return {"decoder_input_ids": random_tokens(model, (BATCH, LENGTH), generator)} if both else {}
    if both and given and model.main_input_name != "input_ids" and not is_type("encoder_text", config.model_type):
        return {"decoder_input_ids": random_tokens(model, (BATCH, LENGTH), generator)}
    ids = random_tokens(model, (BATCH, LENGTH), generator)
    kinds = torch.zeros_like(ids)
    for index, (modality, token) in enumerate(_placeholders(model, given)):
        count = _count(model, modality, given)
        placeholders = torch.full((BATCH, count), token)
        ids = torch.cat([ids[:, :2], placeholders, ids[:, 2:]], dim=1)
        kinds = torch.cat([kinds[:, :2], torch.full_like(placeholders, 1 + 2 * index), kinds[:, 2:]], dim=1)
    text = {"input_ids": ids}
    if given and "mm_token_type_ids" in names:
        text["mm_token_type_ids"] = kinds
    if both:
        text["decoder_input_ids"] = random_tokens(model, (BATCH, LENGTH), generator)
    return text


def random_tokens(model: PretrainedModel, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random tokens of text, special tokens excluded."""
    vocabulary = min(99, vocabulary_size(model))
    special = set(_special(model.config.to_dict()))
    usual = torch.tensor([token for token in range(min(3, vocabulary - 1), vocabulary) if token not in special])
    return usual[torch.randint(0, len(usual), shape, generator=generator)]


def vocabulary_size(model: PretrainedModel) -> int:
    """The size of the text vocabulary."""
    config = model.config
    for one in (getattr(config, "decoder", None), config.get_text_config(), config):
        if isinstance(size := getattr(one, "vocab_size", None), int):
            return size
    return 99


def _special(config: Mapping[str, object]) -> Iterable[int]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special(value)
        elif "token" in str(name) and type(value) is int and str(name).endswith(("_id", "_index", "token", "_idx")):
            yield value


def _placeholders(model: PretrainedModel, given: Mapping[str, Tensor]) -> Iterable[tuple[str, int]]:
    """The kinds of inputs that have placeholder tokens in the text, each with its token."""
    for modality, inputs in (("image", IMAGE_INPUTS), ("audio", AUDIO_INPUTS)):
        if given.keys() & inputs:
            for name in (f"{modality}_token_id", f"{modality}_token_index", f"{modality}_token"):
                if type(token := getattr(model.config, name, None)) is int:
                    yield modality, token
                    break


@torch.no_grad()
def _count(model: PretrainedModel, modality: str, given: Mapping[str, Tensor]) -> int:
    """The number of placeholder tokens of an image or recording: one for each feature that the model computes."""
    features = _method(model, f"get_{modality}_features")
    if features is None:
        return 0
    takes = inspect.signature(features).parameters
    everything = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    wanted = IMAGE_INPUTS if modality == "image" else AUDIO_INPUTS
    found = features(**{name: given[name] for name in given if name in takes or (everything and name in wanted)})
    return sum(one.numel() // one.shape[-1] for one in _feature_tensors(found)) // BATCH


def _method(model: PretrainedModel, name: str) -> Callable[..., object] | None:
    base = getattr(model, "model", None)
    return next((getattr(one, name) for one in (model, base) if hasattr(one, name)), None)


def _feature_tensors(found: Any) -> list[Tensor]:
    if hasattr(found, "last_hidden_state"):
        if found.get("pooler_output") is not None:
            found = found.pooler_output
        elif found.last_hidden_state is not None:
            found = found.last_hidden_state
        else:  # for layers of the text model, as many for each
            found = found.deepstack_features[0][1]
    return [found] if isinstance(found, Tensor) else [one for one in found if isinstance(one, Tensor)]
