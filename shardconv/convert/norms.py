"""Norms over sharded features or heads: each computes what the unsharded norm computes over all of them."""

from typing import Any

import torch
from torch import Tensor, nn

from shardconv.convert.modules import Sharded
from shardconv.distributed import Axis, copy_to_tp, gather_from_tp, reduce_from_tp
from shardconv.layers.sharding import ParallelModule, take_shard
from shardconv.plan.placement import Placement, intervals


class GlobalRMSNorm(Sharded):
    """A root mean square norm over sharded features; one number per row is all-reduced.

    With m the mean of squares over all features and l over the rank's, the module's own output is multiplied by
    sqrt((l + eps) / (m + eps)).
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., features / tp] to the same."""
        placement = self.placements["weight"]
        eps: Any = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        squares = hidden_states.float().pow(2).sum(-1, keepdim=True)
        held = sum(piece.size for pieces in placement.ranks for piece in intervals(pieces))  # copies too, not padding
        total = copy_to_tp(reduce_from_tp(squares, group=self.axis), group=self.axis)
        own, full = squares / hidden_states.shape[-1], total / held
        normed: Tensor = super().forward(hidden_states)
        return (normed * ((own + eps) / (full + eps)).sqrt()).to(normed.dtype)


class GlobalLayerNorm(Sharded):
    """A layer norm over sharded features; two numbers per row are all-gathered."""

    def set_up(self, axis: Axis, **options: Any) -> None:
        """See :class:`Sharded`.

        Raises:
            ValueError: if the features of a rank are padded: padding would count in means.
        """
        super().set_up(axis, **options)
        if any(placement.is_padded for placement in self.placements.values()):
            raise ValueError(
                f"{self.name_in_model}: a layer norm over padded features: use a tp size that divides the heads"
            )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., features / tp] to the same."""
        eps: Any = self.eps
        features = hidden_states.float()
        own = torch.stack([features.mean(-1), features.var(-1, correction=0)], -1)
        of_all = copy_to_tp(gather_from_tp(own.unsqueeze(-1), group=self.axis), group=self.axis)
        means, variances = of_all.unbind(-2)
        mean = means.mean(-1, keepdim=True)
        variance = (variances + (means - mean) ** 2).mean(-1, keepdim=True)
        normed = ((features - mean) * (variance + eps).rsqrt()).to(hidden_states.dtype)
        for name, combine in (("weight", torch.mul), ("bias", torch.add)):
            if self._parameters.get(name) is not None:
                normed = combine(normed, self.shard(name))
        return normed


class GroupedRMSNorm(Sharded):
    """A gated root mean square norm over groups of features; a rank has whole groups, or an even part of one.

    A norm over part of a group is corrected as in :class:`GlobalRMSNorm`.

    Attributes:
        group_size: local features of a group.
        whole_group: features of a group.
    """

    group_size: int
    whole_group: int

    def set_up(self, axis: Axis, **options: Any) -> None:
        """See :class:`Sharded`; sets the local group size.

        Raises:
            ValueError: if a rank has neither whole groups nor an even part of one.
        """
        super().set_up(axis, **options)
        held = self.placements["weight"].local_size(self.axis.rank)
        if held % self.group_size and self.group_size % held:
            raise ValueError(
                f"{self.name_in_model}: {held} features per rank are neither groups of {self.group_size} nor an even "
                f"part of one"
            )
        self.whole_group, self.group_size = self.group_size, min(self.group_size, held)

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """[..., features / tp] to the same."""
        normed: Tensor = super().forward(hidden_states, gate)
        if self.group_size == self.whole_group:
            return normed
        eps: Any = self.variance_epsilon
        gated = hidden_states.float()
        if gate is not None:
            gated = gated * nn.functional.silu(gate.float())
        squares = gated.pow(2).sum(-1, keepdim=True)
        groups = self.placements["weight"].size // self.whole_group
        own = self.axis.rank * groups // self.axis.size
        of_all = nn.functional.pad(squares, (own, groups - 1 - own))
        total = copy_to_tp(reduce_from_tp(of_all, group=self.axis), group=self.axis)[..., own : own + 1]
        scale = (squares / self.group_size + eps) / (total / self.whole_group + eps)
        return (normed * scale.sqrt()).to(normed.dtype)


class NormsOfHeads(ParallelModule):
    """Layer norms in a list, one for each head; a rank computes those of its heads.

    Attributes:
        heads: the placement of the heads.
        norms: the norms of all heads.
    """

    heads: Placement
    norms: nn.ModuleList

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[batch, heads of the rank, tokens, head_dim] to the same."""
        norm: Any = self.norms[0]
        normed = nn.functional.layer_norm(hidden_states, norm.normalized_shape, eps=norm.eps)
        for parameter, combine in (("weight", torch.mul), ("bias", torch.add)):
            if getattr(norm, parameter) is not None:
                every = torch.stack([getattr(one, parameter) for one in self.norms])
                local = take_shard(copy_to_tp(every, group=self.axis), self.heads, self.axis.rank)
                normed = combine(normed, local.unsqueeze(1))
        return normed
