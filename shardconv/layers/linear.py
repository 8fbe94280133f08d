"""Column parallel and row parallel linear layers, as in Megatron-LM (Shoeybi et al., 2019, section 3).

In Y = XA with A of shape [in_features, out_features], ``dim`` is the dim of A that is sharded: -1 or 1 shards columns
(column parallel), 0 shards rows (row parallel), None shards nothing. torch stores the transpose: dim=-1 shards dim 0 of
``weight``, and dim=0 shards dim 1 of it.

A column parallel layer followed by a row parallel layer costs one all-reduce in forward and one in backward.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from shardconv.distributed import Axis, GroupLike, as_axis, copy_to_tp, reduce_from_tp
from shardconv.layers.features import check_features, mark_sharded_output
from shardconv.layers.init import Initializer, fill_shard_, get_initializer, linear_bias_, linear_weight_
from shardconv.layers.sharding import ParallelModule, even_placement, gather_shards, public_function, scatter_shards
from shardconv.layers.tags import check_tag
from shardconv.plan.placement import Placement, intervals

#: ``dim`` to the dim of torch's weight that is sharded.
_WEIGHT_DIM = {None: None, -1: 0, 1: 0, 0: 1}


def weight_dim(dim: int | None) -> int | None:
    """Convert a ``dim`` of [in_features, out_features] to the dim of torch's weight that is sharded.

    Raises:
        ValueError: if ``dim`` is not None, 0, 1 or -1.
    """
    if dim not in _WEIGHT_DIM:
        raise ValueError(
            f"dim is not supported (got {dim!r}, expected None for unsharded, 0 for rows, 1 or -1 for columns)"
        )
    return _WEIGHT_DIM[dim]


def parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dim: int | None = None,
    *,
    gather_output: bool = False,
    input_is_parallel: bool | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Apply ``F.linear`` to shards of weight and bias.

    Args:
        input: [*, in_features], the same on every rank; with dim=0 also [*, in_features / tp].
        weight: [out_features / tp, in_features] with dim=-1, [out_features, in_features / tp] with dim=0.
        bias: [out_features / tp] with dim=-1, [out_features] with dim=0.
        dim: the dim of [in_features, out_features] that is sharded: 0, 1 or -1; None if the weight is unsharded.
        gather_output: with dim=-1, all-gather the output.
        input_is_parallel: with dim=0, whether the input is sharded; by default determined from its last dim.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [*, out_features / tp] with dim=-1 and ``gather_output`` False, else [*, out_features].

    Raises:
        ValueError: if ``dim`` or the shapes are not supported, or the tag of the input contradicts them (see
            :class:`~shardconv.layers.RegisterParallelDim`).

    Example:
        >>> weight = torch.eye(3)
        >>> parallel_linear(torch.ones(2, 3), weight, dim=-1).shape
        torch.Size([2, 3])
    """
    sharded_dim = weight_dim(dim)
    if sharded_dim is None:
        return F.linear(input, weight, bias)
    axis = as_axis(group)
    sizes = (weight.shape[sharded_dim] * axis.size,)
    placement = even_placement(sharded_dim, sizes, axis.size, what="weight")
    if sharded_dim == 0:
        check_features(input, weight.shape[1], axis.size, _describe)
        check_tag(input, [None], axis, _describe)
        output = F.linear(copy_to_tp(input, group=axis), weight, bias)
        return gather_shards(output, placement, axis, dim=-1) if gather_output else output
    shard = shard_input(input, placement, axis, input_is_parallel, _describe)
    output = reduce_from_tp(F.linear(shard, weight), group=axis)
    return output if bias is None else output + bias.to(output.dtype)


def _describe() -> str:
    return "parallel_linear"


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


