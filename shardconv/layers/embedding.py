"""Vocabulary-parallel and embedding-dim-parallel embeddings, with all options of nn.Embedding."""

from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardconv.distributed import Axis, GroupLike, as_axis, reduce_from_tp
from shardconv.layers.features import check_tag
from shardconv.layers.init import Initializer, fill_shard_, get_initializer
from shardconv.layers.parallel_module import ParallelModule, public_function
from shardconv.layers.sharding import even_placement, gather_shards, take_shard
from shardconv.plan.placement import Interval, Placement, intervals

#: ``dim`` to the dim of the embedding table that is sharded.
_TABLE_DIM = {None: None, 0: 0, -1: 1, 1: 1}


def table_placement(num_embeddings: int, embedding_dim: int, dim: int | None, tp: int) -> Placement | None:
    """Return the placement of an embedding table that is sharded evenly; None if it is not sharded.

    Raises:
        ValueError: if ``dim`` is not None, 0, 1 or -1, or ``embedding_dim`` is sharded and not a multiple of ``tp``.
    """
    if dim not in _TABLE_DIM:
        raise ValueError(
            f"dim is not supported (got {dim!r}, expected None for unsharded, 0 for the vocabulary, 1 or -1 for the "
            f"embedding dim)"
        )
    if dim is None:
        return None
    size, what = ((num_embeddings, "num_embeddings"), (embedding_dim, "embedding_dim"))[_TABLE_DIM[dim] or 0]
    return even_placement(_TABLE_DIM[dim] or 0, (size,), tp, pad=dim == 0, what=what)


def parallel_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    num_embeddings: int | None = None,
    dim: int | None = None,
    *,
    gather_output: bool = True,
    group: GroupLike = None,
) -> Tensor:
    """Apply ``F.embedding`` to a shard of the embedding table.

    Args:
        input: ids, [*], the same on every rank.
        weight: this rank's shard: [ceil(num_embeddings / tp), embedding_dim] with dim=0, [num_embeddings,
            embedding_dim / tp] with dim=-1.
        padding_idx: row of the full table that gets no gradient; counted from the end if negative.
        max_norm: used rows with a larger norm are scaled down to it, in place; the norm is computed over the full row.
        norm_type: p of that norm.
        scale_grad_by_freq: divide gradients by the number of times that their id is in the input.
        sparse: make the gradient of the shard a sparse tensor.
        num_embeddings: number of rows of the full table; by default the sum of the rows of all shards.
        dim: the dim of the table that is sharded: 0, 1 or -1; None for an unsharded table.
        gather_output: with dim=-1, all-gather the output.
        group: see :func:`~shardconv.distributed.as_axis`.

    Returns:
        [*, embedding_dim], the same on every rank; [*, embedding_dim / tp] with dim=-1 and without ``gather_output``.

    Raises:
        IndexError: if an id is out of range; on CUDA a device-side assertion, as torch's.
        ValueError: if the shape of the shard does not match, or the ids are tagged as sharded (see
            :class:`~shardconv.layers.RegisterParallelDim`).

    Example:
        >>> table = torch.arange(10.0).view(5, 2)
        >>> parallel_embedding(torch.tensor([4, 0]), table, num_embeddings=5, dim=0)
        tensor([[8., 9.],
                [0., 1.]])
    """
    axis = as_axis(group)
    rows = weight.shape[0] * (axis.size if dim == 0 else 1)
    num_embeddings = rows if num_embeddings is None else num_embeddings
    features = weight.shape[1] * (axis.size if dim in (1, -1) else 1)
    placement = table_placement(num_embeddings, features, dim, axis.size)
    if placement is not None and placement.shard_shape((num_embeddings, features), axis.rank) != tuple(weight.shape):
        raise ValueError(
            f"weight of shape {list(weight.shape)} is not the shard of a table of {num_embeddings} rows on rank "
            f"{axis.rank} of {axis.size}: pass this rank's shard"
        )
    if padding_idx is not None and padding_idx < 0:
        padding_idx += num_embeddings
    if placement is not None:
        check_tag(input, [None], axis, "parallel_embedding".__str__)
    options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return look_up(input, weight, options, placement, axis, gather_output=gather_output)


#: The options of ``F.embedding`` that follow the weight.
LookupOptions = tuple[int | None, float | None, float, bool, bool]


