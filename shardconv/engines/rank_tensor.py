"""Rank tensors: tensors of the full shape of which one rank's elements are there, to be read when they are used.

An engine's own weight loaders take what a rank needs out of full tensors by views: slices, ``narrow``, ``chunk``,
``select``. On a rank tensor views read nothing. Any other operation reads what its view selects, if this rank holds all
of it, and raises otherwise; so what is not there is never read as something else. Knows no engine and no file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map_only

from shardconv.errors import NotHeldError
from shardconv.plan.placement import Interval, Placement

aten = torch.ops.aten
_CPU = torch.device("cpu")

#: Operations that copy each element, and are not marked as pointwise.
_COPIES = {aten.clone.default, aten._to_copy.default}  # noqa: SLF001 - names of operators
#: Views that are not marked as such, as they follow a copy.
_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default}  # noqa: SLF001 - likewise
#: Views whose elements are not elements of the tensor at other places: they are taken of what is held.
_COMPUTED = {aten._conj.default, aten._neg_view.default}  # noqa: SLF001 - likewise
#: Operations that use shape, dtype and device of a tensor, and none of its values.
_LIKE = {
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class HeldShard:
    """One rank's shard of a full tensor, not read yet.

    Attributes:
        name: of the tensor, for messages.
        shape: of the full tensor.
        dim: the dim that is sharded.
        positions: for each index of that dim its index in the shard, -1 where this rank does not hold it: [shape[dim]].
        read: gives the shard: [*shape[:dim], held, *shape[dim + 1:]], contiguous; called at most once.
        remedy: what to do where an element is used that this rank does not hold.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    positions: Tensor
    read: Callable[[], Tensor]
    remedy: str

    @cached_property
    def rows(self) -> Tensor:
        """The shard as [elements before the dim, held, elements behind it]."""
        before, behind = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return self.read().view(prod(before), -1, prod(behind))


def positions_of(placement: Placement, rank: int) -> Tensor:
    """The index in a rank's shard of each index of the sharded dim, -1 where it is not held: [placement.size]."""
    positions = torch.full((placement.size,), -1, device=_CPU)  # engines set other defaults
    local = 0
    for piece in placement.ranks[rank]:
        if isinstance(piece, Interval):
            positions[piece.start : piece.stop] = torch.arange(local, local + piece.size, device=_CPU)
        local += piece.size
    return positions


class _Dim(NamedTuple):
    """A dim of a view: its size, its level (0 before the sharded dim, 1, 2 behind it), and its step in that level."""

    size: int
    level: int
    step: int


class _Selection(NamedTuple):
    """What a view selects of a full tensor, seen as [before, sharded dim, behind].

    Attributes:
        dims: of the view; one that runs over two levels counts as two.
        start: the first index of each level.
        indices: of the sharded dim: one dim for each of ``dims`` of level 1.
    """

    dims: tuple[_Dim, ...]
    start: tuple[int, int, int]
    indices: Tensor


