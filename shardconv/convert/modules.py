"""What modules of a model become that are no plain layers: each computes what it did, on a rank's part.

They are mixed into the class of the module that they convert, so that its forward stays the model's own.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardconv.convert.substitution import Substitutable, Substituted, Substitution
from shardconv.distributed import copy_to_tp, reduce_from_tp
from shardconv.layers.linear import ParallelLinear, num_copies
from shardconv.layers.sharding import ParallelModule
from shardconv.plan.placement import intervals


class Sharded(Substitutable, ParallelModule):
    """A module whose own parameters are shards, or are used on a rank's part, and that computes as it did with them.

    Attributes:
        styles: of each of its parameters that a plan has, which say how it is used.
    """

    styles: dict[str, str]

    @property
    def _always_used(self) -> bool:
        """Whether a parameter is used otherwise than it is, also where no gradient is taken."""
        return "gathered" in self.styles.values()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        if not torch.is_grad_enabled() and not self._always_used:
            return super().forward(*inputs, **options)
        read = [child for child in self.children() if isinstance(child, ParallelDepthwise)]  # maybe without a call
        used: Substitution = {
            (module, name): module._used(name)  # noqa: SLF001 - of this kind, too
            for module in (self, *read)
            for name, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None and name not in module.slices
        }
        with Substituted(used):
            return super().forward(*inputs, **options)

    def _used(self, name: str) -> Tensor:
        """What a parameter is computed with, so that its gradient is that of all ranks."""
        match self.styles.get(name):
            case "gathered":
                return self.gather_parameter(name)
            case "replicated_with_grad_allreduce":
                return copy_to_tp(self.own_tensor(name), group=self.axis)
        return self.shard(name)


class ParallelDepthwise(Sharded):
    """A convolution of each channel, or group of them, by itself, over those of a rank; the bias is cut alike."""

    groups: int
    in_channels: int
    out_channels: int

    def check_channels(self, name: str) -> None:
        """Check that channels are what is cut, and take over how many the rank has.

        Args:
            name: of the module.

        Raises:
            ValueError: if they are not, or the bias is not cut as they are.
        """
        ranks = {placement.ranks for placement in self.placements.values()}
        bias = self._parameters["bias"]
        if {placement.dim for placement in self.placements.values()} != {0} or len(ranks) > 1:
            raise ValueError(f"{name}: only the channels of a convolution can be cut, and its bias as they are")
        pieces = ranks.pop()[self.axis.rank]
        rows, columns = self.out_channels // self.groups, self.in_channels // self.groups
        if any(edge % rows for piece in intervals(pieces) for edge in piece) or (
            bias is not None and "bias" not in self.placements
        ):
            raise ValueError(f"{name}: a convolution is cut between its groups of {rows} channels, weight and bias")
        self.out_channels = self.placements["weight"].local_size(self.axis.rank)
        self.groups = self.out_channels // rows
        self.in_channels = self.groups * columns


class ParallelExpertLinear(Sharded):
    """A linear layer of each expert, its weights in one tensor [experts, out_features, in_features]."""

    def forward(self, inputs: Tensor, *others: Any) -> Tensor:
        """[tokens of all experts, in_features] to out_features: of columns those of the rank, of rows all."""
        if self.placements["weight"].dim == 2:
            return reduce_from_tp(super().forward(inputs, *others), group=self.axis) / num_copies(
                self.placements["weight"]
            )
        output: Tensor = super().forward(copy_to_tp(inputs, group=self.axis), *others)
        return output


class Unfused(ParallelModule):
    """A module that computes in training as it does else: what it has for training reads weights of layers inside."""

    @property
    def training(self) -> bool:
        """Never, for the module itself; those inside have their own."""
        return False

    @training.setter
    def training(self, mode: bool) -> None:
        pass


class SummedOutput(Sharded):
    """A module whose output is a rank's part of a sum over all ranks.

    What the plan leaves whole of its own is added to every output, as a bias is: the first rank does it for all.
    """

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own; of several outputs, the numbers are summed."""
        output = super().forward(*inputs, **options)
        return tuple(map(self._summed, output)) if isinstance(output, tuple) else self._summed(output)

    def _summed(self, value: Any) -> Any:
        return reduce_from_tp(value, group=self.axis) if _is_numbers(value) else value

    @property
    def _always_used(self) -> bool:
        return set(self._parameters) != set(self.placements)

    def _used(self, name: str) -> Tensor:
        if name in self.placements:
            return super()._used(name)
        whole = copy_to_tp(self.own_tensor(name), group=self.axis)
        return whole if self.axis.rank == 0 else whole * 0


