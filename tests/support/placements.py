"""Placements as lists of elements."""

from shardconv.plan.placement import Padding, Placement


def held(placement: Placement, rank: int) -> list[int | None]:
    """The elements of a rank's shard; None for padding."""
    elements: list[int | None] = []
    for entry in placement.ranks[rank]:
        elements += [None] * entry.size if isinstance(entry, Padding) else range(entry.start, entry.stop)
    return elements