def look_up(
    input: Tensor,
    weight: Tensor,
    options: LookupOptions,
    placement: Placement | None,
    axis: Axis,
    *,
    gather_output: bool,
) -> Tensor:
    """Apply ``F.embedding`` to the shard that ``placement`` describes."""
    padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse = options
    if placement is None or (axis.size == 1 and not placement.is_padded):
        return functional.embedding(input, weight, *options)
    if placement.dim != 0:
        if max_norm is not None:
            _scale_rows_(weight, input, max_norm, norm_type, axis)
        output = functional.embedding(input, weight, padding_idx, None, 2.0, scale_grad_by_freq, sparse)
        return gather_shards(output, placement, axis, dim=-1) if gather_output else output
    num_embeddings = placement.size
    ((first, last),) = intervals(placement.ranks[axis.rank]) or [Interval(num_embeddings, num_embeddings)]
    local_padding_idx = padding_idx - first if padding_idx is not None and first <= padding_idx < last else None
    if max_norm is None and not scale_grad_by_freq and not sparse:
        output = _look_up_masked(input, weight, local_padding_idx, first, last, num_embeddings)
    else:
        local_options = (local_padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        output = _look_up_local(input, weight, local_options, first, last, num_embeddings)
    return reduce_from_tp(output, group=axis)


def _look_up_masked(
    input: Tensor, weight: Tensor, padding_idx: int | None, first: int, last: int, num_embeddings: int
) -> Tensor:
    """Look up the ids in [first, last), with zeros for the other ids; no shape depends on the values of ids."""
    is_local = (input >= first) & (input < last)
    # An id outside of the vocabulary stays out of range of the shard, too, so that the lookup raises as torch does.
    is_remote = ~is_local & (input >= 0) & (input < num_embeddings)
    index = torch.where(is_local, input - first, weight.shape[0]).masked_fill(is_remote, 0)
    return functional.embedding(index, weight, padding_idx).masked_fill(~is_local.unsqueeze(-1), 0)


def _look_up_local(
    input: Tensor, weight: Tensor, options: LookupOptions, first: int, last: int, num_embeddings: int
) -> Tensor:
    """Look up only the ids in [first, last): for options that depend on which rows are used."""
    _check_range(input, num_embeddings)
    ids = input.reshape(-1)
    is_local = (ids >= first) & (ids < last)
    output = weight.new_zeros((len(ids), weight.shape[1]))
    output = output.index_put((is_local,), functional.embedding(ids[is_local] - first, weight, *options))
    return output.view(*input.shape, weight.shape[1])


def _check_range(input: Tensor, num_embeddings: int) -> None:
    if ((input < 0) | (input >= num_embeddings)).any():
        raise IndexError("index out of range in self")


@torch.no_grad()
def _scale_rows_(weight: Tensor, input: Tensor, max_norm: float, norm_type: float, axis: Axis) -> None:
    """Scale down the used rows whose norm over all ranks is larger, as ``torch.embedding_renorm_`` does."""
    _check_range(input, len(weight))
    ids = input.unique()
    dtype = torch.promote_types(weight.dtype, torch.float32)  # as torch does, so that sums do not overflow
    rows = weight[ids].to(dtype).abs()
    if norm_type == float("inf"):
        norms = reduce_from_tp(rows.amax(1), op=dist.ReduceOp.MAX, group=axis)
    elif norm_type == 0:
        norms = reduce_from_tp(rows.count_nonzero(1).to(rows.dtype), group=axis)
    else:
        norms = reduce_from_tp(rows.pow(norm_type).sum(1), group=axis).pow(1 / norm_type)
    scales = torch.where(norms > max_norm, max_norm / (norms + 1e-7), 1)
    weight[ids] *= scales.unsqueeze(1).to(weight.dtype)


ModuleT = TypeVar("ModuleT", bound=nn.Module)


class ParallelEmbedding(ParallelModule, nn.Embedding):
    """nn.Embedding with its table sharded over the ranks of the tensor axis.

    After construction the gathered table equals, bit for bit, the table that nn.Embedding draws on the first rank.

    Args:
        num_embeddings: number of rows of the full table; with dim=0 it is padded to a multiple of tp.
        embedding_dim: number of columns of the full table.
        padding_idx: as in nn.Embedding.
        max_norm: as in nn.Embedding; the norm is computed over the full row.
        norm_type: as in nn.Embedding.
        scale_grad_by_freq: as in nn.Embedding.
        sparse: as in nn.Embedding.
        _weight: initial full table, as in nn.Embedding.
        dim: the dim of the table that is sharded: 0 for the vocabulary, 1 or -1 for the embedding dim, None for none;
            by default the dim of the class.
        gather_output: with dim=-1, all-gather the output.
        weight: this rank's shard, used without a copy.
        weight_init: an initializer, or its name; by default N(0, 1) with zeros at ``padding_idx``.
        device: device of the table, which may be ``meta``.
        dtype: dtype of the table.
        group: see :func:`~shardconv.distributed.as_axis`.

    Shape:
        - weight: [ceil(num_embeddings / tp), embedding_dim] with dim=0, [num_embeddings, embedding_dim / tp] with
          dim=-1.
        - input: [*], ids, the same on every rank.
        - output: [*, embedding_dim], the same on every rank; [*, embedding_dim / tp] with dim=-1 and without
          ``gather_output``.

    Raises:
        IndexError: in forward, if an id is out of range; on CUDA a device-side assertion, as torch's.
        ValueError: if ``embedding_dim`` is sharded and not a multiple of tp, or ``padding_idx`` is out of range; in
            forward, if the ids are tagged as sharded (see :class:`~shardconv.layers.RegisterParallelDim`).

    Example:
        >>> layer = ParallelEmbedding(64, 512, dim=0)
        >>> layer(torch.tensor([[1, 2], [3, 63]])).shape
        torch.Size([2, 2, 512])
    """

    weight: nn.Parameter
    bias = None
    _weight_init: Initializer
    #: The ``dim`` of every instance of the class; None where any is possible.
    _class_dim: ClassVar[int | None] = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        dim: int | None = None,
        *,
        gather_output: bool = True,
        weight: nn.Parameter | None = None,
        weight_init: Initializer | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: GroupLike = None,
    ) -> None:
        nn.Module.__init__(self)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx is out of range (got {padding_idx}, expected an id of {num_embeddings} embeddings)"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.set_up(as_axis(group), dim=self._checked_dim(dim), gather_output=gather_output)
        self.register_shard("weight", (num_embeddings, embedding_dim), device=device, dtype=dtype)
        if weight is not None or _weight is not None:
            self._set_weight(weight, _weight)
        self.describe_parameters()
        self._weight_init = get_initializer(weight_init or self._weight_init)
        self._is_default_init = weight_init is None
        self.reset_parameters()

    def _set_weight(self, weight: nn.Parameter | None, full: Tensor | None) -> None:
        """Use a shard of another layer as the table, or copy the shard of a full table."""
        passed = full if weight is None else weight
        expected = self.weight.shape if passed is weight else (self.num_embeddings, self.embedding_dim)
        assert passed is not None
        if tuple(passed.shape) != tuple(expected):
            raise ValueError(f"weight has shape {list(passed.shape)} (expected {list(expected)})")
        if weight is None:
            placement = self.placements.get("weight")
            shard = passed if placement is None else take_shard(passed, placement, self.axis.rank)
            weight = nn.Parameter(shard.detach().clone())
        self.weight, self._is_weight_passed = weight, True

    def set_up(
        self, axis: Axis, *, dim: int | None = None, gather_output: bool = True, placement: Placement | None = None
    ) -> None:
        """See :meth:`ParallelModule.set_up`; pass ``placement`` for a table with more padding than ``tp`` needs."""
        self.axis, self.dim, self.gather_output = axis, -1 if dim == 1 else dim, gather_output
        self._is_weight_passed, self._is_default_init = False, True
        self._weight_init = nn.init.normal_
        placement = placement or table_placement(self.num_embeddings, self.embedding_dim, self.dim, axis.size)
        self.placements = {} if placement is None else {"weight": placement}

    def reset_parameters(self) -> None:
        """Draw the values that nn.Embedding draws; all ranks must call it."""
        if self._is_weight_passed:
            return

        def draw(full: Tensor) -> None:
            self._weight_init(full)
            if self.padding_idx is not None and self._is_default_init:
                full[self.padding_idx].fill_(0)

        fill_shard_(self.weight, self.placements.get("weight"), self.axis, draw)

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows of ids, [*]; for the shape of the output see the class."""
        options = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)
        placement = self.placements.get("weight")
        if placement is not None:
            check_tag(input, [None], self.axis, self.describe_layer)
        return look_up(input, self.weight, options, placement, self.axis, gather_output=self.gather_output)

    @classmethod
    def convert_parallel_embedding(cls, module: ModuleT, dim: int | None = None, *, group: GroupLike = None) -> ModuleT:
        """Call :func:`shardconv.convert_parallel_embedding`; ``dim`` defaults to the dim of the class, if it has one.

        Raises:
            ValueError: also if ``dim`` is not the dim of the class.
        """
        return public_function("convert_parallel_embedding")(module, cls._checked_dim(dim), group=group)

    @classmethod
    def _checked_dim(cls, dim: int | None) -> int | None:
        """Return the dim of the class, if it has one, else ``dim``."""
        if cls._class_dim is not None and dim not in (None, cls._class_dim):
            raise ValueError(f"dim = {dim} (expected {cls._class_dim} for {cls.__name__})")
        return dim if cls._class_dim is None else cls._class_dim

    def extra_repr(self) -> str:
        """The text of nn.Embedding, with dim and tp."""
        defaults = {
            "padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False
        }  # fmt: skip
        options = "".join(f", {n}={getattr(self, n)}" for n, default in defaults.items() if getattr(self, n) != default)
        return f"{self.num_embeddings}, {self.embedding_dim}{options}, dim={self.dim}, tp={self.axis.size}"


class VocabParallelEmbedding(ParallelEmbedding):
    """:class:`ParallelEmbedding` with dim=0: each rank holds a shard of the vocabulary.

    Example:
        >>> layer = VocabParallelEmbedding(1999, 8, padding_idx=0)
        >>> layer(torch.tensor([1998])).shape
        torch.Size([1, 8])
    """

    _class_dim = 0
