"""Detect the tensors of quantized checkpoints, and refuse tensors that no quantization settings describe.

A quantized layer that is treated as unquantized would have the right shape and wrong values.
"""

import re
from collections.abc import Mapping
from math import prod

from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import ConfigError, option

#: Files with quantization settings besides config.json: of ModelOpt, AutoGPTQ, AutoAWQ and Quanto.
SETTINGS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quanto_qmap.json")

#: The key of quantization settings in config.json.
SETTINGS_KEY = "quantization_config"
#: The key in settings of torchao for the metadata of the source files, which are part of the settings.
METADATA_KEY = "safetensors_metadata"

#: Last components of the names of tensors that only quantized layers have, by quantization format.
_COMPANIONS = {
    "GPTQ or AWQ": r"qweight|qzeros|g_idx",
    "compressed-tensors": r"weight_(packed|shape|zero_point|g_idx|global_scale)|input_(global_scale|zero_point)",
    "FP8, INT8 or NVFP4": r"(weight|input)_scale(_inv|_2)?",
    "MXFP4": r"(gate_up|down)_proj_(blocks|scales)",
    "bitsandbytes": r"SCB|(nested_)?(absmax|quant_map)|quant_state\..+|weight_format",
    "Quanto": r"weight\._(data|scale|shift)",
    "torchao": r"_\w+_(qdata|scale|zero_point|scale_and_zero|per_tensor_scale|act_(pre|quant)_scale)",
}
_COMPANION = re.compile(rf"(?:^|.*\.)(?:{'|'.join(_COMPANIONS.values())})")

#: Scales of a KV cache: tensors of one element in an attention module.
CACHE_SCALE = re.compile(r".*attn[^.]*\.(?:.*\.)?([kv]|kv_cache|[kv]_proj\.output)_scale")

#: Dtypes that only quantized tensors have.
_DTYPES = re.compile(r"F8_.*|F4|F6_.*")
#: Integer dtypes: indices and masks, except in the weight of a layer (``W_q`` in HQQ), which is then quantized.
_INTEGERS = re.compile(r"[IU]\d+")


def check_quantization(tensors: Mapping[str, TensorSpec], config: Mapping[str, object] | None) -> None:
    """Refuse quantized tensors without a grid: no quantization settings describe them.

    Args:
        tensors: name to dtype, shape and grid.
        config: the contents of config.json, with quantization settings of another file if config.json has none; None
            without a config.

    Raises:
        PlanError: if there is such a tensor.
    """
    settings = (config or {}).get(SETTINGS_KEY)
    for name, spec in tensors.items():
        if spec.grid is None and is_quantized(name, spec):
            raise ConfigError(*_refusal(name, spec, has_settings=settings is not None))


def is_quantized(name: str, spec: TensorSpec) -> bool:
    """Whether dtype or name of a tensor occur only in quantized checkpoints."""
    if _DTYPES.fullmatch(spec.dtype) or _COMPANION.fullmatch(name):
        return True
    if prod(spec.shape) == 1 and CACHE_SCALE.fullmatch(name):
        return True
    is_matrix = name.endswith((".weight", ".W_q")) and len(spec.shape) > 1
    return is_matrix and _INTEGERS.fullmatch(spec.dtype) is not None


def _refusal(name: str, spec: TensorSpec, *, has_settings: bool) -> tuple[str, str]:
    """The problem and the remedy."""
    tensor = f"{name} ({spec.dtype} {list(spec.shape)})"
    if has_settings:
        return (
            f"{tensor}: only quantized checkpoints have such a tensor, and it is not part of the format that "
            f"quantization_config describes",
            f"pass {option(config='FILE')} with the settings of this checkpoint",
        )
    files = ", ".join(SETTINGS_FILES)
    return (
        f"{tensor}: only quantized checkpoints have such a tensor, and no quantization_config describes it "
        f"(config.json, {files})",
        f"pass {option(config='FILE')} with the quantization_config of this checkpoint, or split the unquantized one",
    )
