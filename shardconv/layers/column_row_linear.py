"""The two parallel linear layers: column parallel over output features, row parallel over input features."""

from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from shardconv.distributed import Axis, copy_to_tp, reduce_from_tp
from shardconv.layers.features import check_features, check_tag, mark_sharded_output
from shardconv.layers.linear import ParallelLinear
from shardconv.layers.sharding import gather_shards, scatter_shards
from shardconv.plan.placement import Placement, intervals


class ColumnParallelLinear(ParallelLinear, sharded_dim=0):
    """:class:`ParallelLinear` with dim=-1: Y_r = X A_r + b_r, with the columns of A sharded.

    Example:
        >>> layer = ColumnParallelLinear(4, 6, split_sizes=(2, 2, 2), gather_output=True)
        >>> layer(torch.randn(3, 4)).shape
        torch.Size([3, 6])
    """

    dim = -1

    def _place(self, placement: Placement) -> None:
        self.placements = {"weight": placement, "bias": replace(placement, dim=0)}
        # the gradient of padding is zero: its outputs multiply padding of the next layer, or are masked logits
        self._gradient_is_local = not placement.has_replicas

    def localize(self, input: Tensor) -> Tensor:
        """Return the input, [*, in_features]; its gradient is all-reduced."""
        check_features(input, self.in_features, self.axis.size, self.describe_layer)
        check_tag(input, [None], self.axis, self.describe_layer)
        return copy_to_tp(input, group=self.axis)

    def complete(self, product: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Gather the output, or mark it as sharded and mask its padding."""
        placement = self.placements["weight"]
        if self.gather_output:
            output = gather_shards(product, placement, self.axis, dim=-1)
            return (output, self.master_bias) if self.skip_bias_add else output
        output = self._mask_padding(product)
        mark_sharded_output(output, placement)
        if not self.skip_bias_add:
            return output
        return output, None if self.bias is None else self._used(self.bias, "bias")

    def _mask_padding(self, output: Tensor) -> Tensor:
        if self._padding is None:
            return output
        size = sum(interval.size for interval in intervals(self.placements["weight"].ranks[self.axis.rank]))
        padding = output.shape[-1] - size
        return functional.pad(output.narrow(-1, 0, size), (0, padding), value=self._padding) if padding else output


class VocabParallelClassifier(ColumnParallelLinear):
    """A column parallel layer over any number of classes; logits of padding are -inf, which softmax and argmax ignore.

    Shape:
        - output: [*, ceil(classes / tp)], or [*, classes] with ``gather_output``.

    Example:
        >>> head = VocabParallelClassifier(4, 7, bias=False)
        >>> head(torch.randn(3, 4)).shape
        torch.Size([3, 7])
    """

    _padding = float("-inf")


def num_replicas(placement: Placement) -> int:
    """Count the ranks that hold each input feature; the all-reduce of a row parallel product adds each as many times.

    Raises:
        ValueError: if some features are on more ranks than others.
    """
    counts = Counter(interval for rank in placement.ranks for interval in intervals(rank))  # padding adds nothing
    if len(set(counts.values())) > 1 or sum(interval.size for interval in counts) != placement.size:
        raise ValueError(
            f"the placement is not supported (got {placement.describe()}, expected every row on the same number of "
            f"ranks)"
        )
    return max(counts.values())


def shard_input(
    input: Tensor, placement: Placement, axis: Axis, is_parallel: bool | None, describe: Callable[[], str]
) -> Tensor:
    """Return this rank's shard of the input of a row parallel layer, [*, in_features / tp].

    Args:
        input: [*, in_features], the same on every rank, or this rank's shard, [*, in_features / tp].
        placement: placement of the input features.
        axis: the ranks.
        is_parallel: whether the input is sharded; None to determine it from its last dim.
        describe: returns the layer's name for the message.

    Raises:
        ValueError: if the size of the last dim is neither, or contradicts ``is_parallel`` or the tag of the input.
    """
    width, last = input.shape[-1], input.dim() - 1
    full, local = placement.size, placement.local_size(axis.rank)
    allowed = {None: (full, local), True: (local,), False: (full,)}[is_parallel]
    if width not in allowed:
        expected = " or ".join(map(str, dict.fromkeys(allowed)))
        raise ValueError(
            f"{describe()}: input of shape {list(input.shape)} has {width} features (expected {expected}: in_features "
            f"{full}, tp {axis.size})"
        )
    check_tag(input, [None, last] if full == local else [last] if width == local else [None], axis, describe)
    return input if width == local else scatter_shards(input, placement, axis)


class RowParallelLinear(ParallelLinear, sharded_dim=1):
    """:class:`ParallelLinear` with dim=0: Y = sum over ranks r of X_r A_r, plus b once, with the rows of A sharded.

    Example:
        >>> layer = RowParallelLinear(4, 6)
        >>> layer(torch.randn(3, 4)).shape
        torch.Size([3, 6])
    """

    dim = 0

    def _place(self, placement: Placement) -> None:
        self.placements = {"weight": placement}
        # a sharded input may have values in the padding, which would give the padding of the weight a gradient
        self._gradient_is_local = not placement.has_replicas and not placement.is_padded
        self._num_replicas = num_replicas(placement)

    def localize(self, input: Tensor) -> Tensor:
        """Return this rank's shard of the input, [*, in_features / tp]."""
        return shard_input(input, self.placements["weight"], self.axis, self.input_is_parallel, self.describe_layer)

    def multiply(self, local: Tensor) -> Tensor:
        """Multiply by this rank's shard of the weight; the bias is added to the sum."""
        weight = self._used(self.weight, "weight")
        return functional.linear(local, weight.t() if self.transposed else weight)

    def complete(self, product: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """All-reduce the product, and add the bias."""
        output = reduce_from_tp(product, group=self.axis)
        output = output / self._num_replicas if self._num_replicas > 1 else output
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias.to(output.dtype)
