"""Names of tensors as patterns and ranges of numbers: a name per kind of tensor, not one per layer and expert.

``model.layers.0.mlp.up_proj.weight`` to ``model.layers.31.mlp.up_proj.weight`` are the pattern
``model.layers.*.mlp.up_proj.weight`` and the range 0 to 31.
"""

import re
from collections.abc import Iterable

#: A path component that is a number as :func:`str` prints it.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")
#: The most numbers that a pattern replaces: of a layer, an expert, and those of submodels.
_MAX_NUMBERS = 4

#: Tuples of numbers as nested ranges: ``[first, last]``, and with further numbers ``[first, last, RANGES]``.
Ranges = list[list["int | Ranges"]]


def parse_name(name: str) -> tuple[str, tuple[int, ...]]:
    """The pattern of a name, with ``*`` for each number, and the numbers."""
    if "*" in name:
        return name, ()
    found = _NUMBER.findall(name)[:_MAX_NUMBERS]
    return _NUMBER.sub("*", name, count=_MAX_NUMBERS), tuple(map(int, found))


def layer_of(pattern: str, numbers: tuple[int, ...]) -> tuple[str, int | None]:
    """The layer of a tensor: its path up to the first number, and the number.

    Tensors without a number belong to their module.
    """
    if not numbers:
        return pattern.rpartition(".")[0] or pattern, None
    return pattern[: pattern.index("*") + 1], numbers[0]


def number_ranges(tuples: Iterable[tuple[int, ...]]) -> Ranges:
    """Distinct tuples of equally many numbers as nested ranges."""
    inner: dict[int, list[tuple[int, ...]]] = {}
    for numbers in sorted(tuples):
        inner.setdefault(numbers[0], []).append(numbers[1:])
    ranges: Ranges = []
    for number, others in inner.items():
        rest: list[int | Ranges] = [number_ranges(others)] if others[0] else []
        if ranges and ranges[-1][1:] == [number - 1, *rest]:
            ranges[-1][1] = number
        else:
            ranges.append([number, number, *rest])
    return ranges