class ParallelExperts(SummedOutput):
    """Packed experts, each of them cut over the ranks, or dealt out over them: replicated in, replicated out.

    Where experts are dealt out, a rank's first expert stands in for those of other ranks, with weight 0: it saves
    memory, not arithmetic.

    Attributes:
        num_cut_experts: experts from this number on hand on what they get; the first rank does it for all. None where
            all are cut.
    """

    num_cut_experts: int | None = None
    num_experts: int

    def check_experts(self, name: str, forward: Any) -> None:
        """Check that experts which are dealt out can be: they are chosen by number, and all tensors have as many.

        Args:
            name: of the module.
            forward: of its own class.

        Raises:
            ValueError: if not.
        """
        sizes = {placement.size for placement in self.placements.values() if placement.dim == 0}
        if not sizes:
            return
        names = inspect.signature(forward).parameters
        if len(sizes) > 1 or len(self.placements) != len(self._parameters) or len(names) < 4:  # with self
            raise ValueError(f"{name}: its experts cannot be dealt out over ranks: leave experts as they are")
        self.num_experts = sizes.pop() // self.axis.size

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own: hidden states, and which experts with which weight."""
        indices = next((one for one in (*inputs, *options.values()) if _is_indices(one)), None)
        entered = [self._enter(value, indices) for value in inputs]
        return super().forward(*entered, **{name: self._enter(value, indices) for name, value in options.items()})

    def _enter(self, value: Any, indices: Tensor | None) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        entered = copy_to_tp(value, group=self.axis) if is_number else value
        if indices is None or not isinstance(value, Tensor) or value.shape != indices.shape:
            return entered
        if any(placement.dim == 0 for placement in self.placements.values()):
            first = self.axis.rank * self.num_experts
            is_elsewhere = (indices < first) | (indices >= first + self.num_experts)
            # not by the number past the last, which is transformers' mark for it: its kernels then leave rows undefined
            return (entered if is_number else entered - first).masked_fill(is_elsewhere, 0)
        if is_number and self.num_cut_experts is not None and self.axis.rank:
            return entered.masked_fill(indices >= self.num_cut_experts, 0)
        return entered


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_indices(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


class SharedOutput(ParallelModule):
    """A replicated module the end of whose output goes to what is cut without a layer between.

    Attributes:
        num_shared: how many elements at the end that is.
    """

    num_shared: int

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        output: Tensor = super().forward(*inputs, **options)
        if not torch.is_grad_enabled():
            return output
        whole, shared = output.split([output.shape[-1] - self.num_shared, self.num_shared], -1)
        return torch.cat([whole, copy_to_tp(shared, group=self.axis)], -1)


class CopiedInput(ParallelModule):
    """A module whose input is whole on every rank and whose output is the rank's: the input's gradient is summed."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        copied = [self._copied(value) for value in inputs]
        return super().forward(*copied, **{name: self._copied(value) for name, value in options.items()})

    def _copied(self, value: Any) -> Any:
        return copy_to_tp(value, group=self.axis) if _is_numbers(value) else value


class Gathering(ParallelModule):
    """A module that reads parameters of others, as a head reads the table of words: they are whole while it does.

    Attributes:
        read: each with the module that it is of.
    """

    read: tuple[tuple[ParallelModule, str], ...]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As the module's own."""
        gathered: Substitution = {(owner, name): owner.gather_parameter(name) for owner, name in self.read}
        with Substituted(gathered):
            return super().forward(*inputs, **options)


class Multiplying(ParallelModule):
    """A module whose methods multiply with parameters that are shards."""

    def product_input(self, value: Any) -> Any:
        """What is multiplied with columns; of an equation for einsum the text."""
        return copy_to_tp(value, group=self.axis) if isinstance(value, Tensor) else value

    def product_output(self, name: str, value: Tensor) -> Tensor:
        """The product with rows, of all ranks."""
        return reduce_from_tp(value, group=self.axis) / num_copies(self.placements[name])

    def shared_product(self, name: str, value: Tensor) -> Tensor:
        """The product with rows, of all ranks, which goes on to shards."""
        return copy_to_tp(self.product_output(name, value), group=self.axis)


class ParallelConv1D(ParallelLinear):
    """transformers' Conv1D, which is a linear layer whose weight is stored (in_features, out_features)."""

    transposed = True


def mixed(kind: type[nn.Module], plain: type[nn.Module]) -> Any:
    """The class of a converted module: ``kind``, going on in the module's own class.

    An embedding of a class of its own goes first instead, and finds ``kind`` in place of nn.Embedding; so does a module
    that was converted before its methods are compiled anew, and finds these in place of its own.
    """
    if issubclass(plain, kind):
        return plain
    if (kind, plain) not in _mixed:
        _mixed[kind, plain] = _mix(kind, plain)
    return _mixed[kind, plain]


_mixed: dict[tuple[type, type], type] = {}


def _mix(kind: type[nn.Module], plain: type[nn.Module]) -> type:
    if issubclass(kind, nn.Linear) or (issubclass(kind, nn.Embedding) and plain is nn.Embedding):
        return kind
    bases = (plain, kind) if issubclass(kind, nn.Embedding | Multiplying) else (kind, plain)
    return type(plain.__name__, bases, {"__module__": plain.__module__})
