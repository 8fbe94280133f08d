"""Find the composition of a tensor from source tensors, by the numbers of its elements.

The elements of a checkpoint are numbered from 1, over its tensors in the order of their names. Pure functions of numpy
arrays of such numbers, independent of vLLM, torch and files.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Values = npt.NDArray[np.float64]
Range = tuple[int, int, int]

#: Values of the second checkpoint are mirrored numbers divided by this, so that exp does not overflow.
SCALE = 2.0**20

#: Number of padding elements.
PADDING = 0


@dataclass(frozen=True)
class Block:
    """Elements of one source: for each of its dims a range (start, stop, step); None for padding.

    Attributes:
        source: name of the tensor, "" for padding.
        ranges: one for each dim of the source.
        shape: shape of the source.
        is_transposed: whether the last two dims are swapped.
    """

    source: str
    ranges: tuple[Range, ...] = ()
    shape: tuple[int, ...] = ()
    is_transposed: bool = False

    @property
    def sliced(self) -> tuple[int, ...]:
        """The dims that are sliced."""
        full_ranges = [(0, size, 1) for size in self.shape]
        return tuple(dim for dim, (have, full) in enumerate(zip(self.ranges, full_ranges, strict=True)) if have != full)


@dataclass(frozen=True)
class Joined:
    """Concatenated blocks along a dim; dim -1 if they are not blocks of a source."""

    dim: int
    parts: tuple["Block | Joined", ...]


class Numbering:
    """The numbers of the elements of a checkpoint.

    Args:
        shapes: name to shape of its tensors.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.names = sorted(shapes)
        self.shapes = {name: tuple(shapes[name]) for name in self.names}
        sizes = [math.prod(self.shapes[name]) for name in self.names]
        self.starts = np.concatenate([[1], 1 + np.cumsum(sizes)]).astype(np.int64)

    @property
    def total(self) -> int:
        """The number of elements."""
        return int(self.starts[-1]) - 1

    @property
    def mirror(self) -> int:
        """The sum of an element's numbers in both checkpoints; odd, so that no number is its own mirror."""
        return self.total + 1 + self.total % 2

    def tensors(self, *, mirrored: bool = False) -> Iterator[tuple[str, Floats]]:
        """Name and values of each tensor: its numbers, or the mirrored ones over :data:`SCALE`."""
        for name, start, stop in zip(self.names, self.starts, self.starts[1:], strict=False):
            numbers = np.arange(start, stop, dtype=np.int64)
            values = (self.mirror - numbers) / SCALE if mirrored else numbers
            yield name, values.astype(np.float32).reshape(self.shapes[name])

    def source(self, number: int) -> int:
        """The index of the tensor that has an element."""
        return int(np.searchsorted(self.starts, number, side="right")) - 1

    def sources(self, numbers: Numbers) -> Numbers:
        """The indices of tensors; -1 for padding."""
        return np.searchsorted(self.starts, numbers, side="right").astype(np.int64) - 1


def numbers_of(numbering: Numbering, first: Floats, second: Floats) -> Numbers | None:
    """Element numbers of a tensor, from its values loaded from both checkpoints.

    None if a value was computed. Values that loading did not change count as padding.
    """
    one, two = first.astype(np.float64), second.astype(np.float64)
    kept = (np.isfinite(one) & (one == two)) | (np.isnan(one) & np.isnan(two))
    copied = (one >= 1) & (one <= numbering.total) & (np.round(one) == one) & (one + two * SCALE == numbering.mirror)
    if not np.all(kept | copied):
        return None
    return np.where(copied, np.where(np.isfinite(one), one, 0), PADDING).astype(np.int64)


#: Formulas that loaders apply to tensors, and their inverses.
_FORMULAS: dict[str, tuple[Callable[[Values], Values], Callable[[Values], Values]]] = {
    "-exp(x)": (lambda x: -np.exp(x), lambda value: np.log(-value)),
    "exp(x)": (np.exp, np.log),
    "-x": (np.negative, np.negative),
    "1 + x": (lambda x: 1 + x, lambda value: value - 1),
    "1 - x": (lambda x: 1 - x, lambda value: 1 - value),
}


def edit_of(numbering: Numbering, first: Floats, second: Floats) -> tuple[str, Numbers] | None:
    """The formula of a computed tensor, and the numbers of its inputs; None if it is unknown.

    Args:
        numbering: the numbering of both checkpoints.
        first: values loaded from the first checkpoint.
        second: values loaded from the second checkpoint.
    """
    one, two = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(all="ignore"):
        scale = float(np.median(one + two * SCALE)) / numbering.mirror
        scaled = (lambda x: x * scale, lambda value: value / scale)
        for formula, (forward, inverse) in {**_FORMULAS, f"{scale:.6g} * x": scaled}.items():
            found = np.round(numbering.mirror - inverse(two) * SCALE)
            if not np.all((found >= 1) & (found <= numbering.total)):
                continue
            if np.allclose(forward(found).astype(np.float32), first, rtol=1e-5, atol=0):
                numbers = found.astype(np.int64)
                return (formula, numbers) if is_known(compose(numbering, numbers)) else None
    return None


def is_known(part: Block | Joined) -> bool:
    """Whether a composition consists of source blocks only."""
    return isinstance(part, Block) or (part.dim >= 0 and all(is_known(one) for one in part.parts))