def _select(view: Tensor, shard: HeldShard) -> _Selection | None:
    """What a view of the full tensor selects; None where it does not consist of ranges of the three levels."""
    size, behind = shard.shape[shard.dim], prod(shard.shape[shard.dim + 1 :])
    units = (size * behind, behind, 1)
    found = list(zip(view.shape, view.stride(), strict=True))
    for unit in units[:2]:
        found = [part for one in found for part in _at_boundary(*one, unit)]
    levels = (next(level for level, unit in enumerate(units) if stride % unit == 0) for _, stride in found)
    dims = tuple(_Dim(n, level, stride // units[level]) for (n, stride), level in zip(found, levels, strict=True))
    offset = int(view.storage_offset())
    start = (offset // units[0], offset % units[0] // behind, offset % behind)
    last = list(start)
    for dim in dims:
        last[dim.level] += (dim.size - 1) * dim.step
    if last[1] >= size or last[2] >= behind:
        return None
    indices = torch.tensor(start[1], device=_CPU)
    for dim in dims:
        if dim.level == 1:
            indices = indices.unsqueeze(-1) + torch.arange(dim.size, device=_CPU) * dim.step
    return _Selection(dims, start, indices)


def _at_boundary(size: int, stride: int, unit: int) -> Sequence[tuple[int, int]]:
    """Size and stride of a dim that runs over a boundary of ``unit`` elements, as of two: across it, and within it."""
    within = unit // stride if stride else 0
    if within <= 1 or unit % stride or size <= within or size % within:
        return ((size, stride),)
    return (size // within, unit), (within, stride)


def _span(dims: Sequence[_Dim]) -> tuple[int, int] | None:
    """The first and the end of the dims of level 1, if none of another level is between them."""
    sharded = [n for n, dim in enumerate(dims) if dim.level == 1]
    sharded = [n for n in sharded if dims[n].size > 1] or sharded[:1]  # a single index may be anywhere
    if not sharded or any(dim.level != 1 and dim.size > 1 for dim in dims[sharded[0] : sharded[-1]]):
        return None
    return sharded[0], sharded[-1] + 1


def _gather(shard: HeldShard, selection: _Selection, positions: Tensor) -> Tensor:
    """The elements of a selection, with ``positions`` in the shard in place of its indices of the sharded dim."""
    flat = positions.flatten()
    first = int(flat[0])
    is_range = bool((flat == torch.arange(first, first + len(flat), device=_CPU)).all())
    rows = shard.rows
    rows = rows.narrow(1, first, len(flat)) if is_range else rows.index_select(1, flat.to(rows.device))
    strides, inner = [], len(flat)
    for dim in selection.dims:
        inner = inner // dim.size if dim.level == 1 else inner
        strides.append(rows.stride(dim.level) * (inner if dim.level == 1 else dim.step))
    offset = rows.storage_offset() + selection.start[0] * rows.stride(0) + selection.start[2] * rows.stride(2)
    return rows.as_strided([dim.size for dim in selection.dims], strides, offset)


class RankTensor(Tensor):
    """A tensor of the full shape of which one rank's shard is there.

    Views of it are rank tensors. Other operations get the elements that they use, or raise
    :class:`~shardconv.errors.NotHeldError`; nothing can be written into it.

    Args:
        shard: what is held.
        view: a tensor on the meta device: a view of one of the full shape, contiguous.
    """

    _shard: HeldShard
    _view: Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as torch's own

    @staticmethod
    def __new__(cls: type[Self], shard: HeldShard, view: Tensor, device: torch.device | None = None) -> Self:
        """Make a tensor without storage."""
        made: Self = Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's way to do it
            cls,
            view.shape,
            view.stride(),
            view.storage_offset(),
            dtype=view.dtype,
            device=device or _CPU,
        )
        made._shard, made._view = shard, view
        return made

    @classmethod
    def of(cls, shard: HeldShard, dtype: torch.dtype, device: torch.device | None = None) -> Self:
        """The full tensor."""
        return cls(shard, torch.empty(shard.shape, dtype=dtype, device="meta"), device)

    def __repr__(self) -> str:  # type: ignore[override]
        """Without values, which would be read for it."""
        return f"RankTensor({self._shard.name!r}, shape={list(self.shape)}, dtype={self.dtype})"

    def data_ptr(self) -> int:
        """Refused: there is no memory behind the full tensor.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self!r}: does not have an address: take what this rank holds of it by narrow, and copy that")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a copy would need the shard.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self!r}: cannot be pickled: take what this rank holds of it by narrow, and copy that")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stay lazy for views, and read for all else."""
        kwargs = kwargs or {}
        if func is aten.as_strided.default:
            raise TypeError(f"{func}: a rank tensor does not have memory to stride over: take a part of it by narrow")
        if (func.is_view and func not in _COMPUTED) or func in _VIEWS:
            return args[0].viewed(func, args[1:], kwargs)
        if func in _COPIES or _is_of_one_tensor(func, args, kwargs):
            return args[0].mapped(func, args[1:], kwargs)
        if func is aten.cat.default:
            return _concatenate(*args, **kwargs)
        if func in _LIKE:
            like = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
            return func(like, *args[1:], **kwargs)
        _refuse_writes(func, args, kwargs)
        args, kwargs = tree_map_only(RankTensor, RankTensor.held, (args, kwargs))
        return func(*args, **kwargs)

    def is_along(self, dim: int) -> bool:
        """Whether this is a full tensor, and not a part of one, that is sharded along ``dim``."""
        return self._shard.dim == dim and self._shard.shape == self.shape and self._view.is_contiguous()

    def held(self) -> Tensor:
        """The elements, which this rank has to hold; a view of its shard where that is possible.

        Raises:
            NotHeldError: if it does not hold all of them.
        """
        shard = self._shard
        if self.numel() == 0:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        selection = self._selection()
        positions = shard.positions[selection.indices]
        if (positions < 0).any():
            raise NotHeldError(self._missing(selection.indices[positions < 0]))
        return _gather(shard, selection, positions).view(self.dtype).reshape(self.shape)

    def _selection(self) -> _Selection:
        found = _select(self._view, self._shard)
        if found is None:
            raise NotHeldError(
                f"{self._shard.name}: a view of shape {list(self.shape)} mixes elements of dim {self._shard.dim} with "
                f"those of other dims: {self._shard.remedy}"
            )
        return found

    def _missing(self, index: Tensor) -> str:
        shard, first, last = self._shard, int(index.min()), int(index.max())
        own = (shard.positions >= 0).nonzero().flatten()
        has = f"[{int(own[0])}, {int(own[-1]) + 1})" if len(own) else "nothing"
        return (
            f"{shard.name}: elements [{first}, {last + 1}) of dim {shard.dim} are not on this rank, which holds {has} "
            f"of {shard.shape[shard.dim]}: {shard.remedy}"
        )

    def viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A view, of which nothing is read; of a dtype of another size, of what is held."""
        found = func(self._view, *args, **kwargs)
        if isinstance(found, Tensor) and found.dtype.itemsize != self.dtype.itemsize:
            return func(self.held(), *args, **kwargs)
        return tree_map_only(Tensor, lambda view: RankTensor(self._shard, view, self.device), found)

    def mapped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Apply an operation to each element: to those that are held, when they are read."""
        selection = None if self.numel() == 0 else _select(self._view, self._shard)
        span = None if selection is None else _span(selection.dims)
        if selection is None or span is None:
            mapped: Tensor = func(self.held(), *args, **kwargs)
            return mapped
        before, behind = selection.dims[: span[0]], selection.dims[span[1] :]
        shard, positions, dtype = self._shard, self._shard.positions[selection.indices].flatten(), self.dtype
        own = positions[positions >= 0]
        rest = selection._replace(dims=(*before, _Dim(len(own), 1, 1), *behind))

        def read() -> Tensor:
            values: Tensor = func(_gather(shard, rest, own).view(dtype), *args, **kwargs)
            return values.contiguous()

        local = torch.full_like(positions, -1)
        local[positions >= 0] = torch.arange(len(own), device=_CPU)
        shape = (*(dim.size for dim in before), len(positions), *(dim.size for dim in behind))
        made = HeldShard(shard.name, shape, len(before), local, read, shard.remedy)
        device = torch.device(kwargs.get("device") or self.device)
        given = {name: value for name, value in kwargs.items() if name != "device"}
        return RankTensor.of(made, func(self._view, *args, **given).dtype, device).view(self.shape)


def _concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat``, which reads what is held when it is read, if it is along the dim that is sharded."""
    copies = [tensor.clone() if isinstance(tensor, RankTensor) else tensor for tensor in tensors]
    joined = torch.cat([torch.empty_like(one, device="meta") for one in copies], dim)  # refuses what torch refuses
    dim %= joined.dim()
    lazy = [one for one in copies if isinstance(one, RankTensor) and one.is_along(dim)]
    if len(lazy) != len(copies) or any(one.dtype != joined.dtype for one in copies):
        return torch.cat([one.held() if isinstance(one, RankTensor) else one for one in copies], dim)
    shards = [one._shard for one in lazy]  # noqa: SLF001 - of this module's own
    positions, held = [], 0
    for shard in shards:
        positions.append(torch.where(shard.positions < 0, -1, shard.positions + held))
        held += int((shard.positions >= 0).sum())

    def read() -> Tensor:
        return torch.cat([shard.read() for shard in shards if (shard.positions >= 0).any()], dim)

    first = shards[0]
    made = HeldShard(first.name, tuple(joined.shape), dim, torch.cat(positions), read, first.remedy)
    return RankTensor.of(made, joined.dtype, copies[0].device)


def _is_of_one_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation computes each element from the same element of the one tensor that it is given."""
    if torch.Tag.pointwise not in func.tags or not isinstance(args[0], RankTensor):
        return False
    is_functional = not any(one.alias_info is not None for one in func._schema.arguments)  # noqa: SLF001 - as below
    return is_functional and not tree_any(lambda one: isinstance(one, Tensor), (args[1:], kwargs))


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to write into a rank tensor, which would be lost."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs  # noqa: SLF001
    for argument in func._schema.arguments:  # noqa: SLF001 - there is no other way to ask
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and tree_any(lambda one: isinstance(one, RankTensor), given.get(argument.name)):
            raise TypeError(
                f"{func}: writes into a rank tensor, of which only a shard is there: write into a copy of it"
            )
