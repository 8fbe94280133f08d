"""Head counts and head size by the names and shapes of tensors, for checkpoints without a config."""

import re
from collections.abc import Collection, Mapping
from math import gcd

from shardconv.plan.families.matcher import pattern_for
from shardconv.plan.plan import TensorSpec
from shardconv.plan.tensor_placement import HEAD_FIELDS
from shardconv.support.errors import PlanError, option

#: The largest head size in common use. If tp is a power of two, a boundary between heads of this size is also one
#: between heads of 32, 64, 80, 96, 128, 192 or any other size that is not divisible by a higher power of two. Where the
#: number of rows is not a multiple of it, this holds for the highest power of two that divides the number of rows.
_ASSUMED_HEAD_DIM = 512

#: Layers whose output is the input of another layer, by name: planning by name requires that their sizes are equal.
_PAIRS = (("q_proj", "o_proj"), ("q_proj", "out_proj"), ("up_proj", "down_proj"), ("fc1", "fc2"), ("w1", "w2"))


def with_heads(
    tensors: Mapping[str, TensorSpec], config: Mapping[str, object] | None, head_dim: int | None, towers: list[str]
) -> tuple[dict[str, object], str, str]:
    """Add head counts and head size to a config, by the names and shapes of tensors.

    With several towers, head counts and size of the config or of one tower do not apply to all, and are not used.

    Returns:
        The config; a sentence on how the head size is inferred or assumed; and the assumption, or "".
    """
    sentence = uncertain = ""
    cause, remedy = "no config.json", "--head-dim or --config"
    if len(towers) > 1:
        config = {field: value for field, value in (config or {}).items() if field not in HEAD_FIELDS}
        cause = f"it may differ between {' and '.join(towers)}"
        remedy = "--head-dim, or --rules FILE"
    if head_dim is None and len(towers) < 2 and (inferred := _head_dim_by_shape(tensors)):
        head_dim, source = inferred
        sentence = f"head_dim = {head_dim}, from the shape of {source}"
    elif head_dim is None and (rows := _projected_rows(tensors)):
        head_dim = gcd(_ASSUMED_HEAD_DIM, *rows)
        uncertain = f"head_dim is unknown ({cause}): assuming it is at most {head_dim}"
        sentence = f"{uncertain}. Pass {remedy}."
    if head_dim is None:
        return dict(config or {}), "", ""
    heads = {
        field: spec.shape[0] // head_dim
        for field, suffix in (("num_attention_heads", "q_proj.weight"), ("num_key_value_heads", "k_proj.weight"))
        if (spec := _first(tensors, suffix)) is not None and spec.shape
    }
    return {**heads, **(config or {}), "head_dim": head_dim}, sentence, uncertain


def _head_dim_by_shape(tensors: Mapping[str, TensorSpec]) -> tuple[int, str] | None:
    """The head size by the shape of a norm over single heads, and the name of the norm; None if there is none.

    The size of ``inv_freq`` does not determine it, as rotary embeddings may cover only part of a head.
    """
    query = _first(tensors, "q_proj.weight")
    for name, spec in tensors.items():
        is_norm = name.endswith(".q_norm.weight") and len(spec.shape) == 1
        if is_norm and query is not None and query.shape and 0 < spec.shape[0] < query.shape[0]:
            return spec.shape[0], name
    return None


def _projected_rows(tensors: Mapping[str, TensorSpec]) -> set[int]:
    """The numbers of rows of the query and key projections, all of which are multiples of the head size."""
    suffixes = ("q_proj.weight", "k_proj.weight")
    return {spec.shape[0] for name, spec in tensors.items() if name.endswith(suffixes) and spec.shape}


def towers_in(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """The patterns of modules with attention heads, such as encoder and decoder, or text and vision."""
    return sorted({pattern_for(name) for name in tensors if name.endswith(".q_proj.weight")})


def _first(tensors: Mapping[str, TensorSpec], suffix: str) -> TensorSpec | None:
    return next((spec for name, spec in tensors.items() if name.endswith(suffix)), None)


def check_pairs(tensors: Mapping[str, TensorSpec], by_names: Collection[str]) -> None:
    """Check that the output features of layers are the input features of the layers that follow by name.

    Args:
        tensors: name to dtype and shape.
        by_names: the tensors that are planned by name; pairs without any of them are not checked.

    Raises:
        PlanError: if they differ, so that names do not determine the sharding.
    """
    for name, spec in tensors.items() if by_names else ():
        for producer, consumer in _PAIRS:
            if not name.endswith(f".{producer}.weight"):
                continue
            partner = re.sub(rf"{producer}\.weight$", f"{consumer}.weight", name)
            other = tensors.get(partner) if name in by_names or partner in by_names else None
            if other is not None and other.shape[-1:] != spec.shape[-2:-1]:
                raise PlanError(
                    f"{name} of shape {list(spec.shape)}: its output features are not the input features of {partner} "
                    f"of shape {list(other.shape)}, so the names do not determine the sharding: pass {option('rules')}"
                )
