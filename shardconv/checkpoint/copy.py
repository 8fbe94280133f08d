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
from itertools import chain
from typing import NamedTuple, Protocol

import xxhash

from shardconv.checkpoint.fileio import Bytes
from shardconv.checkpoint.geometry import Geometry
from shardconv.errors import IntegrityError, UsageError

#: Bytes of a stripe; also the grain of the checksums, so a manifest records the value it was written with.
STRIPE_BYTES = 32 * 2**20
#: Bytes that pass through at once, for each thread; more ranks get more, so that single writes do not become small.
_BLOCK_BYTES = 2 * 2**20
_BLOCK_BYTES_PER_SHARD = 256 * 2**10
#: Bytes of blocks that all threads together may hold.
_MAX_BLOCKS_BYTES = 12 * 2**20
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 64 * 2**10, 4 * 2**20
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


def apart(count: int, threads: int) -> Iterator[int]:
    """The numbers below ``count`` in an order that keeps those taken at the same time far from each other.

    Stripes that are neighbours often go to the same file, where threads would wait for each other.
    """
    distance = -(-count // threads)
    return chain.from_iterable(range(first, count, distance) for first in range(distance))


class Scratch:
    """The buffers of one thread, as large as was needed so far; a block should have at most ``block_bytes``."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._buffers: dict[str, Bytes] = {}

    def take(self, name: str, size: int) -> Bytes:
        """A buffer of ``size`` bytes with any content; the one of that name that was taken before is gone."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = memoryview(bytearray(size))
        return buffer[:size]


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
        running.update(data)


class Reader(Protocol):
    """Where blocks of full-tensor bytes come from."""

    tensors: Sequence[Shards]

    def prefetch(self, stripe: Stripe) -> None:
        """Have the system begin to read a stripe."""

    def gather(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch) -> None:
        """Fill a block with the bytes of a span."""

    def finish(self, state: StripeState, stripe: Stripe) -> None:
        """Called when the stripe is through; raises IntegrityError if something in it was wrong."""


class Sink(Protocol):
    """Where blocks of full-tensor bytes go."""

    tensors: Sequence[Shards]

    def put(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch) -> None:
        """Take a block."""

    def finish(self, state: StripeState, stripe: Stripe) -> None:
        """Called when the stripe is through; raises IntegrityError if something in it was wrong."""


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
    reader: Reader
    sinks: Sequence[Sink]
    on_problem: Callable[[IntegrityError], None] | None = None

    def run(self, *, threads: int | None = None, progress: Progress | None = None) -> None:
        """Pass everything, on several threads.

        Raises:
            IntegrityError: if something read is wrong and there is no ``on_problem``.
            UsageError: if ``threads`` is less than one.
            OSError: if something cannot be written.
        """
        if threads is not None and threads < 1:
            raise UsageError(f"threads = {threads}: there is at least one")
        _Run(self, progress).run(threads or min(_MAX_THREADS, os.cpu_count() or 1))

    def pass_stripe(self, number: int, scratch: Scratch, advance: Callable[[int], None]) -> None:
        """Pass one stripe, from a thread with buffers of its own."""
        state = StripeState(number)
        sinks = [(sink, StripeState(number)) for sink in self.sinks]
        stripe = self.stripes[number]
        self.reader.prefetch(stripe)
        for whole_span in stripe:
            for span in self._blocks(whole_span, scratch.block_bytes):
                block = scratch.take("block", span.stop - span.start)
                self.reader.gather(state, span, block, scratch)
                for sink, sink_state in sinks:
                    sink.put(sink_state, span, block, scratch)
                advance(len(block))
        self._finish(stripe, [(self.reader, state), *sinks])

    @staticmethod
    def _finish(stripe: Stripe, sides: Sequence[tuple[Reader | Sink, StripeState]]) -> None:
        """Let every side say what was wrong, so that one does not hide what another has found."""
        problems = []
        for side, state in sides:
            try:
                side.finish(state, stripe)
            except IntegrityError as error:
                problems.append(str(error))
        if problems:
            raise IntegrityError("\n".join(problems))

    def _blocks(self, span: Span, max_bytes: int) -> Iterator[Span]:
        """A span in blocks, of whole rows where rows are short."""
        everyone = [self.reader.tensors, *(sink.tensors for sink in self.sinks)]
        sides = [tensors[span.tensor].geometry for tensors in everyone]
        shards = max(len(side.shards) for side in sides)
        size = min(max(_BLOCK_BYTES, shards * _BLOCK_BYTES_PER_SHARD), max_bytes)
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
        self._numbers: Iterator[int] = iter(())
        self._is_stopping = False
        self._lock = threading.Lock()

    def run(self, threads: int) -> None:
        """Pass all stripes; whatever ends it, an error or Ctrl-C, no thread is left running."""
        with ThreadPoolExecutor(threads, thread_name_prefix="shardconv") as pool:
            try:
                workers = min(threads, len(self._job.stripes))
                self._numbers = apart(len(self._job.stripes), threads)
                block_bytes = max(min(_MAX_BLOCKS_BYTES // max(workers, 1), _MAX_BLOCK_BYTES), _MIN_BLOCK_BYTES)
                pending = {pool.submit(self._work, Scratch(block_bytes)) for _ in range(workers)}
                while pending:
                    finished, pending = wait(pending, timeout=_REPORT_SECONDS, return_when=FIRST_COMPLETED)
                    for future in finished:
                        future.result()
                    if self._progress is not None:
                        self._progress(self._done, self._total)
            finally:
                self._is_stopping = True

    def _work(self, scratch: Scratch) -> None:
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
