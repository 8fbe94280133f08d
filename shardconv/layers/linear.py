"""Column parallel and row parallel linear layers, as in Megatron-LM (Shoeybi et al., 2019, section 3).

In Y = XA with A of shape [in_features, out_features], ``dim`` is the dim of A that is sharded: -1 or 1 shards columns
(column parallel), 0 shards rows (row parallel), None shards nothing. torch stores the transpose: dim=-1 shards dim 0 of
``weight``, and dim=0 shards dim 1 of it.

A column parallel layer followed by a row parallel layer costs one all-reduce in forward and one in backward.
"""

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial, update_wrapper
from typing import Any, ClassVar, Self, TypedDict, TypeVar, Unpack

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

from shardconv.distributed import Axis, GroupLike, as_axis, copy_to_tp, reduce_from_tp
from shardconv.layers.features import check_features, check_tag, mark_sharded_output
from shardconv.layers.init import Initializer, fill_shard_, get_initializer, linear_bias_, linear_weight_
from shardconv.layers.parallel_module import ParallelModule, public_function
from shardconv.layers.sharding import even_placement, gather_shards, scatter_shards
from shardconv.plan.placement import Placement, intervals

ModuleT = TypeVar("ModuleT", bound=nn.Module)

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


class LinearOptions(TypedDict, total=False):
    """Options of :class:`ParallelLinear`, for its constructor and for conversions; see there."""

    gather_output: bool
    input_is_parallel: bool | None
    skip_bias_add: bool
    split_sizes: tuple[int, ...] | None
    placement: Placement | None