def num_copies(placement: Placement) -> int:
    """Count the ranks that hold each input feature of a row parallel layer; the all-reduce adds each as many times.

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


class ParallelLinear(ParallelModule, nn.Linear):
    """nn.Linear with its weight sharded over the ranks of the tensor axis.

    After construction the gathered weight and bias equal, bit for bit, those that nn.Linear draws on the first rank.

    Args:
        in_features: number of input features of the full layer.
        out_features: number of output features of the full layer.
        bias: whether the layer has a bias.
        dim: the dim of [in_features, out_features] that is sharded: -1 or 1 for columns, 0 for rows, None for none.
        gather_output: with dim=-1, all-gather the output.
        input_is_parallel: with dim=0, whether the input is already sharded; by default determined from its last dim.
        skip_bias_add: return ``(output, bias)`` and leave the addition to the caller.
        split_sizes: sizes of the segments of the sharded dim, as of [q; k; v]; each is sharded over all ranks.
        placement: placement of the sharded dim, instead of ``split_sizes``.
        weight: this rank's shard, used without a copy, as of a tied embedding.
        lora_rank: rank of a LoRA pair, 0 for none; its product is zero after construction.
        lora_alpha: the product of the pair is scaled by ``lora_alpha / lora_rank``; by default by 1.
        weight_init: an initializer, or its name (see :data:`~shardconv.layers.init.INITIALIZERS`).
        bias_init: likewise.
        device: device of the parameters, which may be ``meta``.
        dtype: dtype of the parameters.
        group: see :func:`~shardconv.distributed.as_axis`.

    Shape:
        - weight: [out_features / tp, in_features] with dim=-1, [out_features, in_features / tp] with dim=0.
        - bias: [out_features / tp] with dim=-1, [out_features] with dim=0, the same on every rank.
        - lora_a: [lora_rank, in_features], or [lora_rank, in_features / tp] with dim=0.
        - lora_b: [out_features, lora_rank], or [out_features / tp, lora_rank] with dim=-1.
        - input: [*, in_features], or [*, in_features / tp] with dim=0.
        - output: [*, out_features], or [*, out_features / tp] with dim=-1 and without ``gather_output``.

    Raises:
        ValueError: if sizes are not multiples of tp, or options contradict each other; in forward, if the shape or the
            tag of the input does not match (see :class:`~shardconv.layers.RegisterParallelDim`).

    Example:
        >>> layer = ParallelLinear(20, 30, dim=-1)
        >>> layer(torch.randn(128, 20)).shape  # [128, 30 / tp]
        torch.Size([128, 30])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment] # nn.Linear annotates it as never None
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    _weight_init: Initializer
    _bias_init: Initializer

    #: The value of output columns that are padding; None where padding is not allowed.
    _padding: ClassVar[float | None] = None
    #: The ``dim`` of every instance of the class; None where any is possible.
    _class_dim: ClassVar[int | None] = None
    #: Whether the weight is stored as [in_features, out_features].
    transposed: ClassVar[bool] = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dim: int | None = None,
        *,
        gather_output: bool = False,
        input_is_parallel: bool | None = None,
        skip_bias_add: bool = False,
        split_sizes: tuple[int, ...] | None = None,
        placement: Placement | None = None,
        weight: nn.Parameter | None = None,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        weight_init: Initializer | str | None = None,
        bias_init: Initializer | str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        group: GroupLike = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.dim = in_features, out_features, dim
        self.set_up(
            as_axis(group),
            gather_output=gather_output,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            split_sizes=split_sizes,
            placement=placement,
        )
        if skip_bias_add and not bias:
            raise ValueError("skip_bias_add=True needs a bias (got bias=False): pass bias=True")
        alpha = lora_rank if lora_alpha is None else lora_alpha
        self.lora_rank, self.lora_scale = lora_rank, alpha / max(lora_rank, 1)
        options = {"device": device, "dtype": dtype}
        shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
        shapes |= {"lora_a": (lora_rank, in_features), "lora_b": (out_features, lora_rank)} if lora_rank else {}
        for name, shape in shapes.items():
            local = self._local_shape(name, shape)
            is_absent = name == "bias" and not bias
            self.register_parameter(name, None if is_absent else nn.Parameter(torch.empty(local, **options)))
        if weight is not None:
            if weight.shape != self.weight.shape:
                raise ValueError(
                    f"weight has shape {list(weight.shape)} (expected {list(self.weight.shape)} on rank "
                    f"{self.axis.rank}): pass this rank's shard"
                )
            self.weight = weight
        self.describe_parameters()
        self._is_tied = weight is not None
        self._weight_init = get_initializer(weight_init or self._weight_init)
        self._bias_init = get_initializer(bias_init or self._bias_init)
        self.reset_parameters()

    def set_up(
        self,
        axis: Axis,
        *,
        gather_output: bool = False,
        input_is_parallel: bool | None = None,
        skip_bias_add: bool = False,
        split_sizes: tuple[int, ...] | None = None,
        placement: Placement | None = None,
    ) -> None:
        """See :meth:`ParallelModule.set_up`."""
        sharded_dim = weight_dim(self.dim)
        if (gather_output and sharded_dim != 0) or (input_is_parallel is not None and sharded_dim != 1):
            raise ValueError(
                f"options do not match dim (got dim = {self.dim}): gather_output needs dim = -1, and input_is_parallel "
                f"dim = 0"
            )
        self.axis, self.lora_rank, self.lora_scale = axis, 0, 1.0
        self._is_tied = False
        self._weight_init = linear_weight_
        self._bias_init = partial(linear_bias_, in_features=self.in_features)
        self.gather_output, self.input_is_parallel = gather_output, input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.placements = {}
        self._gradient_is_local, self._num_copies = True, 1
        if sharded_dim is None:
            return
        size = self.out_features if sharded_dim == 0 else self.in_features
        sizes = tuple(split_sizes or (size,))
        what = "out_features" if sharded_dim == 0 else "in_features"
        stored_dim = 1 - sharded_dim if self.transposed else sharded_dim
        if sum(sizes) != size:
            raise ValueError(
                f"split_sizes {list(sizes)} have another sum than {what} (got {sum(sizes)}, expected {size})"
            )
        if placement is None:
            placement = even_placement(stored_dim, sizes, axis.size, pad=self._padding is not None, what=what)
        if (placement.dim, placement.size, placement.tp) != (stored_dim, size, axis.size):
            raise ValueError(
                f"the placement does not match (got {placement.describe()}, expected dim {stored_dim} of size "
                f"{size} over {axis.size} ranks)"
            )
        if not placement.is_even:
            raise ValueError(
                f"the placement has shards of different sizes (got {placement.describe()}, expected equal sizes)"
            )
        # padded columns get no gradient: their outputs meet padded rows of the next layer, or are masked logits
        self._gradient_is_local = not placement.has_replicas and not (sharded_dim == 1 and placement.is_padded)
        if sharded_dim == 1:
            self._num_copies = num_copies(placement)
        self.placements["weight"] = placement
        untransposed = replace(placement, dim=sharded_dim)  # bias and LoRA pair are stored as in nn.Linear
        self.placements |= (
            {"bias": untransposed, "lora_b": untransposed} if sharded_dim == 0 else {"lora_a": untransposed}
        )

    def _local_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        placement = self.placements.get(name)
        return shape if placement is None else placement.shard_shape(shape, self.axis.rank)

    def reset_parameters(self) -> None:
        """Draw the values that nn.Linear draws; all ranks must call it."""
        if not self._is_tied:
            fill_shard_(self.weight, self.placements.get("weight"), self.axis, self._weight_init)
        if self.bias is not None:
            fill_shard_(self.bias, self.placements.get("bias"), self.axis, self._bias_init)
        if self.lora_rank:
            fill_shard_(self.lora_a, self.placements.get("lora_a"), self.axis, linear_weight_)
            nn.init.zeros_(self.lora_b)

    def forward(self, input: Tensor) -> Any:
        """Compute the output, or ``(output, bias)`` with ``skip_bias_add``; for shapes see the class."""
        sharded_dim = weight_dim(self.dim)
        is_row = sharded_dim == 1
        if is_row:
            is_parallel = self.input_is_parallel
            local = shard_input(input, self.placements["weight"], self.axis, is_parallel, self.describe_layer)
        else:
            check_features(input, self.in_features, self.axis.size, self.describe_layer)
            allowed = [None] if sharded_dim == 0 else [None, *range(input.dim() - 1)]  # unsharded: rows are separate
            check_tag(input, allowed, self.axis, self.describe_layer)
            local = input if sharded_dim is None else copy_to_tp(input, group=self.axis)
        late_bias = is_row or self.skip_bias_add
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if not self._gradient_is_local and torch.is_grad_enabled():
            weight, bias = self.shard("weight"), None if bias is None else self.shard("bias")
        output = F.linear(local, weight.t() if self.transposed else weight, None if late_bias else bias)
        if self.lora_rank:
            output = output + self._low_rank(local)
        if is_row:
            output = reduce_from_tp(output, group=self.axis)
            output = output / self._num_copies if self._num_copies > 1 else output
        elif self.gather_output:
            output = gather_shards(output, self.placements["weight"], self.axis, dim=-1)
        elif sharded_dim == 0:
            output = self._mask_padding(output)
            mark_sharded_output(output, self.placements["weight"])
        if self.skip_bias_add:
            return output, self.master_bias if self.gather_output else bias
        return output + bias.to(output.dtype) if late_bias and bias is not None else output

    def _low_rank(self, input: Tensor) -> Tensor:
        """Compute the LoRA term of the output; the gradient of the replicated matrix is summed over the ranks."""
        first, second = (
            self.shard(name) if name in self.placements or self.dim is None else copy_to_tp(full, group=self.axis)
            for name, full in (("lora_a", self.lora_a), ("lora_b", self.lora_b))
        )
        return F.linear(F.linear(input, first), second) * self.lora_scale

    def _mask_padding(self, output: Tensor) -> Tensor:
        if self._padding is None:
            return output
        placement = self.placements["weight"]
        size = sum(interval.size for interval in intervals(placement.ranks[self.axis.rank]))
        padding = output.shape[-1] - size
        return F.pad(output.narrow(-1, 0, size), (0, padding), value=self._padding) if padding else output

    @classmethod
    def convert_parallel_linear(cls, module: nn.Module, dim: int | None = None, **options: Any) -> Any:
        """Call :func:`shardconv.convert_parallel_linear`; on a class for one ``dim``, that is the default.

        Raises:
            ValueError: also if ``dim`` is not that of the class.
        """
        dim = cls._class_dim if dim is None else dim
        if cls._class_dim is not None and weight_dim(dim) != weight_dim(cls._class_dim):
            raise ValueError(f"dim = {dim} (expected {cls._class_dim} for {cls.__name__})")
        layer_class = VocabParallelClassifier if issubclass(cls, VocabParallelClassifier) else ParallelLinear
        return public_function("convert_parallel_linear")(module, dim, layer_class=layer_class, **options)

    def extra_repr(self) -> str:
        """The text of nn.Linear, with dim and tp."""
        options = "".join(f", {name}=True" for name in ("gather_output", "skip_bias_add") if getattr(self, name))
        lora = f", lora_rank={self.lora_rank}" if self.lora_rank else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"dim={self.dim}, tp={self.axis.size}{options}{lora}"
        )


class ColumnParallelLinear(ParallelLinear):
    """:class:`ParallelLinear` with dim=-1: Y_r = X A_r + b_r, with the columns of A sharded.

    Example:
        >>> layer = ColumnParallelLinear(4, 6, split_sizes=(2, 2, 2), gather_output=True)
        >>> layer(torch.randn(3, 4)).shape
        torch.Size([3, 6])
    """

    _class_dim = -1

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__(in_features, out_features, bias, -1, **options)


class RowParallelLinear(ParallelLinear):
    """:class:`ParallelLinear` with dim=0: Y = sum over ranks r of X_r A_r, plus b once, with the rows of A sharded.

    Example:
        >>> layer = RowParallelLinear(4, 6)
        >>> layer(torch.randn(3, 4)).shape
        torch.Size([3, 6])
    """

    _class_dim = 0

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__(in_features, out_features, bias, 0, **options)


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
