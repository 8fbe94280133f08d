"""Query and key weights in the other order of rows, by which rotary embeddings rotate rows together.

Meta's models rotate rows 2i and 2i+1 of a head, Hugging Face's models rows i and i + D/2 of a head of D rows. The
permutations between the two orders are inverse to each other.
"""

from collections.abc import Iterator

from msgspec import Struct

from shardconv.checkpoint.engine import arrays
from shardconv.checkpoint.engine.copy import Scratch
from shardconv.checkpoint.sources.stored_tensors import ReadTensor, TensorRange
from shardconv.files.fileio import Bytes


class RotaryRows(Struct, frozen=True):
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

    def reads(self, start: int, stop: int) -> Iterator[TensorRange]:
        """Yield the range of heads that is read to fill these bytes."""
        yield self.stored, start // self.unit * self.unit, -(-stop // self.unit) * self.unit
