"""The column parallel linear layer, and the classifier whose classes are padded to a multiple of tp."""

from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from shardconv.distributed import copy_to_tp
from shardconv.layers.features import check_features, mark_sharded_output
from shardconv.layers.linear import ParallelLinear
from shardconv.layers.sharding import gather_shards
from shardconv.layers.tags import check_tag
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
