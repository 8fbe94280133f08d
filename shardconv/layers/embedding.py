"""Vocabulary-parallel and embedding-dim-parallel embeddings, with all options of nn.Embedding."""

from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from shardconv.distributed import Axis, GroupLike, as_axis
from shardconv.layers.init import Initializer, fill_shard_, get_initializer
from shardconv.layers.lookup import look_up, table_placement
from shardconv.layers.parallel_module import ParallelModule, public_function
from shardconv.layers.sharding import take_shard
from shardconv.layers.tags import check_tag
from shardconv.plan.placement import Placement

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class ParallelEmbedding(ParallelModule, nn.Embedding):
    """nn.Embedding with its table sharded over the ranks of the tensor axis.

    After construction the gathered table equals, bit for bit, the one that nn.Embedding draws on the first rank.

    Args:
        num_embeddings: number of rows of the full table; with dim=0 it is padded to a multiple of tp.
        embedding_dim: number of columns of the full table.
        padding_idx: as in nn.Embedding.
        max_norm: as in nn.Embedding; the norm is that of the full row.
        norm_type: as in nn.Embedding.
        scale_grad_by_freq: as in nn.Embedding.
        sparse: as in nn.Embedding.
        _weight: initial full table, as in nn.Embedding.
        dim: the dim of the table that is sharded: 0 for the vocabulary, 1 or -1 for the embedding dim, None for none;
            by default that of the class.
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
        """Call :func:`shardconv.convert_parallel_embedding`; on a class for one ``dim``, that is the default.

        Raises:
            ValueError: also if ``dim`` is not that of the class.
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
