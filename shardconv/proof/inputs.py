"""Inputs for a small model of any kind: text, images, sound, and text with places for either.

Owns what a model has to be called with. Its config and the signature of its ``forward`` tell nearly all of it; how many
places of the text an image or a sound takes is asked of the model itself.
"""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

#: Examples in a batch, and tokens of text in each.
BATCH, LENGTH = 2, 7

#: Patches of an image along each side, where a model takes patches instead of images.
GRID = 4


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
    if (special := _SPECIAL.get(type(model).__name__) or _SPECIAL.get(kind)) is not None:
        given = special(model, generator)
        if not given.keys() & {"input_ids", "decoder_input_ids"}:
            given |= _text(model, names, given, generator)
        return given
    if kind in _TEXT_ONLY:
        return _text(model, names, given, generator)
    given |= _images(model, names, generator)
    given |= _sounds(model, names, generator)
    return given | _text(model, names, given, generator)


def can_generate_text(model: Any) -> bool:
    """Whether ``generate`` gives tokens of text for what ``example_inputs`` gives."""
    can = getattr(model, "can_generate", None)
    return bool(can and can()) and model.config.model_type not in _NO_GENERATION


# --- text -------------------------------------------------------------------------------------------------------------


def _text(
    model: Any, names: Iterable[str], given: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """The tokens, with places for what else is given."""
    names, config = set(names), model.config
    both = bool(getattr(config, "is_encoder_decoder", False)) and "decoder_input_ids" in names
    if "input_ids" not in names:
        return {"decoder_input_ids": _tokens(model, (BATCH, LENGTH), generator)} if both else {}
    if both and given and model.main_input_name != "input_ids" and config.model_type not in _BOTH:
        return {"decoder_input_ids": _tokens(model, (BATCH, LENGTH), generator)}
    ids = _tokens(model, (BATCH, LENGTH), generator)
    kinds = torch.zeros_like(ids)
    for place, (what, token) in enumerate(_places(model, given)):
        count = _count(model, what, given)
        spot = torch.full((BATCH, count), token)
        ids = torch.cat([ids[:, :2], spot, ids[:, 2:]], dim=1)
        kinds = torch.cat([kinds[:, :2], torch.full_like(spot, 1 + 2 * place), kinds[:, 2:]], dim=1)
    text = {"input_ids": ids}
    if given and "mm_token_type_ids" in names:
        text["mm_token_type_ids"] = kinds
    if both:
        text["decoder_input_ids"] = _tokens(model, (BATCH, LENGTH), generator)
    return text


def _tokens(model: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random tokens of text: none that stands for something else."""
    vocabulary = min(99, _vocabulary(model))
    special = set(_special(model.config.to_dict()))
    usual = torch.tensor([token for token in range(min(3, vocabulary - 1), vocabulary) if token not in special])
    return usual[torch.randint(0, len(usual), shape, generator=generator)]


def _vocabulary(model: Any) -> int:
    config = model.config
    for one in (getattr(config, "decoder", None), config.get_text_config(), config):
        if isinstance(size := getattr(one, "vocab_size", None), int):
            return size
    return 99


def _special(config: Mapping[str, Any]) -> Iterable[int]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special(value)
        elif "token" in str(name) and type(value) is int and str(name).endswith(("_id", "_index", "token", "_idx")):
            yield value


def _places(model: Any, given: Mapping[str, Tensor]) -> Iterable[tuple[str, int]]:
    """What the text has places for, with the token that holds them."""
    for what, inputs in (("image", _IMAGE_INPUTS), ("audio", _AUDIO_INPUTS)):
        if given.keys() & inputs:
            for name in (f"{what}_token_id", f"{what}_token_index", f"{what}_token"):
                if type(token := getattr(model.config, name, None)) is int:
                    yield what, token
                    break


@torch.no_grad()
def _count(model: Any, what: str, given: Mapping[str, Tensor]) -> int:
    """How many places one of the images or sounds takes: as many as the model makes features of it."""
    features = _method(model, f"get_{what}_features")
    if features is None:
        return 0
    takes = inspect.signature(features).parameters
    everything = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    wanted = _IMAGE_INPUTS if what == "image" else _AUDIO_INPUTS
    found = features(**{name: given[name] for name in given if name in takes or (everything and name in wanted)})
    return sum(one.numel() // one.shape[-1] for one in _feature_tensors(found)) // BATCH


def _method(model: Any, name: str) -> Any:
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


# --- images -----------------------------------------------------------------------------------------------------------

_IMAGE_INPUTS = {
    "pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "pixel_values_local",
    "num_local_patches", "high_res_pixel_values", "image_position_ids", "target_sizes", "image_merge_sizes",
    "image_grid_hw", "image_token_pooling", "image_grids", "image_num_crops", "patches_grid", "tile_fine_mask",
}  # fmt: skip


def _images(model: Any, names: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """One image an example: whole, in parts, or as patches, whichever the model takes."""
    if "pixel_values" not in names:
        return {}
    if getattr(model.config, "vision_config", model) is None:
        return {}
    vision = _part(model.config, "vision_config", "encoder", "backbone_config")
    vision = _part(vision, "vision_config")
    if "spatial_shapes" in names:
        return _patches_with_mask(vision, generator)
    if "image_grid_hw" in names:
        packed = _patches(model.config, vision, generator)
        return {"pixel_values": packed["pixel_values"], "image_grid_hw": packed["image_grid_thw"][:, 1:]}
    if "image_grid_thw" in names:
        merged = {"image_merge_sizes": torch.tensor([2] * BATCH)} if "image_merge_sizes" in names else {}
        return _patches(model.config, vision, generator) | merged
    kind = str(model.config.model_type)
    size = _pair(_first(vision, ("image_size", "img_size", "input_size"), 32))
    parts = _PARTS.get(kind, ())
    images = torch.rand(BATCH, *parts, _channels(vision), *size, generator=generator) * 2 - 1
    given = {"pixel_values": images}
    if "high_res_pixel_values" in names:
        high = _pair(model.config.high_res_vision_config.image_size)
        given["high_res_pixel_values"] = torch.rand(BATCH, _channels(vision), *high, generator=generator) * 2 - 1
    if "image_sizes" in names and (parts or getattr(vision, "model_type", "") == "pixtral" or kind in _SIZED):
        given["image_sizes"] = torch.tensor([[side * (2 if parts else 1) for side in size]] * BATCH)
    return given


def _patches(config: Any, vision: Any, generator: torch.Generator) -> dict[str, Tensor]:
    side = _pair(_first(vision, ("patch_size",), 4))[0]
    times = _first(vision, ("temporal_patch_size", "patch_temporal"), 1)
    shape: tuple[int, ...] = (_channels(vision) * times * side * side,)
    if config.model_type in _UNFOLDED:
        shape = (_channels(vision), side, side)
    patches = torch.rand(BATCH * GRID * GRID, *shape, generator=generator) * 2 - 1
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, GRID, GRID]] * BATCH)}


def _patches_with_mask(vision: Any, generator: torch.Generator) -> dict[str, Tensor]:
    width = _channels(vision) * _pair(vision.patch_size)[0] ** 2
    return {
        "pixel_values": torch.rand(BATCH, GRID * GRID, width, generator=generator) * 2 - 1,
        "pixel_attention_mask": torch.ones(BATCH, GRID * GRID, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[GRID, GRID]] * BATCH),
    }


def _channels(vision: Any) -> int:
    return int(_first(vision, ("num_channels", "in_channels", "in_chans", "num_input_channels"), 3))


# --- sound ------------------------------------------------------------------------------------------------------------

_AUDIO_INPUTS = {
    "input_features",
    "input_values",
    "input_features_mask",
    "feature_attention_mask",
    "padding_mask",
    "sample",
    "chunk_sample_lengths",
}


def _sounds(model: Any, names: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """One sound an example, where it is all that the model hears, or what the text has places for."""
    if "pixel_values" in names:
        return {}
    audio = _part(model.config, "audio_config", "encoder_config", "encoder")
    both = {"input_features", "input_values"} <= names.keys()
    if (
        "input_features" in names
        and not (both and hasattr(audio, "conv_stride"))
        and model.config.model_type not in _DEAF
    ):
        given = {"input_features": _features(model.config, audio, generator)}
        frames = given["input_features"].shape[1 if _frames_first(model.config, audio) else 2]
        masks = () if model.config.model_type in _UNMASKED else ("input_features_mask", "feature_attention_mask")
        for mask in masks:
            if mask in names:
                given[mask] = torch.ones(BATCH, frames, dtype=torch.int64)
        return given
    if "input_values" in names:
        step = math.prod(_deep(audio, ("conv_stride", "downsampling_ratios"), (320,)))
        channels = (1,) if model.config.model_type in _CHANNELED else ()
        given = {"input_values": torch.randn(BATCH, *channels, 16 * step, generator=generator)}
        if "padding_mask" in names:
            given["padding_mask"] = torch.ones(BATCH, 16 * step, dtype=torch.bool)
        if "sample" in names:  # no noise
            given["sample"] = torch.tensor(data=False)
        return given
    return {}


def _features(config: Any, audio: Any, generator: torch.Generator) -> Tensor:
    width = _deep(audio, ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim"), 80)
    nested = _part(audio, "encoder_config")
    width *= _first(audio, ("num_stacked_frames",), 4 if nested.model_type == "granite_speech5_encoder" else 1)
    frames = 2 * _first(audio, ("max_source_positions", "n_window"), 24)
    shape = (BATCH, frames, width) if _frames_first(config, audio) else (BATCH, width, frames)
    return torch.randn(*shape, generator=generator)


def _frames_first(config: Any, audio: Any) -> bool:
    return not {config.model_type, getattr(audio, "model_type", "")} & _MEL_FIRST


# --- configs ----------------------------------------------------------------------------------------------------------


def _part(config: Any, *names: str) -> Any:
    """A nested config, or the config itself."""
    thinker = getattr(config, "thinker_config", config)
    found = (getattr(thinker, name, None) for name in names)
    return next((one for one in found if hasattr(one, "to_dict")), config)


def _first(config: Any, names: Iterable[str], default: Any) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _deep(config: Any, names: Iterable[str], default: Any) -> Any:
    """Like ``_first``, in nested configs, too."""
    if (found := _first(config, names, None)) is not None:
        return found
    nested = (value for value in vars(config).values() if hasattr(value, "to_dict"))
    return next((found for one in nested if (found := _deep(one, names, None)) is not None), default)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


# --- single types -----------------------------------------------------------------------------------------------------


def _codebooks(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """MusicGen's decoder: one row of tokens for each codebook."""
    decoder = _part(model.config, "decoder")
    return {"input_ids": _tokens(model, (BATCH * decoder.num_codebooks, LENGTH), generator)}


def _dia(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Dia's decoder: a token of each codebook at every place."""
    channels = model.config.decoder_config.num_channels
    return {
        "input_ids": _tokens(model, (BATCH, LENGTH), generator),
        "decoder_input_ids": _tokens(model, (BATCH, LENGTH, channels), generator),
    }


def _kyutai(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Kyutai's: a token of text and one of each codebook at every place."""
    return {"input_ids": _tokens(model, (BATCH, LENGTH, model.config.num_codebooks + 1), generator)}


def _voxtral_realtime(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Voxtral Realtime: as much sound as there are tokens."""
    audio, frames = model.config.audio_config, 2 * model.config.downsample_factor * LENGTH
    sound = torch.randn(BATCH, audio.num_mel_bins, frames, generator=generator)
    return {"input_ids": _tokens(model, (BATCH, LENGTH), generator), "input_features": sound}


def _qwen2_audio(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Qwen2-Audio: a place for every fourth frame, and masks of both."""
    frames = 2 * model.config.audio_config.max_source_positions
    spot = torch.full((BATCH, frames // 4), model.config.audio_token_index)
    ids = torch.cat([spot, _tokens(model, (BATCH, LENGTH), generator)], dim=1)
    return {
        "input_features": torch.randn(BATCH, model.config.audio_config.num_mel_bins, frames, generator=generator),
        "feature_attention_mask": torch.ones(BATCH, frames, dtype=torch.int64),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def _mllama(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Llama Vision: images in tiles, which every token of the text sees."""
    vision = model.config.vision_config
    side, tiles = vision.image_size, vision.max_num_tiles
    return {
        "pixel_values": torch.rand(BATCH, 1, tiles, vision.num_channels, side, side, generator=generator) * 2 - 1,
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(BATCH, 1, tiles, dtype=torch.int64),
        "cross_attention_mask": torch.ones(BATCH, LENGTH, 1, tiles, dtype=torch.int64),
        "input_ids": _tokens(model, (BATCH, LENGTH), generator),
    }


def _idefics(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """IDEFICS: images which every token of the text sees."""
    side = model.config.vision_config.image_size
    return {
        "pixel_values": torch.rand(BATCH, 1, 3, side, side, generator=generator) * 2 - 1,
        "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.int64),
        "input_ids": _tokens(model, (BATCH, LENGTH), generator),
    }


def _kosmos(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Kosmos-2: a mask tells the places of the image."""
    side, count = model.config.vision_config.image_size, model.config.latent_query_num
    mask = torch.zeros(BATCH, LENGTH + count, dtype=torch.int64)
    mask[:, 2 : 2 + count] = 1
    return {
        "pixel_values": torch.rand(BATCH, 3, side, side, generator=generator) * 2 - 1,
        "image_embeds_position_mask": mask,
        "input_ids": _tokens(model, (BATCH, LENGTH + count), generator),
    }


def _molmo(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Molmo 2: one crop an image, as patches, of which four make a place of the text."""
    vision = model.config.vision_config
    count = vision.num_position_embeddings
    width = vision.num_channels * vision.patch_size**2
    token = model.config.image_patch_id
    spot = torch.full((BATCH, count // 4), token)
    return {
        "pixel_values": torch.rand(BATCH, count, width, generator=generator) * 2 - 1,
        "image_token_pooling": torch.arange(BATCH * count).view(-1, 4),
        "image_grids": torch.tensor([[1, count // 4, 0, 0]] * BATCH),
        "image_num_crops": torch.ones(BATCH, dtype=torch.int64),
        "input_ids": torch.cat([spot, _tokens(model, (BATCH, LENGTH), generator)], dim=1),
    }


def _pi0(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """PI0: what one camera sees, what to do, where the robot is, and noise that becomes what it does."""
    config = model.config
    vision = config.vlm_config.vision_config
    side = vision.image_size
    spot = torch.full((BATCH, (side // vision.patch_size) ** 2), config.vlm_config.image_token_id)
    return {
        "pixel_values": torch.rand(BATCH, 1, 3, side, side, generator=generator) * 2 - 1,
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        "input_ids": torch.cat([spot, _tokens(model, (BATCH, LENGTH), generator)], dim=1),
        "state": torch.randn(BATCH, config.max_state_dim, generator=generator),
        "noise": torch.randn(BATCH, config.chunk_size, config.max_action_dim, generator=generator),
        "timestep": torch.rand(BATCH, generator=generator),
    }


def _pix2struct(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Pix2Struct: patches, each after its row and column."""
    return {
        "flattened_patches": _numbered_patches(model.config.vision_config.patch_embed_hidden_size, generator),
        "decoder_input_ids": _tokens(model, (BATCH, LENGTH), generator),
    }


def _minicpm(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """MiniCPM-V: the patches of all images beside each other, as one wide image."""
    vision = model.config.vision_config
    side, width = vision.patch_size, BATCH * GRID * GRID * vision.patch_size
    return {
        "pixel_values": torch.rand(1, vision.num_channels, side, width, generator=generator) * 2 - 1,
        "target_sizes": torch.tensor([[GRID, GRID]] * BATCH),
    }


def _videoprism(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """VideoPrism: a few frames, and text."""
    vision = model.config.vision_config
    shape = (BATCH, vision.num_frames, vision.num_channels, *_pair(vision.image_size))
    return {
        "pixel_values_videos": torch.rand(*shape, generator=generator) * 2 - 1,
        "input_ids": _tokens(model, (BATCH, LENGTH), generator),
    }


def _udop(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """UDOP: text with its boxes on the page, and the page."""
    boxes = torch.rand(BATCH, LENGTH, 4, generator=generator).sort(dim=-1).values
    size = _pair(model.config.image_size)
    return {
        "input_ids": _tokens(model, (BATCH, LENGTH), generator),
        "bbox": boxes,
        "pixel_values": torch.rand(BATCH, model.config.num_channels, *size, generator=generator) * 2 - 1,
        "decoder_input_ids": _tokens(model, (BATCH, LENGTH), generator),
    }


def _instructblip(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """InstructBLIP: the query transformer reads text, too."""
    side, count, config = model.config.vision_config.image_size, model.config.num_query_tokens, model.config
    video = config.model_type == "instructblipvideo"
    frames = (2,) if video else ()
    ids = _tokens(model, (BATCH, LENGTH), generator)
    token = config.video_token_index if video else config.image_token_index
    spot = torch.full((BATCH, count * (2 if video else 1)), token)
    return {
        "pixel_values": torch.rand(BATCH, *frames, 3, side, side, generator=generator) * 2 - 1,
        "qformer_input_ids": _tokens(model, (BATCH, LENGTH), generator),
        "input_ids": torch.cat([spot, ids], dim=1),
    }


def _gemma3n(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Gemma 3n: an image and a sound, each with as many places as its config says."""
    config, frames = model.config, 16 * model.config.audio_soft_tokens_per_image
    return {
        "pixel_values": torch.rand(BATCH, 3, 32, 32, generator=generator) * 2 - 1,
        "input_features": torch.randn(BATCH, frames, config.audio_config.input_feat_size, generator=generator),
        "input_features_mask": torch.ones(BATCH, frames, dtype=torch.bool),
        "input_ids": _ids_after(
            model,
            {
                config.image_token_id: config.vision_soft_tokens_per_image,
                config.audio_token_id: config.audio_soft_tokens_per_image,
            },
            generator,
        ),
    }


def _inkling(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Inkling: patches, each with a place, and sound as a word for each pitch of a frame."""
    config, vision, audio = model.config, model.config.vision_config, model.config.audio_config
    patch = (vision.temporal_patch_size, vision.patch_size, vision.patch_size, vision.num_channels)
    sound = (BATCH, 3, audio.n_mel_bins)
    return {
        "pixel_values": torch.rand(2 * BATCH, *patch, generator=generator) * 2 - 1,
        "audio_input_ids": torch.randint(0, audio.mel_vocab_size, sound, generator=generator),
        "input_ids": _ids_after(model, {config.image_token_id: 2, config.audio_token_id: 3}, generator),
    }


def _kosmos25(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """KOSMOS-2.5: patches after their rows and columns, and a mask of the places for what is seen in them."""
    count = model.config.latent_query_num
    mask = torch.zeros(BATCH, LENGTH + count, dtype=torch.int64)
    mask[:, 2 : 2 + count] = 1
    return {
        "flattened_patches": _numbered_patches(model.config.vision_config.patch_embed_hidden_size, generator),
        "image_embeds_position_mask": mask,
        "input_ids": _tokens(model, (BATCH, LENGTH + count), generator),
    }


def _numbered_patches(width: int, generator: torch.Generator) -> Tensor:
    """Patches, each after its row and column."""
    patches = torch.randn(BATCH, GRID * GRID, width, generator=generator)
    places = torch.arange(GRID * GRID)
    places = torch.stack([places // GRID + 1, places % GRID + 1], dim=-1).expand(BATCH, -1, -1)
    return torch.cat([places.float(), patches], dim=-1)


def _moss(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """MOSS Transcribe Diarize: sound as long as the encoder wants it, some frames of it a place."""
    config, audio = model.config, model.config.audio_config
    frames = 2 * audio.max_source_positions
    return {
        "input_features": torch.randn(BATCH, audio.num_mel_bins, frames, generator=generator),
        "input_features_mask": torch.ones(BATCH, frames, dtype=torch.int64),
        "input_ids": _ids_after(
            model, {config.audio_token_id: audio.max_source_positions // config.audio_merge_size}, generator
        ),
    }


def _phi4(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Phi-4 Multimodal: an image whole and in one part, each row of which ends in a mark; and a sound."""
    vision, audio = model.config.vision_config, model.config.audio_config
    side, patches, sound = vision.image_size, vision.image_size // vision.patch_size, 4
    tokens = patches // 2 * (patches // 2 + 1)
    return {
        "image_pixel_values": torch.rand(BATCH, 2, vision.num_channels, side, side, generator=generator) * 2 - 1,
        "image_sizes": torch.tensor([[side, side]] * BATCH),
        "image_attention_mask": torch.ones(BATCH, 2, patches, patches),
        "audio_input_features": torch.randn(BATCH, sound * audio.time_reduction, audio.input_size, generator=generator),
        "audio_embed_sizes": torch.tensor([sound] * BATCH),
        "input_ids": _ids_after(model, {vision.image_token_id: 2 * tokens + 1, audio.audio_token_id: sound}, generator),
    }


def _trocr(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """TrOCR: text, and an image as another model has read it."""
    width = model.config.cross_attention_hidden_size or model.config.d_model
    return {
        "input_ids": _tokens(model, (BATCH, LENGTH), generator),
        "encoder_hidden_states": torch.randn(BATCH, GRID, width, generator=generator),
    }


def _longformer(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Longformer: text whose first token sees all, and is seen by all."""
    ids = _tokens(model, (BATCH, LENGTH), generator)
    mask = torch.zeros_like(ids)
    mask[:, 0] = 1
    both = {"decoder_input_ids": _tokens(model, ids.shape, generator)} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "global_attention_mask": mask, **both}


def _luke(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """LUKE: text with two entities in it, the second of them longer."""
    places = torch.tensor([[[1, -1], [3, 4]]]).expand(BATCH, -1, -1)
    return {
        "input_ids": _tokens(model, (BATCH, LENGTH), generator),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64),
        "entity_ids": _tokens(model, (BATCH, 2), generator),
        "entity_position_ids": places,
        "entity_attention_mask": torch.ones(BATCH, 2, dtype=torch.int64),
    }


def _ids_after(model: Any, places: Mapping[int, int], generator: torch.Generator) -> Tensor:
    """Tokens of text after so many places for each of some special tokens."""
    spots = [torch.full((BATCH, count), token) for token, count in places.items()]
    return torch.cat([*spots, _tokens(model, (BATCH, LENGTH), generator)], dim=1)


def _blip_2_retrieval(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """BLIP-2 beside text: the places of the image come before the text, and there is a mask of both."""
    side, config = model.config.vision_config.image_size, model.config
    spot = torch.full((BATCH, config.num_query_tokens), config.image_token_index)
    ids = torch.cat([spot, _tokens(model, (BATCH, LENGTH), generator)], dim=1)
    return {
        "pixel_values": torch.rand(BATCH, 3, side, side, generator=generator) * 2 - 1,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def _seen_and_heard(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """An image and a sound an example."""
    names, audio = inspect.signature(model.forward).parameters, model.config.audio_config
    sound = _features(model.config, audio, generator)
    mask = torch.ones(BATCH, sound.shape[2], dtype=torch.int64)
    return {**_images(model, names, generator), "input_features": sound, "feature_attention_mask": mask}


def _diffusion_gemma(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """DiffusionGemma: an image in patches, a canvas, and what was guessed of it before."""
    vision, canvas = model.config.vision_config, (BATCH, LENGTH)
    side = 2 * vision.pooling_kernel_size
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    given = {
        "pixel_values": torch.rand(BATCH, side * side, 3 * vision.patch_size**2, generator=generator),
        "image_position_ids": places.expand(BATCH, -1, -1),
    }
    spot = torch.full((BATCH, 4), model.config.image_token_id)
    return {
        **given,
        "input_ids": torch.cat([spot, _tokens(model, (BATCH, LENGTH), generator)], dim=1),
        "decoder_input_ids": _tokens(model, canvas, generator),
        "self_conditioning_logits": torch.randn(*canvas, _vocabulary(model), generator=generator),
    }


def _evolla(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Evolla: a protein beside the text, and masks of both."""
    ids, protein = (_tokens(model, (BATCH, LENGTH), generator) for _ in range(2))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "protein_input_ids": protein,
        "protein_attention_mask": torch.ones_like(protein),
    }


def _granite_docling(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Granite Docling: images in tiles, with a mask of those that are none."""
    vision = model.config.vision_config
    tiles = torch.rand(BATCH, 2, vision.num_channels, vision.image_size, vision.image_size, generator=generator)
    given = {"pixel_values": tiles * 2 - 1, "pixel_attention_mask": torch.ones(BATCH, 2, dtype=torch.bool)}
    return {**given, **_text(model, ["input_ids"], given, generator)}


def _dots3_note(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """dots3 note: an image and a sound an example, and how long the sounds are."""
    audio, frames = model.config.audio_config, 32
    return {
        **_images(model, inspect.signature(model.forward).parameters, generator),
        "input_features": torch.randn(BATCH, audio.feature_size, frames, generator=generator),
        "chunk_sample_lengths": torch.full((BATCH,), frames * audio.hop_length),
    }


def _detr(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """DETR: an image large enough to be more than one place at the end of its backbone."""
    return {"pixel_values": torch.rand(BATCH, model.config.num_channels, 96, 96, generator=generator) * 2 - 1}


def _lxmert(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """LXMERT: features of things that were seen, and their boxes."""
    config = model.config
    return {
        "visual_feats": torch.randn(BATCH, GRID, config.visual_feat_dim, generator=generator),
        "visual_pos": torch.rand(BATCH, GRID, config.visual_pos_dim, generator=generator),
    }


def _visual_bert(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """VisualBERT: features of things that were seen."""
    return {
        "visual_embeds": torch.randn(BATCH, GRID, model.config.visual_embedding_dim, generator=generator),
        "visual_attention_mask": torch.ones(BATCH, GRID),
        "attention_mask": torch.ones(BATCH, LENGTH),
    }


#: Parts that an image comes in, between the batch and the channels.
_PARTS: dict[str, tuple[int, ...]] = {
    "idefics2": (1,), "idefics3": (2,), "smolvlm": (2,), "llava_next": (5,), "llava_next_video": (5,),
    "llava_onevision": (5,), "granite4_vision": (5,), "modernvbert": (1,), "ultravbert": (1,), "perception_lm": (1,),
}  # fmt: skip
#: Types whose patches are small images.
_UNFOLDED = {"paddleocr_vl", "kimi_k25"}
#: Types with features of a sound by number and time; all others have time first.
_MEL_FIRST = {
    "whisper", "voxtral_encoder", "voxtral_realtime_encoder", "qwen2_audio_encoder", "qwen3_asr_encoder",
    "audioflamingo3_encoder", "glmasr_encoder", "musicflamingo_encoder", "qwen2_5_omni_audio_encoder",
    "qwen3_omni_moe_audio_encoder",
}  # fmt: skip
#: Types that take the sizes of images which come whole.
_SIZED = {"emu3", "mistral3", "lighton_ocr"}
#: Types whose sound is made from the text.
_DEAF = {"pop2piano"}
#: Types whose encoder reads text beside its main input.
_BOTH = {"instructblip", "instructblipvideo", "blip-2"}
#: Types whose mask is one of features, not of frames.
_UNMASKED = {"granite_speech", "granite_speech_plus"}
#: Types that take sound in channels.
_CHANNELED = {"vibevoice", "vibevoice_asr"}
#: Types that are called with text alone: what else they take is not made here.
_TEXT_ONLY = {"fuyu", "musicflamingo", "neomme"}
#: Types that generate no text, whatever their class says.
_NO_GENERATION = {
    "blt", "diffusion_gemma", "kyutai_speech_to_text", "musicgen", "musicgen_decoder", "musicgen_melody",
    "musicgen_melody_decoder", "pop2piano", "vibevoice", "voxtral_realtime",
}  # fmt: skip

_SPECIAL: dict[str, Any] = {
    "gemma3n": _gemma3n,
    "Blip2ForImageTextRetrieval": _blip_2_retrieval,
    "detr": _detr,
    "lxmert": _lxmert,
    "visual_bert": _visual_bert,
    "idefics": _idefics,
    "inkling_mm_model": _inkling,
    "instructblip": _instructblip,
    "instructblipvideo": _instructblip,
    "kosmos-2": _kosmos,
    "kosmos-2.5": _kosmos25,
    "led": _longformer,
    "longformer": _longformer,
    "luke": _luke,
    "moss_transcribe_diarize": _moss,
    "phi4_multimodal": _phi4,
    "trocr": _trocr,
    "minicpm_ocr": _minicpm,
    "minicpmv4_6": _minicpm,
    "minicpmv4_7": _minicpm,
    "molmo2": _molmo,
    "pi0": _pi0,
    "pix2struct": _pix2struct,
    "udop": _udop,
    "dia": _dia,
    "kyutai_speech_to_text": _kyutai,
    "mllama": _mllama,
    "diffusion_gemma": _diffusion_gemma,
    "Dots3NoteForConditionalGeneration": _dots3_note,
    "evolla": _evolla,
    "granite_docling": _granite_docling,
    "qwen2_5_omni_thinker": _seen_and_heard,
    "qwen2_audio": _qwen2_audio,
    "videoprism": _videoprism,
    "qwen3_omni_moe_thinker": _seen_and_heard,
    "voxtral_realtime": _voxtral_realtime,
    "MusicgenForCausalLM": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "musicgen": _codebooks,
    "musicgen_melody": _codebooks,
}
