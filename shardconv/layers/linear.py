"""Linear layers whose weight is cut over ranks.

In Y = XA, ``dim`` is the dim of A that is cut, A being (in_features, out_features): -1 or 1 cuts columns, 0 cuts rows,
None cuts nothing. torch keeps the transpose: dim=-1 cuts dim 0 of ``weight``, and dim=0 cuts dim 1 of it.

A column layer followed by a row layer costs one all-reduce forward and one backward.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch import Tensor, nn

from shardconv.distributed import Axis, GroupLike, as_axis, copy_to_tp, reduce_from_tp
from shardconv.layers.features import check_features, mark_sharded_output
from shardconv.layers.init import Initializer, fill_shard_, get_initializer, linear_bias_, linear_weight_
from shardconv.layers.sharding import ParallelModule, even_placement, gather_shards, public_function, scatter_shards
from shardconv.plan.placement import Placement, intervals

#: ``dim`` to the dim of torch's weight that it cuts.
_WEIGHT_DIM = {None: None, -1: 0, 1: 0, 0: 1}


def weight_dim(dim: int | None) -> int | None:
    """The dim of torch's weight that is cut for a ``dim`` of (in_features, out_features).

    Raises:
        ValueError: if ``dim`` is not None, 0, 1 or -1.
    """
    if dim not in _WEIGHT_DIM:
        raise ValueError(f"dim = {dim!r}: it has to be None (not split), 0 (rows), 1 or -1 (columns)")
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
    """``F.linear`` on shards that the caller has made.

    Args:
        input: [*, in_features], the same on every rank; with dim=0 also [*, in_features / tp].
        weight: [out_features / tp, in_features] with dim=-1, [out_features, in_features / tp] with dim=0.
        bias: [out_features / tp] with dim=-1, [out_features] with dim=0.
        dim: the dim of (in_features, out_features) that is cut.
        gather_output: with dim=-1, put the ranks' outputs behind each other.
        input_is_parallel: with dim=0, whether the input is split; by default its width tells.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [*, out_features / tp] with dim=-1 and ``gather_output`` False, else [*, out_features].

    Raises:
        ValueError: if ``dim`` is not one of those, or shapes do not fit.

    Example:
        >>> weight = torch.eye(3)
        >>> parallel_linear(torch.ones(2, 3), weight, dim=-1).shape
        torch.Size([2, 3])
    """
    cut_dim = weight_dim(dim)
    if cut_dim is None:
        return F.linear(input, weight, bias)
    axis = as_axis(group)
    sizes = (weight.shape[cut_dim] * axis.size,)
    placement = even_placement(cut_dim, sizes, axis.size, what="weight")
    if cut_dim == 0:
        check_features(input, weight.shape[1], axis.size, _describe)
        output = F.linear(copy_to_tp(input, group=axis), weight, bias)
        return gather_shards(output, placement, axis, dim=-1) if gather_output else output
    split = enter_split(input, placement, axis, input_is_parallel, _describe)
    output = reduce_from_tp(F.linear(split, weight), group=axis)
    return output if bias is None else output + bias.to(output.dtype)


def _describe() -> str:
    return "parallel_linear"


def enter_split(
    input: Tensor, placement: Placement, axis: Axis, is_parallel: bool | None, describe: Callable[[], str]
) -> Tensor:
    """The rank's part of the input of a row layer.

    Args:
        input: [*, in_features] or [*, in_features / tp].
        placement: of the input features.
        axis: the ranks.
        is_parallel: whether the input is split; None to tell by its width.
        describe: gives the layer, for the message.

    Raises:
        ValueError: if the width is neither, or not the one that ``is_parallel`` says.
    """
    width = input.shape[-1]
    whole, part = placement.size, placement.local_size(axis.rank)
    allowed = {None: (whole, part), True: (part,), False: (whole,)}[is_parallel]
    if width not in allowed:
        expected = " or ".join(map(str, dict.fromkeys(allowed)))
        raise ValueError(
            f"{describe()}: input of shape {list(input.shape)}: its last dim has to be {expected} "
            f"(in_features {whole}, tp {axis.size})"
        )
    return input if width == part else scatter_shards(input, placement, axis, dim=-1)


def num_copies(placement: Placement) -> int:
    """How many ranks hold each input feature of a row layer; the sum over ranks has each as often.

    Raises:
        ValueError: if some are held by more ranks than others.
    """
    counts = Counter(piece for pieces in placement.ranks for piece in intervals(pieces))  # padding adds nothing
    if len(set(counts.values())) > 1 or sum(piece.size for piece in counts) != placement.size:
        raise ValueError(f"the placement ({placement.describe()}): some rows have more copies than others")
    return max(counts.values())


class ParallelLinear(ParallelModule, nn.Linear):
    """nn.Linear with its weight cut over the ranks of the tensor axis.

    After construction the gathered weight and bias are, bit for bit, what nn.Linear would have drawn on the first rank.

    Args:
        in_features: of the full layer.
        out_features: of the full layer.
        bias: whether there is one.
        dim: the dim of (in_features, out_features) that is cut: -1 or 1 for columns, 0 for rows, None for none.
        gather_output: with dim=-1, give the full output instead of the rank's part.
        input_is_parallel: with dim=0, whether the input is split already; by default its width tells.
        skip_bias_add: give ``(output, bias)`` and leave the addition to the caller.
        split_sizes: sizes of the parts of which the cut dim consists, as of [q; k; v]; each part is cut over all ranks.
        placement: how the cut dim is placed, instead of ``split_sizes``.
        weight: a shard that is used as it is, as that of an embedding that the layer is tied to.
        lora_rank: the rank of a low-rank pair beside the weight, 0 for none; it begins as zero.
        lora_alpha: the pair counts ``lora_alpha / lora_rank`` times; by default once.
        weight_init: an initialiser, or the name of one (see :data:`~shardconv.layers.init.INITIALIZERS`).
        bias_init: likewise.
        device: of the parameters, also ``meta``.
        dtype: of the parameters.
        group: see :func:`~shardconv.distributed.as_axis`.

    Shape:
        - weight: [out_features / tp, in_features] with dim=-1, [out_features, in_features / tp] with dim=0.
        - bias: [out_features / tp] with dim=-1, [out_features] with dim=0, the same on every rank.
        - lora_a: [lora_rank, in_features], or [lora_rank, in_features / tp] with dim=0.
        - lora_b: [out_features, lora_rank], or [out_features / tp, lora_rank] with dim=-1.
        - input: [*, in_features], or [*, in_features / tp] with dim=0.
        - output: [*, out_features], or [*, out_features / tp] with dim=-1 and without ``gather_output``.

    Raises:
        ValueError: if sizes do not divide, or options do not fit together.

    Example:
        >>> layer = ParallelLinear(20, 30, dim=-1)
        >>> layer(torch.randn(128, 20)).shape  # [128, 30 / tp]
        torch.Size([128, 30])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment] # as in nn.Linear, which says otherwise
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    _weight_init: Initializer
    _bias_init: Initializer

    #: The fill of output columns that are padding; None where padding is not allowed.
    _padding: ClassVar[float | None] = None
    #: The only ``dim`` of the class; None where any is possible.
    _class_dim: ClassVar[int | None] = None
    #: Whether the weight is stored (in_features, out_features).
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
            raise ValueError("skip_bias_add without a bias: there is nothing to skip")
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
                    f"weight of shape {list(weight.shape)}: rank {self.axis.rank} needs {list(self.weight.shape)}"
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
        cut_dim = weight_dim(self.dim)
        if (gather_output and cut_dim != 0) or (input_is_parallel is not None and cut_dim != 1):
            raise ValueError(f"dim = {self.dim}: gather_output is for columns, input_is_parallel for rows")
        self.axis, self.lora_rank, self.lora_scale = axis, 0, 1.0
        self._is_tied = False
        self._weight_init = linear_weight_
        self._bias_init = partial(linear_bias_, in_features=self.in_features)
        self.gather_output, self.input_is_parallel = gather_output, input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.placements = {}
        self._has_own_gradient, self._num_copies = True, 1
        if cut_dim is None:
            return
        size = self.out_features if cut_dim == 0 else self.in_features
        sizes = tuple(split_sizes or (size,))
        what = "out_features" if cut_dim == 0 else "in_features"
        stored_dim = 1 - cut_dim if self.transposed else cut_dim
        if sum(sizes) != size:
            raise ValueError(f"split_sizes {list(sizes)} are {sum(sizes)} together, {what} is {size}")
        if placement is None:
            placement = even_placement(stored_dim, sizes, axis.size, pad=self._padding is not None, what=what)
        if (placement.dim, placement.size, placement.tp) != (stored_dim, size, axis.size):
            raise ValueError(f"the placement ({placement.describe()}) is not one of dim {cut_dim} of {size}")
        if not placement.is_even:
            raise ValueError(f"the placement ({placement.describe()}) has shards of different sizes")
        # padding of columns gets no gradient from the rows behind it, nor from masked logits
        self._has_own_gradient = not placement.has_copies and not (cut_dim == 1 and placement.is_padded)
        if cut_dim == 1:
            self._num_copies = num_copies(placement)
        self.placements["weight"] = placement
        own = replace(placement, dim=cut_dim)  # what is stored as in nn.Linear
        self.placements |= {"bias": own, "lora_b": own} if cut_dim == 0 else {"lora_a": own}

    def _local_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        placement = self.placements.get(name)
        return shape if placement is None else placement.shard_shape(shape, self.axis.rank)

    def reset_parameters(self) -> None:
        """Draw the values that nn.Linear draws; all ranks have to call it."""
        if not self._is_tied:
            fill_shard_(self.weight, self.placements.get("weight"), self.axis, self._weight_init)
        if self.bias is not None:
            fill_shard_(self.bias, self.placements.get("bias"), self.axis, self._bias_init)
        if self.lora_rank:
            fill_shard_(self.lora_a, self.placements.get("lora_a"), self.axis, linear_weight_)
            nn.init.zeros_(self.lora_b)

    def forward(self, input: Tensor) -> Any:
        """The output, or ``(output, bias)`` with ``skip_bias_add``."""
        cut_dim = weight_dim(self.dim)
        is_row = cut_dim == 1
        if is_row:
            is_parallel = self.input_is_parallel
            entered = enter_split(input, self.placements["weight"], self.axis, is_parallel, self.describe_layer)
        else:
            check_features(input, self.in_features, self.axis.size, self.describe_layer)
            entered = input if cut_dim is None else copy_to_tp(input, group=self.axis)
        late_bias = is_row or self.skip_bias_add
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if not self._has_own_gradient and torch.is_grad_enabled():
            weight, bias = self.shard("weight"), None if bias is None else self.shard("bias")
        output = F.linear(entered, weight.t() if self.transposed else weight, None if late_bias else bias)
        if self.lora_rank:
            output = output + self._low_rank(entered)
        if is_row:
            output = reduce_from_tp(output, group=self.axis)
            output = output / self._num_copies if self._num_copies > 1 else output
        elif self.gather_output:
            output = gather_shards(output, self.placements["weight"], self.axis, dim=-1)
        elif cut_dim == 0:
            output = self._mask_padding(output)
            mark_sharded_output(output, self.placements["weight"])
        if self.skip_bias_add:
            return output, self.master_bias if self.gather_output else bias
        return output + bias.to(output.dtype) if late_bias and bias is not None else output

    def _low_rank(self, input: Tensor) -> Tensor:
        """The pair's part of the output; the gradient of its replicated half is the sum of the ranks'."""
        first, second = (
            self.shard(name) if name in self.placements or self.dim is None else copy_to_tp(whole, group=self.axis)
            for name, whole in (("lora_a", self.lora_a), ("lora_b", self.lora_b))
        )
        return F.linear(F.linear(input, first), second) * self.lora_scale

    def _mask_padding(self, output: Tensor) -> Tensor:
        if self._padding is None:
            return output
        placement = self.placements["weight"]
        true = sum(piece.size for piece in intervals(placement.ranks[self.axis.rank]))
        missing = output.shape[-1] - true
        return F.pad(output.narrow(-1, 0, true), (0, missing), value=self._padding) if missing else output

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
        """As nn.Linear's, with dim and tp."""
        options = "".join(f", {name}=True" for name in ("gather_output", "skip_bias_add") if getattr(self, name))
        lora = f", lora_rank={self.lora_rank}" if self.lora_rank else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"dim={self.dim}, tp={self.axis.size}{options}{lora}"
        )


