"""Rank tensors: lazy tensors of the full shape that have the elements of one rank only.

An engine's weight loaders select a rank's elements of full tensors by views: slices, ``narrow``, ``chunk``, ``select``.
Views of a rank tensor read nothing. Every other operation reads the elements of its view, if this rank holds all of
them, and raises otherwise.

A view of a contiguous tensor is a list of dims with sizes and strides. It is converted to indices of the sharded dim,
which select elements of the shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias

import torch
from torch import Tensor
from torch._C import _disabled_torch_function_impl  # torch's documentation of subclasses uses it
from torch._ops import OpOverload
from torch.utils._pytree import tree_any, tree_map_only

from shardconv.plan.placement import Placement
from shardconv.support.errors import NotHeldError

#: The device of indices and shards. Given explicitly, as engines change the default device.
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class HeldShard:
    """One rank's shard of a full tensor, read on first use.

    Attributes:
        name: name of the tensor, for messages.
        shape: shape of the full tensor.
        dim: the dim that is sharded.
        positions: [shape[dim]], the index in the shard of each index of that dim, -1 if this rank does not hold it.
        read: returns the shard, [*shape[:dim], held, *shape[dim + 1:]], whose dims before ``dim`` can be viewed as one,
            and those after it; called at most once.
        remedy: the remedy if an element is used that this rank does not hold, for the message.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    positions: Tensor
    read: Callable[[], Tensor]
    remedy: str

    @cached_property
    def rows(self) -> Tensor:
        """The shard as [elements before the dim, held, elements after it]."""
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return self.read().view(prod(before), -1, prod(after))

    def range_of(self, view: Tensor) -> Tensor | None:
        """The elements of a view that is a range of the sharded dim, with all of the others.

        Args:
            view: a view of a contiguous tensor of the full shape.

        Returns:
            [elements before the dim, size of the range, elements after it], a view of the shard; None for other views,
            or if the range is not one in the shard.
        """
        size = view.shape[self.dim] if view.dim() == len(self.shape) else 0
        after = prod(self.shape[self.dim + 1 :])
        start, within = divmod(int(view.storage_offset()), max(after, 1))
        if within or view.shape != (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :]):
            return None
        if view.stride() != _contiguous_strides(self.shape):
            return None
        positions = self.positions[start : start + size]
        return self.rows.narrow(1, int(positions[0]), size) if _is_range(positions) else None


@lru_cache(maxsize=256)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(max(prod(shape[at + 1 :]), 1) for at in range(len(shape)))


@lru_cache(maxsize=16)
def positions_of(placement: Placement, rank: int) -> Tensor:
    """The :attr:`HeldShard.positions` of a rank's shard."""
    positions = torch.full((placement.size,), -1, device=CPU)
    for interval, local in placement.local_intervals(rank):
        positions[interval.start : interval.stop] = torch.arange(local, local + interval.size, device=CPU)
    return positions


def _is_range(positions: Tensor) -> bool:
    """Whether positions, of which there is at least one, are held and consecutive."""
    first = int(positions[0])
    return first >= 0 and torch.equal(positions, torch.arange(first, first + len(positions), device=CPU))


class ViewDim(NamedTuple):
    """A dim of a view.

    Attributes:
        size: its size.
        level: 0 for dims before the sharded dim of the full tensor, 1 for the sharded dim, 2 for dims after it.
        step: distance of consecutive indices, counted in indices of the level.
    """

    size: int
    level: int
    step: int


class Selection(NamedTuple):
    """The elements of a full tensor that a view selects; the tensor has three levels, [before, sharded dim, after].

    Attributes:
        dims: dims of the view; a dim that covers two levels is split into two.
        start: the first index of each level.
        indices: selected indices of the sharded dim, with one dim for each of ``dims`` of level 1.
    """

    dims: tuple[ViewDim, ...]
    start: tuple[int, int, int]
    indices: Tensor


