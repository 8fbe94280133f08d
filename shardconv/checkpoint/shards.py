"""The sides of a copy: shards that are read, shards that are written, and shards that are compared.

Owns how a block of a full tensor and the shards of it meet: what lies as it has to is read and written in place, the
rest is one strided copy a box. Knows nothing of threads and stripes beyond the one at hand.
"""

from collections.abc import Sequence

import xxhash

from shardconv.checkpoint.copy import Scratch, Shards, Span, Stripe, StripeState
from shardconv.checkpoint.fileio import Bytes, InputFiles, OutputFiles, will_need
from shardconv.checkpoint.geometry import Box
from shardconv.errors import IntegrityError


def _as_it_lies(boxes: Sequence[Box], size: int, block: Bytes) -> Bytes | None:
    """The part of a block that is a shard's whole range of ``size`` bytes as it lies, if there is one."""
    if len(boxes) != 1 or boxes[0].rows * boxes[0].size != size:
        return None
    box = boxes[0]
    if box.rows > 1 and box.size != box.full_width:
        return None
    return block[box.full + box.offset : box.full + box.offset + size]


class ShardReader:
    """The side that is read.

    Args:
        tensors: where each tensor's shards lie.
        files: the open files.
        labels: for each file how messages name it.
        names: for each tensor its name.
        checksums: for each file and stripe the checksum to expect; None where there are none.
    """

    def __init__(
        self,
        tensors: Sequence[Shards],
        files: InputFiles,
        *,
        labels: Sequence[str],
        names: Sequence[str],
        checksums: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.tensors = tensors
        self._files = files
        self._labels = labels
        self._names = names
        self._checksums = checksums

    def gather(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch) -> None:
        """Fill a block with the bytes of a span; note copies that differ and padding that is not zero."""
        shards = self.tensors[span.tensor]
        for rank, shard, low, high in shards.geometry.shares(span.start, span.stop):
            file, offset = shards.files[rank], shards.offsets[rank]
            boxes = list(shard.boxes(span.start, span.stop))
            data = None if any(box.is_copy for box in boxes) else _as_it_lies(boxes, high - low, block)
            if data is not None:
                self._read(state, file, data, offset + low)
                continue
            data = scratch.take("gather", high - low)
            self._read(state, file, data, offset + low)
            self._place(state, span, file, data, block, boxes, is_padded=shard.is_padded)

    def _read(self, state: StripeState, file: int, data: Bytes, offset: int) -> None:
        self._files.read(file, data, offset)
        if self._checksums is not None:
            state.update(file, data)

    def _place(
        self, state: StripeState, span: Span, file: int, data: Bytes, block: Bytes, boxes: Sequence[Box], *,
        is_padded: bool,
    ) -> None:  # fmt: skip
        from shardconv.checkpoint import strided  # noqa: PLC0415 - see there

        label, name = self._labels[file], self._names[span.tensor]
        problem = ""
        if not strided.gather(data, boxes, block):
            problem = f"{label}: its copy of {name} differs from a lower rank's"
        elif is_padded and not strided.is_zero_beside(boxes, data):
            problem = f"{label}: the padding of {name} is not zero"
        state.problem = state.problem or problem

    def finish(self, state: StripeState, stripe: Stripe) -> None:
        """Check what was read.

        Raises:
            IntegrityError: if checksums, copies or padding are not as they should be.
        """
        if self._checksums is not None:
            found = {file: running.hexdigest() for file, running in state.hashes.items()}
            wrong = [file for file, digest in found.items() if digest != self._checksums[file][state.number]]
            if wrong:
                raise IntegrityError("\n".join(self._wrong(file, found[file], state, stripe) for file in wrong))
        if state.problem:
            raise IntegrityError(state.problem)

    def _wrong(self, file: int, digest: str, state: StripeState, stripe: Stripe) -> str:
        assert self._checksums is not None
        first, last = self._names[stripe[0].tensor], self._names[stripe[-1].tensor]
        where = first if first == last else f"{first} ... {last}"
        owners = [other for other in range(len(self._checksums)) if self._checksums[other][state.number] == digest]
        hint = f": these are the bytes of {self._labels[owners[0]]}" if owners else ""
        return f"{self._labels[file]}: the bytes of {where} differ from their checksum{hint}"

    def prefetch(self, stripe: Stripe) -> None:
        """Have the system begin to read a stripe."""
        for span in stripe:
            shards = self.tensors[span.tensor]
            for rank, _, low, high in shards.geometry.shares(span.start, span.stop):
                will_need(self._files.descriptors[shards.files[rank]], shards.offsets[rank] + low, high - low)


class ShardWriter:
    """The side that is written: a sink that also takes the checksums.

    Args:
        tensors: where each tensor's shards lie.
        files: the open files.
        num_stripes: how many stripes will pass.
        with_checksums: whether checksums are wanted.
    """

    def __init__(
        self, tensors: Sequence[Shards], files: OutputFiles, *, num_stripes: int, with_checksums: bool
    ) -> None:
        self.tensors = tensors
        self._files = files
        self._with_checksums = with_checksums
        empty = xxhash.xxh3_128().hexdigest()
        self.checksums = [[empty] * num_stripes for _ in files.descriptors]

    def put(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch) -> None:
        """Write to every shard what it wants of a block."""
        shards = self.tensors[span.tensor]
        for rank, shard, low, high in shards.geometry.shares(span.start, span.stop):
            file, offset = shards.files[rank], shards.offsets[rank]
            boxes = list(shard.boxes(span.start, span.stop))
            data = _as_it_lies(boxes, high - low, block)
            if data is None:
                from shardconv.checkpoint import strided  # noqa: PLC0415 - see there

                data = scratch.take("scatter", high - low)
                strided.scatter(block, boxes, data, is_padded=shard.is_padded)
            if self._with_checksums:
                state.update(file, data)
            self._files.write(file, data, offset + low)

    def finish(self, state: StripeState, stripe: Stripe) -> None:  # noqa: ARG002 - all sides have it
        """Keep the checksums of a stripe."""
        for file, running in state.hashes.items():
            self.checksums[file][state.number] = running.hexdigest()


class Comparer:
    """A sink that compares every block with what another reader has there."""

    def __init__(self, reader: ShardReader, names: Sequence[str]) -> None:
        self.tensors = reader.tensors
        self._reader = reader
        self._names = names

    def put(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch) -> None:
        """Compare a block."""
        from shardconv.checkpoint import strided  # noqa: PLC0415 - see there

        other = scratch.take("compare", len(block))
        self._reader.gather(state, span, other, scratch)
        at = strided.first_difference(block, other)
        if at is not None and not state.problem:
            state.problem = f"{self._names[span.tensor]}: byte {span.start + at} of the tensor is not the source's"

    def finish(self, state: StripeState, stripe: Stripe) -> None:  # noqa: ARG002 - all sides have it
        """Say what was found.

        Raises:
            IntegrityError: if something differed.
        """
        if state.problem:
            raise IntegrityError(state.problem)
