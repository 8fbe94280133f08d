"""Transforms: compute the bytes of tensors, or of files, from stored tensors whose bytes they rearrange."""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, Self, TypeVar

from msgspec import Struct

from shardconv.checkpoint import engine
from shardconv.checkpoint.engine.copy import ReadTensor, Scratch
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.fileio import Bytes
from shardconv.files.folder import Compressed
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import IntegrityError, PlanError

if TYPE_CHECKING:
    from shardconv.checkpoint.engine.arrays import StridedTensor

A = TypeVar("A")
#: The most literal bytes that become one part: those between two chunks.
_MAX_JOINED = 4096
#: The name of a tensor, and a range of its bytes.
TensorRange = tuple[str, int, int]


class Transform(Protocol):
    """Computes the bytes of a tensor from tensors that are stored, or computed by transforms below it.

    Attributes:
        unit: ranges of bytes are read once if they begin and end at multiples of this.
    """

    @property
    def unit(self) -> int:
        """See the class."""

    def fill(self, block: Bytes, start: int, read: ReadTensor, scratch: Scratch) -> None:
        """Fill a block with the bytes of the tensor from ``start`` on."""

    def reads(self, start: int, stop: int) -> Iterable[TensorRange]:
        """The ranges that are read to fill these bytes, where they are worth a prefetch."""


#: Name to the transform of each tensor that a layer computes.
Transforms = Mapping[str, Transform]