def select(view: Tensor, shard: HeldShard) -> Selection | None:
    """Determine the elements that a view selects; None if they are not ranges in each of the three levels.

    Args:
        view: a view of a contiguous tensor of the full shape.
        shard: the shard of that tensor.
    """
    size, after = shard.shape[shard.dim], prod(shard.shape[shard.dim + 1 :])
    level_strides = (size * after, after, 1)
    sized = list(zip(view.shape, view.stride(), strict=True))
    for level_stride in level_strides[:2]:
        sized = [split for dim in sized for split in _split_at_level(*dim, level_stride)]
    dims = tuple(_view_dim(dim_size, stride, level_strides) for dim_size, stride in sized)
    offset = int(view.storage_offset())
    start = (offset // level_strides[0], offset % level_strides[0] // after, offset % after)
    last = list(start)
    for dim in dims:
        last[dim.level] += (dim.size - 1) * dim.step
    if last[1] >= size or last[2] >= after:
        return None
    indices = torch.tensor(start[1], device=CPU)
    for dim in dims:
        if dim.level == 1:
            indices = indices.unsqueeze(-1) + torch.arange(dim.size, device=CPU) * dim.step
    return Selection(dims, start, indices)


def _view_dim(size: int, stride: int, level_strides: Sequence[int]) -> ViewDim:
    """The dim of a view, in the outermost level whose stride divides the stride of the dim."""
    level = next(level for level, level_stride in enumerate(level_strides) if stride % level_stride == 0)
    return ViewDim(size, level, stride // level_strides[level])


def _split_at_level(size: int, stride: int, level_stride: int) -> Sequence[tuple[int, int]]:
    """Split a dim that covers several steps of a level in two (size, stride): over those steps, and within one."""
    within = level_stride // stride if stride else 0
    if within <= 1 or level_stride % stride or size <= within or size % within:
        return ((size, stride),)
    return (size // within, level_stride), (within, stride)


def span_of(dims: Sequence[ViewDim]) -> tuple[int, int] | None:
    """Return the range [first, end) of the dims of level 1; None if dims of another level are between them."""
    sharded = [n for n, dim in enumerate(dims) if dim.level == 1]
    sharded = [n for n in sharded if dims[n].size > 1] or sharded[:1]  # dims of size 1 may be anywhere
    if not sharded or any(dim.level != 1 and dim.size > 1 for dim in dims[sharded[0] : sharded[-1]]):
        return None
    return sharded[0], sharded[-1] + 1


def gather(shard: HeldShard, selection: Selection, positions: Tensor) -> Tensor:
    """Return the elements of a selection, whose indices of the sharded dim are at ``positions`` in the shard."""
    flat, rows = positions.flatten(), shard.rows
    is_range = _is_range(flat)
    rows = rows.narrow(1, int(flat[0]), len(flat)) if is_range else rows.index_select(1, flat.to(rows.device))
    strides, inner = [], len(flat)
    for dim in selection.dims:
        inner = inner // dim.size if dim.level == 1 else inner
        strides.append(rows.stride(dim.level) * (inner if dim.level == 1 else dim.step))
    offset = rows.storage_offset() + selection.start[0] * rows.stride(0) + selection.start[2] * rows.stride(2)
    return rows.as_strided([dim.size for dim in selection.dims], strides, offset)


#: Positional and keyword arguments of an operation, of any type.
_Arguments: TypeAlias = tuple[Any, ...]
_Options: TypeAlias = dict[str, Any]

_aten = torch.ops.aten


def _operations(*names: str) -> frozenset[OpOverload]:
    return frozenset(getattr(_aten, name).default for name in names)


#: Operations that copy each element, but do not have the tag pointwise.
_COPIES = _operations("clone", "_to_copy")
#: Views for which ``is_view`` is False.
_VIEWS = _operations("_unsafe_view", "_reshape_alias")
#: Views that torch computes lazily, such as conjugates: their values are not elements of the tensor.
_COMPUTED = _operations("_conj", "_neg_view")
#: Operations that use shape, dtype and device of a tensor, but not its values.
_LIKE = _operations(
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"
)


class RankTensor(Tensor):
    """A read-only tensor of the full shape that has the elements of one rank's shard.

    Views of it are rank tensors. Other operations read the elements that they use, or raise
    :class:`~shardconv.support.errors.NotHeldError`.

    Args:
        shard: this rank's shard.
        view: a view, on the meta device, of a contiguous tensor of the full shape.
        device: device of the tensor; by default the CPU.
    """

    shard: HeldShard
    _view: Tensor
    __torch_function__: Any = _disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[Self], shard: HeldShard, view: Tensor, device: torch.device | None = None) -> Self:
        """Create a tensor without storage."""
        tensor: Self = Tensor._make_wrapper_subclass(  # noqa: SLF001 - the only way to create a tensor without storage
            cls,
            view.shape,
            view.stride(),
            view.storage_offset(),
            dtype=view.dtype,
            device=device or CPU,
        )
        tensor.shard, tensor._view = shard, view
        return tensor

    @classmethod
    def of(cls, shard: HeldShard, dtype: torch.dtype, device: torch.device | None = None) -> Self:
        """Create the rank tensor of a full tensor, [*shard.shape]."""
        return cls(shard, torch.empty(shard.shape, dtype=dtype, device="meta"), device)

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe the tensor by name, shape and dtype, without reading its values."""
        return f"RankTensor({self.shard.name!r}, shape={list(self.shape)}, dtype={self.dtype})"

    def data_ptr(self) -> int:
        """Raise TypeError: a rank tensor does not have storage.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self!r} does not have an address: select the elements of this rank by narrow, and clone them"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError: pickling would read the shard.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self!r} cannot be pickled: select the elements of this rank by narrow, and clone them")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: _Arguments = (), kwargs: _Options | None = None
    ) -> object:
        """Apply views and elementwise operations lazily; read the elements for others."""
        kwargs = kwargs or {}
        if func is _aten.as_strided.default:
            raise TypeError(
                f"{func} is not supported on a rank tensor, which does not have a storage: select elements by narrow"
            )
        if (func.is_view and func not in _COMPUTED) or func in _VIEWS:
            return args[0].viewed(func, args[1:], kwargs)
        if func in _COPIES or _is_elementwise(func, args, kwargs):
            return args[0].mapped(func, args[1:], kwargs)
        if func is _aten.cat.default:
            return _concatenate(*args, **kwargs)
        if func in _LIKE:
            like = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
            return func(like, *args[1:], **kwargs)
        _refuse_writes(func, args, kwargs)
        return func(*map(_read, args), **{name: _read(value) for name, value in kwargs.items()})

    def is_sharded_along(self, dim: int) -> bool:
        """Whether this is a full tensor, not a view of some of its elements, that is sharded along ``dim``."""
        return self.shard.dim == dim and self.shard.shape == self.shape and self._view.is_contiguous()

    def read(self) -> Tensor:
        """Read the elements, [*self.shape]; a view of the shard where possible.

        Raises:
            NotHeldError: if this rank does not hold all of them.
        """
        shard = self.shard
        if self.numel() == 0:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if (rows := shard.range_of(self._view)) is not None:  # of most weights
            return rows.view(self.dtype).reshape(self.shape)
        selection = self._selection()
        positions = shard.positions[selection.indices]
        if (positions < 0).any():
            raise NotHeldError(self._missing(selection.indices[positions < 0]))
        return gather(shard, selection, positions).view(self.dtype).reshape(self.shape)

    def _selection(self) -> Selection:
        selection = select(self._view, self.shard)
        if selection is None:
            raise NotHeldError(
                f"{self.shard.name}: a view of shape {list(self.shape)} mixes elements of dim {self.shard.dim} and of "
                f"other dims: {self.shard.remedy}"
            )
        return selection

    def _missing(self, index: Tensor) -> str:
        """The message for indices of the sharded dim that this rank does not hold."""
        shard, first, last = self.shard, int(index.min()), int(index.max())
        local = (shard.positions >= 0).nonzero().flatten()
        held = f"[{int(local[0])}, {int(local[-1]) + 1})" if len(local) else "nothing"
        return (
            f"{shard.name}: elements [{first}, {last + 1}) of dim {shard.dim} are not on this rank, which holds {held} "
            f"of {shard.shape[shard.dim]}: {shard.remedy}"
        )

    def viewed(self, func: OpOverload, args: _Arguments, kwargs: _Options) -> object:
        """Return the views, without reading; for a view as a dtype of another size, read the elements first."""
        views = func(self._view, *args, **kwargs)
        if isinstance(views, Tensor) and views.dtype.itemsize != self.dtype.itemsize:
            return func(self.read(), *args, **kwargs)
        if isinstance(views, Tensor):
            return RankTensor(self.shard, views, self.device)
        return tree_map_only(Tensor, lambda view: RankTensor(self.shard, view, self.device), views)

    def mapped(self, func: OpOverload, args: _Arguments, kwargs: _Options) -> Tensor:
        """Apply an elementwise operation lazily: to the held elements, when they are read."""
        selection = None if self.numel() == 0 else select(self._view, self.shard)
        span = None if selection is None else span_of(selection.dims)
        if selection is None or span is None:
            mapped: Tensor = func(self.read(), *args, **kwargs)
            return mapped
        before, after = selection.dims[: span[0]], selection.dims[span[1] :]
        shard, positions, dtype = self.shard, self.shard.positions[selection.indices].flatten(), self.dtype
        held_positions = positions[positions >= 0]
        held_selection = selection._replace(dims=(*before, ViewDim(len(held_positions), 1, 1), *after))

        def read() -> Tensor:
            values: Tensor = func(gather(shard, held_selection, held_positions).view(dtype), *args, **kwargs)
            return values.contiguous()

        new_positions = torch.full_like(positions, -1)
        new_positions[positions >= 0] = torch.arange(len(held_positions), device=CPU)
        shape = (*(dim.size for dim in before), len(positions), *(dim.size for dim in after))
        result = HeldShard(shard.name, shape, len(before), new_positions, read, shard.remedy)
        device = torch.device(kwargs.get("device") or self.device)
        on_meta = {name: value for name, value in kwargs.items() if name != "device"}
        return RankTensor.of(result, func(self._view, *args, **on_meta).dtype, device).view(self.shape)


