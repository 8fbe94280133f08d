"""Single-file checkpoints of diffusion models, whose tensors have other names than those that diffusers gives them."""

from itertools import product

from shardconv.checkpoint.sources.source import Source
from shardconv.support.errors import SourceError

#: Tensors that are together in files with original names only, to the class of diffusers that converts these; the first
#: that are found.
_CLASSES = {
    "double_stream_modulation_img.lin.weight": "Flux2Transformer2DModel",
    "distilled_guidance_layer.layers.0.in_layer.weight": "ChromaTransformer2DModel",
    "double_blocks.0.img_attn.qkv.weight": "FluxTransformer2DModel",
    "double_blocks.0.img_attn_qkv.weight": "HunyuanVideoTransformer3DModel",
    "joint_blocks.0.x_block.attn.qkv.weight": "SD3Transformer2DModel",
    "joint_transformer_blocks.0.attn.w1q.weight": "AuraFlowTransformer2DModel",
    "double_layers.0.attn.w1q.weight": "AuraFlowTransformer2DModel",
    "noise_refiner.0.attention.qkv.weight layers.0.adaLN_modulation.0.weight": "ZImageTransformer2DModel",
    "noise_refiner.0.attention.qkv.weight": "Lumina2Transformer2DModel",
    "audio_patchify_proj.weight": "LTX2VideoTransformer3DModel",
    "patchify_proj.weight": "LTXVideoTransformer3DModel",
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
    for (names, class_name), prefix in product(_CLASSES.items(), _PREFIXES):
        found = [f"{prefix}{name}" for name in names.split()]
        if all(name in source.specs for name in found):
            raise SourceError(
                f"{source.path}: holds a diffusion model with its original names (such as {found[0]}): convert it to "
                f"the names of diffusers in Python, and pass the new folder:\nfrom diffusers import {class_name}\n"
                f"{class_name}.from_single_file({str(source.paths[0])!r}).save_pretrained('{source.name}-diffusers')"
            )
