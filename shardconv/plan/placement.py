"""Placement: the elements of a full tensor on each rank; and units, such as heads, that no boundary divides.

Every sharding rule is a :class:`Placement`: one dim, and for each rank an ordered list of intervals of that dim, with
padding between them. Pure integer arithmetic, independent of bytes, files, models and torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Self

from msgspec import Struct

from shardconv.support.structs import Data


class Interval(NamedTuple):
    """The half-open range ``[start, stop)`` of a dim."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements along the dim."""
        return self.stop - self.start


class Padding(Data, frozen=True, rename={"size": "padding"}):
    """Padding: ``size`` zeros that the full tensor does not have."""

    size: int


IntervalOrPadding = Interval | Padding


class Placement(Data, frozen=True, omit_defaults=False, cache_hash=True):
    """The division of one dim of a tensor over ranks.

    A rank's shard is the concatenation of its intervals and padding along ``dim``. The intervals of a rank are
    ascending and do not overlap; the intervals of all ranks together cover the dim. Intervals of different ranks
    may overlap: these elements are replicated.

    Attributes:
        dim: the sharded dim, from 0; None if the tensor is replicated.
        size: the size of that dim in the full tensor, without padding; 0 if ``dim`` is None.
        ranks: the intervals and padding of each rank; empty if ``dim`` is None.
    """

    dim: int | None
    size: int
    ranks: tuple[tuple[IntervalOrPadding, ...], ...]

    def __post_init__(self) -> None:
        if self.dim is None:
            if self.size or any(self.ranks) or not self.ranks:
                raise ValueError("a placement without a dim has a size or intervals, or does not have ranks")
            return
        for entries in self.ranks:
            _check_ascending(entries, self.size)
        _check_covered(sorted(entry for entries in self.ranks for entry in intervals(entries)), self.size)

    @classmethod
    def replicated(cls, tp: int) -> Self:
        """The placement of a tensor that is replicated on ``tp`` ranks."""
        return cls(None, 0, ((),) * tp)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def is_padded(self) -> bool:
        """Whether the shard of some rank has padding."""
        return any(isinstance(entry, Padding) for entries in self.ranks for entry in entries)

    @property
    def num_padding(self) -> int:
        """Elements of padding along the dim, summed over ranks."""
        return sum(entry.size for entries in self.ranks for entry in entries if isinstance(entry, Padding))

    @property
    def has_replicas(self) -> bool:
        """Whether the dim is sharded and some of its elements are on several ranks."""
        return sum(entry.size for entries in self.ranks for entry in intervals(entries)) > self.size

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same shape."""
        return len({self.local_size(rank) for rank in range(self.num_ranks)}) == 1

    def local_size(self, rank: int) -> int:
        """Elements of a rank's shard along ``dim``, with padding; 0 if ``dim`` is None."""
        return sum(entry.size for entry in self.ranks[rank])

    def local_intervals(self, rank: int) -> Iterator[tuple[Interval, int]]:
        """Yield each interval of a rank, and its start in the rank's shard."""
        for entry, position in located(self.ranks[rank]):
            if isinstance(entry, Interval):
                yield entry, position

    @property
    def max_local_size(self) -> int:
        """Elements of the largest shard along ``dim``; 0 if ``dim`` is None."""
        return max(map(self.local_size, range(self.num_ranks)))

    def chunk(self, index: int, chunks: int) -> "Placement":
        """The placement of one of the tensors into which the full tensor is divided evenly along ``dim``.

        Args:
            index: index of the tensor, from 0.
            chunks: number of tensors; divides the size of the dim, which must not be padded.
        """
        size = self.size // chunks
        start, stop = index * size, (index + 1) * size
        ranks = (
            tuple(
                Interval(max(entry.start, start) - start, min(entry.stop, stop) - start)
                for entry in intervals(entries)
                if entry.start < stop and entry.stop > start
            )
            for entries in self.ranks
        )
        return Placement(self.dim, size, tuple(ranks))

    def repeated(self, times: int) -> "Placement":
        """The placement on ``times`` as many ranks, of which rank ``r`` holds the shard of rank ``r % num_ranks``."""
        return self if times == 1 else Placement(self.dim, self.size, self.ranks * times)

    def first(self, num_ranks: int) -> "Placement":
        """The placement on the first ranks alone."""
        return self if num_ranks == self.num_ranks else Placement(self.dim, self.size, self.ranks[:num_ranks])

    def shard_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard of a tensor of shape ``shape``."""
        if self.dim is None:
            return tuple(shape)
        return (*shape[: self.dim], self.local_size(rank), *shape[self.dim + 1 :])

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the full tensor of a shard of shape ``shape``."""
        if self.dim is None:
            return tuple(shape)
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def describe(self) -> str:
        """A short description for reports."""
        if self.dim is None:
            return "replicated"
        properties = [f"dim {self.dim}"]
        if (count := max(len(intervals(entries)) for entries in self.ranks)) > 1:
            properties.append(f"{count} intervals")
        if self.has_replicas:
            num_shards = len(set(self.ranks))
            is_shared = num_shards < self.num_ranks
            properties.append(f"{num_shards} shards on {self.num_ranks} ranks" if is_shared else "overlapping shards")
        if self.is_padded:
            properties.append(f"padded from {self.size}")
        return ", ".join(properties)


