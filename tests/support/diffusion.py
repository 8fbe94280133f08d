"""Small pipelines of diffusers (Flux, Stable Diffusion 3, Wan), with random weights and the demo model's tokenizer."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, IPAdapterTimeImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from transformers import (
    AutoTokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from shardconv.hf.package import quiet
from tests.support.checkpoints import DEMO

#: Features of text encoders, and of each head of a transformer.
_WIDTH, _HEAD_DIM, _HEADS = 32, 16, 4
_VOCABULARY = 2048
#: Arguments of a call of each pipeline, without the prompt.
CALLS: dict[str, dict[str, Any]] = {
    "flux": {"height": 16, "width": 16, "max_sequence_length": 16},
    "sd3": {"height": 32, "width": 32, "max_sequence_length": 16},
    "wan": {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16},
}


def _clip(kind: type[Any]) -> Any:
    config = CLIPTextConfig(
        vocab_size=_VOCABULARY, hidden_size=_WIDTH, intermediate_size=64, num_attention_heads=_HEADS,
        num_hidden_layers=2, projection_dim=_WIDTH, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    return kind(config)


def _t5() -> Any:
    return T5EncoderModel(
        T5Config(vocab_size=_VOCABULARY, d_model=_WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=_HEADS)
    )


def _tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(DEMO, model_max_length=16)
    made.pad_token = made.pad_token or made.eos_token
    return made


def _vae(**settings: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(4,), layers_per_block=1, latent_channels=4, norm_num_groups=1, use_quant_conv=False,
        use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5, **settings,
    )  # fmt: skip


def _flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=_HEAD_DIM, num_attention_heads=_HEADS,
        joint_attention_dim=_WIDTH, pooled_projection_dim=_WIDTH, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), _vae(sample_size=32), _clip(CLIPTextModel), _tokenizer(), _t5(),
        _tokenizer(), transformer,
    )  # fmt: skip


def _sd3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=_HEAD_DIM,
        num_attention_heads=_HEADS, caption_projection_dim=_HEADS * _HEAD_DIM, joint_attention_dim=_WIDTH,
        pooled_projection_dim=2 * _WIDTH, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    clip = [part for _ in range(2) for part in (_clip(CLIPTextModelWithProjection), _tokenizer())]
    return diffusers.StableDiffusion3Pipeline(
        transformer, diffusers.FlowMatchEulerDiscreteScheduler(), _vae(sample_size=32), *clip, _t5(), _tokenizer()
    )


def _wan() -> Any:
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=_HEADS, attention_head_dim=_HEAD_DIM, in_channels=16, out_channels=16, text_dim=_WIDTH,
        freq_dim=64, ffn_dim=64, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return diffusers.WanPipeline(
        _tokenizer(), _t5(), vae, diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0), transformer
    )


_PIPELINES = {"flux": _flux, "sd3": _sd3, "wan": _wan}


def write_diffusion(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write a pipeline as diffusers does."""
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(0)
        _PIPELINES[name]().to(dtype=dtype).save_pretrained(folder)
    return folder


#: Features of images, and arguments of a call with them; Stable Diffusion 3 gets features of no image before them.
_IMAGE = 8
IMAGES: dict[str, dict[str, Any]] = {
    "flux": {
        "ip_adapter_image_embeds": [torch.ones(1, 1, _IMAGE)],
        "negative_ip_adapter_image_embeds": [torch.zeros(1, 1, _IMAGE)],
    },
    "sd3": {"ip_adapter_image_embeds": torch.linspace(0, 1, 2 * 3 * _IMAGE).view(2, 3, _IMAGE)},
}


def ip_adapter(name: str, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _ip_adapter(name)


def _ip_adapter(name: str) -> dict[str, dict[str, torch.Tensor]]:
    """An IP adapter with random weights, with the names of published ones."""
    width = _HEADS * _HEAD_DIM
    if name == "flux":
        projection = ImageProjection(_IMAGE, _WIDTH, 4).state_dict()
        processors = [FluxIPAdapterAttnProcessor(width, _WIDTH)]
    else:
        projection = IPAdapterTimeImageProjection(_IMAGE, width, 64, heads=1, num_queries=2).state_dict()
        attentions = 3  # two in the first layer
        processors = [SD3IPAdapterJointAttnProcessor2_0(width, width, _HEAD_DIM, 64) for _ in range(attentions)]
    states = [(number, one.state_dict()) for number, one in enumerate(processors)]
    layers = {f"{number}.{key.replace('ip.0.', 'ip.')}": value for number, one in states for key, value in one.items()}
    return {
        "image_proj": {key.replace("image_embeds", "proj"): value for key, value in projection.items()},
        "ip_adapter": layers,
    }


def load_ip_adapter(pipeline: Any, name: str, seed: int = 0) -> None:
    """Load an IP adapter into a pipeline as users do, with a scale of 0.7."""
    encoder = {"flux": "image_encoder_pretrained_model_name_or_path", "sd3": "image_encoder_folder"}[name]
    with quiet():
        pipeline.load_ip_adapter(ip_adapter(name, seed), weight_name="", **{encoder: None})
    pipeline.set_ip_adapter_scale(0.7)


def latents(pipeline: Any, name: str, *, steps: int = 2, **call: Any) -> torch.Tensor:
    """The latents of a prompt."""
    pipeline.set_progress_bar_config(disable=True)
    seeded = torch.Generator().manual_seed(0)
    given = {**CALLS[name], "num_inference_steps": steps, "output_type": "latent", "generator": seeded, **call}
    found: torch.Tensor = pipeline("An exception is a class", return_dict=False, **given)[0]
    return found