class TransformsOnUse(Mapping[str, Transform], Generic[A]):
    """Transforms that are made when they are used: tens of thousands of them take much memory.

    Args:
        arguments: name of each tensor to the argument of ``make``.
        make: makes the transform of a tensor from its name and its argument.
    """

    def __init__(self, arguments: Mapping[str, A], make: Callable[[str, A], Transform]) -> None:
        self._arguments, self._make = arguments, make

    def __getitem__(self, name: str) -> Transform:
        return self._make(name, self._arguments[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments)

    def __len__(self) -> int:
        return len(self._arguments)

    def __contains__(self, name: object) -> bool:
        return name in self._arguments


class Rows(NamedTuple):
    """The name of a stored tensor, the range of bytes of a full tensor that it has, and the offset of these in it."""

    stored: str
    start: int
    stop: int
    at: int = 0


#: Remedy for a head that is not a copy of the embedding.
UNTIE = "correct tie_word_embeddings of the config"


class WithCopies(Struct, frozen=True):
    """A tensor, and its copies in the source, which must be equal.

    Attributes:
        tensor: the transform to the tensor.
        name: of the tensor in the source.
        copies: names of the copies.
        remedy: for a copy that differs.
    """

    tensor: Transform
    name: str
    copies: tuple[str, ...]
    remedy: str

    @property
    def unit(self) -> int:
        """Bytes of a row."""
        return self.tensor.unit

    def fill(self, block: Bytes, start: int, read: ReadTensor, scratch: Scratch) -> None:
        """Fill a block with the bytes of the tensor from ``start`` on.

        Raises:
            IntegrityError: if a copy differs.
        """
        self.tensor.fill(block, start, read, scratch)
        for copy in self.copies:
            other = scratch.take("copy", len(block))
            read(copy, start, other)
            if other != block:
                raise IntegrityError(
                    f"{copy}: differs from {self.name} (expected a copy): {self.remedy}, or use a checkpoint in which "
                    f"they are equal"
                )

    def reads(self, start: int, stop: int) -> Iterator[TensorRange]:
        """Yield the ranges that are read to fill these bytes."""
        yield from self.tensor.reads(start, stop)
        yield from ((copy, start, stop) for copy in self.copies)


class Concatenation:
    """A tensor, or a file, of up to hundreds of thousands of ranges of tensors and literal bytes.

    Args:
        unit: bytes of a row, of which the ranges consist; 0 without rows.

    Attributes:
        size: bytes of all ranges.
        unit: see :class:`Transform`.
    """

    def __init__(self, unit: int = 0) -> None:
        self.size, self.unit = 0, unit
        self._parts: list[str | bytes | Compressed] = []
        self._starts, self._offsets = array("Q"), array("Q")

    @classmethod
    def of_parts(cls, parts: Iterable[bytes | Compressed]) -> Self:
        """These bytes."""
        found = cls()
        for part in parts:
            found.add(part, len(part))
        return found

    @classmethod
    def of_rows(cls, parts: Iterable[Rows], unit: int) -> Self:
        """Rows of ``unit`` bytes, in order."""
        found = cls(unit)
        for stored, start, stop, at in parts:
            found.add(stored, stop - start, at)
        return found

    @classmethod
    def of_tensor(cls, stored: str, spec: TensorSpec) -> Self:
        """All rows of a stored tensor."""
        return cls.of_rows([Rows(stored, 0, num_bytes(*spec[:2]))], num_bytes(spec.dtype, spec.shape[1:]))

    def add(self, part: str | bytes | Compressed, size: int, offset: int = 0) -> None:
        """Add bytes at the end: of the tensor of this name from ``offset`` on, or these, followed by zeros."""
        if not size:
            return
        last = self._parts[-1] if self._parts else None
        if (
            isinstance(part, bytes) and isinstance(last, bytes) and len(last) + len(part) <= _MAX_JOINED
            and len(last) == self.size - self._starts[-1] and not offset and not self._offsets[-1]
        ):  # fmt: skip
            self._parts[-1] = _join_literals(last, part)
        else:
            self._parts.append(part)
            self._starts.append(self.size)
            self._offsets.append(offset)
        self.size += size

    def fill(self, block: Bytes, start: int, read: ReadTensor, _scratch: Scratch) -> None:
        """Fill a block with the bytes from ``start`` on."""
        for part, low, high in self._within(start, start + len(block)):
            piece, block = block[: high - low], block[high - low :]
            if isinstance(part, str):
                read(part, low, piece)
            else:
                literal = memoryview(part.raw() if isinstance(part, Compressed) else part)[low:high]
                piece[: len(literal)], piece[len(literal) :] = literal, bytes(len(piece) - len(literal))

    def reads(self, start: int, stop: int) -> Iterator[TensorRange]:
        """Yield the ranges that are read to fill these bytes."""
        return ((part, low, high) for part, low, high in self._within(start, stop) if isinstance(part, str))

    def _within(self, start: int, stop: int) -> Iterator[tuple[str | bytes | Compressed, int, int]]:
        """Yield the parts that have these bytes, and the range of each."""
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(self._starts[at + 1] if at + 1 < len(self._starts) else self.size, stop)
            offset = self._offsets[at] - self._starts[at]
            yield self._parts[at], offset + start, offset + end
            start, at = end, at + 1


@lru_cache
def _join_literals(first: bytes, second: bytes) -> bytes:
    """Literal bytes that follow each other. Equal ones are one object, as between the chunks of a file."""
    return first + second


def rotary_rows(stored: str, spec: TensorSpec, head_rows: int, *, to_halves: bool = True) -> "StridedTensor":
    """A tensor with the rows of each head in another order: rotary pairs are neighbors, or half a head apart.

    Args:
        stored: the name of the stored tensor.
        spec: dtype and shape of both.
        head_rows: rows per head.
        to_halves: whether the stored pairs are neighbors; otherwise pairs of the tensor are.

    Raises:
        PlanError: if rows of a head do not form pairs.
    """
    if head_rows % 2:
        raise PlanError(f"{stored}: has heads of {head_rows} rows (expected an even number): correct head_dim")
    row, half = prod(spec.shape[1:]), head_rows // 2
    pairs, strides = ((2, half), (row, 2 * row)) if to_halves else ((half, 2), (row, half * row))
    shape = spec.shape[0] // head_rows, *pairs, row
    return engine.arrays.StridedTensor(stored, num_bytes(spec.dtype, (1,)), shape, (head_rows * row, *strides, 1))
