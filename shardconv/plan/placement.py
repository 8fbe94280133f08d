"""Placement: which elements of a full tensor each rank holds.

Every sharding rule is a :class:`Placement`: one dim, and for each rank an ordered list of intervals of that dim, with
padding between them. Pure integer arithmetic, independent of bytes, files, models and torch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

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
    def tp(self) -> int:
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
        return len({self.local_size(rank) for rank in range(self.tp)}) == 1

    def local_size(self, rank: int) -> int:
        """Elements of a rank's shard along ``dim``, with padding; 0 if ``dim`` is None."""
        return sum(entry.size for entry in self.ranks[rank])

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

    def shard_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard of a tensor of shape ``shape``."""
        if self.dim is None:
            return tuple(shape)
        return (*shape[: self.dim], self.local_size(rank), *shape[self.dim + 1 :])

    def describe(self) -> str:
        """A short description for reports."""
        if self.dim is None:
            return "replicated"
        properties = [f"dim {self.dim}"]
        if (count := max(len(intervals(entries)) for entries in self.ranks)) > 1:
            properties.append(f"{count} intervals")
        if self.has_replicas:
            properties.append("partly replicated")
        if self.is_padded:
            properties.append(f"padded from {self.size}")
        return ", ".join(properties)


def intervals(entries: Sequence[IntervalOrPadding]) -> list[Interval]:
    """The intervals among ``entries``, without padding."""
    return [entry for entry in entries if isinstance(entry, Interval)]


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
