"""Tensors whose rows are stored in another order, or in several tensors.

Query and key weights have two orders of rows, by which rows rotary embeddings rotate together.

Meta's models rotate rows 2i and 2i+1 of a head, Hugging Face's models rows i and i + D/2 of a head of D rows. The
permutations between the two orders are inverse to each other.
"""

from dataclasses import dataclass
from typing import NamedTuple

from shardconv.checkpoint.engine import arrays
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


@dataclass(frozen=True, slots=True)
class RotaryRows:
    """A tensor whose heads have their rows in the other order than the stored tensor.

    Attributes:
        stored: the name of the stored tensor, of the same size.
        head_rows: rows per head.
        row_bytes: bytes per row.
        to_halves: whether stored pairs are neighbors, and pairs of the tensor half a head apart; else the inverse.
    """

    stored: str
    head_rows: int
    row_bytes: int
    to_halves: bool = True

    @property
    def unit(self) -> int:
        """Bytes of a head."""
        return self.head_rows * self.row_bytes

    def fill(self, block: Bytes, start: int, read: ReadTensor, scratch: Scratch) -> None:
        """Fill a block with the bytes of the tensor from ``start`` on; reads the heads that overlap it."""
        step = max(scratch.block_bytes // self.unit, 1) * self.unit
        half, at = self.head_rows // 2, start
        pairs = (half, 2) if self.to_halves else (2, half)
        while at < start + len(block):
            low = at // self.unit * self.unit
            high = min(low + step, -(-(start + len(block)) // self.unit) * self.unit)
            data = scratch.take("stored heads", high - low)
            read(self.stored, low, data)
            heads = scratch.take("reordered heads", high - low)
            arrays.strided.transpose_inner(data, (len(data) // self.unit, *pairs, self.row_bytes), heads)
            stop = min(high, start + len(block))
            block[at - start : stop - start] = heads[at - low : stop - low]
            at = stop
