"""Placement: which elements of a full tensor each rank holds.

Every sharding rule is a :class:`Placement`: one dim, and for each rank an ordered list of intervals of that dim, with
padding between them. Pure integer arithmetic, independent of bytes, files, models and torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Self


class Interval(NamedTuple):
    """The half-open range ``[start, stop)`` of a dim."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements along the dim."""
        return self.stop - self.start


class Zeros(NamedTuple):
    """Padding: ``size`` zeros that the full tensor does not have."""

    size: int


Piece = Interval | Zeros


class IndivisibleError(ValueError):
    """The units of a dim cannot be divided over this number of ranks."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How one dim of a tensor is divided over ranks.

    A rank's shard is the concatenation of its intervals and padding along ``dim``. The intervals of a rank are
    ascending and do not overlap; those of all ranks together cover the dim. Intervals of different ranks may overlap:
    these elements are replicated.

    Attributes:
        dim: the sharded dim, from 0; None if the tensor is replicated.
        size: the size of that dim in the full tensor, without padding; 0 if ``dim`` is None.
        ranks: the intervals and padding of each rank; empty if ``dim`` is None.
    """

    dim: int | None
    size: int
    ranks: tuple[tuple[Piece, ...], ...]

    def __post_init__(self) -> None:
        if self.dim is None:
            if self.size or any(self.ranks) or not self.ranks:
                raise ValueError("a placement without a dim has a size or intervals, or does not have ranks")
            return
        for pieces in self.ranks:
            _check_ascending(pieces, self.size)
        _check_covered(sorted(piece for pieces in self.ranks for piece in intervals(pieces)), self.size)

    @classmethod
    def replicated(cls, tp: int) -> Self:
        """The placement of a tensor that is replicated on ``tp`` ranks."""
        return cls(None, 0, ((),) * tp)

    @property
    def tp(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def is_padded(self) -> bool:
        """Whether the shard of some rank has padding."""
        return any(isinstance(piece, Zeros) for pieces in self.ranks for piece in pieces)

    @property
    def num_padding(self) -> int:
        """Elements of padding along the dim, summed over ranks."""
        return sum(piece.size for pieces in self.ranks for piece in pieces if isinstance(piece, Zeros))

    @property
    def has_replicas(self) -> bool:
        """Whether the dim is sharded and some of its elements are on several ranks."""
        return sum(piece.size for pieces in self.ranks for piece in intervals(pieces)) > self.size

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same shape."""
        return len({self.local_size(rank) for rank in range(self.tp)}) == 1

    def local_size(self, rank: int) -> int:
        """Elements of a rank's shard along ``dim``, with padding; 0 if ``dim`` is None."""
        return sum(piece.size for piece in self.ranks[rank])

    def chunk(self, index: int, chunks: int) -> "Placement":
        """The placement of one of the tensors into which the full tensor is divided evenly along ``dim``.

        Args:
            index: index of the tensor, from 0.
            chunks: number of tensors; divides the size of the dim, which has no padding.
        """
        size = self.size // chunks
        start, stop = index * size, (index + 1) * size
        ranks = (
            tuple(
                Interval(max(piece.start, start) - start, min(piece.stop, stop) - start)
                for piece in intervals(pieces)
                if piece.start < stop and piece.stop > start
            )
            for pieces in self.ranks
        )
        return Placement(self.dim, size, tuple(ranks))

    def shard_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard of a tensor of shape ``shape``."""
        if self.dim is None:
            return tuple(shape)
        return (*shape[: self.dim], self.local_size(rank), *shape[self.dim + 1 :])

    def shard_numel(self, shape: Sequence[int], rank: int) -> int:
        """Number of elements of a rank's shard of a tensor of shape ``shape``."""
        return prod(self.shard_shape(shape, rank))

    def describe(self) -> str:
        """A short description for reports."""
        if self.dim is None:
            return "replicated"
        properties = [f"dim {self.dim}"]
        if (count := max(len(intervals(pieces)) for pieces in self.ranks)) > 1:
            properties.append(f"{count} intervals")
        if self.has_replicas:
            properties.append("partly replicated")
        if self.is_padded:
            properties.append(f"padded from {self.size}")
        return ", ".join(properties)

    def to_json(self) -> dict[str, Any]:
        """Plain data: an interval is ``[start, stop]``, padding is its size."""
        ranks = [[p.size if isinstance(p, Zeros) else [p.start, p.stop] for p in pieces] for pieces in self.ranks]
        return {"dim": self.dim, "size": self.size, "ranks": ranks}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: if the data is not a placement.
        """
        try:
            ranks = tuple(tuple(_piece(item) for item in pieces) for pieces in data["ranks"])
            return cls(data["dim"], data["size"], ranks)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a placement: {data!r:.100}") from error


def intervals(pieces: Sequence[Piece]) -> list[Interval]:
    """The intervals among ``pieces``, without padding."""
    return [piece for piece in pieces if isinstance(piece, Interval)]


def _piece(item: Any) -> Piece:  # noqa: ANN401 - anything JSON holds
    if isinstance(item, int):
        return Zeros(item)
    start, stop = item
    return Interval(start, stop)


def _check_ascending(pieces: Sequence[Piece], size: int) -> None:
    end = 0
    for piece in pieces:
        if piece.size <= 0:
            raise ValueError(f"{piece} is empty (expected at least one element)")
        if isinstance(piece, Interval):
            if not end <= piece.start or not piece.stop <= size:
                raise ValueError(f"{piece} overlaps the interval before it or exceeds the dim of size {size}")
            end = piece.stop


def _check_covered(ascending: Sequence[Interval], size: int) -> None:
    end = 0
    for piece in ascending:
        if piece.start > end:
            break
        end = max(end, piece.stop)
    if end < size:
        raise ValueError(f"no rank holds element {end} of the dim of size {size}")


@dataclass(frozen=True, slots=True)
class Unit:
    """A segment of a dim: ``count`` units (heads, rows, blocks) of ``size`` elements, none of which is split.

    Attributes:
        count: number of units, without padding.
        size: elements per unit.
        copies: replicate units if there are fewer of them than ranks.
        pad: pad a count that the number of ranks does not divide.
        multiple: always pad the count to a multiple of this, which the number of ranks then has to divide.
        groups: number of equal groups of units, such as one group of query heads per KV head.
        padded: number of groups and number of units per group, both with padding, which follows the units of each
            group, and the groups; None if ``pad`` and ``multiple`` determine the padding.
    """

    count: int
    size: int = 1
    copies: bool = False
    pad: bool = False
    multiple: int = 1
    groups: int = 1
    padded: tuple[int, int] | None = None

    @property
    def width(self) -> int:
        """Number of elements of all units, without padding."""
        return self.count * self.size

    def local(self, tp: int, rank: int) -> list[Piece]:
        """The intervals and padding of a rank, counted in units.

        Raises:
            IndivisibleError: if the units cannot be divided over ``tp`` ranks.
        """
        groups, group = self._padded(tp)
        total = groups * group
        if total % tp and self.copies and tp % total == 0:
            first = rank // (tp // total)
            return self._range(first, first + 1, group)
        if total % tp:
            padding = f" ({self.count} padded to a multiple of {self.multiple})" if self.multiple > 1 else ""
            replicas = f", nor is {tp} a multiple of {self.count}" if self.copies else ""
            raise IndivisibleError(f"{total}{padding} is not a multiple of {tp}{replicas}")
        per_rank = total // tp
        return self._range(rank * per_rank, (rank + 1) * per_rank, group)

    def padded_count(self, tp: int) -> int:
        """Number of units with padding, for ``tp`` ranks."""
        groups, group = self._padded(tp)
        return groups * group

    def _padded(self, tp: int) -> tuple[int, int]:
        """Number of groups and number of units per group, with padding."""
        if self.padded is not None:
            return self.padded
        count = round_up(self.count, self.multiple)
        is_replicated = self.copies and count and tp % count == 0
        return 1, round_up(count, tp) if self.pad and self.multiple == 1 and not is_replicated else count

    def _range(self, first: int, last: int, group: int) -> list[Piece]:
        """The padded units ``[first, last)``, where each group has ``group`` units with padding."""
        groups, unpadded = (self.groups, self.count // self.groups) if self.padded else (1, self.count)
        pieces: list[Piece] = []
        while first < last:
            index, low = divmod(first, group)
            high = min(last - index * group, group)
            interval = Interval(index * unpadded + min(low, unpadded), index * unpadded + min(high, unpadded))
            if index < groups:
                pieces.append(interval)
                first += interval.size
            pieces.append(Zeros(index * group + high - first))
            first = index * group + high
        return pieces


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple that is not less than ``count``."""
    return -(-count // multiple) * multiple


def cut(dim: int, segments: Sequence[Unit], tp: int, *, groups: int = 1, padded_groups: int | None = None) -> Placement:
    """Shard a dim that consists of ``groups`` repetitions of the same ``segments``.

    One group of one segment is an ordinary column or row split; one group of three is a fused ``[q; k; v]``; one group
    per KV head is a projection that is interleaved per KV head. With at least as many groups as ranks, each rank has
    full groups; with fewer, each segment of a group is sharded over the ranks of the group.

    Args:
        dim: the dim, from 0.
        segments: the units of each segment of a group.
        tp: number of ranks.
        groups: number of groups.
        padded_groups: number of groups with padding at the end of the dim; None if there is none.

    Raises:
        IndivisibleError: if groups or units cannot be divided over ``tp`` ranks.
    """
    width, total = sum(units.width for units in segments), padded_groups or groups
    has_full_groups = total % tp == 0 and all(units.multiple == 1 for units in segments)
    if not has_full_groups and tp % total:
        raise IndivisibleError(f"{total} is not a multiple of {tp}, nor is {tp} a multiple of {total}")
    per_rank, group_ranks = (total // tp, 1) if has_full_groups else (1, tp // total)
    ranks = []
    for rank in range(tp):
        pieces: list[Piece] = []
        for group in range(rank * per_rank // group_ranks, rank * per_rank // group_ranks + per_rank):
            local = _group_pieces(segments, group_ranks, rank % group_ranks, group * width)
            pieces += local if group < groups else [Zeros(sum(piece.size for piece in local))]
        ranks.append(_merge_adjacent(pieces))
    return Placement(dim, groups * width, tuple(ranks))


def _group_pieces(segments: Sequence[Unit], tp: int, rank: int, start: int) -> list[Piece]:
    """The intervals and padding of a rank of one group that starts at ``start``, counted in elements."""
    pieces: list[Piece] = []
    for units in segments:
        for piece in units.local(tp, rank):
            if isinstance(piece, Interval):
                pieces.append(Interval(start + piece.start * units.size, start + piece.stop * units.size))
            else:
                pieces.append(Zeros(piece.size * units.size))
        start += units.width
    return pieces


def _merge_adjacent(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Remove empty intervals and padding, and merge adjacent ones."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if piece.size == 0:
            continue
        if isinstance(piece, Interval) and isinstance(last, Interval) and last.stop == piece.start:
            merged[-1] = Interval(last.start, piece.stop)
        elif isinstance(piece, Zeros) and isinstance(last, Zeros):
            merged[-1] = Zeros(last.size + piece.size)
        else:
            merged.append(piece)
    return tuple(merged)
