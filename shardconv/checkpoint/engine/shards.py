"""Readers and sinks of the copy engine: read, write and compare shards.

What a block and a rank have in common is read and written in place if it is one range of the block. If not, its pieces
are copied by way of a buffer: contiguous ones as they are, all others with one strided copy per box.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

import xxhash

from shardconv.checkpoint import engine
from shardconv.checkpoint.engine.copy import (
    Edits,
    Reader,
    Scratch,
    Shards,
    Span,
    Stripe,
    StripeState,
    parts_of,
    split_span,
)
from shardconv.checkpoint.engine.geometry import Box, Overlap
from shardconv.files.fileio import Bytes, OutputFiles
from shardconv.files.input_files import InputFiles
from shardconv.support.errors import IntegrityError

#: Maximum bytes that a :class:`Comparer` compares at once.
_COMPARED_BYTES = 512 * 2**10
#: Maximum bytes that :meth:`ShardReader.check` reads at once: few enough that they are hashed in the processor's cache.
_CHECKED_BYTES = 256 * 2**10


def _edit(data: Bytes, edits: Edits, rank: int, offset: int, *, sign: int) -> None:
    assert edits.values is not None
    engine.arrays.add_integers(data, edits.dtype, offset, edits.values[rank], sign=sign)


def name_tensors(stripe: Stripe, names: Sequence[str], damaged: str = "") -> str:
    """The tensors of a stripe, for a message on damaged bytes; ``damaged`` is a tensor that is known to have some."""
    first, last, count = names[stripe[0].tensor], names[stripe[-1].tensor], len({span.tensor for span in stripe})
    if damaged and count > 1:
        return f"{damaged} (possibly also of others of these {count} tensors)"
    return first if count == 1 else f"one or more of {count} tensors from {first} to {last}"


class ShardReader:
    """A reader of full tensors from their shards.

    Args:
        tensors: the shards of each tensor.
        files: the open files.
        labels: for each file its name in messages.
        names: for each tensor its name.
        checksums: for each rank and stripe the expected checksum, or None.
        rank_of: for each file its rank, whose files share checksums; empty if each file is a rank.
        remedy: the end of messages about damaged files.
    """

    def __init__(
        self,
        tensors: Sequence[Shards],
        files: InputFiles,
        *,
        labels: Sequence[str],
        names: Sequence[str],
        checksums: Sequence[Sequence[str]] | None = None,
        rank_of: Sequence[int] = (),
        remedy: str = "",
    ) -> None:
        self.tensors, self.is_remote = tensors, files.is_remote
        self._files = files
        self._labels = labels
        self._names = names
        self._checksums = checksums
        self._rank_of = rank_of or range(len(labels))
        self._remedy = remedy

    def gather(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch) -> Bytes:
        """Read the bytes of a span; check replicas, padding, and values that follow from a grid.

        Returns:
            As :meth:`Reader.gather`.
        """
        shards = self.tensors[span.tensor]
        if shards.edits is not None and (not shards.files or shards.geometry.columns is not None):
            engine.arrays.fill_expected(block, shards.edits, span.start)  # bytes that no shard holds are as expected
        overlaps = shards.geometry.overlaps(span.start, span.stop)
        for overlap in overlaps:
            rank, shard, low, high, boxes, contiguous = overlap
            file, ranges = shards.files[rank], shards.ranges(overlap)
            if contiguous is not None and not shards.is_edited and not boxes[0].is_replica:
                is_whole = len(overlaps) == 1 and contiguous == slice(0, len(block)) and shards.edits is None
                data = block if is_whole else block[contiguous]
                read = self._read(state, file, data, ranges, may_view=is_whole)
                block = read if is_whole else block
                continue
            may_view = not (shards.is_edited or shard.is_padded)  # both write to the data
            data = self._read(state, file, scratch.take("gather", high - low), ranges, may_view=may_view)
            if shards.edits is not None and shards.is_edited:
                _edit(data, shards.edits, rank, low, sign=1)
            self._copy_boxes(state, span, file, data, block, boxes, is_padded=shard.is_padded)
            del data  # the memory of a view is free for the next read
        if shards.edits is not None:
            state.problem = state.problem or engine.arrays.unexpected(block, shards.edits, span.start)
        return block

    def check(self, number: int, stripe: Stripe) -> None:
        """Check a stripe against its checksum, without gathering full tensors.

        Args:
            number: of the stripe.
            stripe: its spans.

        Raises:
            IntegrityError: if the checksum differs.
            SourceError: if a file was truncated, or cannot be read.
        """
        state, block = StripeState(number), memoryview(bytearray(_CHECKED_BYTES))
        for span in stripe:
            for file, offset, size in self.tensors[span.tensor].stored(span.start, span.stop):
                for start in range(offset, offset + size, _CHECKED_BYTES):
                    count = min(_CHECKED_BYTES, offset + size - start)
                    self._read(state, file, block[:count], [(start, count)], may_view=True)
        self.finish(state, stripe)

    def _read(
        self, state: StripeState, file: int, data: Bytes, ranges: Iterable[tuple[int, int]], *, may_view: bool
    ) -> Bytes:
        """The bytes of ranges, as a view of memory that holds them or in ``data``."""
        ranges = [*ranges]
        view = self._files.view(file, *ranges[0]) if may_view and len(ranges) == 1 else None
        if view is None:
            self._files.read_ranges(file, data, ranges)
            view = data
        if self._checksums is not None:
            state.update(self._rank_of[file], view)
        return view

    def _copy_boxes(
        self, state: StripeState, span: Span, file: int, data: Bytes, block: Bytes, boxes: Sequence[Box], *,
        is_padded: bool,
    ) -> None:  # fmt: skip
        label, name = self._labels[file], self._names[span.tensor]
        problem = ""
        if not engine.arrays.gather(data, boxes, block):
            problem = f"{label}: {name} differs from the shard of a lower rank (expected equal replicas){self._remedy}"
        elif is_padded and not engine.arrays.is_padding_zero(boxes, data):
            problem = f"{label}: the padding of {name} is not zero{self._remedy}"
        if problem and not state.problem:
            state.problem, state.damaged = problem, name

    def finish(self, state: StripeState, stripe: Stripe, /) -> None:
        """Check the stripe.

        Raises:
            IntegrityError: if checksums or replicas differ, padding is not zero, or values differ from their grid.
        """
        if self._checksums is not None:
            digests = {rank: running.hexdigest() for rank, running in state.hashes.items()}
            wrong = [rank for rank, digest in digests.items() if digest != self._checksums[rank][state.number]]
            if wrong:
                damaged = state.damaged if len(wrong) == 1 else ""  # of several ranks, it may be in any
                lines = [self._mismatch(rank, digests[rank], state, stripe, damaged) for rank in wrong]
                raise IntegrityError("\n".join(lines) + self._remedy)
        if state.problem:
            raise IntegrityError(state.problem)

    def _mismatch(self, rank: int, digest: str, state: StripeState, stripe: Stripe, damaged: str) -> str:
        assert self._checksums is not None
        tensors = name_tensors(stripe, self._names, damaged)
        equal = [other for other in range(len(self._checksums)) if self._checksums[other][state.number] == digest]
        hint = f" (got the bytes of {self._label(equal[0], stripe)})" if equal else ""
        return f"{self._label(rank, stripe)}: the bytes of {tensors} differ from their checksum{hint}"

    def _label(self, rank: int, stripe: Stripe) -> str:
        """The names of the files of a rank that hold a stripe."""
        files = sorted({file for span in stripe for file in self.tensors[span.tensor].files})
        return ", ".join(self._labels[file] for file in files if self._rank_of[file] == rank)

    def prefetch(self, stripe: Iterable[Span]) -> None:
        """Prefetch a stripe."""
        extents = (self.tensors[span.tensor].extents(span.start, span.stop) for span in stripe)
        self._files.prefetch(chain.from_iterable(extents))

    def cancel(self) -> None:
        """Cancel pending requests."""
        self._files.cancel()


class _Part(NamedTuple):
    """The part of a block that a rank gets of one span: a range of its shard.

    Attributes:
        file: number of the file that gets it.
        shards: the shards of the tensor.
        overlap: the range.
        at: offset in the block of the span that has it.
    """

    file: int
    shards: Shards
    overlap: Overlap
    at: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.overlap.stop - self.overlap.start

    def in_block(self) -> slice | None:
        """The slice of the block that equals it; None if it is not contiguous there, or has other values."""
        within = self.overlap.contiguous
        return None if within is None or self.shards.is_edited else slice(self.at + within.start, self.at + within.stop)

    def copy_to(self, data: Bytes, block: Bytes) -> None:
        """Copy it from the block to a buffer of its size."""
        rank, shard, low, _, boxes, within = self.overlap
        if within is None:
            engine.arrays.scatter(block, boxes, data, is_padded=shard.is_padded, at=self.at)
        else:
            data[:] = block[self.at + within.start : self.at + within.stop]
        if self.shards.edits is not None and self.shards.is_edited:
            _edit(data, self.shards.edits, rank, low, sign=-1)


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join each range, of an offset and a size, with the one before it if it begins where that one ends."""
    start = size = 0
    for offset, more in ranges:
        if offset != start + size:
            if size:
                yield start, size
            start, size = offset, 0
        size += more
    if size:
        yield start, size


