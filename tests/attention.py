"""How the attention of a model is sharded, module by module: for docs/models.md."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardconv.plan.family_file import load_family
from shardconv.plan.plan import Plan, TensorPlan

#: Classes of modules that attend, but for parts of them, or that keep a state of fixed size instead.
_ATTENTION = re.compile(r"\w*(Attention|Attn|MLA)\w*(?<!Residual)(?<!Norm)(?<!Output)(?<!Projection)(?<!Projector)")
_STATE = re.compile(
    r"\w*(Mixer|DeltaNet|DeltaAttention|\wLinearAttention|LightningAttention|RwkvSelfAttention|LSTMLayer|RecurrentBlock"
    r"|ShortConv|MambaLayer)"
)
#: Styles whose module computes with all features on every rank.
_WHOLE = ("colwise_gather_output", "gathered", "replicate", "embedding_colwise_gather_output")


def attention_kinds(model: nn.Module, plan: Plan) -> tuple[str, list[str]]:
    """How attention is sharded, and why some is not.

    Args:
        model: a model of transformers.
        plan: for its tensors in memory.

    Returns:
        The kinds that it has of ``heads``, ``latent`` (heads over a latent that every rank holds), ``state`` (a state
        of fixed size, whose heads or channels are sharded) and ``gathered``, and the reasons of the families for the
        last; "" for families that give none.
    """
    kinds, reasons = set(), set()
    for module, matrices in _modules(model, plan):
        if all(matrix.style in _WHOLE for matrix in matrices):
            kinds.add("gathered")
            reasons.add(load_family(matrices[0].reason.origin.removeprefix("family ")).gathered)
        elif _STATE.fullmatch(type(module).__name__):
            kinds.add("state")
        else:
            kinds.add("latent" if _has_latent(module) else "heads")
    return ", ".join(kind for kind in ("heads", "latent", "state", "gathered") if kind in kinds), sorted(reasons)


def _modules(model: nn.Module, plan: Plan) -> Iterator[tuple[nn.Module, list[TensorPlan]]]:
    """Modules that attend and have none in them that do, with the plans of their matrices."""
    for name, module in model.named_modules():
        if not _is_attention(module) or any(map(_is_attention, [*module.modules()][1:])):
            continue
        named = [(f"{name}.{own}", parameter) for own, parameter in module.named_parameters()]
        if matrices := [plan.tensors[own] for own, one in named if one.dim() > 1 and own in plan.tensors]:
            yield module, matrices


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    is_named = _ATTENTION.fullmatch(name) or _STATE.fullmatch(name)
    return bool(is_named) and any(parameter.dim() > 1 for parameter in module.parameters())


def _has_latent(module: Any) -> bool:
    return any("kv_lora_rank" in vars(one) for one in (module, getattr(module, "config", module)))