def intervals(entries: Sequence[IntervalOrPadding]) -> list[Interval]:
    """The intervals among ``entries``, without padding."""
    return [entry for entry in entries if isinstance(entry, Interval)]


def located(entries: Iterable[IntervalOrPadding]) -> Iterator[tuple[IntervalOrPadding, int]]:
    """The intervals and padding of a rank, each with its position in the shard."""
    position = 0
    for entry in entries:
        yield entry, position
        position += entry.size


def union(ascending: Iterable[Interval]) -> list[Interval]:
    """Merge sorted intervals that overlap or touch."""
    merged: list[Interval] = []
    for interval in ascending:
        if merged and interval.start <= merged[-1].stop:
            merged[-1] = Interval(merged[-1].start, max(merged[-1].stop, interval.stop))
        else:
            merged.append(interval)
    return merged


def split_replicas(interval: Interval, held: Sequence[Interval]) -> Iterator[tuple[Interval, bool]]:
    """Split an interval at the bounds of ``held``, the disjoint sorted intervals of lower ranks.

    Yields:
        An interval, and whether a lower rank holds it.
    """
    start = interval.start
    for other in held:
        low, high = max(start, other.start), min(interval.stop, other.stop)
        if low >= high:
            continue
        if start < low:
            yield Interval(start, low), False
        yield Interval(low, high), True
        start = high
    if start < interval.stop:
        yield Interval(start, interval.stop), False


@lru_cache
def own_intervals(placement: Placement, rank: int) -> tuple[tuple[Interval, int], ...]:
    """The intervals of a rank that no lower rank holds, each with its start in the rank's shard."""
    lower = union(sorted(one for entries in placement.ranks[:rank] for one in intervals(entries)))
    return tuple(
        (own, position + own.start - interval.start)
        for interval, position in placement.local_intervals(rank)
        for own, is_replica in split_replicas(interval, lower)
        if not is_replica
    )


def _check_ascending(entries: Sequence[IntervalOrPadding], size: int) -> None:
    end = 0
    for entry in entries:
        if entry.size <= 0:
            raise ValueError(f"{entry} is empty (expected at least one element)")
        if isinstance(entry, Interval):
            if not end <= entry.start or not entry.stop <= size:
                raise ValueError(f"{entry} overlaps the interval before it or exceeds the dim of size {size}")
            end = entry.stop


def _check_covered(ascending: Sequence[Interval], size: int) -> None:
    end = 0
    for entry in ascending:
        if entry.start > end:
            break
        end = max(end, entry.stop)
    if end < size:
        raise ValueError(f"no rank holds element {end} of the dim of size {size}")


class IndivisibleError(ValueError):
    """The units of a dim cannot be divided over this number of ranks."""


