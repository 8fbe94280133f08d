"""Detect quantized checkpoints by their settings and tensors, and refuse unsupported quantization.

A quantized layer that is treated as unquantized would have the right shape and wrong values.
"""

import re
from collections.abc import Mapping
from math import prod

from shardconv.errors import PlanError
from shardconv.plan.plan import TensorSpec

#: Files with quantization settings besides config.json: those of ModelOpt, AutoGPTQ and AutoAWQ.
SETTINGS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")

#: The key of quantization settings in config.json.
SETTINGS_KEY = "quantization_config"

#: Suffix of the names of block scales, and the block size if the config has none: those of DeepSeek-V3.
SCALE, DEFAULT_BLOCK = ".weight_scale_inv", (128, 128)

#: Last components of the names of tensors that only quantized layers have, by quantization format.
_COMPANIONS = {
    "GPTQ or AWQ": r"qweight|qzeros|g_idx",
    "compressed-tensors": r"weight_(packed|shape|zero_point|g_idx|global_scale)|input_(global_scale|zero_point)",
    "FP8, INT8 or NVFP4": r"(weight|input)_scale(_inv|_2)?",
    "MXFP4": r"(gate_up|down)_proj_(blocks|scales)",
    "bitsandbytes": r"SCB|(nested_)?(absmax|quant_map)|quant_state\..+|weight_format",
    "Quanto": r"weight\._(data|scale|shift)",
}
_COMPANION = re.compile(rf"(?:^|.*\.)(?:{'|'.join(_COMPANIONS.values())})")

#: Scales of a KV cache: tensors of one element in an attention module.
_CACHE_SCALE = re.compile(r".*attn[^.]*\.(?:.*\.)?([kv]|kv_cache|[kv]_proj\.output)_scale")

#: Dtypes that only quantized tensors have.
_DTYPES = re.compile(r"F8_.*|F4|F6_.*")
#: Integer dtypes: indices and masks, except in the weight of a layer (``W_q`` in HQQ), which is then quantized.
_INTEGERS = re.compile(r"[IU]\d+")


def check_quantization(tensors: Mapping[str, TensorSpec], config: Mapping[str, object] | None) -> None:
    """Refuse unsupported quantization, and quantized tensors that no settings describe.

    Args:
        tensors: name to dtype and shape.
        config: the contents of config.json, with quantization settings of another file if config.json has none; None
            without a config.

    Raises:
        PlanError: if the quantization is not supported.
    """
    settings = (config or {}).get(SETTINGS_KEY)
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method not in (None, "fp8"):
        raise PlanError(
            f"quantization {method!r:.60} is not supported (expected FP8 with block scales): split the unquantized "
            f"checkpoint, or ignore a file with settings that do not apply (--ignore FILE)"
        )
    for name, spec in tensors.items():
        is_described = name.endswith((SCALE, ".activation_scale")) or _DTYPES.fullmatch(spec.dtype)
        if is_quantized(name, spec) and not (method == "fp8" and is_described):
            raise PlanError(_refusal(name, spec, has_settings=method is not None))


def is_quantized(name: str, spec: TensorSpec) -> bool:
    """Whether dtype or name of a tensor occur only in quantized checkpoints."""
    if _DTYPES.fullmatch(spec.dtype) or _COMPANION.fullmatch(name):
        return True
    if prod(spec.shape) == 1 and _CACHE_SCALE.fullmatch(name):
        return True
    is_matrix = name.endswith((".weight", ".W_q")) and len(spec.shape) > 1
    return is_matrix and _INTEGERS.fullmatch(spec.dtype) is not None


def _refusal(name: str, spec: TensorSpec, *, has_settings: bool) -> str:
    tensor = f"{name} ({spec.dtype} {list(spec.shape)})"
    if has_settings:
        return f"{tensor}: this tensor is not part of FP8 with block scales, which quantization_config describes"
    files = ", ".join(SETTINGS_FILES)
    return (
        f"{tensor}: only quantized checkpoints have such a tensor, and no quantization_config describes it "
        f"(config.json, {files}): pass --config FILE with the quantization_config of this checkpoint, or split the "
        f"unquantized one"
    )


def block_size(config: Mapping[str, object] | None) -> object:
    """Rows and columns of a block with one scale, as in the config; None if the config does not have them."""
    settings = (config or {}).get(SETTINGS_KEY)
    return settings.get("weight_block_size") if isinstance(settings, dict) else None