class ColumnParallelLinear(ParallelLinear):
    """:class:`ParallelLinear` with dim=-1: Y_r = X A_r + b_r, A cut into columns.

    Example:
        >>> layer = ColumnParallelLinear(4, 6, split_sizes=(2, 2, 2), gather_output=True)
        >>> layer(torch.randn(3, 4)).shape
        torch.Size([3, 6])
    """

    _class_dim = -1

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__(in_features, out_features, bias, -1, **options)


class RowParallelLinear(ParallelLinear):
    """:class:`ParallelLinear` with dim=0: Y = sum of X_r A_r, plus b once, A cut into rows.

    Example:
        >>> layer = RowParallelLinear(4, 6)
        >>> layer(torch.randn(3, 4)).shape
        torch.Size([3, 6])
    """

    _class_dim = 0

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__(in_features, out_features, bias, 0, **options)


class VocabParallelClassifier(ColumnParallelLinear):
    """A column layer over classes that need not divide: what is padding is -inf, so no softmax or argmax meets it.

    Shape:
        - output: [*, ceil(classes / tp)], or [*, classes] with ``gather_output``.

    Example:
        >>> head = VocabParallelClassifier(4, 7, bias=False)
        >>> head(torch.randn(3, 4)).shape
        torch.Size([3, 7])
    """

    _padding = float("-inf")
