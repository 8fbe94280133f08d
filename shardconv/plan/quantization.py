"""Quantization: which checkpoints are quantized, by their settings or by their tensors, and which are supported.

Owns the refusal of what is not understood: a quantized layer that is taken for an unquantized one has the right shape
and wrong values. Knows no more of files than the names of those that hold settings.
"""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from shardconv.errors import PlanError
from shardconv.plan.plan import TensorSpec

#: Where settings of quantization are, apart from config.json: ModelOpt's, AutoGPTQ's and AutoAWQ's.
SETTINGS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")

#: The key in config.json that holds them.
SETTINGS_KEY = "quantization_config"

#: How the name of a block scale ends, and the block where the config does not give it: DeepSeek-V3's.
SCALE, DEFAULT_BLOCK = ".weight_scale_inv", (128, 128)

#: The last part of the name of a tensor that only quantized layers have, by the format that it belongs to.
_COMPANIONS = {
    "GPTQ or AWQ": r"qweight|qzeros|g_idx",
    "compressed-tensors": r"weight_(packed|shape|zero_point|g_idx|global_scale)|input_(global_scale|zero_point)",
    "FP8, INT8 or NVFP4": r"(weight|input)_scale(_inv|_2)?",
    "MXFP4": r"(gate_up|down)_proj_(blocks|scales)",
    "bitsandbytes": r"SCB|(nested_)?(absmax|quant_map)|quant_state\..+|weight_format",
    "Quanto": r"weight\._(data|scale|shift)",
}
_COMPANION = re.compile(rf"(?:^|.*\.)(?:{'|'.join(_COMPANIONS.values())})")

#: Scales of a KV cache: one number each, in an attention module.
_CACHE_SCALE = re.compile(r".*attn[^.]*\.(?:.*\.)?([kv]|kv_cache|[kv]_proj\.output)_scale")

#: Dtypes that only quantized values have.
_DTYPES = re.compile(r"F8_.*|F4|F6_.*")
#: Integers are indices and masks, except in the weight of a layer (``W_q`` in HQQ).
_INTEGERS = re.compile(r"[IU]\d+")


def check_quantization(tensors: Mapping[str, TensorSpec], config: Mapping[str, Any] | None) -> None:
    """Refuse a quantization that is not supported, and quantized tensors that no settings describe.

    Args:
        tensors: name to dtype and shape.
        config: what config.json holds, with the settings of another file if only that has them; or None.

    Raises:
        PlanError: if the checkpoint is quantized in a way that is not understood.
    """
    settings = (config or {}).get(SETTINGS_KEY)
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method not in (None, "fp8"):
        raise PlanError(
            f"the checkpoint is quantized by {method!r:.60}, which is not supported (expected FP8 with block scales): "
            f"split the unquantized checkpoint, or leave out a file with settings that do not apply (--ignore)"
        )
    for name, spec in tensors.items():
        is_described = name.endswith((SCALE, ".activation_scale")) or _DTYPES.fullmatch(spec.dtype)
        if is_quantized(name, spec) and not (method == "fp8" and is_described):
            raise PlanError(_unexplained(name, spec, has_settings=method is not None))


def is_quantized(name: str, spec: TensorSpec) -> bool:
    """Whether only a quantized checkpoint has such a tensor, by its dtype or by its name."""
    if _DTYPES.fullmatch(spec.dtype) or _COMPANION.fullmatch(name):
        return True
    if prod(spec.shape) == 1 and _CACHE_SCALE.fullmatch(name):
        return True
    is_matrix = name.endswith((".weight", ".W_q")) and len(spec.shape) > 1
    return is_matrix and _INTEGERS.fullmatch(spec.dtype) is not None


def _unexplained(name: str, spec: TensorSpec, *, has_settings: bool) -> str:
    kind = f"{name} ({spec.dtype} {list(spec.shape)})"
    if has_settings:
        return f"{kind}: this tensor is not part of FP8 with block scales, which quantization_config describes"
    files = ", ".join(SETTINGS_FILES)
    return (
        f"{kind}: only quantized checkpoints have such a tensor, and no quantization_config describes it (config.json, "
        f"{files}): pass --config FILE with the quantization_config of this checkpoint, or split the unquantized one"
    )


def block_size(config: Mapping[str, Any] | None) -> Any:  # noqa: ANN401 - as the config has it
    """The size of the blocks that have a scale each, as the config gives it; None where it does not."""
    settings = (config or {}).get(SETTINGS_KEY)
    return settings.get("weight_block_size") if isinstance(settings, dict) else None
