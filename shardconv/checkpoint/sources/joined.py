"""Tensors and files that consist of ranges of stored tensors, one after the other."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from shardconv.checkpoint.engine.copy import Scratch
from shardconv.checkpoint.sources.stored_tensors import ReadTensor, Transform
from shardconv.files.fileio import Bytes
from shardconv.support.errors import IntegrityError, option


class Rows(NamedTuple):
    """The name of a stored tensor, the range of bytes of a full tensor that it has, and the offset of these in it."""

    stored: str
    start: int
    stop: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """A tensor with the rows of several stored tensors, one after the other.

    Attributes:
        parts: the stored tensors, in order.
        unit: bytes of a row.
    """

    parts: tuple[Rows, ...]
    unit: int

    def fill(self, block: Bytes, start: int, read: ReadTensor, _scratch: Scratch) -> None:
        """Fill a block with the bytes of the tensor from ``start`` on."""
        for part in self.parts:
            low, high = max(start, part.start), min(start + len(block), part.stop)
            if low < high:
                read(part.stored, part.at + low - part.start, block[low - start : high - start])


@dataclass(frozen=True, slots=True)
class Literal:
    """A tensor that is not stored: its first bytes are here, and all others are zero."""

    data: bytes = b""
    unit: int = 0

    def fill(self, block: Bytes, start: int, _read: ReadTensor, _scratch: Scratch) -> None:
        """Fill a block with the bytes of the tensor from ``start`` on."""
        held = self.data[start : start + len(block)]
        block[:] = held + bytes(len(block) - len(held))


@dataclass(frozen=True, slots=True)
class WithCopies:
    """A tensor, of which there are copies in the source that must be equal.

    Attributes:
        tensor: the transform to the tensor.
        name: of the tensor in the source.
        copies: names of the copies.
    """

    tensor: Transform
    name: str
    copies: tuple[str, ...]

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
                    f"{copy}: differs from {self.name}, and Megatron-Core has one tensor for both: use "
                    f"{option(layout='native')}, or a checkpoint in which they are equal"
                )


class FileContents:
    """A file that consists of ranges of tensors and literal bytes, of which it may have hundreds of thousands.

    Attributes:
        size: bytes of the file.
        unit: see :class:`~shardconv.checkpoint.sources.stored_tensors.Transform`.
    """

    unit = 0

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[str | bytes | bytearray] = []
        self._starts, self._offsets = array("Q"), array("Q")

    @classmethod
    def of_parts(cls, parts: Iterable[bytes | bytearray]) -> Self:
        """A file of these bytes."""
        contents = cls()
        for part in parts:
            contents.add(part, len(part))
        return contents

    def add(self, part: str | bytes | bytearray, size: int, offset: int = 0) -> None:
        """Add bytes at the end: of the tensor of this name from ``offset`` on, or these, followed by zeros."""
        self._parts.append(part)
        self._starts.append(self.size)
        self._offsets.append(offset)
        self.size += size

    def fill(self, block: Bytes, start: int, read: ReadTensor, _scratch: Scratch) -> None:
        """Fill a block with the bytes of the file from ``start`` on."""
        at = bisect_right(self._starts, start) - 1
        while block:
            stop = self._starts[at + 1] if at + 1 < len(self._starts) else self.size
            piece, part, offset = block[: stop - start], self._parts[at], self._offsets[at] + start - self._starts[at]
            if isinstance(part, str):
                read(part, offset, piece)
            else:
                literal = memoryview(part)[offset : offset + len(piece)]
                piece[: len(literal)], piece[len(literal) :] = literal, bytes(len(piece) - len(literal))
            block, start, at = block[len(piece) :], stop, at + 1
