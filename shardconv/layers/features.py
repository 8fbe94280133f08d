"""Activations whose last dim, the features, is sharded: which layer outputs are, and inputs that should not be.

Owns what is known of an activation, and the error for a shard in place of all features. Knows nothing of conversion.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shardconv.plan.placement import Placement

#: The attribute of an output of a column parallel layer that has the placement of its features.
_PLACEMENT = "_shardconv_features"


def mark_sharded_output(output: Tensor, placement: Placement) -> None:
    """Remember how a layer's output is sharded; what is computed from the output does not inherit it.

    Args:
        output: this rank's shard of the output.
        placement: of the output features; its dim is not read.
    """
    if placement.tp > 1 and not torch.compiler.is_compiling():  # a compiled graph has no tensors to remember
        setattr(output, _PLACEMENT, placement)


def output_placement(tensor: Tensor) -> Placement | None:
    """How a layer's own output is sharded; None if it is not, or the tensor is not such an output."""
    return None if torch.compiler.is_compiling() else getattr(tensor, _PLACEMENT, None)


def is_shard_of(width: int, features: int, tp: int) -> bool:
    """Whether ``width`` is what a rank has of ``features``."""
    return width != features and width == -(-features // tp)


def check_features(input: Tensor, features: int, tp: int, describe: Callable[[], str]) -> None:
    """Check that an input has all features.

    Args:
        input: [*, features].
        features: that the layer needs.
        tp: number of ranks.
        describe: gives the layer, for the message.

    Raises:
        ValueError: if the input has other features.
    """
    width = input.shape[-1]
    if width == features:
        return
    remedy = ""
    if is_shard_of(width, features, tp):
        remedy = (
            f": it is one rank's shard of {features} features on {tp} ranks. Convert the layer that computes it with "
            f"gather_output=True, or this layer with dim=0"
        )
    raise ValueError(
        f"{describe()}: input of shape {list(input.shape)} has {width} features (expected {features}){remedy}"
    )
