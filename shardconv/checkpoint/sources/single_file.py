"""Single-file checkpoints of diffusion models, whose tensors have other names than those that diffusers gives them."""

from shardconv.checkpoint.sources.source import Source
from shardconv.support.errors import SourceError

#: A tensor that only the original names have to the class of diffusers that converts them; the first that is found.
_CLASSES = {
    "double_stream_modulation_img.lin.weight": "Flux2Transformer2DModel",
    "distilled_guidance_layer.layers.0.in_layer.weight": "ChromaTransformer2DModel",
    "double_blocks.0.img_attn.qkv.weight": "FluxTransformer2DModel",
    "double_blocks.0.img_attn_qkv.weight": "HunyuanVideoTransformer3DModel",
    "joint_blocks.0.x_block.attn.qkv.weight": "SD3Transformer2DModel",
    "joint_transformer_blocks.0.attn.w1q.weight": "AuraFlowTransformer2DModel",
    "double_layers.0.attn.w1q.weight": "AuraFlowTransformer2DModel",
    "noise_refiner.0.attention.qkv.weight": "Lumina2Transformer2DModel",
    "blocks.0.attn.qkv_x.weight": "MochiTransformer3DModel",
    "blocks.0.cross_attn.norm_k.weight": "WanTransformer3DModel",
    "input_blocks.0.0.weight": "UNet2DConditionModel",
}
#: What may precede these names in a file that also has a VAE and text encoders.
_PREFIXES = ("", "model.diffusion_model.")


def refuse_original_names(source: Source) -> None:
    """Refuse a diffusion model with its original names, which cannot be planned.

    Raises:
        SourceError: if it is one, with the lines that convert it.
    """
    named = ((f"{prefix}{name}", kind) for name, kind in _CLASSES.items() for prefix in _PREFIXES)
    name, class_name = next((one for one in named if one[0] in source.specs), ("", ""))
    if name:
        raise SourceError(
            f"{source.path}: holds a diffusion model with its original names (such as {name}): convert it to the names "
            f"of diffusers in Python, and pass the new folder:\nfrom diffusers import {class_name}\n"
            f"{class_name}.from_single_file({str(source.paths[0])!r}).save_pretrained('{source.name}-diffusers')"
        )
