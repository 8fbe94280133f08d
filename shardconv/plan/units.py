"""Units: elements of a dim that no boundary divides, such as heads, and how they are sharded over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardconv.plan.placement import Interval, IntervalOrPadding, Padding, Placement


class IndivisibleError(ValueError):
    """The units of a dim cannot be divided over this number of ranks."""


@dataclass(frozen=True, slots=True)
class Unit:
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

    def local(self, tp: int, rank: int) -> list[IntervalOrPadding]:
        """The intervals and padding of a rank, counted in units.

        Raises:
            IndivisibleError: if the units cannot be divided over ``tp`` ranks.
        """
        groups, group = self._padded(tp)
        total = groups * group
        if total % tp and self.replicate and tp % total == 0:
            first = rank // (tp // total)
            return self._range(first, first + 1, group)
        if total % tp:
            padding = f" ({self.count} padded to a multiple of {self.multiple})" if self.multiple > 1 else ""
            replicas = f", nor is {tp} a multiple of {self.count}" if self.replicate else ""
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
        is_replicated = self.replicate and count and tp % count == 0
        return 1, round_up(count, tp) if self.pad and self.multiple == 1 and not is_replicated else count

    def _range(self, first: int, last: int, group: int) -> list[IntervalOrPadding]:
        """The padded units ``[first, last)``, where each group has ``group`` units with padding."""
        groups, unpadded = (self.groups, self.count // self.groups) if self.padded else (1, self.count)
        entries: list[IntervalOrPadding] = []
        while first < last:
            index, low = divmod(first, group)
            high = min(last - index * group, group)
            held = max(min(high, unpadded) - low, 0) if index < groups else 0
            if held:
                entries.append(Interval(index * unpadded + low, index * unpadded + low + held))
            if held < high - low:
                entries.append(Padding(high - low - held))
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
        groups: number of groups.
        padded_groups: number of groups with padding at the end of the dim; None if there is none.

    Raises:
        IndivisibleError: if groups or units cannot be divided over ``tp`` ranks.
    """
    return _shard_dim(dim, tuple(segments), tp, groups, padded_groups)


@lru_cache(1024)  # a report places the same few units for every tp
def _shard_dim(dim: int, segments: tuple[Unit, ...], tp: int, groups: int, padded_groups: int | None) -> Placement:
    width, total = sum(units.width for units in segments), padded_groups or groups
    has_full_groups = total % tp == 0 and all(units.multiple == 1 for units in segments)
    if not has_full_groups and tp % total:
        raise IndivisibleError(f"{total} is not a multiple of {tp}, nor is {tp} a multiple of {total}")
    per_rank, group_ranks = (total // tp, 1) if has_full_groups else (1, tp // total)
    ranks = []
    for rank in range(tp):
        entries: list[IntervalOrPadding] = []
        for group in range(rank * per_rank // group_ranks, rank * per_rank // group_ranks + per_rank):
            local = _group_entries(segments, group_ranks, rank % group_ranks, group * width)
            entries += local if group < groups else [Padding(sum(entry.size for entry in local))]
        ranks.append(_merge_adjacent(entries))
    return Placement(dim, groups * width, tuple(ranks))


def _group_entries(segments: Sequence[Unit], tp: int, rank: int, start: int) -> list[IntervalOrPadding]:
    """The intervals and padding of a rank of one group that starts at ``start``, counted in elements."""
    entries: list[IntervalOrPadding] = []
    for units in segments:
        for entry in units.local(tp, rank):
            if isinstance(entry, Interval):
                entries.append(Interval(start + entry.start * units.size, start + entry.stop * units.size))
            else:
                entries.append(Padding(entry.size * units.size))
        start += units.width
    return entries


def _merge_adjacent(entries: Sequence[IntervalOrPadding]) -> tuple[IntervalOrPadding, ...]:
    """Remove empty intervals and padding, and merge adjacent ones."""
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
