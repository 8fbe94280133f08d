"""Marks on tensors that describe how they are sharded, and their checks; the results of operations do not have them.

A layer marks its output with the placement of its features, for losses and for layers that need all features. A tag of
:class:`RegisterParallelDim` asserts an assumption of the consumer of a tensor. Neither changes the results of a layer.
"""

from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import Tensor, nn

from shardconv.distributed import Axis
from shardconv.plan.placement import Placement

#: The attribute of a column parallel layer's output that holds the placement of its features.
_PLACEMENT = "_shardconv_features"


def mark_sharded_output(output: Tensor, placement: Placement) -> None:
    """Store on a layer's output how it is sharded; the results of operations on it do not have the mark.

    Args:
        output: this rank's shard of the output, [*, local features].
        placement: placement of the output features; its dim is ignored.
    """
    if (
        placement.num_ranks > 1 and not torch.compiler.is_compiling()
    ):  # a compiled graph does not keep attributes of tensors
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


Tensors = TypeVar("Tensors", Tensor, list[Tensor], tuple[Tensor, ...])

#: The attribute of a tensor that holds its tag.
_TAG = "parallel_dim"


def get_parallel_dim(tensor: Tensor) -> int | None:
    """The dim along which a tensor is tagged as sharded; None if it is tagged as replicated, or not tagged."""
    return getattr(tensor, _TAG, None)


def check_tag(
    tensor: Tensor, allowed: Collection[int | None], axis: Axis, describe: Callable[[], str], name: str = "input"
) -> None:
    """Check the tag of a tensor against the assumptions of its consumer.

    Does nothing on one rank, where sharded and replicated are the same, and in a compiled graph, which is without tags.

    Args:
        tensor: of any shape; without a tag it passes.
        allowed: dims of ``tensor``, from 0, along which it may be sharded; None if it may be replicated.
        axis: the ranks over which it is sharded or replicated.
        describe: returns the name of the consumer for the message.
        name: name of the tensor in the message.

    Raises:
        ValueError: if the tag is not one of ``allowed``.
    """
    if axis.size == 1 or torch.compiler.is_compiling() or not hasattr(tensor, _TAG):
        return
    dim = get_parallel_dim(tensor)
    if (dim if dim is None else dim % max(tensor.dim(), 1)) not in allowed:
        raise ValueError(
            f"{describe()}: {name} of shape {list(tensor.shape)} is tagged as {_describe(dim)} "
            f"(expected {' or '.join(map(_describe, allowed))}): correct its RegisterParallelDim, or pass the tensor "
            f"that the tag describes"
        )


def _describe(dim: int | None) -> str:
    return "replicated" if dim is None else f"sharded along dim {dim}"


class RegisterParallelDim(nn.Module):
    """Tag each tensor that passes as sharded along ``dim``, or as replicated.

    Parallel layers and losses raise if the tag of a tensor that they receive contradicts their assumptions. Linear
    layers check their input; embeddings, their ids; cross entropy, its logits, target and class weights; and
    :class:`~shardconv.layers.ParallelDropout`, its input.

    Args:
        dim: 0, 1 or -1: the dim that is sharded over the ranks of the tensor axis; None: every rank holds the full
            tensor.

    Raises:
        ValueError: if ``dim`` is another value, or if the input of forward is neither a tensor nor a list or tuple of
            tensors, or a tensor does not have this dim.

    Example:
        >>> get_parallel_dim(RegisterParallelDim(dim=0)(torch.zeros(3)))
        0
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        if dim not in (None, 0, 1, -1):
            raise ValueError(f"dim is not supported (got {dim!r}, expected None, 0, 1 or -1)")
        self.dim = dim

    def forward(self, tensors: Tensors) -> Tensors:
        """Tag the tensors, of any shape that has the dim, and return the same object."""
        tagged = [tensors] if isinstance(tensors, Tensor) else tensors
        if not isinstance(tagged, list | tuple) or not all(isinstance(tensor, Tensor) for tensor in tagged):
            raise ValueError(f"input is a {type(tensors).__name__} (expected a tensor, or a list or tuple of tensors)")
        for tensor in tagged:
            if self.dim is not None and not -tensor.dim() <= self.dim < tensor.dim():
                raise ValueError(f"input of shape {list(tensor.shape)} does not have dim {self.dim}")
        for tensor in tagged:
            setattr(tensor, _TAG, self.dim)
        return tensors

    def extra_repr(self) -> str:
        """The dim."""
        return f"dim={self.dim}"
