"""Byte offsets of shards: which bytes of a rank's shard hold a flat byte range of the full tensor.

A full tensor is a matrix of bytes with one row of ``width`` bytes per index of the dims before the sharded dim. A shard
has the same number of shorter rows. A flat range of the full tensor then is at most three boxes (the end of a row, full
rows, the beginning of a row), and one contiguous range of every shard, because intervals are ascending.

There may be shards of some ranks only. Then the full tensor has ranges of which no shard holds a byte.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, Self

from msgspec import Struct

from shardconv.files.containers.safetensors import DTYPE_BITS
from shardconv.plan.placement import Interval, IntervalOrPadding, Placement, intervals, located, split_replicas, union

#: Gaps between held ranges with fewer bytes than this are read, too: another block would take as long.
GAP_BYTES = 2**20
#: Bytes at the beginning of a row with which padding before the first interval is written; a multiple of every element.
_ROW_START = 64
#: Ranges whose boxes, or whose shards, are kept: layers repeat the shapes of their tensors.
_NUM_KEPT = 1024


class Run(NamedTuple):
    """A contiguous range of bytes of a row that is in the full tensor and in the shard.

    Attributes:
        start: its offset in a row of the full tensor.
        local: its offset in a row of the shard.
        size: its number of bytes.
        is_replica: whether a lower rank holds the same bytes.
    """

    start: int
    local: int
    size: int
    is_replica: bool


class Box(NamedTuple):
    """A rectangle of bytes that is in a block of the full tensor and in a byte range of a shard.

    Attributes:
        full: offset of its first row in the block.
        local: offset of its first row in the shard's range.
        rows: number of rows.
        full_width: stride of the rows in the block, in bytes.
        local_width: stride of the rows in the shard's range, in bytes.
        offset: offset of its bytes in each row of the block.
        local_offset: offset of its bytes in each row of the shard's range.
        size: bytes per row.
        is_replica: whether a lower rank holds the same bytes.
    """

    full: int
    local: int
    rows: int
    full_width: int
    local_width: int
    offset: int
    local_offset: int
    size: int
    is_replica: bool


class ShardRows(Struct, frozen=True, cache_hash=True):
    """The rows of one rank's shard.

    Attributes:
        full_width: bytes of a row of the full tensor.
        width: bytes of a row of the shard.
        runs: the byte ranges of a row that are in both.
        starts: for each run its offset in a row of the full tensor.
        is_padded: whether the shard has padding.
    """

    full_width: int
    width: int
    runs: tuple[Run, ...]
    starts: tuple[int, ...]
    is_padded: bool

    @classmethod
    def of_runs(cls, full_width: int, width: int, runs: Sequence[Run]) -> Self:
        """Rows of ``width`` bytes with these runs; all other bytes are padding."""
        is_padded = sum(run.size for run in runs) < width
        return cls(full_width, width, tuple(runs), tuple(run.start for run in runs), is_padded)

    def local(self, position: int) -> int:
        """Number of bytes of the shard before a byte of the full tensor; padding belongs to the run before it."""
        row, column = divmod(position, self.full_width)
        return row * self.width + self.column(column)

    def column(self, position: int) -> int:
        """Number of bytes of a row of the shard before a byte of a row of the full tensor."""
        if position == 0:
            return 0
        after = bisect_left(self.starts, position)
        if after:
            run = self.runs[after - 1]
            if position < run.start + run.size:
                return run.local + position - run.start
        return self.runs[after].local if after < len(self.runs) else self.width

    def boxes(self, start: int, stop: int) -> Sequence[Box]:
        """The boxes of the flat range ``[start, stop)`` of the full tensor that are in this shard."""
        column = start % self.full_width
        return _boxes(self, column, column + stop - start)  # equal for all rows


@lru_cache(_NUM_KEPT)
def _boxes(shard: ShardRows, start: int, stop: int) -> tuple[Box, ...]:
    width, base, found = shard.full_width, shard.local(start), list[Box]()
    for row, rows, first, last in row_spans(start, stop, width):
        before = shard.column(first)
        full, local = row * width + first - start, row * shard.width + before - base
        for run in shard.runs:
            low, high = max(first, run.start), min(last, run.start + run.size)
            if low < high:
                at = run.local + low - run.start - before
                found.append(Box(full, local, rows, width, shard.width, low - first, at, high - low, run.is_replica))
    return tuple(found)


def row_spans(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Split a flat range into rectangles: (row, number of rows, first column, last column)."""
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


class Overlap(NamedTuple):
    """A byte range of a rank's shard that is in a flat range of the full tensor.

    Attributes:
        rank: the rank.
        rows: the rows of its shard.
        start: offset of the first byte in the shard.
        stop: offset after the last byte.
        boxes: its bytes that are in the full tensor.
        contiguous: the slice of the flat range that equals it; None if it is not contiguous there.
    """

    rank: int
    rows: ShardRows
    start: int
    stop: int
    boxes: Sequence[Box]
    contiguous: slice | None