def _ranges_of(parts: Sequence[_Part]) -> Iterable[tuple[int, int]]:
    """The contiguous ranges of a file with parts: offset and size."""
    ranges = [part.shards.ranges(part.overlap) for part in parts]
    return _joined(chain.from_iterable(ranges)) if len(ranges) > 1 else ranges[0]


def _slice_of(parts: Iterable[_Part]) -> slice | None:
    """The slice of the block that equals parts, one after the other; None if they are not contiguous there."""
    whole = None
    for part in parts:
        within = part.in_block()
        if within is None or (whole is not None and whole.stop != within.start):
            return None
        whole = within if whole is None else slice(whole.start, within.stop)
    return whole


class ShardWriter:
    """A sink that writes shards and computes their checksums.

    Args:
        tensors: the shards of each tensor.
        files: the open files.
        num_stripes: number of stripes.
        with_checksums: whether to compute checksums.
        rank_of: for each file its rank, whose files share checksums; empty if each file is a rank.

    Attributes:
        checksums: for each rank and stripe the checksum.
    """

    def __init__(
        self,
        tensors: Sequence[Shards],
        files: OutputFiles,
        *,
        num_stripes: int,
        with_checksums: bool,
        rank_of: Sequence[int] = (),
    ) -> None:
        self.tensors, self.is_remote = tensors, False
        self._files = files
        self._with_checksums = with_checksums
        empty = xxhash.xxh3_128().hexdigest()
        self._rank_of = rank_of or range(files.num_files)
        self.checksums = [[empty] * num_stripes for _ in {*self._rank_of}]

    def put(self, state: StripeState, spans: Sequence[Span], block: Bytes, scratch: Scratch) -> None:
        """Write the bytes of a block to every shard that holds some of them."""
        parts, at = dict[int, list[_Part]](), 0  # of each rank in the order of the spans, in which it is hashed
        for span in spans:
            shards = self.tensors[span.tensor]
            for overlap in shards.geometry.overlaps(span.start, span.stop):
                file = shards.files[overlap.rank]
                parts.setdefault(self._rank_of[file], []).append(_Part(file, shards, overlap, at))
            at += span.stop - span.start
        groups = [*parts.values()]
        while groups:
            group = groups.pop(self._next(groups))
            for _, of_file in groupby(group, attrgetter("file")):
                self._write(state, [*of_file], block, scratch)

    def _next(self, groups: Sequence[Sequence[_Part]]) -> int:
        """The number of the first group whose next file is free; 0 if none is."""
        for number, (first, *_) in enumerate(groups):
            if not self._files.would_wait(first.file):
                return number
        return 0

    def _write(self, state: StripeState, parts: Sequence[_Part], block: Bytes, scratch: Scratch) -> None:
        """Hash and write parts of one rank that are written to one file."""
        if (within := _slice_of(parts)) is not None:
            data = block[within]
        else:
            data, at = scratch.take("scatter", sum([part.size for part in parts])), 0
            for part in parts:
                part.copy_to(data[at : at + part.size], block)
                at += part.size
        first = parts[0]
        if self._with_checksums:
            state.update(self._rank_of[first.file], data)
        self._files.write_ranges(first.file, data, _ranges_of(parts))

    def prefetch(self, stripe: Iterable[Span]) -> None:
        """Do nothing: nothing is read."""

    def cancel(self) -> None:
        """Cancel pending requests."""
        self._files.cancel()

    def finish(self, state: StripeState, _stripe: Stripe, /) -> None:
        """Store the checksums of a stripe."""
        for rank, running in state.hashes.items():
            self.checksums[rank][state.number] = running.hexdigest()


