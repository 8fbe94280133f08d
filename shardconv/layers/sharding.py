"""Placements of tensors in memory: a rank's shard of a full tensor, and the full tensor out of the shards.

Owns what all parallel layers have in common: which of their parameters are cut and how. The placements are those of
:mod:`shardconv.plan.placement`, so a layer and a rank's file agree by construction.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import wrap_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from shardconv.distributed import Axis, gather_from_tp, reduce_from_tp, scatter_to_tp
from shardconv.plan.placement import IndivisibleError, Interval, Placement, Unit, cut, intervals

#: The placement and the ranks of each parameter that is a shard; apart from it, so that it is saved as torch.Tensor.
_described: Any = WeakTensorKeyDictionary()


def public_function(name: str) -> Any:
    """A function that ``shardconv`` exports, for methods that call it; layers do not depend on its module."""
    return getattr(import_module("shardconv"), name)


def description(tensor: Tensor) -> tuple[Placement, Axis] | None:
    """How a parameter of a parallel layer is cut, and over which ranks; None of any other tensor."""
    found: tuple[Placement, Axis] | None = _described.get(tensor)
    return found


def even_placement(dim: int, sizes: tuple[int, ...], tp: int, *, pad: bool = False, what: str) -> Placement:
    """The placement of a dim that consists of parts of these sizes, each shared evenly.

    Args:
        dim: the dim that is cut.
        sizes: of the parts, one behind the other.
        tp: number of ranks.
        pad: fill up what does not divide with zeros.
        what: what the dim is, for the message.

    Raises:
        ValueError: if a part does not divide.
    """
    try:
        return cut(dim, [Unit(size, pad=pad) for size in sizes], tp)
    except IndivisibleError as error:
        raise ValueError(f"{what}: {error} (tp)") from error


def take_shard(full: Tensor, placement: Placement, rank: int) -> Tensor:
    """A rank's shard of a full tensor: its pieces along the placement's dim, behind each other.

    Contiguous; a view of the full tensor where that is.
    """
    if placement.dim is None:
        return full
    dim = placement.dim
    pieces = placement.ranks[rank]
    # a shard of padding alone still depends on the full tensor, whose backward pass may be a collective
    parts = [] if intervals(pieces) else [full.narrow(dim, 0, 0)]
    for piece in pieces:
        if isinstance(piece, Interval):
            parts.append(full.narrow(dim, piece.start, piece.size))
        else:
            parts.append(full.new_zeros((*full.shape[:dim], piece.size, *full.shape[dim + 1 :])))
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def _first_argument(shard: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
    return (shard,)


# What a parameter is given to, and what then applies an autograd.Function, is a function of torch's for those who watch
# these: the Function is none, and would leave them half of what it does.
_seen = wrap_torch_function(_first_argument)


@_seen
def gather_shards(shard: Tensor, placement: Placement, axis: Axis, *, dim: int | None = None) -> Tensor:
    """The full tensor, in its original order and without padding; differentiable.

    Args:
        shard: this rank's shard.
        placement: how the full tensor is cut.
        axis: the ranks that hold the shards.
        dim: the dim that is cut, where it is not the placement's: outputs are cut along their last dim as a weight is
            along its first.
    """
    if placement.dim is None:
        return shard
    dim = placement.dim if dim is None else dim
    gathered = gather_from_tp(shard, dim, group=axis)
    runs = _runs(placement)
    if len(runs) == 1:
        return gathered.narrow(dim, *runs[0]) if runs[0][1] != gathered.shape[dim] else gathered
    return torch.cat([gathered.narrow(dim, start, size) for start, size in runs], dim)


def scatter_shards(full: Tensor, placement: Placement, axis: Axis, *, dim: int) -> Tensor:
    """This rank's shard of a replicated tensor; differentiable: backward gathers.

    Args:
        full: the full tensor, the same on every rank.
        placement: how it is sharded.
        axis: the ranks.
        dim: the dim of ``full`` that is cut.
    """
    if placement.is_padded or len(_runs(placement)) > 1:
        along = replace(placement, dim=dim % full.dim())
        full = torch.cat([take_shard(full, along, rank) for rank in range(axis.size)], dim)
    return scatter_to_tp(full, dim, group=axis)


@_seen
def share_copies(shard: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """A shard as it is. Its gradient becomes the sum of those of all ranks that hold the same elements.

    Args:
        shard: this rank's shard.
        placement: how the full tensor is cut, with copies.
        axis: the ranks.
    """
    return shard if axis.size == 1 else _Share.apply(shard, placement, axis)


@_seen
def keep_padding(shard: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """A shard as it is. Its gradient becomes zero in the padding, which so stays zero in training.

    Args:
        shard: this rank's shard.
        placement: how the full tensor is sharded, with padding.
        axis: the ranks.
    """
    return _KeepPadding.apply(shard, placement, axis.rank)


class _KeepPadding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, placement: Placement, rank: int) -> Tensor:
        ctx.placement, ctx.rank = placement, rank
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _KeepPadding.apply(_without_padding(grad, ctx.placement, ctx.rank), ctx.placement, ctx.rank), None, None


def _without_padding(shard: Tensor, placement: Placement, rank: int) -> Tensor:
    """A copy of a rank's shard with zeros in the padding."""
    assert placement.dim is not None
    copied, position = shard.clone(), 0
    for piece in placement.ranks[rank]:
        if not isinstance(piece, Interval):
            copied.narrow(placement.dim, position, piece.size).zero_()
        position += piece.size
    return copied


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, placement: Placement, axis: Axis) -> Tensor:
        ctx.placement, ctx.axis = placement, axis
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SumShared.apply(grad, ctx.placement, ctx.axis), None, None