class ParallelLinear(ParallelModule, nn.Linear):
    """nn.Linear with its weight sharded over the ranks of the tensor axis.

    The constructor returns a :class:`~shardconv.layers.ColumnParallelLinear` with dim=-1, and a
    :class:`~shardconv.layers.RowParallelLinear` with dim=0. This class is the base class of both, and with dim=None the
    class of an unsharded layer.

    After construction the gathered weight and bias equal, bit for bit, the values that nn.Linear draws on the first
    rank.

    Args:
        in_features: number of input features of the full layer.
        out_features: number of output features of the full layer.
        bias: whether the layer has a bias.
        dim: the dim of [in_features, out_features] that is sharded: -1 or 1 for columns, 0 for rows, None for none; by
            default the dim of the class.
        gather_output: with dim=-1, all-gather the output.
        input_is_parallel: with dim=0, whether the input is already sharded; by default determined from its last dim.
        skip_bias_add: return ``(output, bias)`` and leave the addition to the caller.
        split_sizes: sizes of the segments of the sharded dim, such as [q; k; v]; each is sharded over all ranks.
        placement: placement of the sharded dim, instead of ``split_sizes``.
        weight: this rank's shard, used without a copy, such as the shard of a tied embedding.
        weight_init: an initializer, or its name (see :data:`~shardconv.layers.init.INITIALIZERS`).
        bias_init: the same for the bias.
        device: device of the parameters, which may be ``meta``.
        dtype: dtype of the parameters.
        group: see :func:`~shardconv.distributed.as_axis`.

    Shape:
        - weight: [out_features / tp, in_features] with dim=-1, [out_features, in_features / tp] with dim=0.
        - bias: [out_features / tp] with dim=-1, [out_features] with dim=0, the same on every rank.
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
    transposed: bool = False
    _weight_init: Initializer
    _bias_init: Initializer
    #: The classes of sharded layers, by the dim of torch's weight that they shard.
    _classes: ClassVar[dict[int, type["ParallelLinear"]]] = {}
    #: The value of output columns that are padding; None where padding is not allowed.
    _padding: float | None = None

    def __init_subclass__(cls, *, sharded_dim: int | None = None, **options: object) -> None:
        """Register the class of layers that shard this dim of torch's weight."""
        super().__init_subclass__(**options)
        if sharded_dim is not None:
            cls._classes[sharded_dim] = cls

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dim: int | None = None,
        *,
        weight: nn.Parameter | None = None,
        weight_init: Initializer | str | None = None,
        bias_init: Initializer | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: GroupLike = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        nn.Module.__init__(self)
        self.class_for(dim)  # raises where a derived class passes the dim of another class
        self.set_up(as_axis(group), in_features=in_features, out_features=out_features, **options)
        if self.skip_bias_add and not bias:
            raise ValueError("skip_bias_add=True needs a bias (got bias=False): pass bias=True")
        self.register_shard("weight", (out_features, in_features), device=device, dtype=dtype)
        if bias:
            self.register_shard("bias", (out_features,), device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)
        if weight is not None:
            self._tie(weight)
        self.describe_parameters()
        self._weight_init = get_initializer(weight_init or self._weight_init)
        self._bias_init = get_initializer(bias_init or self._bias_init)
        self.reset_parameters()
        self.prevent_fusion()

    def __new__(cls, _in: int = 0, _out: int = 0, _bias: bool = True, /, dim: int | None = None, **_: object) -> Self:
        """Create a layer of the class for ``dim``."""
        return super().__new__(cls.class_for(dim))

    @classmethod
    def class_for(cls, dim: int | None) -> type[Self]:
        """Return the class of layers with this ``dim``: this class, or a class derived from ParallelLinear.

        Raises:
            ValueError: if ``dim`` is not supported, or differs from the dim of the class.
        """
        sharded_dim = weight_dim(dim)
        found: Any = ParallelLinear if sharded_dim is None else cls._classes[sharded_dim]
        if issubclass(cls, found):
            return cls
        if cls is not ParallelLinear:
            raise ValueError(f"dim = {dim} (expected {cls.dim} for {cls.__name__})")
        return found

    def set_up(
        self,
        axis: Axis,
        *,
        in_features: int | None = None,
        out_features: int | None = None,
        transposed: bool | None = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        """See :meth:`ParallelModule.set_up`.

        Args:
            axis: the ranks.
            in_features: number of input features of the full layer; by default the attribute of the converted layer.
            out_features: the same for output features.
            transposed: whether the weight of the converted layer is stored as [in_features, out_features].
            options: see :class:`LinearOptions`.
        """
        self.axis = axis
        self.in_features = self.in_features if in_features is None else in_features
        self.out_features = self.out_features if out_features is None else out_features
        self.gather_output = options.get("gather_output", False)
        self.input_is_parallel = options.get("input_is_parallel")
        self.skip_bias_add = options.get("skip_bias_add", False)
        self.transposed = self.transposed if transposed is None else transposed
        if (self.gather_output and self.dim != -1) or (self.input_is_parallel is not None and self.dim != 0):
            raise ValueError(
                f"options do not match dim (got dim = {self.dim}): gather_output needs dim = -1, and input_is_parallel "
                f"dim = 0"
            )
        self._weight_init, self._is_tied = linear_weight_, False
        self._bias_init = partial(linear_bias_, in_features=self.in_features)
        self.placements, self._gradient_is_local = {}, True
        sharded_dim = weight_dim(self.dim)
        if sharded_dim is not None:
            self._place(self._weight_placement(sharded_dim, options.get("split_sizes"), options.get("placement")))

    def _weight_placement(
        self, sharded_dim: int, split_sizes: tuple[int, ...] | None, placement: Placement | None
    ) -> Placement:
        """Return the placement of the weight as it is stored, after checking it."""
        size, what = ((self.out_features, "out_features"), (self.in_features, "in_features"))[sharded_dim]
        stored_dim = 1 - sharded_dim if self.transposed else sharded_dim
        sizes = tuple(split_sizes or (size,))
        if sum(sizes) != size:
            raise ValueError(f"split_sizes {list(sizes)} do not add up to {what} (got {sum(sizes)}, expected {size})")
        if placement is None:
            return even_placement(stored_dim, sizes, self.axis.size, pad=self._padding is not None, what=what)
        if (placement.dim, placement.size, placement.num_ranks) != (stored_dim, size, self.axis.size):
            raise ValueError(
                f"the placement does not match (got {placement.describe()}, expected dim {stored_dim} of size "
                f"{size} over {self.axis.size} ranks)"
            )
        if not placement.is_even:
            raise ValueError(
                f"the placement has shards of different sizes (got {placement.describe()}, expected equal sizes)"
            )
        return placement

    def _place(self, placement: Placement) -> None:
        """Set the placements of all parameters from the placement of the weight."""
        raise NotImplementedError

    def _tie(self, weight: nn.Parameter) -> None:
        """Use a shard of another layer as the weight."""
        if weight.shape != self.weight.shape:
            raise ValueError(
                f"weight has shape {list(weight.shape)} (expected {list(self.weight.shape)} on rank {self.axis.rank}): "
                f"pass this rank's shard"
            )
        self.weight, self._is_tied = weight, True

    def reset_parameters(self) -> None:
        """Draw the values that nn.Linear draws; all ranks must call it."""
        if not self._is_tied:
            fill_shard_(self.weight, self.placements.get("weight"), self.axis, self._weight_init)
        if self.bias is not None:
            fill_shard_(self.bias, self.placements.get("bias"), self.axis, self._bias_init)

    def forward(self, input: Tensor) -> Any:  # nn.Linear's is a Tensor
        """Compute the output, or ``(output, bias)`` with ``skip_bias_add``; for shapes see the class."""
        if input.is_nested:
            raise ValueError(
                f"{self.describe_layer()}: the input is a nested tensor (expected one with the same number of tokens "
                f"in each example): of an nn.TransformerEncoder, set use_nested_tensor = False, or convert it whole"
            )
        return self.complete(self.multiply(self.localize(input)))

    def prevent_fusion(self) -> None:
        """Register a hook that does nothing, so that a torch.nn.TransformerEncoderLayer calls this layer.

        Where no gradients are needed, an encoder layer without hooks reads the weights of its layers instead.
        """
        if _do_nothing not in self._forward_pre_hooks.values():
            self.register_forward_pre_hook(_do_nothing)

    def localize(self, input: Tensor) -> Tensor:
        """First step of forward: check the input, and return the tensor that this rank multiplies with its shard."""
        check_features(input, self.in_features, self.axis.size, self.describe_layer)
        check_tag(input, [None, *range(input.dim() - 1)], self.axis, self.describe_layer)  # rows are separate
        return input

    def multiply(self, local: Tensor) -> Tensor:
        """Second step: multiply by this rank's shard of the weight, and add the bias where it is not added later."""
        weight = self._used(self.weight, "weight")
        bias = None if self.bias is None or self.skip_bias_add else self._used(self.bias, "bias")
        return functional.linear(local, weight.t() if self.transposed else weight, bias)

    def complete(self, product: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Third step: return the output of the layer from the products of all ranks."""
        return (product, self.bias) if self.skip_bias_add else product

    def _used(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return a parameter for use in forward, with the gradient of its replicas and padding."""
        return parameter if self._gradient_is_local or not torch.is_grad_enabled() else self.shard(name)

    @classmethod
    def convert_parallel_linear(
        cls,
        module: ModuleT,
        dim: int | None = None,
        *,
        gather_output: bool = False,
        counts: Collection[str] | None = None,
        group: GroupLike = None,
    ) -> ModuleT:
        """Call :func:`shardconv.convert_parallel_linear`; ``dim`` defaults to the dim of the class, if it has one.

        Raises:
            ValueError: also if ``dim`` is not the dim of the class.
        """
        convert = public_function("convert_parallel_linear")
        dim = cls.dim if dim is None else dim
        return convert(module, dim, layer_class=cls, gather_output=gather_output, counts=counts, group=group)

    def extra_repr(self) -> str:
        """The text of nn.Linear, with dim and tp."""
        options = "".join(f", {name}=True" for name in ("gather_output", "skip_bias_add") if getattr(self, name))
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"dim={self.dim}, tp={self.axis.size}{options}"
        )


def _do_nothing(_: nn.Module, __: tuple[object, ...]) -> None:
    pass


# help() and inspect show the signature of __init__
update_wrapper(ParallelLinear.__new__, ParallelLinear.__init__, assigned=(), updated=())


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
    """A column parallel layer over any number of classes.

    The logits of padding are -inf, which softmax and argmax ignore.

    Shape:
        - input: [*, in_features], the same on every rank.
        - weight: [ceil(classes / tp), in_features].
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