class Unit(Struct, frozen=True):
    """A segment of a dim: ``count`` units (heads, rows, blocks) of ``size`` elements, none of which is split.

    Attributes:
        count: number of units, without padding.
        size: elements per unit.
        replicate: replicate units if there are fewer of them than ranks.
        pad: pad a count that the number of ranks does not divide.
        multiple: always pad the count to a multiple of this, which the number of ranks then has to divide.
        groups: number of equal groups of units, such as one group of query heads per KV head.
        padded: number of groups and number of units per group, both with padding, which follows the units of each
            group, and the groups; None if ``pad`` and ``multiple`` determine the padding.
    """

    count: int
    size: int = 1
    replicate: bool = False
    pad: bool = False
    multiple: int = 1
    groups: int = 1
    padded: tuple[int, int] | None = None

    @property
    def width(self) -> int:
        """Number of elements of all units, without padding."""
        return self.count * self.size

    def shards(self, tp: int) -> list[list[IntervalOrPadding]]:
        """The intervals and padding of each rank, in elements from the start of the segment.

        Raises:
            IndivisibleError: if the units cannot be divided over ``tp`` ranks.
        """
        groups, group = self._padded(tp)
        total = groups * group
        if total % tp and self.replicate and tp % total == 0:
            firsts, per_rank = [rank // (tp // total) for rank in range(tp)], 1
        elif total % tp:
            padding = f" ({self.count} padded to a multiple of {self.multiple})" if self.multiple > 1 else ""
            if self.replicate:
                raise IndivisibleError(f"{tp} neither divides {total}{padding} nor is a multiple of {self.count}")
            raise IndivisibleError(f"{total}{padding} is not a multiple of {tp}")
        else:
            per_rank = total // tp
            firsts = [rank * per_rank for rank in range(tp)]
        return [self._range(first, first + per_rank, group) for first in firsts]

    def padded_count(self, tp: int) -> int:
        """Number of units with padding, for ``tp`` ranks."""
        groups, group = self._padded(tp)
        return groups * group

    def _padded(self, tp: int) -> tuple[int, int]:
        """Number of groups and number of units per group, with padding."""
        if self.padded is not None:
            return self.padded
        count = round_up(self.count, self.multiple)
        is_replicated = self.replicate and count and tp % count == 0
        return 1, round_up(count, tp) if self.pad and self.multiple == 1 and not is_replicated else count

    def _range(self, first: int, last: int, group: int) -> list[IntervalOrPadding]:
        """The elements of the padded units ``[first, last)``, where each group has ``group`` units with padding."""
        groups, unpadded = (self.groups, self.count // self.groups) if self.padded else (1, self.count)
        if first < last <= groups * unpadded and (groups == 1 or group == unpadded):  # no padding before the last one
            return [Interval(first * self.size, last * self.size)]
        entries: list[IntervalOrPadding] = []
        while first < last:
            index, low = divmod(first, group)
            high = min(last - index * group, group)
            held = max(min(high, unpadded) - low, 0) if index < groups else 0
            if held:
                start = (index * unpadded + low) * self.size
                entries.append(Interval(start, start + held * self.size))
            if held < high - low:
                entries.append(Padding((high - low - held) * self.size))
            first = index * group + high
        return entries


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple that is not less than ``count``."""
    return -(-count // multiple) * multiple


def shard_dim(
    dim: int, segments: Sequence[Unit], tp: int, *, groups: int = 1, padded_groups: int | None = None
) -> Placement:
    """Shard a dim that consists of ``groups`` repetitions of the same ``segments``.

    One group of one segment is an ordinary column or row split; one group of three is a fused ``[q; k; v]``; one group
    per KV head is a projection that is interleaved per KV head. With at least as many groups as ranks, each rank has
    full groups; with fewer, each segment of a group is sharded over the ranks of the group.

    Args:
        dim: the dim, from 0.
        segments: the units of each segment of a group.
        tp: number of ranks.
        groups: number of groups in the tensor.
        padded_groups: number of groups that the ranks hold in total, of which those after ``groups`` are padding; None
            without padding.

    Raises:
        IndivisibleError: if groups or units cannot be divided over ``tp`` ranks.
    """
    return _shard_dim(dim, tuple(segments), tp, groups, padded_groups)


@lru_cache(1024)  # a report places the same few units for every tp
def _shard_dim(dim: int, segments: tuple[Unit, ...], tp: int, groups: int, padded_groups: int | None) -> Placement:
    width, total = sum(units.width for units in segments), padded_groups or groups
    has_full_groups = total % tp == 0 and all(units.multiple == 1 for units in segments)
    if not has_full_groups and tp % total:
        raise IndivisibleError(f"{tp} neither divides {total} nor is a multiple of {total}")
    per_rank, group_ranks = (total // tp, 1) if has_full_groups else (1, tp // total)
    starts = accumulate((units.width for units in segments), initial=0)
    shards = [(start, units.shards(group_ranks)) for start, units in zip(starts, segments, strict=False)]
    ranks = []
    for rank in range(tp):
        entries: list[IntervalOrPadding] = []
        for group in range(rank * per_rank // group_ranks, rank * per_rank // group_ranks + per_rank):
            for start, of_rank in shards:
                shard = of_rank[rank % group_ranks]
                if group < groups:
                    entries += _shifted(shard, group * width + start)
                else:
                    entries += [Padding(entry.size) for entry in shard]
        ranks.append(_merge_adjacent(entries))
    return Placement(dim, groups * width, tuple(ranks))


def _shifted(entries: list[IntervalOrPadding], start: int) -> list[IntervalOrPadding]:
    """The intervals and padding, with intervals that are counted from ``start``."""
    if not start:
        return entries
    return [
        Interval(start + entry.start, start + entry.stop) if isinstance(entry, Interval) else entry for entry in entries
    ]


def _merge_adjacent(entries: Sequence[IntervalOrPadding]) -> tuple[IntervalOrPadding, ...]:
    """Remove empty intervals and padding, and merge adjacent ones."""
    if len(entries) == 1 and entries[0].size:
        return tuple(entries)
    merged: list[IntervalOrPadding] = []
    for entry in entries:
        last = merged[-1] if merged else None
        if entry.size == 0:
            continue
        if isinstance(entry, Interval) and isinstance(last, Interval) and last.stop == entry.start:
            merged[-1] = Interval(last.start, entry.stop)
        elif isinstance(entry, Padding) and isinstance(last, Padding):
            merged[-1] = Padding(last.size + entry.size)
        else:
            merged.append(entry)
    return tuple(merged)