class _SumShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, placement: Placement, axis: Axis) -> Tensor:
        ctx.placement, ctx.axis = placement, axis
        full = reduce_from_tp(_put_shard(shard, placement, axis.rank), group=axis)
        return take_shard(full, placement, axis.rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Share.apply(grad, ctx.placement, ctx.axis), None, None


def _put_shard(shard: Tensor, placement: Placement, rank: int) -> Tensor:
    """A full tensor with a rank's shard in its place, and zeros elsewhere."""
    assert placement.dim is not None
    dim, position = placement.dim, 0
    full = shard.new_zeros((*shard.shape[:dim], placement.size, *shard.shape[dim + 1 :]))
    for piece in placement.ranks[rank]:
        if isinstance(piece, Interval):
            full.narrow(dim, piece.start, piece.size).copy_(shard.narrow(dim, position, piece.size))
        position += piece.size
    return full


@lru_cache
def _runs(placement: Placement) -> tuple[tuple[int, int], ...]:
    """The full dim in its order, as (start, size) in what the ranks' shards are behind each other."""
    found = []
    position = 0
    for pieces in placement.ranks:
        for piece in pieces:
            if isinstance(piece, Interval):
                found.append((piece.start, position, piece.size))
            position += piece.size
    runs: list[tuple[int, int]] = []
    end = 0
    for start, at, size in sorted(found):
        if (skip := end - start) >= size:
            continue  # a copy
        begin, length = at + skip, size - skip
        if runs and sum(runs[-1]) == begin:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((begin, length))
        end = start + size
    return tuple(runs)


class ParallelModule(nn.Module):
    """A module some of whose parameters are shards.

    Attributes:
        axis: the ranks that hold the shards.
        dim: the dim that is cut, as the layer counts; None where none is.
        placements: name of each parameter of its own that is a shard, to its placement.
        name_in_model: of a converted layer, for messages; in the module that was converted.
    """

    name_in_model: str = ""
    axis: Axis
    dim: int | None
    placements: dict[str, Placement]

    def set_up(self, axis: Axis) -> None:
        """Set all but the parameters, from the sizes and the ``dim`` that are there; a plain layer becomes this so."""
        raise NotImplementedError

    def describe_layer(self) -> str:
        """The layer in a message: its name, if it was converted, and its sizes."""
        return f"{self.name_in_model} ({self})" if self.name_in_model else str(self)

    def own_tensor(self, name: str) -> Tensor:
        """A parameter or buffer as the module holds it, also while its forward finds another tensor in its place."""
        own: Tensor | None = self._parameters.get(name)
        own = self._buffers.get(name) if own is None else own
        found: Tensor = getattr(self, name) if own is None else own  # a plain attribute, as of torch's pruning
        return found

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the full tensor of a parameter."""
        shape, placement = list(self.own_tensor(name).shape), self.placements.get(name)
        if placement is not None and placement.dim is not None:
            shape[placement.dim] = placement.size
        return tuple(shape)

    def gather_parameter(self, name: str) -> Tensor:
        """The full tensor of a parameter, in its original order; differentiable. All ranks have to call it."""
        placement = self.placements.get(name)
        return self.own_tensor(name) if placement is None else gather_shards(self.shard(name), placement, self.axis)

    def shard(self, name: str) -> Tensor:
        """A parameter of the layer, to compute with: copies have one gradient, and padding has none."""
        parameter, placement = self.own_tensor(name), self.placements.get(name)
        if placement is None:
            return parameter
        if placement.is_padded:
            parameter = keep_padding(parameter, placement, self.axis)
        return share_copies(parameter, placement, self.axis) if placement.has_copies else parameter

    @property
    def master_weight(self) -> Tensor:
        """The full weight, in its original order; differentiable. All ranks have to ask for it."""
        return self.gather_parameter("weight")

    @property
    def master_bias(self) -> Tensor | None:
        """The full bias, or None; differentiable. All ranks have to ask for it."""
        return None if self.bias is None else self.gather_parameter("bias")

    def describe_parameters(self) -> None:
        """Say how each shard is cut, for those who meet the parameter without its module: see :func:`description`."""
        for name, placement in self.own_shards():
            _described[self.own_tensor(name)] = placement, self.axis

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has parameters of its own."""
        super().__setstate__(state)
        self.describe_parameters()

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        """What moves or converts parameters may make new ones."""
        super()._apply(*arguments, **options)
        self.describe_parameters()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *arguments: Any
    ) -> None:
        error_messages: list[str] = arguments[-1]
        if local_metadata.get("is_full"):
            for name, placement in self.own_shards():
                key = prefix + name
                full = state_dict.get(key)
                if full is None:
                    continue
                if tuple(full.shape) != (expected := self.full_shape(name)):
                    error_messages.append(
                        f"size mismatch for {key}: copying a param with shape {full.shape} from checkpoint, the shape "
                        f"in current model is {torch.Size(expected)}."
                    )
                    state_dict[key] = self.own_tensor(name)  # said already
                else:
                    shard = take_shard(full, placement, self.axis.rank)
                    is_kept = local_metadata.get("assign_to_params_buffers", False)
                    state_dict[key] = shard.clone() if is_kept else shard  # a view would keep the full tensor alive
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
        self.describe_parameters()  # assign=True puts others in their place

    def own_shards(self) -> Iterator[tuple[str, Placement]]:
        """Name and placement of each shard that is there."""
        return (item for item in self.placements.items() if self._parameters.get(item[0]) is not None)
