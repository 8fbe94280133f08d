"""Tensors whose rows are stored in another order, or in several tensors.

Query and key weights have two orders of rows, by which rows rotary embeddings rotate together.

Meta's models rotate rows 2i and 2i+1 of a head, Hugging Face's models rows i and i + D/2 of a head of D rows. The
permutations between the two orders are inverse to each other.
"""

from dataclasses import dataclass
from typing import NamedTuple

from shardconv.checkpoint.engine import arrays
from shardconv.checkpoint.engine.copy import Scratch
from shardconv.checkpoint.sources.stored_tensors import ReadTensor
from shardconv.files.fileio import Bytes


class Rows(NamedTuple):
    """The name of a stored tensor, and the range of bytes of a full tensor that it has."""

    stored: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """A tensor whose rows are those of several stored tensors, one after the other.

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
                read(part.stored, low - part.start, block[low - start : high - start])


@dataclass(frozen=True, slots=True)
class RotaryRows:
    """A tensor whose heads have their rows in the other order than the stored tensor.

    Attributes:
        stored: the name of the stored tensor, of the same size.
        head_rows: rows per head.
        row_bytes: bytes per row.
        to_halves: whether stored pairs are neighbors and those of the tensor half a head apart; else the inverse.
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
