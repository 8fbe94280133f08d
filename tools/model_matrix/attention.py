"""The sharding of a model's attention modules, for docs/models.md."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardconv.plan.families.loading import load_family
from shardconv.plan.plan import Plan, TensorPlan

#: Classes of attention modules (without their submodules), and of modules with a state of fixed size.
_ATTENTION = re.compile(r"\w*(Attention|Attn)\w*(?<!Residual)(?<!Norm)(?<!Output)(?<!Projection)(?<!Projector)")
_STATE = re.compile(
    r"\w*(Mixer|DeltaNet|DeltaAttention|\wLinearAttention|LightningAttention|RwkvSelfAttention|LSTMLayer|RecurrentBlock"
    r"|ShortConv|MambaLayer)"
)
#: Styles of modules that compute all features on every rank.
_FULL_OUTPUT = ("colwise_gather_output", "gathered", "replicate", "embedding_colwise_gather_output")


def attention_kinds(model: nn.Module, plan: Plan) -> tuple[str, list[str]]:
    """The sharding of attention, and the reasons why some of it is gathered.

    Args:
        model: a model of transformers.
        plan: the plan of its tensors in memory.

    Returns:
        The model's kinds: ``heads``, ``latent`` (heads over a latent that every rank holds), ``state`` (a state
        of fixed size, whose heads or channels are sharded) and ``gathered``, and the reasons of the families for the
        last, also where it depends on the number of ranks; "" for a family without a reason.
    """
    kinds, reasons = set(), set()
    models = plan.rules.models if plan.rules else ()
    undivided = {name for model in models for name, unit in model.family.units.items() if unit.shard_if_divisible}
    for module, matrices in _modules(model, plan):
        is_gathered = all(matrix.style in _FULL_OUTPUT for matrix in matrices)
        if is_gathered or any(undivided.intersection(matrix.units) for matrix in matrices):
            families = {matrix.reason.origin.removeprefix("family ").partition(",")[0] for matrix in matrices}
            reasons |= {load_family(family).gathered for family in families}
        if is_gathered:
            kinds.add("gathered")
        elif _STATE.fullmatch(type(module).__name__):
            kinds.add("state")
        else:
            kinds.add("latent" if _has_latent(module) else "heads")
    return ", ".join(kind for kind in ("heads", "latent", "state", "gathered") if kind in kinds), sorted(reasons)


def _modules(model: nn.Module, plan: Plan) -> Iterator[tuple[nn.Module, list[TensorPlan]]]:
    """The innermost attention modules, with the plans of their matrices."""
    for name, module in model.named_modules():
        inside = [type(one).__name__ for one in module.modules()]
        if not _is_attention(inside[0]) or any(map(_is_attention, inside[1:])):
            continue
        named = [(f"{name}.{own}", parameter) for own, parameter in module.named_parameters()]
        if matrices := [plan.tensors[own] for own, one in named if one.dim() > 1 and own in plan.tensors]:
            yield module, matrices


def _is_attention(name: str) -> bool:
    return bool(_ATTENTION.fullmatch(name) or _STATE.fullmatch(name))


def _has_latent(module: Any) -> bool:
    return any("kv_lora_rank" in vars(one) for one in (module, getattr(module, "config", module)))