class Geometry(Struct, frozen=True, cache_hash=True):
    """A full tensor of ``num_bytes`` bytes with rows of ``width`` bytes, and the shard of each rank.

    Attributes:
        num_bytes: bytes of the full tensor.
        width: bytes of a row.
        shards: the rows of each shard.
        columns: the ranges of a row that shards hold, with short gaps; None if they hold every byte, empty without
            shards.
    """

    num_bytes: int
    width: int
    shards: tuple[ShardRows, ...]
    columns: tuple[tuple[int, int], ...] | None = None

    def overlaps(self, start: int, stop: int) -> Sequence[Overlap]:
        """The shards that hold bytes of a flat range."""
        return _overlaps(self, start, stop)

    def held(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of a flat range that shards hold, with short gaps between them."""
        columns = ((0, self.width),) if self.columns is None else self.columns
        if columns == ((0, self.width),):
            yield start, stop
            return
        if not columns:
            return
        for row, rows, first, last in row_spans(start, stop, self.width):
            for base in range(row * self.width, (row + rows) * self.width, self.width):
                for low, high in columns:
                    if max(low, first) < min(high, last):
                        yield base + max(low, first), base + min(high, last)


@lru_cache(_NUM_KEPT)
def _overlaps(of: Geometry, start: int, stop: int) -> tuple[Overlap, ...]:
    found = []
    for rank, rows in enumerate(of.shards):
        low, high = rows.local(start), rows.local(stop)
        if low < high:
            boxes = rows.boxes(start, stop)
            found.append(Overlap(rank, rows, low, high, boxes, _contiguous(boxes, high - low)))
    return tuple(found)


def _contiguous(boxes: Sequence[Box], size: int) -> slice | None:
    """The slice of the full tensor's range that equals a shard's range of ``size`` bytes; None if none does."""
    if len(boxes) != 1 or boxes[0].rows * boxes[0].size != size:
        return None
    box = boxes[0]
    is_one = box.rows == 1 or box.size == box.full_width
    return slice(box.full + box.offset, box.full + box.offset + size) if is_one else None


@lru_cache(maxsize=4096)
def geometry(
    placement: Placement, dtype: str, shape: tuple[int, ...], ranks: tuple[int, ...] | None = None
) -> Geometry:
    """The geometry of a tensor under a placement.

    Args:
        placement: of the tensor.
        dtype: of the tensor.
        shape: of the full tensor.
        ranks: the ranks whose shards there are, in order; None for all. Ranks may repeat.

    Raises:
        ValueError: if placement and shape do not fit, or an interval does not begin and end at a byte boundary.
    """
    num_bytes = _to_bytes(prod(shape) * DTYPE_BITS[dtype])
    if ranks == tuple(range(placement.num_ranks)):
        return geometry(placement, dtype, shape)
    chosen = placement.ranks if ranks is None else [placement.ranks[rank] for rank in ranks]
    if placement.dim is None or num_bytes == 0:
        full = tuple(_full_rows(num_bytes, at) for at in range(len(chosen)))
        return Geometry(num_bytes, num_bytes, full, None if full else ())
    if placement.dim >= len(shape) or shape[placement.dim] != placement.size:
        raise ValueError(f"placement along dim {placement.dim} of {placement.size} does not fit shape {list(shape)}")
    bits = prod(shape[placement.dim + 1 :]) * DTYPE_BITS[dtype]
    width = _to_bytes(placement.size * bits)
    held: list[Interval] = []
    shards = []
    for entries in chosen:
        shards.append(_shard_rows(entries, width, bits, held))
        held = union(sorted([*held, *intervals(entries)]))
    is_complete = held == [Interval(0, placement.size)]
    columns = None if is_complete else _columns(shards, width, is_one_row=width == num_bytes)
    return Geometry(num_bytes, width, tuple(shards), columns)


@lru_cache(maxsize=4096)
def unsharded(num_bytes: int) -> Geometry:
    """The geometry of a full tensor in one file."""
    return Geometry(num_bytes, num_bytes, (_full_rows(num_bytes, 0),))


def _columns(shards: Sequence[ShardRows], width: int, *, is_one_row: bool) -> tuple[tuple[int, int], ...]:
    """The ranges of a row that shards hold, with short gaps; the full row if gaps between rows are short, too."""
    held = [Interval(run.start, run.start + run.size) for shard in shards for run in shard.runs]
    if any(shard.runs[0].local if shard.runs else shard.width for shard in shards):  # padding at the beginning
        held.append(Interval(0, min(_ROW_START, width)))
    columns: list[tuple[int, int]] = []
    for start, stop in union(sorted(held)):
        if columns and start - columns[-1][1] < GAP_BYTES:
            columns[-1] = (columns[-1][0], stop)
        else:
            columns.append((start, stop))
    is_dense = len(columns) == 1 and width - columns[0][1] + columns[0][0] < GAP_BYTES
    return ((0, width),) if is_dense and not is_one_row else tuple(columns)


def _full_rows(num_bytes: int, rank: int) -> ShardRows:
    runs = [Run(0, 0, num_bytes, rank > 0)] if num_bytes else []
    return ShardRows.of_runs(num_bytes, num_bytes, runs)


def _shard_rows(entries: Sequence[IntervalOrPadding], width: int, bits: int, held: Sequence[Interval]) -> ShardRows:
    runs = []
    for entry, position in located(entries):
        if isinstance(entry, Interval):
            for interval, is_replica in split_replicas(entry, held):
                at = (position + interval.start - entry.start) * bits
                start, size = _to_bytes(interval.start * bits), _to_bytes(interval.size * bits)
                runs.append(Run(start, _to_bytes(at), size, is_replica))
    return ShardRows.of_runs(width, _to_bytes(sum(entry.size for entry in entries) * bits), runs)


def _to_bytes(bits: int) -> int:
    if bits % 8:
        raise ValueError("a shard begins or ends inside a byte")
    return bits // 8
