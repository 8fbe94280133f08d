"""Inputs of single model types, which neither the signature of ``forward`` nor the config determines."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardconv.hf.inputs.audio import audio_features
from shardconv.hf.inputs.configs import BATCH, GRID, LENGTH, pair_of, part_of
from shardconv.hf.inputs.images import image_inputs
from shardconv.hf.inputs.text import random_tokens, text_inputs, vocabulary_size


def _codebooks(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """MusicGen's decoder: one row of tokens for each codebook."""
    decoder = part_of(model.config, "decoder")
    return {"input_ids": random_tokens(model, (BATCH * decoder.num_codebooks, LENGTH), generator)}


def _dia(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Dia's decoder: a token of each codebook at every place."""
    channels = model.config.decoder_config.num_channels
    return {
        "input_ids": random_tokens(model, (BATCH, LENGTH), generator),
        "decoder_input_ids": random_tokens(model, (BATCH, LENGTH, channels), generator),
    }


def _kyutai(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Kyutai's: a token of text and one of each codebook at every place."""
    return {"input_ids": random_tokens(model, (BATCH, LENGTH, model.config.num_codebooks + 1), generator)}


def _voxtral_realtime(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Voxtral Realtime: as much sound as there are tokens."""
    audio, frames = model.config.audio_config, 2 * model.config.downsample_factor * LENGTH
    sound = torch.randn(BATCH, audio.num_mel_bins, frames, generator=generator)
    return {"input_ids": random_tokens(model, (BATCH, LENGTH), generator), "input_features": sound}


def _qwen2_audio(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Qwen2-Audio: a place for every fourth frame, and masks of both."""
    frames = 2 * model.config.audio_config.max_source_positions
    spot = torch.full((BATCH, frames // 4), model.config.audio_token_index)
    ids = torch.cat([spot, random_tokens(model, (BATCH, LENGTH), generator)], dim=1)
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
        "input_ids": random_tokens(model, (BATCH, LENGTH), generator),
    }


def _idefics(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """IDEFICS: images which every token of the text sees."""
    side = model.config.vision_config.image_size
    return {
        "pixel_values": torch.rand(BATCH, 1, 3, side, side, generator=generator) * 2 - 1,
        "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.int64),
        "input_ids": random_tokens(model, (BATCH, LENGTH), generator),
    }


def _kosmos(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Kosmos-2: a mask tells the places of the image."""
    side, count = model.config.vision_config.image_size, model.config.latent_query_num
    mask = torch.zeros(BATCH, LENGTH + count, dtype=torch.int64)
    mask[:, 2 : 2 + count] = 1
    return {
        "pixel_values": torch.rand(BATCH, 3, side, side, generator=generator) * 2 - 1,
        "image_embeds_position_mask": mask,
        "input_ids": random_tokens(model, (BATCH, LENGTH + count), generator),
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
        "input_ids": torch.cat([spot, random_tokens(model, (BATCH, LENGTH), generator)], dim=1),
        "mm_token_type_ids": torch.cat([torch.ones_like(spot), torch.zeros(BATCH, LENGTH, dtype=torch.int64)], dim=1),
    }


def _inkling2(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Inkling 2: two places of the text for each image, which are as many squares of patches."""
    vision = model.config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    spot = torch.full((BATCH, 2), model.config.image_token_id)
    return {
        "pixel_values": torch.rand(2 * BATCH, side, side, vision.num_channels, generator=generator) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, 1, 2]] * BATCH),
        "input_ids": torch.cat([spot, random_tokens(model, (BATCH, LENGTH), generator)], dim=1),
    }


def _muse_spark(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Muse Spark: an image and a sound for each text, of one place and of two."""
    vision, audio = model.config.vision_config, model.config.audio_config
    patches = vision.merge_size**2
    width = vision.patch_temporal * 3 * vision.patch_size**2
    seen = torch.full((BATCH, 1), model.config.image_token_id)
    heard = torch.full((BATCH, 2), model.config.audio_token_id)
    return {
        "pixel_values": torch.rand(BATCH * patches, width, generator=generator) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, vision.merge_size, vision.merge_size]] * BATCH),
        "input_values": torch.randn(BATCH, 2 * audio.samples_per_token, generator=generator),
        "input_ids": torch.cat([seen, heard, random_tokens(model, (BATCH, LENGTH), generator)], dim=1),
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
        "input_ids": torch.cat([spot, random_tokens(model, (BATCH, LENGTH), generator)], dim=1),
        "state": torch.randn(BATCH, config.max_state_dim, generator=generator),
        "noise": torch.randn(BATCH, config.chunk_size, config.max_action_dim, generator=generator),
        "timestep": torch.rand(BATCH, generator=generator),
    }


def _pix2struct(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Pix2Struct: patches, each after its row and column."""
    return {
        "flattened_patches": _numbered_patches(model.config.vision_config.patch_embed_hidden_size, generator),
        "decoder_input_ids": random_tokens(model, (BATCH, LENGTH), generator),
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
    shape = (BATCH, vision.num_frames, vision.num_channels, *pair_of(vision.image_size))
    return {
        "pixel_values_videos": torch.rand(*shape, generator=generator) * 2 - 1,
        "input_ids": random_tokens(model, (BATCH, LENGTH), generator),
    }


def _udop(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """UDOP: text with its boxes on the page, and the page."""
    boxes = torch.rand(BATCH, LENGTH, 4, generator=generator).sort(dim=-1).values
    size = pair_of(model.config.image_size)
    return {
        "input_ids": random_tokens(model, (BATCH, LENGTH), generator),
        "bbox": boxes,
        "pixel_values": torch.rand(BATCH, model.config.num_channels, *size, generator=generator) * 2 - 1,
        "decoder_input_ids": random_tokens(model, (BATCH, LENGTH), generator),
    }


def _instructblip(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """InstructBLIP: the query transformer reads text, too."""
    side, count, config = model.config.vision_config.image_size, model.config.num_query_tokens, model.config
    frames = (2,) if hasattr(config, "video_token_index") else ()
    ids = random_tokens(model, (BATCH, LENGTH), generator)
    token = config.video_token_index if frames else config.image_token_index
    spot = torch.full((BATCH, count * (2 if frames else 1)), token)
    return {
        "pixel_values": torch.rand(BATCH, *frames, 3, side, side, generator=generator) * 2 - 1,
        "qformer_input_ids": random_tokens(model, (BATCH, LENGTH), generator),
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
        "input_ids": random_tokens(model, (BATCH, LENGTH + count), generator),
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
        "input_ids": random_tokens(model, (BATCH, LENGTH), generator),
        "encoder_hidden_states": torch.randn(BATCH, GRID, width, generator=generator),
    }


def _longformer(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Longformer: text whose first token sees all, and is seen by all."""
    ids = random_tokens(model, (BATCH, LENGTH), generator)
    mask = torch.zeros_like(ids)
    mask[:, 0] = 1
    both = {"decoder_input_ids": random_tokens(model, ids.shape, generator)} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "global_attention_mask": mask, **both}


def _luke(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """LUKE: text with two entities in it, the second of them longer."""
    places = torch.tensor([[[1, -1], [3, 4]]]).expand(BATCH, -1, -1)
    return {
        "input_ids": random_tokens(model, (BATCH, LENGTH), generator),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64),
        "entity_ids": random_tokens(model, (BATCH, 2), generator),
        "entity_position_ids": places,
        "entity_attention_mask": torch.ones(BATCH, 2, dtype=torch.int64),
    }


def _ids_after(model: Any, places: Mapping[int, int], generator: torch.Generator) -> Tensor:
    """Tokens of text after so many places for each of some special tokens."""
    spots = [torch.full((BATCH, count), token) for token, count in places.items()]
    return torch.cat([*spots, random_tokens(model, (BATCH, LENGTH), generator)], dim=1)


def _blip_2_retrieval(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """BLIP-2 beside text: the places of the image come before the text, and there is a mask of both."""
    side, config = model.config.vision_config.image_size, model.config
    spot = torch.full((BATCH, config.num_query_tokens), config.image_token_index)
    ids = torch.cat([spot, random_tokens(model, (BATCH, LENGTH), generator)], dim=1)
    return {
        "pixel_values": torch.rand(BATCH, 3, side, side, generator=generator) * 2 - 1,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def _seen_and_heard(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """An image and a sound an example."""
    names, audio = inspect.signature(model.forward).parameters, model.config.audio_config
    sound = audio_features(model.config, audio, generator)
    mask = torch.ones(BATCH, sound.shape[2], dtype=torch.int64)
    return {**image_inputs(model, names, generator), "input_features": sound, "feature_attention_mask": mask}


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
        "input_ids": torch.cat([spot, random_tokens(model, (BATCH, LENGTH), generator)], dim=1),
        "decoder_input_ids": random_tokens(model, canvas, generator),
        "self_conditioning_logits": torch.randn(*canvas, vocabulary_size(model), generator=generator),
    }


def _evolla(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Evolla: a protein beside the text, and masks of both."""
    ids, protein = (random_tokens(model, (BATCH, LENGTH), generator) for _ in range(2))
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
    return {**given, **text_inputs(model, ["input_ids"], given, generator)}


def _dots3_note(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """dots3 note: an image and a sound an example, and how long the sounds are."""
    audio, frames = model.config.audio_config, 32
    return {
        **image_inputs(model, inspect.signature(model.forward).parameters, generator),
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


SPECIAL: dict[str, Any] = {
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
    "inkling2": _inkling2,
    "muse_spark": _muse_spark,
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
