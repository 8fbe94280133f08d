"""Ranges of bytes of several files, merged where they touch, so that each byte is read ahead once."""

from collections.abc import Iterable


def merged_ranges(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Number of the file, start and stop of ranges; those that overlap or follow one another in order are one.

    Args:
        ranges: number of the file, offset and size of each.
    """
    merged: list[tuple[int, int, int]] = []
    for number, start, stop in _without_overlaps(ranges):
        if merged and merged[-1][0] == number and merged[-1][2] == start:
            merged[-1] = (number, merged[-1][1], stop)
        else:
            merged.append((number, start, stop))
    return merged


def _without_overlaps(ranges: Iterable[tuple[int, int, int]]) -> Iterable[tuple[int, int, int]]:
    """Number of the file, start and stop of ranges, those that overlap as one range at the position of the first."""
    merged: dict[int, tuple[int, int, int]] = {}
    at, end = 0, (-1, 0)
    for number, offset, size, position in sorted((*one, position) for position, one in enumerate(ranges)):
        if (number, offset) < end:
            _, start, stop = merged.pop(at)
            at = min(at, position)
            merged[at] = (number, start, max(stop, offset + size))
        else:
            at = position
            merged[at] = (number, offset, offset + size)
        end = (number, merged[at][2])
    return (merged[at] for at in sorted(merged))
