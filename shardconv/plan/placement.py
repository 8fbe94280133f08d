"""Placement: which elements of a full tensor each rank holds.

One idea carries the project: every rule for cutting a tensor is one dim and, for each rank, an ordered list of pieces
of that dim. Pure integers; knows nothing of bytes, files, models or torch.
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
        """Elements of the dim that the piece takes up in the shard."""
        return self.stop - self.start


class Zeros(NamedTuple):
    """Padding: zeros that the full tensor does not have."""

    size: int


Piece = Interval | Zeros


class IndivisibleError(ValueError):
    """The units of a dim cannot be shared among that many ranks."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The pieces of one tensor, rank by rank.

    A rank's shard is its pieces, concatenated along ``dim``. The intervals of a rank ascend and do not overlap; those
    of all ranks together cover the dim. Ranks may hold the same elements: then they hold copies.

    Attributes:
        dim: the dim that is cut, from 0; None where every rank holds the whole tensor.
        size: the true size of that dim in the full tensor, without padding; 0 where ``dim`` is None.
        ranks: for each rank its pieces; empty where ``dim`` is None.
    """

    dim: int | None
    size: int
    ranks: tuple[tuple[Piece, ...], ...]

    def __post_init__(self) -> None:
        if self.dim is None:
            if self.size or any(self.ranks) or not self.ranks:
                raise ValueError("a replicated placement has no pieces")
            return
        for pieces in self.ranks:
            _check_ascending(pieces, self.size)
        _check_covered(sorted(piece for pieces in self.ranks for piece in intervals(pieces)), self.size)

    @classmethod
    def replicated(cls, tp: int) -> Self:
        """Every one of ``tp`` ranks holds the whole tensor."""
        return cls(None, 0, ((),) * tp)

    @property
    def tp(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def is_padded(self) -> bool:
        """Whether some rank holds zeros that the full tensor does not have."""
        return any(isinstance(piece, Zeros) for pieces in self.ranks for piece in pieces)

    @property
    def num_padding(self) -> int:
        """Elements of padding along the dim, of all ranks together."""
        return sum(piece.size for pieces in self.ranks for piece in pieces if isinstance(piece, Zeros))

    @property
    def has_copies(self) -> bool:
        """Whether some rank holds elements that another holds, too, and the dim is cut."""
        return sum(piece.size for pieces in self.ranks for piece in intervals(pieces)) > self.size

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same shape."""
        return len({self.local_size(rank) for rank in range(self.tp)}) == 1

    def local_size(self, rank: int) -> int:
        """Elements of a rank's shard along ``dim``, padding included; 0 where ``dim`` is None."""
        return sum(piece.size for piece in self.ranks[rank])

    def share(self, number: int, shares: int) -> "Placement":
        """The placement of one of several tensors that hold even shares of the dim, one behind the other.

        Args:
            number: of the tensor, from 0.
            shares: how many tensors there are; the dim is a multiple of it, and without padding.
        """
        size = self.size // shares
        start, stop = number * size, (number + 1) * size
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
        """The shape of a rank's shard of a tensor of this ``shape``."""
        if self.dim is None:
            return tuple(shape)
        return (*shape[: self.dim], self.local_size(rank), *shape[self.dim + 1 :])

    def shard_numel(self, shape: Sequence[int], rank: int) -> int:
        """Elements of a rank's shard of a tensor of this ``shape``."""
        return prod(self.shard_shape(shape, rank))

    def describe(self) -> str:
        """The placement in a few words, for people."""
        if self.dim is None:
            return "replicated"
        words = [f"dim {self.dim}"]
        if (count := max(len(intervals(pieces)) for pieces in self.ranks)) > 1:
            words.append(f"{count} pieces")
        if self.has_copies:
            words.append("copies")
        if self.is_padded:
            words.append(f"padded from {self.size}")
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Plain data: an interval is ``[start, stop]``, a run of zeros its size."""
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
    """The pieces that are elements of the full tensor."""
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
            raise ValueError(f"{piece} is empty")
        if isinstance(piece, Interval):
            if not end <= piece.start or not piece.stop <= size:
                raise ValueError(f"{piece} overlaps the piece before it or leaves the dim of {size}")
            end = piece.stop


def _check_covered(ascending: Sequence[Interval], size: int) -> None:
    end = 0
    for piece in ascending:
        if piece.start > end:
            break
        end = max(end, piece.stop)
    if end < size:
        raise ValueError(f"no rank holds element {end} of the dim of {size}")


@dataclass(frozen=True, slots=True)
class Unit:
    """What boundaries fall between: ``count`` things (heads, rows, blocks) of ``size`` elements each.

    Attributes:
        count: how many there are, without padding.
        size: elements of each.
        copies: fewer units than ranks are held by several ranks each.
        pad: a count that does not divide is padded with zeros.
        multiple: the count is padded to a multiple of this in any case, and has to divide then.
        groups: in how many equal groups they come, as query heads in one for each KV head.
        padded: how many groups there are with padding, and how many units in each: padding follows the units of each
            group, and the groups; None where ``pad`` and ``multiple`` decide.
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
        """Elements of all units, without padding."""
        return self.count * self.size

    def share(self, tp: int, rank: int) -> list[Piece]:
        """The units of a rank, and the padding between and behind them; counted in units.

        Raises:
            IndivisibleError: if the units cannot be shared among ``tp`` ranks.
        """
        groups, group = self._padded(tp)
        total = groups * group
        if total % tp and self.copies and tp % total == 0:
            first = rank // (tp // total)
            return self._range(first, first + 1, group)
        if total % tp:
            of = f" ({self.count} padded to a multiple of {self.multiple})" if self.multiple > 1 else ""
            either = f", nor is {tp} a multiple of {self.count}" if self.copies else ""
            raise IndivisibleError(f"{total}{of} is not a multiple of {tp}{either}")
        per_rank = total // tp
        return self._range(rank * per_rank, (rank + 1) * per_rank, group)

    def padded_count(self, tp: int) -> int:
        """How many units there are with padding, for ``tp`` ranks."""
        groups, group = self._padded(tp)
        return groups * group

    def _padded(self, tp: int) -> tuple[int, int]:
        """The number of groups and the units of each, with padding."""
        if self.padded is not None:
            return self.padded
        count = round_up(self.count, self.multiple)
        has_copies = self.copies and count and tp % count == 0
        return 1, round_up(count, tp) if self.pad and self.multiple == 1 and not has_copies else count

    def _range(self, first: int, last: int, group: int) -> list[Piece]:
        """The places ``[first, last)`` of all, padding included, where each group takes up ``group`` places."""
        groups, true = (self.groups, self.count // self.groups) if self.padded else (1, self.count)
        pieces: list[Piece] = []
        while first < last:
            number, low = divmod(first, group)
            high = min(last - number * group, group)
            held = number * true + min(low, true), number * true + min(high, true)
            if number < groups:
                pieces.append(Interval(*held))
                first += held[1] - held[0]
            pieces.append(Zeros(number * group + high - first))
            first = number * group + high
        return pieces


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple that is not less than ``count``."""
    return -(-count // multiple) * multiple


def cut(dim: int, parts: Sequence[Unit], tp: int, *, groups: int = 1, padded_groups: int | None = None) -> Placement:
    """Shard a dim that consists of ``groups`` times the same ``parts``, one behind the other.

    One group of one part is an ordinary column or row split; one group of three is a fused ``[q; k; v]``; as many
    groups as KV heads is a projection that is interleaved per group. With at least as many groups as ranks, each rank
    has whole groups; with fewer, the ranks that share a group shard each of its parts.

    Args:
        dim: the dim.
        parts: of each group.
        tp: number of ranks.
        groups: how many groups there are.
        padded_groups: how many there are with padding behind them, if there is some.

    Raises:
        IndivisibleError: if groups or units cannot be shared among ``tp`` ranks.
    """
    width, total = sum(part.width for part in parts), padded_groups or groups
    has_whole = total % tp == 0 and all(part.multiple == 1 for part in parts)
    if not has_whole and tp % total:
        raise IndivisibleError(f"{total} is not a multiple of {tp}, nor is {tp} a multiple of {total}")
    per_rank, sharers = (total // tp, 1) if has_whole else (1, tp // total)
    ranks = []
    for rank in range(tp):
        pieces: list[Piece] = []
        for group in range(rank * per_rank // sharers, rank * per_rank // sharers + per_rank):
            found = _pieces(parts, sharers, rank % sharers, group * width)
            pieces += found if group < groups else [Zeros(sum(piece.size for piece in found))]
        ranks.append(_joined(pieces))
    return Placement(dim, groups * width, tuple(ranks))


def _pieces(parts: Sequence[Unit], tp: int, rank: int, start: int) -> list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        for piece in part.share(tp, rank):
            if isinstance(piece, Interval):
                pieces.append(Interval(start + piece.start * part.size, start + piece.stop * part.size))
            else:
                pieces.append(Zeros(piece.size * part.size))
        start += part.width
    return pieces


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same pieces without empty ones, and with neighbors of a kind made one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if piece.size == 0:
            continue
        if isinstance(piece, Interval) and isinstance(last, Interval) and last.stop == piece.start:
            joined[-1] = Interval(last.start, piece.stop)
        elif isinstance(piece, Zeros) and isinstance(last, Zeros):
            joined[-1] = Zeros(last.size + piece.size)
        else:
            joined.append(piece)
    return tuple(joined)