class Comparer:
    """A sink that compares every block with the block of another reader.

    Args:
        reader: the other reader.
        common: the names of its tensors; others are not compared.
        names: for each tensor its name.
        held: the shards that blocks consist of: where these hold no bytes, nothing is compared.

    Attributes:
        differences: descriptions of the differences.
    """

    def __init__(self, reader: Reader, common: Sequence[str], names: Sequence[str], held: Sequence[Shards]) -> None:
        self.differences: set[str] = set()
        numbers = {name: number for number, name in enumerate(common)}
        self._numbers = [numbers.get(name) for name in names]
        found = zip(self._numbers, held, strict=True)
        self.tensors: Sequence[Shards] = [one if number is None else reader.tensors[number] for number, one in found]
        self._reader, self.is_remote = reader, reader.is_remote
        self._names = names
        self._held = held

    def put(self, state: StripeState, spans: Sequence[Span], block: Bytes, scratch: Scratch) -> None:
        """Compare a block in small parts. Parts end with rows of the other reader, which may compute whole rows."""
        for span, data in parts_of(spans, block):
            self._compare_span(state, span, data, scratch)

    def _compare_span(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch) -> None:
        geometry = self.tensors[span.tensor].geometry
        width = 1 if geometry.width == geometry.num_bytes else geometry.width
        for part in split_span(span, max(_COMPARED_BYTES, width), width):
            for common in self._common([part]):
                # both readers may keep parts of tensors that have the same names
                buffer, nested = scratch.take("compare", part.stop - part.start), scratch.nested("compare")
                other = self._reader.gather(state, common, buffer, nested)
                self._compare(state, part, block[part.start - span.start : part.stop - span.start], other, scratch)
                del other  # the memory of a view is free for the next read

    def _common(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Yield the spans of the other reader."""
        for span in spans:
            if (number := self._numbers[span.tensor]) is not None:
                yield span._replace(tensor=number)

    def _compare(self, state: StripeState, span: Span, block: Bytes, other: Bytes, scratch: Scratch) -> None:
        held = self._held[span.tensor].geometry
        if held.columns is not None:
            compared = scratch.take("held", len(block))
            compared[:] = other
            for overlap in held.overlaps(span.start, span.stop):
                engine.arrays.copy_boxes(block, overlap.boxes, compared)
            block = compared
        at = engine.arrays.first_difference(block, other)
        if at is not None and not state.problem:
            state.problem = f"{self._names[span.tensor]}: byte {span.start + at} of the tensor differs from the source"

    def prefetch(self, stripe: Iterable[Span]) -> None:
        """Prefetch a stripe."""
        self._reader.prefetch(self._common(stripe))

    def cancel(self) -> None:
        """Cancel pending requests."""
        self._reader.cancel()

    def finish(self, state: StripeState, _stripe: Stripe, /) -> None:
        """Report the first difference.

        Raises:
            IntegrityError: if there is one.
        """
        if state.problem:
            self.differences.add(state.problem)
            raise IntegrityError(state.problem)
