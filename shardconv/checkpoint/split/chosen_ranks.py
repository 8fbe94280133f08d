"""The ranks whose files a folder has: how users choose them, and how messages name them."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from operator import index
from typing import SupportsIndex, cast

from shardconv.support.errors import UsageError, option
from shardconv.support.formatting import ranges

#: Some of the ranks: a text such as ``"0,2,5-7"``, a number or numbers; None for all.
Ranks = str | SupportsIndex | Iterable[SupportsIndex] | None

#: A rank, or the first and the last of a range; more digits than these are not of a rank.
_RANGE = re.compile(r"0*(\d{1,18})(?:-0*(\d{1,18}))?", re.ASCII)


def choose_ranks(chosen: Ranks, num_ranks: int) -> tuple[int, ...]:
    """The ranks that a user chooses of ``num_ranks``, ascending.

    Raises:
        UsageError: if they are none, malformed, not below ``num_ranks``, or one is given twice.
    """
    if chosen is None:
        return tuple(range(num_ranks))
    spans = list(_parse(chosen) if isinstance(chosen, str) else _numbers(chosen))
    if not spans:
        raise UsageError(
            f"{option('ranks')} is empty: pass the ranks to write, such as 0-7, or leave it out to write all"
        )
    if wrong := [bound for span in spans for bound in span if not 0 <= bound < num_ranks]:
        raise UsageError(
            f"{option('ranks')} has rank {wrong[-1]} (expected ranks from 0 to {num_ranks - 1}, of {num_ranks} ranks): "
            "correct it"
        )
    ((rank, count),) = Counter(rank for first, last in spans for rank in range(first, last + 1)).most_common(1)
    if count > 1:
        raise UsageError(f"{option('ranks')} has rank {rank} twice: correct it")
    return tuple(sorted(rank for first, last in spans for rank in range(first, last + 1)))


def _parse(text: str) -> Iterator[tuple[int, int]]:
    """Yield first and last of each range in a text."""
    for part in text.split(",") if text.strip() else ():
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"{option('ranks')} is malformed (got {text!r:.60}, expected numbers and ranges, such as 0,2,5-7): "
                "correct it"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UsageError(
                f"{option('ranks')} has a reversed range (got {first}-{last}, expected {last}-{first}): correct it"
            )
        yield first, last


def _numbers(chosen: object) -> Iterator[tuple[int, int]]:
    """Yield each rank as the first and last of a range."""
    for rank in chosen if isinstance(chosen, Iterable) else (chosen,):
        number = _integer(rank)
        yield number, number


def _integer(rank: object) -> int:
    """A rank as Python's integer, also where it is NumPy's."""
    with suppress(TypeError):
        if not isinstance(rank, bool):
            return index(cast("SupportsIndex", rank))
    raise UsageError(f"{option('ranks')} is malformed (got {rank!r:.60}, expected integers): correct it")


def size_suffix(tp: int, ep: int, pp: int) -> str:
    """The end of the default name of a folder with rank files for these parallel sizes."""
    return f"-tp{tp}" + (f"-ep{ep}" if ep > 1 else "") + (f"-pp{pp}" if pp > 1 else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks in a sentence, such as "ranks 0, 2, 5-7"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def as_option(ranks: Sequence[int]) -> str:
    """Ascending ranks as ``--ranks`` has them, such as "0,2,5-7"."""
    return ranges(ranks).replace(", ", ",")
