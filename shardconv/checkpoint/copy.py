"""The copy engine: bytes from the files of one side to the files of another, in one pass and in bounded memory.

The full tensors are the common ground. They are cut into stripes, flat runs of some 32 MiB that depend on the tensors
alone and on no tp; threads take stripe after stripe, and block after block of a stripe is gathered from the shards that
hold it and scattered to the shards that want it. The source of a split, and the result of a merge, are sides with one
shard a tensor; a reshard has many on both; a verification has nothing to scatter to. So checksums of stripes, taken
while the bytes pass, can be checked by whatever reads them next.

A block is small enough to stay in the processor's cache between the read and the writes.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from shardconv.checkpoint.fileio import Bytes, InputFiles, OutputFiles, will_need
from shardconv.checkpoint.geometry import Box, Geometry
from shardconv.errors import IntegrityError

#: Bytes of a stripe; also the grain of the checksums, so a manifest records the value it was written with.
STRIPE_BYTES = 32 * 2**20
#: Bytes that pass through at once, for each thread; more ranks get more, so that single writes do not become small.
_BLOCK_BYTES = 2**20
_BLOCK_BYTES_PER_SHARD = 128 * 2**10
_MAX_BLOCK_BYTES = 4 * 2**20
_MAX_THREADS = 8
#: Seconds between two calls for progress.
_REPORT_SECONDS = 0.1

#: Called with the bytes done and the bytes in all.
Progress = Callable[[int, int], None]


class Span(NamedTuple):
    """A flat range of bytes of one full tensor."""

    tensor: int
    start: int
    stop: int


Stripe = tuple[Span, ...]


class Shards(NamedTuple):
    """Where the shards of one tensor lie: for each the number of its file, and its first byte there."""

    geometry: Geometry
    files: Sequence[int]
    offsets: Sequence[int]


def cut_stripes(sizes: Sequence[int], stripe_bytes: int = STRIPE_BYTES) -> list[Stripe]:
    """Cut tensors of these sizes, one behind the other, into stripes.

    Small tensors share a stripe; a large one begins its own.
    """
    stripes: list[Stripe] = []
    open_stripe: list[Span] = []
    room = stripe_bytes
    for tensor, size in enumerate(sizes):
        if size > room and open_stripe:
            stripes.append(tuple(open_stripe))
            open_stripe, room = [], stripe_bytes
        start = 0
        while size - start > room:
            stripes.append((Span(tensor, start, start + room),))
            start += room
        if start < size:
            open_stripe.append(Span(tensor, start, size))
            room -= size - start
    return [*stripes, tuple(open_stripe)] if open_stripe else stripes


class Scratch:
    """The buffers of one thread, as large as was needed so far."""

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def take(self, name: str, size: int) -> Bytes:
        """A buffer of ``size`` bytes with any content; the one of that name that was taken before is gone."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size]


class Sink(Protocol):
    """What is done with a block of full-tensor bytes."""

    tensors: Sequence[Shards]

    def put(self, state: "StripeState", span: Span, block: Bytes, scratch: Scratch) -> None:
        """Take a block."""

    def finish(self, state: "StripeState") -> None:
        """Called when the stripe is through."""