def compose(numbering: Numbering, numbers: Numbers) -> Block | Joined:
    """The composition of a tensor from blocks of its sources."""
    numbers = np.atleast_1d(numbers)
    if (block := _block(numbering, numbers)) is not None:
        return block
    for dim in range(numbers.ndim):
        runs = _runs(numbering, np.moveaxis(numbers, dim, 0))
        if len(runs) == 1:
            continue
        inner = [np.take(numbers, range(start, stop), axis=dim) for start, stop in runs]
        inner = [part[0] if part.shape[0] == 1 and part.ndim > 2 and not dim else part for part in inner]
        parts = tuple(compose(numbering, part) for part in inner)
        if all(is_known(part) for part in parts):
            return Joined(dim, parts)
    names = sorted({numbering.names[one] for one in np.unique(numbering.sources(numbers)) if one >= 0})
    return Joined(-1, tuple(Block(name) for name in names))


def _block(numbering: Numbering, numbers: Numbers) -> Block | None:
    """The source block equal to a tensor; None if there is none."""
    if not numbers.any():
        return Block("")
    if not numbers.all():
        return None
    found = numbering.source(int(numbers.flat[0]))
    name, start = numbering.names[found], int(numbering.starts[found])
    shape = numbering.shapes[name] or (1,)
    if numbers.min() < start or numbers.max() >= start + math.prod(shape):
        return None
    ranges = tuple(_range(taken) for taken in np.unravel_index(numbers.ravel() - start, shape))
    box = (np.arange(math.prod(shape), dtype=np.int64).reshape(shape) + start)[tuple(slice(*one) for one in ranges)]
    for is_transposed in (False, True)[: box.ndim]:
        ordered = np.swapaxes(box, -1, -2) if is_transposed else box
        if np.array_equal(ordered.ravel(), numbers.ravel()):
            return Block(name, ranges, shape, is_transposed=is_transposed)
    return None


def _range(indices: npt.NDArray[np.intp]) -> Range:
    """The range of a dim with these indices; the first two determine the step."""
    taken = np.unique(indices)
    step = int(taken[1] - taken[0]) if len(taken) > 1 else 1
    return int(taken[0]), int(taken[-1]) + 1, step


def _runs(numbering: Numbering, numbers: Numbers) -> list[tuple[int, int]]:
    """Runs of rows from the same source with a constant distance of element numbers."""
    rows = numbers.reshape(numbers.shape[0], -1)
    if not rows.shape[1]:
        return [(0, rows.shape[0])]
    sources = numbering.sources(rows)
    is_same = (sources[1:] == sources[:-1]).all(axis=1)
    steps = np.diff(rows, axis=0)
    is_even = is_same & (steps == steps[:, :1]).all(axis=1) & (steps[:, 0] >= 0)
    runs, start, step = [], 0, None
    for row in range(1, rows.shape[0]):
        now = int(steps[row - 1].max()) if is_even[row - 1] else None
        if now is None or (step is not None and now != step):
            runs.append((start, row))
            start, step = row, None
        else:
            step = now
    return [*runs, (start, rows.shape[0])]


def pattern(name: str) -> str:
    """A tensor's name with * for layer numbers and # for expert numbers."""
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdigit():
            words[place] = "#" if place and re.search(r"experts?$", words[place - 1]) else "*"
    return ".".join(words)


def describe(part: Block | Joined) -> Any:
    """A composition in JSON: patterns instead of names, dims instead of ranges.

    A block is ``"name"``, ``"name[rows]"`` or ``"name[cols]"``, and ``"name.T"`` if it is transposed. Concatenated
    blocks are ``["cat 0", ...]``, similar ones ``["stack", ...]`` or ``["repeat", ...]``.
    """
    if isinstance(part, Block):
        return _describe_block(part)
    if part.dim < 0:
        return ["unknown", *dict.fromkeys(pattern(block.source) for block in part.parts if isinstance(block, Block))]
    texts = [describe(one) for one in part.parts]
    sources = {block.source for block in _blocks(part)}
    if len(texts) > 1 and all(one == texts[0] for one in texts):
        word = "stack" if "#" in str(texts[0]) or "[expert" in str(texts[0]) else "repeat"
        order = "" if _ascends(part) else ", reordered"
        return [f"{word} {part.dim}{order}", texts[0]]
    for width in range(2, len(texts) // 2 + 1):  # [q, k, v] of each head
        if len(texts) % width == 0 and texts == texts[:width] * (len(texts) // width) and len(sources) == 1:
            return [f"repeat {part.dim}", *texts[:width]]
    return [f"cat {part.dim}", *_merged(texts)]


def _ascends(part: Block | Joined) -> bool:
    """Whether the blocks of one source are in its order."""
    starts = [[start for start, _, _ in one.ranges] for one in _blocks(part)]
    names = [block.source for block in _blocks(part)]
    pairs = zip(zip(names, starts, strict=True), list(zip(names, starts, strict=True))[1:], strict=False)
    return all(before <= after for (name, before), (following, after) in pairs if name == following)


def _merged(texts: list[Any]) -> list[Any]:
    """Merge equal neighbors into one, followed by ``...``."""
    merged: list[Any] = []
    for _, same in groupby(texts, key=str):
        group = list(same)
        merged += group if len(group) == 1 else [group[0], "..."]
    return merged


def _blocks(part: Block | Joined) -> list[Block]:
    return [part] if isinstance(part, Block) else [block for one in part.parts for block in _blocks(one)]


def _describe_block(block: Block) -> str:
    if not block.source:
        return "padding"
    names = {0: "rows", 1: "cols"} if len(block.shape) == 2 else {}
    words = []
    for dim in block.sliced:
        start, stop, step = block.ranges[dim]
        is_expert = len(block.shape) > 2 and dim == 0 and stop - start == 1
        word = "expert" if is_expert else names.get(dim, f"dim {dim}")
        words.append(word if step == 1 else f"{word}, step {step}")
    slices = f"[{'; '.join(words)}]" if words else ""
    return f"{pattern(block.source)}{slices}{'.T' if block.is_transposed else ''}"