def _read(value: object) -> object:
    """An argument of an operation, with the elements of rank tensors read; lists of them are the only nested ones."""
    if isinstance(value, RankTensor):
        return value.read()
    return [_read(one) for one in value] if isinstance(value, list | tuple) else value


def _concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Apply ``torch.cat``, lazily if it is along the sharded dim."""
    # clones are full rank tensors also where a tensor is a view, and nothing else reads their shards
    copies = [tensor.clone() if isinstance(tensor, RankTensor) else tensor for tensor in tensors]
    joined = torch.cat([torch.empty_like(tensor, device="meta") for tensor in copies], dim)  # raises as torch does
    dim %= joined.dim()
    lazy = [tensor for tensor in copies if isinstance(tensor, RankTensor) and tensor.is_sharded_along(dim)]
    if len(lazy) != len(copies) or any(tensor.dtype != joined.dtype for tensor in copies):
        return torch.cat([tensor.read() if isinstance(tensor, RankTensor) else tensor for tensor in copies], dim)
    shards = [tensor.shard for tensor in lazy]
    positions, held = [], 0
    for shard in shards:
        positions.append(torch.where(shard.positions < 0, -1, shard.positions + held))
        held += int((shard.positions >= 0).sum())

    def read() -> Tensor:
        return torch.cat([shard.read() for shard in shards if (shard.positions >= 0).any()], dim)

    first = shards[0]
    result = HeldShard(first.name, tuple(joined.shape), dim, torch.cat(positions), read, first.remedy)
    return RankTensor.of(result, joined.dtype, copies[0].device)


def _is_elementwise(func: OpOverload, args: _Arguments, kwargs: _Options) -> bool:
    """Whether an operation is elementwise, writes into no argument, and has one tensor argument."""
    if torch.Tag.pointwise not in func.tags or not isinstance(args[0], RankTensor):
        return False
    is_functional = not any(argument.alias_info is not None for argument in _declared_arguments(func))
    return is_functional and not tree_any(lambda value: isinstance(value, Tensor), (args[1:], kwargs))


def _refuse_writes(func: OpOverload, args: _Arguments, kwargs: _Options) -> None:
    """Raise TypeError if an operation writes into a rank tensor."""
    for at, name in _written_arguments(func):
        value = args[at] if at < len(args) else kwargs.get(name)
        if tree_any(lambda leaf: isinstance(leaf, RankTensor), value):
            raise TypeError(
                f"{func} writes into a rank tensor, which is read-only: select the elements of this rank by narrow, "
                f"and write into a clone of them"
            )


@lru_cache(maxsize=256)
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operation writes into."""
    declared = enumerate(_declared_arguments(func))
    return tuple((at, one.name) for at, one in declared if one.alias_info is not None and one.alias_info.is_write)


def _declared_arguments(func: OpOverload) -> Sequence[torch.Argument]:
    """The declared arguments of an operation."""
    return func._schema.arguments  # noqa: SLF001 - torch does not export it