class StripeState:
    """What one side keeps while a stripe passes: a running checksum for each file, and the first thing found wrong."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.hashes: dict[int, xxhash.xxh3_128] = {}
        self.problem = ""

    def update(self, file: int, data: Bytes) -> None:
        """Carry the checksum of a file on."""
        running = self.hashes.get(file)
        if running is None:
            running = self.hashes[file] = xxhash.xxh3_128()
        running.update(data.data)


def _view(array: Bytes, start: int, rows: int, width: int, offset: int, size: int) -> Bytes:
    if rows == 1:
        return array[start + offset : start + offset + size]
    return array[start : start + rows * width].reshape(rows, width)[:, offset : offset + size]


def _full_view(block: Bytes, box: Box) -> Bytes:
    return _view(block, box.full, box.rows, box.full_width, box.offset, box.size)


def _local_view(local: Bytes, box: Box) -> Bytes:
    return _view(local, box.local, box.rows, box.local_width, box.local_offset, box.size)


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
        for shard, file, offset in zip(shards.geometry.shards, shards.files, shards.offsets, strict=True):
            low, high = shard.local(span.start), shard.local(span.stop)
            if low == high:
                continue
            boxes = list(shard.boxes(span.start, span.stop))
            data = None if any(box.is_copy for box in boxes) else _as_it_lies(boxes, high - low, block)
            if data is not None:
                self._read(state, file, data, offset + low)
                continue
            data = scratch.take("gather", high - low)
            self._read(state, file, data, offset + low)
            self._place(state, span, file, data, block, boxes)
            if shard.is_padded:
                self._check_padding(state, span, file, data, boxes)

    def _read(self, state: StripeState, file: int, data: Bytes, offset: int) -> None:
        self._files.read(file, data, offset)
        if self._checksums is not None:
            state.update(file, data)

    def _place(
        self, state: StripeState, span: Span, file: int, data: Bytes, block: Bytes, boxes: Sequence[Box]
    ) -> None:
        for box in boxes:
            ours, full = _local_view(data, box), _full_view(block, box)
            if not box.is_copy:
                np.copyto(full, ours)
            elif not state.problem and not np.array_equal(full, ours):
                state.problem = (
                    f"{self._labels[file]}: its copy of {self._names[span.tensor]} differs from a lower rank's"
                )

    def _check_padding(self, state: StripeState, span: Span, file: int, data: Bytes, boxes: Sequence[Box]) -> None:
        for box in boxes:
            _local_view(data, box)[...] = 0
        if not state.problem and data.any():
            state.problem = f"{self._labels[file]}: the padding of {self._names[span.tensor]} is not zero"

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
            for shard, file, offset in zip(shards.geometry.shards, shards.files, shards.offsets, strict=True):
                low, high = shard.local(span.start), shard.local(span.stop)
                will_need(self._files.descriptors[file], offset + low, high - low)


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
        for shard, file, offset in zip(shards.geometry.shards, shards.files, shards.offsets, strict=True):
            low, high = shard.local(span.start), shard.local(span.stop)
            if low == high:
                continue
            boxes = list(shard.boxes(span.start, span.stop))
            data = _as_it_lies(boxes, high - low, block)
            if data is None:
                data = scratch.take("scatter", high - low)
                if shard.is_padded:
                    data[...] = 0
                for box in boxes:
                    np.copyto(_local_view(data, box), _full_view(block, box))
            if self._with_checksums:
                state.update(file, data)
            self._files.write(file, data, offset + low)

    def finish(self, state: StripeState) -> None:
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
        other = scratch.take("compare", len(block))
        self._reader.gather(state, span, other, scratch)
        if not state.problem and not np.array_equal(block, other):
            at = span.start + int(np.flatnonzero(block != other)[0])
            state.problem = f"{self._names[span.tensor]}: byte {at} of the tensor is not the source's"

    def finish(self, state: StripeState) -> None:
        """Say what was found.

        Raises:
            IntegrityError: if something differed.
        """
        if state.problem:
            raise IntegrityError(state.problem)


@dataclass(frozen=True, slots=True)
class CopyJob:
    """All that passes from a reader to the sinks.

    Attributes:
        stripes: what passes, in order.
        reader: where it comes from.
        sinks: where it goes.
        on_problem: takes what is found wrong, so that the rest is still read; None to stop at the first.
    """

    stripes: Sequence[Stripe]
    reader: ShardReader
    sinks: Sequence[Sink]
    on_problem: Callable[[IntegrityError], None] | None = None

    def run(self, *, threads: int | None = None, progress: Progress | None = None) -> None:
        """Pass everything, on several threads.

        Raises:
            IntegrityError: if something read is wrong and there is no ``on_problem``.
            OSError: if something cannot be written.
        """
        _Run(self, progress).run(threads or min(_MAX_THREADS, os.cpu_count() or 1))

    def pass_stripe(self, number: int, scratch: Scratch, advance: Callable[[int], None]) -> None:
        """Pass one stripe, from a thread with buffers of its own."""
        state = StripeState(number)
        sinks = [(sink, StripeState(number)) for sink in self.sinks]
        stripe = self.stripes[number]
        self.reader.prefetch(stripe)
        for whole_span in stripe:
            for span in self._blocks(whole_span):
                block = scratch.take("block", span.stop - span.start)
                self.reader.gather(state, span, block, scratch)
                for sink, sink_state in sinks:
                    sink.put(sink_state, span, block, scratch)
                advance(len(block))
        self.reader.finish(state, stripe)
        for sink, sink_state in sinks:
            sink.finish(sink_state)

    def _blocks(self, span: Span) -> Iterator[Span]:
        """A span in blocks, of whole rows where rows are short."""
        everyone = [self.reader.tensors, *(sink.tensors for sink in self.sinks)]
        sides = [tensors[span.tensor].geometry for tensors in everyone]
        shards = max(len(side.shards) for side in sides)
        size = min(max(_BLOCK_BYTES, shards * _BLOCK_BYTES_PER_SHARD), _MAX_BLOCK_BYTES)
        width = max((side.width for side in sides if side.width <= size), default=1)
        start = span.start
        while start < span.stop:
            stop = min((start + size) // width * width, span.stop)
            yield Span(span.tensor, start, stop)
            start = stop


class _Run:
    """One run of a job: its threads, how far they are, and whether they should stop."""

    def __init__(self, job: CopyJob, progress: Progress | None) -> None:
        self._job = job
        self._progress = progress
        self._total = sum(span.stop - span.start for stripe in job.stripes for span in stripe)
        self._done = 0
        self._numbers = iter(range(len(job.stripes)))
        self._is_stopping = False
        self._lock = threading.Lock()

    def run(self, threads: int) -> None:
        """Pass all stripes; whatever ends it, an error or Ctrl-C, no thread is left running."""
        with ThreadPoolExecutor(threads, thread_name_prefix="shardconv") as pool:
            try:
                pending = {pool.submit(self._work) for _ in range(min(threads, len(self._job.stripes)))}
                while pending:
                    finished, pending = wait(pending, timeout=_REPORT_SECONDS, return_when=FIRST_COMPLETED)
                    for future in finished:
                        future.result()
                    if self._progress is not None:
                        self._progress(self._done, self._total)
            finally:
                self._is_stopping = True

    def _work(self) -> None:
        scratch = Scratch()
        while (number := self._next()) is not None:
            try:
                self._job.pass_stripe(number, scratch, self._advance)
            except IntegrityError as error:
                self._note(error)

    def _next(self) -> int | None:
        with self._lock:
            return None if self._is_stopping else next(self._numbers, None)

    def _note(self, error: IntegrityError) -> None:
        if self._job.on_problem is None:
            raise error
        with self._lock:
            self._job.on_problem(error)

    def _advance(self, num_bytes: int) -> None:
        if self._is_stopping:
            raise InterruptedError("another thread has failed, or the user interrupted")
        with self._lock:
            self._done += num_bytes
