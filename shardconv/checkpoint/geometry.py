"""From elements to bytes: where a flat range of a full tensor's bytes lies in each rank's shard.

Owns the arithmetic between a placement and the copy engine. A full tensor is seen as rows, the elements before its cut
dim, each of ``width`` bytes; a shard as the same rows, narrower. A flat range of the full tensor is then at most three
boxes (the rest of a row, whole rows, the beginning of a row) and, because pieces ascend, one contiguous range of every
shard. Pure integers: opens nothing.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple, Self

from shardconv.checkpoint.header import DTYPE_BITS
from shardconv.plan.placement import Interval, Piece, Placement, intervals


class Run(NamedTuple):
    """Bytes of a row that full tensor and shard have in common.

    Attributes:
        start: where the run begins in a row of the full tensor.
        local: where it begins in a row of the shard.
        size: its bytes.
        is_copy: whether a lower rank holds the same bytes.
    """

    start: int
    local: int
    size: int
    is_copy: bool


class Box(NamedTuple):
    """A rectangle of bytes that a block and its range of a shard have in common.

    Attributes:
        full: where it begins in the block.
        local: where it begins in the shard's range.
        rows: its rows; ``full_width`` and ``local_width`` bytes apart.
        offset: where in each row of the block the bytes begin, beyond ``full``.
        local_offset: the same in the shard's range, beyond ``local``.
        size: bytes in each row.
        is_copy: whether a lower rank holds the same bytes.
    """

    full: int
    local: int
    rows: int
    full_width: int
    local_width: int
    offset: int
    local_offset: int
    size: int
    is_copy: bool


@dataclass(frozen=True, slots=True)
class ShardRows:
    """One rank's shard, row by row.

    Attributes:
        full_width: bytes of a row of the full tensor.
        width: bytes of a row of the shard.
        runs: what both have in common.
        starts: where each run begins in a row of the full tensor.
        is_padded: whether the shard has zeros beside the runs.
    """

    full_width: int
    width: int
    runs: tuple[Run, ...]
    starts: tuple[int, ...]
    is_padded: bool

    @classmethod
    def of_runs(cls, full_width: int, width: int, runs: Sequence[Run]) -> Self:
        """Rows of ``width`` bytes with these runs, and zeros elsewhere."""
        is_padded = sum(run.size for run in runs) < width
        return cls(full_width, width, tuple(runs), tuple(run.start for run in runs), is_padded)

    def local(self, position: int) -> int:
        """How many bytes of the shard come before a byte of the full tensor; padding goes with what is before it."""
        row, column = divmod(position, self.full_width)
        return row * self.width + self._local_column(column)

    def _local_column(self, column: int) -> int:
        if column == 0:
            return 0
        after = bisect_left(self.starts, column)
        if after:
            run = self.runs[after - 1]
            if column < run.start + run.size:
                return run.local + column - run.start
        return self.runs[after].local if after < len(self.runs) else self.width

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """What the flat range ``[start, stop)`` of the full tensor and this shard have in common."""
        base = self.local(start)
        for row, rows, first, last in _spans(start, stop, self.full_width):
            before = self._local_column(first)
            full, local = row * self.full_width + first - start, row * self.width + before - base
            for run in self.runs:
                low, high = max(first, run.start), min(last, run.start + run.size)
                if low < high:
                    at = run.local + low - run.start - before
                    yield Box(full, local, rows, self.full_width, self.width, low - first, at, high - low, run.is_copy)


def _spans(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """A flat range as (row, rows, first column, last column)."""
    row, column = divmod(start, width)
    last_row, last_column = divmod(stop, width)
    if column and row < last_row:
        yield row, 1, column, width
        row, column = row + 1, 0
    if row < last_row:
        yield row, last_row - row, 0, width
        row = last_row
    if column < last_column and row == last_row:
        yield row, 1, column, last_column


@dataclass(frozen=True, slots=True)
class Geometry:
    """A full tensor of ``num_bytes`` bytes in rows of ``width``, and the shard of each rank."""

    num_bytes: int
    width: int
    shards: tuple[ShardRows, ...]

    def shares(self, start: int, stop: int) -> Iterator[tuple[int, ShardRows, int, int]]:
        """The shards that hold something of a flat range: the rank, its rows, and the range of the shard's bytes."""
        for rank, shard in enumerate(self.shards):
            low, high = shard.local(start), shard.local(stop)
            if low < high:
                yield rank, shard, low, high


@lru_cache(maxsize=4096)
def geometry(placement: Placement, dtype: str, shape: tuple[int, ...]) -> Geometry:
    """The geometry of a tensor under a placement.

    Raises:
        ValueError: if placement and shape do not fit, or a cut would fall inside a byte.
    """
    num_bytes = _whole(prod(shape) * DTYPE_BITS[dtype])
    if placement.dim is None or num_bytes == 0:
        return Geometry(num_bytes, num_bytes, tuple(_whole_rows(num_bytes, rank) for rank in range(placement.tp)))
    if placement.dim >= len(shape) or shape[placement.dim] != placement.size:
        raise ValueError(f"placement along dim {placement.dim} of {placement.size} does not fit shape {list(shape)}")
    bits = prod(shape[placement.dim + 1 :]) * DTYPE_BITS[dtype]
    width = _whole(placement.size * bits)
    owned: list[Interval] = []
    shards = []
    for pieces in placement.ranks:
        shards.append(_shard_rows(pieces, width, bits, owned))
        owned = _joined(sorted([*owned, *intervals(pieces)]))
    return Geometry(num_bytes, width, tuple(shards))


def whole(num_bytes: int) -> Geometry:
    """A tensor that lies in one file as it is."""
    return Geometry(num_bytes, num_bytes, (_whole_rows(num_bytes, 0),))


def _whole_rows(num_bytes: int, rank: int) -> ShardRows:
    runs = [Run(0, 0, num_bytes, rank > 0)] if num_bytes else []
    return ShardRows.of_runs(num_bytes, num_bytes, runs)


def _shard_rows(pieces: Sequence[Piece], width: int, bits: int, owned: Sequence[Interval]) -> ShardRows:
    runs = []
    local = 0
    for piece in pieces:
        if isinstance(piece, Interval):
            for part, is_copy in _by_owner(piece, owned):
                at = local + (part.start - piece.start) * bits
                runs.append(Run(_whole(part.start * bits), _whole(at), _whole(part.size * bits), is_copy))
        local += piece.size * bits
    return ShardRows.of_runs(width, _whole(local), runs)


def _joined(ascending: Sequence[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for piece in ascending:
        if joined and piece.start <= joined[-1].stop:
            joined[-1] = Interval(joined[-1].start, max(joined[-1].stop, piece.stop))
        else:
            joined.append(piece)
    return joined


def _by_owner(piece: Interval, owned: Sequence[Interval]) -> Iterator[tuple[Interval, bool]]:
    """A piece in parts that a lower rank holds already (``owned``, apart and sorted), and parts that none does."""
    start = piece.start
    for other in owned:
        low, high = max(start, other.start), min(piece.stop, other.stop)
        if low >= high:
            continue
        if start < low:
            yield Interval(start, low), False
        yield Interval(low, high), True
        start = high
    if start < piece.stop:
        yield Interval(start, piece.stop), False


def _whole(bits: int) -> int:
    if bits % 8:
        raise ValueError("a cut would fall inside a byte")
    return bits // 8
