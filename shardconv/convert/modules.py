"""Parallel classes of modules other than linear layers and embeddings, such as convolutions, experts and norms.

Each extends the class of the module that is converted, so that the forward stays the model's own.
"""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypedDict, TypeGuard, Unpack

import torch
from torch import Tensor, nn

from shardconv.distributed import Axis, copy_to_tp, gather_from_tp, reduce_from_tp
from shardconv.distributed.operations import GroupRows, gather_rows, sum_rows
from shardconv.layers.linear import num_replicas
from shardconv.layers.parallel_module import ParallelModule
from shardconv.layers.sharding import take_shard
from shardconv.plan.placement import Placement, intervals
from shardconv.support.errors import PlanError, option

#: The value for each module and name of an attribute of it.
Substitution = Mapping[tuple[nn.Module, str], object]


class _ThreadState(threading.local):
    """The substitution of a thread; a new thread has none."""

    values: Substitution = MappingProxyType({})


current_substitution = _ThreadState()


class Substitutable(nn.Module):
    """A module whose parameters, buffers and children can be substituted.

    Attributes:
        slices: placements of the parameters and buffers whose local slice its forward reads.
    """

    slices: Mapping[str, Placement] = MappingProxyType({})

    def __getattr__(self, name: str) -> Any:  # any attribute, as of nn.Module
        """Return the substitute, else the module's own parameter, buffer or child."""
        found = current_substitution.values.get((self, name))
        return super().__getattr__(name) if found is None else found


class Substituted:
    """A context in which attributes are substituted for the code of this thread, in addition to earlier substitutions.

    Args:
        values: the substitutes; their modules are :class:`Substitutable`.
        without: a module whose earlier substitutions are suspended.
    """

    def __init__(self, values: Substitution, without: nn.Module | None = None) -> None:
        self._values, self._without = values, without

    def __enter__(self) -> None:
        """Add the substitutes to the thread's."""
        self._before = current_substitution.values
        kept = {key: value for key, value in self._before.items() if key[0] is not self._without}
        current_substitution.values = {**kept, **self._values}

    def __exit__(self, *_: object) -> None:
        """Restore the earlier substitutions."""
        current_substitution.values = self._before


class ForwardWithShards(Substitutable):
    """A parallel layer that computes with its shards also while other modules read its full tensors."""

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the layer's own forward, without substitutions of others."""
        with Substituted({}, without=self):
            return super().forward(*inputs, **options)


class ShardedOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Sharded.set_up`.

    Attributes:
        placements: the placement of each parameter that is sharded.
        styles: the style in the plan of each parameter.
        data: the ranks with the same tensor parallel rank in each data group, where these share the experts.
    """

    placements: Mapping[str, Placement]
    styles: Mapping[str, str]
    data: Axis | None


class Sharded(Substitutable, ParallelModule):
    """A module that computes with shards of its own parameters, or with replicated ones on local heads only.

    Attributes:
        styles: the style in the plan of each of its parameters.
        output_is_full: whether its forward all-reduces its products with row parallel parameters.
    """

    styles: Mapping[str, str]
    output_is_full = False

    def set_up(self, axis: Axis, **options: Unpack[ShardedOptions]) -> None:
        """See :meth:`ParallelModule.set_up`."""
        self.axis = axis
        self.placements, self.styles = dict(options.get("placements", {})), dict(options.get("styles", {}))

    @property
    def _always_used(self) -> bool:
        """Whether forward uses other tensors than the stored ones even without gradients."""
        return "gathered" in self.styles.values()

    def forward(self, *inputs: Any, **options: Any) -> Any:  # derived classes have arguments of their own
        """Run the module's own forward, with the tensors of :meth:`substitution`."""
        if not torch.is_grad_enabled() and not self._always_used:
            return super().forward(*inputs, **options)
        used = self.substitution()
        for child in self.children():
            if isinstance(child, ParallelDepthwise):  # forward may read its weight without calling it
                used |= child.substitution()
        with Substituted(used):
            return super().forward(*inputs, **options)

    def substitution(self) -> dict[tuple[nn.Module, str], object]:
        """The tensors that forward uses instead of the parameters."""
        names = [name for name, parameter in self._parameters.items() if parameter is not None]
        return {(self, name): self._used(name) for name in names if name not in self.slices}

    def _used(self, name: str) -> Tensor:
        """Return the tensor that forward uses for a parameter; its gradient is reduced over the ranks."""
        match self.styles.get(name):
            case "gathered":
                return self.gather_parameter(name)
            case "replicated_with_grad_allreduce":
                return copy_to_tp(self.own_tensor(name), group=self.axis)
        return self.shard(name)


class ParallelDepthwise(Sharded):
    """A grouped convolution over the groups of a rank; its bias is sharded in the same way."""

    groups: int
    in_channels: int
    out_channels: int

    def set_up(self, axis: Axis, **options: Unpack[ShardedOptions]) -> None:
        """See :class:`Sharded`; sets the local numbers of groups and channels.

        Raises:
            ValueError: if a shard has part of a group, or the bias is sharded otherwise.
        """
        super().set_up(axis, **options)
        name = self.name_in_model
        ranks = {placement.ranks for placement in self.placements.values()}
        bias = self._parameters["bias"]
        if {placement.dim for placement in self.placements.values()} != {0} or len(ranks) > 1:
            raise ValueError(f"{name}: only the channels of a convolution can be sharded, weight and bias alike")
        entries = ranks.pop()[self.axis.rank]
        rows, columns = self.out_channels // self.groups, self.in_channels // self.groups
        sharded = {"weight"} if bias is None else {"weight", "bias"}
        if any(edge % rows for entry in intervals(entries) for edge in entry) or sharded != set(self.placements):
            raise ValueError(f"{name}: a convolution is split between its groups of {rows} channels, weight and bias")
        self.out_channels = self.placements["weight"].local_size(self.axis.rank)
        self.groups = self.out_channels // rows
        self.in_channels = self.groups * columns


class ParallelExpertLinear(Sharded):
    """A linear layer for each expert, with all weights in one tensor [experts, out_features, in_features]."""

    output_is_full = True

    def forward(self, inputs: Tensor, *others: object) -> Tensor:
        """Map [tokens of all experts, in_features] to local (column parallel) or all (row parallel) out_features."""
        if self.placements["weight"].dim == 2:
            return reduce_from_tp(super().forward(inputs, *others), group=self.axis) / num_replicas(
                self.placements["weight"]
            )
        output: Tensor = super().forward(copy_to_tp(inputs, group=self.axis), *others)
        return output


class AllReducedOutput(Sharded):
    """A module whose output is all-reduced.

    Its replicated parameters are added to the output, as a bias is: only the first rank adds them.
    """

    output_is_full = True

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward; all-reduce the floating-point tensors of its output."""
        return self._summed(partial(reduce_from_tp, group=self.axis), inputs, options)

    def _summed(
        self, reduce: Callable[[Tensor], Tensor], inputs: Sequence[object], options: Mapping[str, object]
    ) -> object:
        """Run the module's own forward, and a function on the floating-point tensors of its output."""
        output = super().forward(*inputs, **options)
        values = output if isinstance(output, tuple) else (output,)
        reduced = tuple(reduce(value) if is_floating_point(value) else value for value in values)
        return reduced if isinstance(output, tuple) else reduced[0]

    @property
    def _always_used(self) -> bool:
        return set(self._parameters) != set(self.placements)

    def _used(self, name: str) -> Tensor:
        if name in self.placements:
            return super()._used(name)
        full = copy_to_tp(self.own_tensor(name), group=self.axis)
        return full if self.axis.rank == 0 else full * 0


class ParallelExperts(AllReducedOutput):
    """Packed experts, each sharded over the ranks, or whole experts on each rank (expert parallel).

    Inputs and outputs are replicated in a data group. With expert parallelism, a rank processes the tokens of all data
    groups. Tokens of experts on other ranks go through its first expert, with weight 0: this saves memory, not
    arithmetic. Gradients of experts are gradients of the sum of the losses of all data groups.

    Attributes:
        data: the ranks with the same tensor parallel rank in each data group; None for one group.
        num_weighted_experts: number of experts with weights; None for all. Others return their input, which only the
            first rank adds.
    """

    num_weighted_experts: int | None = None
    num_experts: int
    data: Axis | None = None

    def set_up(self, axis: Axis, **options: Unpack[ShardedOptions]) -> None:
        """See :class:`Sharded`; expert parallel, sets the local number of experts.

        Raises:
            ValueError: if experts are not chosen by number, or not all tensors have as many experts.
        """
        super().set_up(axis, **options)
        self.data = options.get("data")
        whole = {placement for placement in self.placements.values() if placement.dim == 0}
        if not whole:
            return
        names = inspect.signature(super(ParallelModule, self).forward).parameters  # of the module's own class
        if len(whole) > 1 or len(self.placements) != len(self._parameters) or len(names) < 3:
            raise PlanError(f"{self.name_in_model}: cannot keep whole experts on each rank: use {option(ep=1)}")
        self.num_experts = whole.pop().local_size(self.axis.rank)

    def forward(self, *inputs: object, **options: object) -> object:
        """Run the module's own forward on hidden states, indices of experts and their weights."""
        indices = next((one for one in (*inputs, *options.values()) if _is_indices(one)), None)
        spread, reduce = partial(copy_to_tp, group=self.axis), partial(reduce_from_tp, group=self.axis)
        if self.data is not None and indices is not None:
            rows = GroupRows.of(self.axis, self.data, indices)
            spread, reduce = partial(gather_rows, rows=rows), partial(sum_rows, rows=rows)
            indices = spread(indices)
        entered = [self._enter(value, indices, spread) for value in inputs]
        named = {name: self._enter(value, indices, spread) for name, value in options.items()}
        return self._summed(reduce, entered, named)

    def _enter(self, value: object, indices: Tensor | None, spread: Callable[[Tensor], Tensor]) -> object:
        """Mask an input that has an element per token and expert, after ``spread`` where it is floating-point."""
        if not isinstance(value, Tensor):
            return value
        is_number = value.is_floating_point()
        entered = spread(value) if is_number or self.data is not None else value
        if indices is None or entered.shape != indices.shape:
            return entered
        whole = next((placement for placement in self.placements.values() if placement.dim == 0), None)
        if whole is not None:
            first = intervals(whole.ranks[self.axis.rank])[0].start
            is_elsewhere = (indices < first) | (indices >= first + self.num_experts)
            # 0 and not num_experts, which means "none" in transformers: its kernels then leave rows undefined
            return (entered if is_number else entered - first).masked_fill(is_elsewhere, 0)
        if is_number and self.num_weighted_experts is not None and self.axis.rank:
            return entered.masked_fill(indices >= self.num_weighted_experts, 0)
        return entered


def is_floating_point(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_indices(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not value.is_floating_point()


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


class HeadNorms(ParallelModule):
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
