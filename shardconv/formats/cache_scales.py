"""Scales of a KV cache with one element per KV head, which are sharded with the heads of the projection."""

import re
from collections.abc import Mapping
from math import prod

from shardconv.plan.grid import NO_DIM, Grid, GridDim
from shardconv.plan.plan import TensorSpec, logical_tensors
from shardconv.support.errors import PlanError

#: A scale or zero point of keys or values.
_SCALE = re.compile(r"(?P<attention>.*attn[^.]*\.)(?P<of>[kv])_(?:scale|zero_point)")


def cache_grids(tensors: Mapping[str, TensorSpec], config: Mapping[str, object]) -> dict[str, Grid]:
    """The grids of scales of a KV cache with several elements, over the weight of the projection.

    Args:
        tensors: name to dtype, shape and grid; those of quantized layers have one.
        config: the contents of config.json.

    Raises:
        PlanError: if a scale does not have one element per KV head.
    """
    scales = {name: match for name in tensors if (match := _SCALE.fullmatch(name)) and prod(tensors[name].shape) != 1}
    matrices = logical_tensors(tensors) if scales else {}
    heads = _kv_heads(config)
    grids = {}
    for name, match in scales.items():
        weight = f"{match['of']}_proj.weight"
        matrix, shape = matrices.get(match["attention"] + weight), tensors[name].shape
        if matrix is None or not heads or matrix.shape[0] % heads or shape not in ((heads,), (heads, 1, 1)):
            raise PlanError(
                f"{name} has shape {list(shape)}, which is not supported (expected one element, or one per KV head, "
                f"of which there are {heads or 'an unknown number'}, beside a {weight}): quantize the KV cache with "
                f"one scale per layer"
            )
        dims = (GridDim(0, matrix.shape[0] // heads, 1, "KV head"), *(NO_DIM,) * (len(shape) - 1))
        grids[name] = Grid(name.removeprefix(match["attention"]), weight, matrix.shape, dims, ("output", "input"))
    return grids


def _kv_heads(config: Mapping[str, object]) -> int:
    """The number of KV heads by the config; 0 if it has none."""
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, Mapping) else config
    heads = fields.get("num_key_value_heads", fields.get("num_attention_heads"))
    return heads if type(heads) is int and heads > 0 else 0
