"""LoRA adapters that PEFT makes of tiny models, with random values in all tensors."""

import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

#: Name of a case to the model of models.py and the settings of the adapter. Together they have all that is supported.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
            "use_rslora": True,
            "rank_pattern": {"k_proj": 6, r"layers\.0\.mlp\.up_proj": 2},
            "alpha_pattern": {"self_attn.q_proj": 5},
            "modules_to_save": ["norm"],
        },
    ),
    "llama-dora": (
        "llama",
        {"target_modules": ["embed_tokens", "k_proj", "o_proj", "up_proj", "down_proj", "lm_head"], "use_dora": True},
    ),
    "llama-regex": (
        "llama-biases",
        {"target_modules": r".*\.self_attn\.(q|o)_proj", "lora_bias": True, "lora_alpha": 12, "bias": "lora_only"},
    ),
    "gpt2": (
        "gpt2",
        {"target_modules": ["c_attn", "c_proj", "c_fc", "wte"], "fan_in_fan_out": True, "bias": "all"},
    ),
    "gpt2-dora": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    "phi3": ("phi3", {"target_modules": "all-linear"}),
    "deepseek": (
        "deepseek_v3",
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"], "layers_to_transform": [1]},
    ),
}


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function of PEFT without the warnings of PEFT and transformers about each other."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*arguments, **options)

    return call


@quiet
def write_adapter(folder: Path, source: Path, **settings: Any) -> Path:
    """Write an adapter of the checkpoint ``source``."""
    model = peft.get_peft_model(unadapted(source), peft.LoraConfig(r=4, **{"init_lora_weights": False, **settings}))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:  # magnitudes are positive
            parameter.data.normal_(std=0.2, generator=generator)
        elif parameter.requires_grad:
            parameter.data.mul_(torch.rand(parameter.shape, generator=generator) + 0.5)
    model.save_pretrained(folder)
    return folder


@quiet
def adapted(source: Path, adapter: Path) -> peft.PeftModel:
    """The unsharded model with an adapter, by PEFT."""
    return peft.PeftModel.from_pretrained(unadapted(source), adapter).eval()


def unadapted(source: Path) -> transformers.PreTrainedModel:
    """The unsharded model without an adapter."""
    (architecture,) = transformers.AutoConfig.from_pretrained(source).architectures
    return getattr(transformers, architecture).from_pretrained(source, dtype="auto")
