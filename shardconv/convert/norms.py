"""Norms over sharded features or heads, with the results of the unsharded norms."""

from typing import Unpack

import torch
from torch import Tensor, nn

from shardconv.convert.modules import Sharded, ShardedOptions
from shardconv.distributed import Axis, copy_to_tp, gather_from_tp, reduce_from_tp
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Placement, intervals


class GlobalRMSNorm(Sharded):
    """A root mean square norm over sharded features; one number per row is all-reduced.

    With m the mean of squares over all features and l over the rank's, the module's own output is multiplied by
    sqrt((l + eps) / (m + eps)).
    """

    eps: float | None  # of torch.nn.RMSNorm; None for the default of the dtype
    variance_epsilon: float  # the name of eps in most models
    normalized_shape: tuple[int, ...]  # of torch.nn.RMSNorm

    def set_up(self, axis: Axis, **options: Unpack[ShardedOptions]) -> None:
        """See :class:`Sharded`; sets the local number of features of torch's class."""
        super().set_up(axis, **options)
        if hasattr(self, "normalized_shape"):
            self.normalized_shape = self.placements["weight"].shard_shape(self.normalized_shape, axis.rank)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [..., features / tp]."""
        placement = self.placements["weight"]
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        eps = torch.finfo(dtype).eps if eps is None else eps  # as torch, which computes in this dtype
        squares = hidden_states.to(dtype).pow(2).sum(-1, keepdim=True)
        held = sum(one.size for entries in placement.ranks for one in intervals(entries))  # replicas, and no padding
        total = copy_to_tp(reduce_from_tp(squares, group=self.axis), group=self.axis)
        own, full = squares / hidden_states.shape[-1], total / held
        normed: Tensor = super().forward(hidden_states)
        return (normed * ((own + eps) / (full + eps)).sqrt()).to(normed.dtype)


class GlobalLayerNorm(Sharded):
    """A layer norm over sharded features. All-gathers two numbers per row, which exclude padding.

    Mean and variance of all features follow from the mean and variance of each rank: see Chan, Golub and LeVeque,
    "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """

    eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [..., local features]."""
        placement = next(iter(self.placements.values()))
        counts = [sum(entry.size for entry in intervals(entries)) for entries in placement.ranks]
        features = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        held = _without_padding(features, placement, self.axis.rank)
        mean = held.sum(-1, keepdim=True) / max(held.shape[-1], 1)
        own = torch.stack([mean, (held - mean).pow(2).sum(-1, keepdim=True)], -2)
        means, squares = copy_to_tp(gather_from_tp(own, group=self.axis), group=self.axis).unbind(-2)
        weights = means.new_tensor(counts)
        mean = (weights * means).sum(-1, keepdim=True) / sum(counts)
        variance = (squares + weights * (means - mean) ** 2).sum(-1, keepdim=True) / sum(counts)
        normed = ((features - mean) * (variance + self.eps).rsqrt()).to(hidden_states.dtype)
        for name, combine in (("weight", torch.mul), ("bias", torch.add)):
            if self._parameters.get(name) is not None:
                normed = combine(normed, self.shard(name))
        return normed


def _without_padding(features: Tensor, placement: Placement, rank: int) -> Tensor:
    """Remove padding from the features of a rank, [..., local features]."""
    held = [features.narrow(-1, start, interval.size) for interval, start in placement.local_intervals(rank)]
    return torch.cat(held, -1) if held else features[..., :0]


class GroupedRMSNorm(Sharded):
    """A gated root mean square norm over groups of features; a rank has full groups, or an equal part of one.

    A norm over part of a group is corrected as in :class:`GlobalRMSNorm`.

    Attributes:
        group_size: local features of a group.
        full_group_size: features of a group.
        variance_epsilon: see the module's own class.
    """

    group_size: int
    full_group_size: int
    variance_epsilon: float

    def set_up(self, axis: Axis, **options: Unpack[ShardedOptions]) -> None:
        """See :class:`Sharded`; sets the local group size.

        Raises:
            ValueError: if a rank has neither full groups nor an equal part of one.
        """
        super().set_up(axis, **options)
        held = self.placements["weight"].local_size(self.axis.rank)
        if held % self.group_size and self.group_size % held:
            raise ValueError(
                f"{self.name_in_model}: {held} features per rank are neither groups of {self.group_size} nor an equal "
                f"part of one"
            )
        self.full_group_size, self.group_size = self.group_size, min(self.group_size, held)

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize [..., features / tp]."""
        normed: Tensor = super().forward(hidden_states, gate)
        if self.group_size == self.full_group_size:
            return normed
        gated = hidden_states.float()
        if gate is not None:
            gated = gated * nn.functional.silu(gate.float())
        squares = gated.pow(2).sum(-1, keepdim=True)
        groups = self.placements["weight"].size // self.full_group_size
        own = self.axis.rank * groups // self.axis.size
        of_all = nn.functional.pad(squares, (own, groups - 1 - own))
        total = copy_to_tp(reduce_from_tp(of_all, group=self.axis), group=self.axis)[..., own : own + 1]
        scale = (squares / self.group_size + self.variance_epsilon) / (
            total / self.full_group_size + self.variance_epsilon
        )
        return (normed * scale.sqrt()).to(normed.dtype)


class NormsOfHeads(ParallelModule):
    """Layer norms in a list, one for each head; a rank computes the norms of its heads.

    Attributes:
        heads: the placement of the heads.
        norms: the norms of all heads.
    """

    heads: Placement
    norms: nn.ModuleList

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [batch, local heads, tokens, head_dim]."""
        norm = self.norms[0]
        assert isinstance(norm, nn.LayerNorm)
        normed = nn.functional.layer_norm(hidden_states, norm.normalized_shape, eps=norm.eps)
        for parameter, combine in (("weight", torch.mul), ("bias", torch.add)):
            if getattr(norm, parameter) is not None:
                every = torch.stack([getattr(one, parameter) for one in self.norms])
                local = take_shard(copy_to_tp(every, group=self.axis), self.heads, self.axis.rank)
                normed = combine(normed, local.unsqueeze(1))
        return normed
