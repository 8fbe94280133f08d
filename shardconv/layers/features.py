"""Mark layer outputs whose features (the last dim) are sharded, and check inputs of layers that need all features."""

from collections.abc import Callable

import torch
from torch import Tensor

from shardconv.plan.placement import Placement

#: The attribute of a column parallel layer's output that holds the placement of its features.
_PLACEMENT = "_shardconv_features"


def mark_sharded_output(output: Tensor, placement: Placement) -> None:
    """Store on a layer's output how it is sharded; the results of operations on it do not have the mark.

    Args:
        output: this rank's shard of the output, [*, local features].
        placement: placement of the output features; its dim is ignored.
    """
    if placement.tp > 1 and not torch.compiler.is_compiling():  # a compiled graph does not keep attributes of tensors
        setattr(output, _PLACEMENT, placement)


def output_placement(tensor: Tensor) -> Placement | None:
    """The placement of the features of a layer's direct output; None if they are not sharded, or for other tensors."""
    return None if torch.compiler.is_compiling() else getattr(tensor, _PLACEMENT, None)


def is_shard_of(width: int, features: int, tp: int) -> bool:
    """Whether ``width`` is the size of one rank's shard of ``features``."""
    return width != features and width == -(-features // tp)


def check_features(input: Tensor, features: int, tp: int, describe: Callable[[], str]) -> None:
    """Check that an input has all features.

    Args:
        input: [*, features].
        features: number of features that the layer needs.
        tp: tensor parallel size.
        describe: returns the layer's name for the message.

    Raises:
        ValueError: if the input has another number of features.
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
