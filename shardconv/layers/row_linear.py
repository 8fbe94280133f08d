"""The row parallel linear layer, and the shard of its input."""

from collections import Counter
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from shardconv.distributed import Axis, reduce_from_tp
from shardconv.layers.linear import ParallelLinear
from shardconv.layers.sharding import scatter_shards
from shardconv.layers.tags import check_tag
from shardconv.plan.placement import Placement, intervals


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
    return input if width == local else scatter_shards(input, placement, axis, dim=-1)


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
