"""The copy engine: copies tensors from a reader to sinks in one pass and in bounded memory.

The full tensors are split into stripes, flat byte ranges of about 32 MiB that depend on the tensors but not on tp. Each
thread copies one stripe at a time, block by block: a block, which is a part of a tensor or some small tensors, is
gathered from the shards of the reader and scattered to the shards of the sinks. A tensor has one shard in the source of
a split and in the result of a merge, and one per rank in a split checkpoint; the sinks of a verification do not write.
Because stripes do not depend on tp, checksums of stripes that one operation stores can be checked by the next.

A block is small enough to stay in the processor's cache between the read and the writes.
"""

import mmap
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, overload

import xxhash

from shardconv.checkpoint.engine.geometry import Geometry, Overlap
from shardconv.files.fileio import Bytes
from shardconv.plan.grid import Grid
from shardconv.support import Progress
from shardconv.support.errors import IntegrityError

if TYPE_CHECKING:
    from queue import SimpleQueue

#: Bytes of a stripe. There is one checksum per rank and stripe, so a manifest stores the value it was written with.
STRIPE_BYTES = 32 * 2**20
#: Bytes of a block; it grows with the number of shards, so that single writes do not become small.
BLOCK_BYTES = 2 * 2**20
BLOCK_BYTES_PER_SHARD = 256 * 2**10
#: Maximum bytes of the blocks of all threads together; and the same if files are at URLs: threads that receive data
#: wait for the interpreter's lock at each step of a block.
_MAX_BLOCKS_BYTES, _REMOTE_BLOCKS_BYTES = 4 * 2**20, 16 * 2**20
_MIN_BLOCK_BYTES = 64 * 2**10
#: Maximum spans of a block: sinks keep an object for each of them and each rank.
_MAX_SPANS = 1024
#: Maximum bytes of the parts of transposed tensors that all threads keep together, and maximum number of threads that
#: keep one at a time: the bytes of a matrix may be read once for each of its parts, so that these must not be short.
KEPT_BYTES, _NUM_KEPT = 10 * 2**20, 2
#: Maximum bytes of such a part that one thread keeps if files are at URLs, where each part is a request of its own, and
#: the maximum number of these threads.
REMOTE_KEPT_BYTES, _NUM_REMOTE_KEPT = 48 * 2**20, 4
#: Maximum number of threads: more of them would not have room for their blocks.
_MAX_WORKERS = _MAX_BLOCKS_BYTES // _MIN_BLOCK_BYTES
#: Default of the number of threads, with many processors.
_MAX_THREADS = 8
#: Seconds between two calls of the progress callback.
_REPORT_SECONDS = 0.1

#: Fills a buffer with the bytes of a tensor from an offset on.
ReadTensor = Callable[[str, int, Bytes], None]


class Span(NamedTuple):
    """A flat byte range of one full tensor."""

    tensor: int
    start: int
    stop: int


Stripe = tuple[Span, ...]


class Stripes(Sequence[Stripe]):
    """Stripes whose spans are stored in an array: there may be hundreds of thousands.

    Args:
        stripes: the spans of each stripe.
    """

    def __init__(self, stripes: Iterable[Iterable[Span]]) -> None:
        self._numbers, self._ends = array("Q"), array("Q", [0])
        for stripe in stripes:
            self._numbers.extend(chain.from_iterable(stripe))
            self._ends.append(len(self._numbers))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Stripe: ...

    @overload
    def __getitem__(self, index: slice) -> list[Stripe]: ...

    def __getitem__(self, index: int | slice) -> Stripe | list[Stripe]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        numbers = self._numbers[self._ends[number] : self._ends[number + 1]]
        return tuple(Span(*numbers[at : at + 3]) for at in range(0, len(numbers), 3))


class Edits(NamedTuple):
    """Integers of a quantization format: their values in the full tensor, and the differences in shards.

    Attributes:
        name: of the tensor.
        dtype: of the tensor.
        grid: of the tensor, which its values follow from.
        values: the integers that are subtracted on each rank: one for all elements, or one for each; None for none.
    """

    name: str
    dtype: str
    grid: Grid
    values: Sequence[Sequence[int]] | None


class FileRows(NamedTuple):
    """The rows of a shard in a file, with bytes of other tensors between them.

    Attributes:
        size: bytes of a row.
        stride: bytes from the start of a row to the start of the next.
    """

    size: int
    stride: int


class Shards(NamedTuple):
    """The shards of one tensor.

    Attributes:
        geometry: their bytes.
        files: for each rank the index of its file; empty if no file has the tensor, as its values follow from its grid.
        offsets: for each rank the offset of the shard in the file.
        edits: of a tensor whose values follow from its grid; None for all others.
        rows: for each rank the rows of the shard in the file; None if all shards are contiguous.
    """

    geometry: Geometry
    files: Sequence[int]
    offsets: Sequence[int]
    edits: Edits | None = None
    rows: Sequence[FileRows] | None = None

    @property
    def is_edited(self) -> bool:
        """Whether values of shards differ from the full tensor."""
        return self.edits is not None and self.edits.values is not None

    @property
    def is_implied(self) -> bool:
        """Whether the settings of a quantization format determine the values of the full tensor."""
        return self.edits is not None and self.edits.grid.is_implied

    def position(self, rank: int, offset: int) -> int:
        """The position in its file of a byte of a rank's shard."""
        if self.rows is None:
            return self.offsets[rank] + offset
        row, column = divmod(offset, self.rows[rank].size)
        return self.offsets[rank] + row * self.rows[rank].stride + column

    def ranges(self, overlap: Overlap) -> Iterable[tuple[int, int]]:
        """The contiguous ranges of a file with the bytes of an overlap: offset and size."""
        rank, start, stop = overlap.rank, overlap.start, overlap.stop
        if self.rows is None:
            return [(self.offsets[rank] + start, stop - start)]
        size = self.rows[rank].size
        edges = (start, *range(start // size * size + size, stop, size), stop)
        return ((self.position(rank, low), high - low) for low, high in pairwise(edges))

    def stored(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """File, offset and size of each contiguous range with bytes ``[start, stop)`` of the full tensor."""
        for overlap in self.geometry.overlaps(start, stop):
            for offset, size in self.ranges(overlap):
                yield self.files[overlap.rank], offset, size

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The range of each shard's file from the first to the last of these bytes: file, offset and size."""
        for overlap in self.geometry.overlaps(start, stop):
            first, last = (self.position(overlap.rank, at) for at in (overlap.start, overlap.stop - 1))
            yield self.files[overlap.rank], first, last + 1 - first


def split_into_stripes(sizes: Sequence[int], stripe_bytes: int = STRIPE_BYTES) -> Stripes:
    """Split consecutive tensors of these sizes in bytes into stripes.

    Small tensors share a stripe; a large tensor begins a new one.
    """
    return Stripes(_stripes(sizes, stripe_bytes))


def _stripes(sizes: Sequence[int], stripe_bytes: int) -> Iterator[list[Span]]:
    open_stripe: list[Span] = []
    room = stripe_bytes
    for tensor, size in enumerate(sizes):
        if size > room and open_stripe:
            yield open_stripe
            open_stripe, room = [], stripe_bytes
        start = 0
        while size - start > room:
            yield [Span(tensor, start, start + room)]
            start += room
        if start < size:
            open_stripe.append(Span(tensor, start, size))
            room -= size - start
    if open_stripe:
        yield open_stripe


def split_span(span: Span, size: int, width: int) -> Iterator[Span]:
    """Split a span into spans of at most ``size`` bytes, which end at multiples of ``width`` (at most ``size``)."""
    start = span.start
    while start < span.stop:
        stop = min((start + size) // width * width, span.stop)
        yield Span(span.tensor, start, stop)
        start = stop


def parts_of(spans: Iterable[Span], block: Bytes) -> Iterator[tuple[Span, Bytes]]:
    """Each span with its part of a block that has the bytes of spans, one after the other."""
    at = 0
    for span in spans:
        size = span.stop - span.start
        yield span, block[at : at + size]
        at += size


def held_stripes(stripes: Sequence[Stripe], tensors: Sequence[Shards]) -> Stripes:
    """The stripes without ranges that no shard holds; equal stripes if there are shards of all ranks.

    Args:
        stripes: of the full tensors.
        tensors: the shards of each tensor.
    """
    return Stripes(_held(stripe, tensors) for stripe in stripes)


def _held(stripe: Stripe, tensors: Sequence[Shards]) -> Iterator[Span]:
    for span in stripe:
        for held in tensors[span.tensor].geometry.held(span.start, span.stop):
            yield span if held == span[1:] else Span(span.tensor, *held)


def spread(count: int, threads: int) -> Iterator[int]:
    """The numbers below ``count``, ordered such that ``threads`` consecutive ones are far apart.

    Adjacent stripes often belong to the same file, where threads would wait for each other.
    """
    distance = -(-count // threads)
    return chain.from_iterable(range(first, count, distance) for first in range(distance))


def default_threads(processes: int = 1) -> int:
    """The number of threads of each of ``processes`` that copy or check stripes, unless it is given."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(min(_MAX_THREADS, (processors or 1) // processes), 1)


class Scratch:
    """Reusable buffers of one thread.

    Args:
        block_bytes: maximum bytes of a block.
        kept_bytes: maximum bytes of a part of a tensor that is kept for the next blocks.
        shared: the buffers for such parts that threads share; None for own ones.
        names: of the nested objects that lead to this one.
    """

    def __init__(
        self,
        block_bytes: int,
        kept_bytes: int = KEPT_BYTES,
        shared: "_SharedParts | None" = None,
        names: tuple[str, ...] = (),
    ) -> None:
        self.block_bytes, self.kept_bytes = block_bytes, kept_bytes
        self._shared, self._names = shared, names
        self._buffers: dict[str, Bytes] = {}
        self._keys: dict[str, object] = {}
        self._nested: dict[str, Scratch] = {}

    def nested(self, name: str) -> "Scratch":
        """Separate buffers for functions that are called while buffers of this object are in use."""
        if name not in self._nested:
            self._nested[name] = Scratch(self.block_bytes, self.kept_bytes, self._shared, (*self._names, name))
        return self._nested[name]

    def parts(self) -> "Scratch":
        """The buffers for parts of tensors."""
        return self if self._shared is None else reduce(Scratch.nested, self._names, self._shared.take())

    def give_back(self) -> None:
        """Return the shared buffers for parts of tensors, if this thread has some."""
        if self._shared is not None:
            self._shared.give_back()

    def keep(self, name: str, key: object, size: int, fill: Callable[[Bytes], None]) -> Bytes:
        """A buffer of ``size`` bytes, filled unless the buffer of this name was last filled for the same key."""
        buffer = self.take(name, size)
        if self._keys.get(name) != key:
            self._keys.pop(name, None)  # until it is filled
            fill(buffer)
            self._keys[name] = key
        return buffer

    def take(self, name: str, size: int) -> Bytes:
        """An uninitialized buffer of ``size`` bytes; invalidates the previous buffer of the same name."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = _new_buffer(size)
        return buffer[:size]


def _new_buffer(size: int) -> Bytes:
    """Zeros; more than a page of them are page-aligned.

    The allocator's large buffers begin 16 bytes behind a page. Some processors (Zen 3) copy at a third of their speed
    to an address that is 1 to 31 bytes behind the source's, modulo 4096, such as from the start of a file.
    """
    if size <= mmap.PAGESIZE:
        return memoryview(bytearray(size))
    try:
        return memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise MemoryError(f"a buffer of {size} bytes cannot be allocated") from error


class _SharedParts:
    """The buffers for parts of tensors of one thread, from those that all threads share.

    The thread takes them for its first part, and returns them after its stripe. It must not hold a lock that another
    thread may need before it returns its own.
    """

    def __init__(self, shared: "SimpleQueue[Scratch]") -> None:
        self._shared = shared
        self._taken: Scratch | None = None

    def take(self) -> Scratch:
        """The buffers; waits until another thread returns some."""
        if self._taken is None:
            self._taken = self._shared.get()
        return self._taken

    def give_back(self) -> None:
        """Return the buffers, if the thread has some."""
        if self._taken is not None:
            self._shared.put(self._taken)
            self._taken = None


class StripeState:
    """State of a reader or sink for one stripe.

    Attributes:
        number: of the stripe.
        hashes: a running checksum per rank.
        problem: the first problem; "" if there is none.
        damaged: the tensor whose replicas or padding are the problem; "" if there is none.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.hashes: dict[int, xxhash.xxh3_128] = {}
        self.problem = self.damaged = ""

    def update(self, rank: int, data: Bytes) -> None:
        """Update the checksum of a rank."""
        running = self.hashes.get(rank)
        if running is None:
            running = self.hashes[rank] = xxhash.xxh3_128()
        running.update(data)


class Side(Protocol):
    """A reader or a sink.

    Attributes:
        tensors: the shards of each tensor.
        is_remote: whether it reads from URLs.
    """

    tensors: Sequence[Shards]
    is_remote: bool

    def prefetch(self, stripe: Iterable[Span]) -> None:
        """Start to read a stripe. The calling thread copies stripes in the order in which it prefetched them."""

    def cancel(self) -> None:
        """Cancel pending requests: the copy failed or was interrupted."""

    def finish(self, state: StripeState, stripe: Stripe, /) -> None:
        """Finish a stripe; raises IntegrityError if it has a problem."""


class Reader(Side, Protocol):
    """Reads blocks of full tensors."""

    def gather(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch, /) -> Bytes:
        """Read the bytes of a span.

        Returns:
            The block, filled with the bytes, or a view of memory that holds them, which must not be written to. The
            memory is free for other reads when the view is deleted, and at the next read of this thread.
        """


def fill(reader: Reader, state: StripeState, span: Span, block: Bytes, scratch: Scratch) -> None:
    """Fill a block with the bytes of a span."""
    data = reader.gather(state, span, block, scratch)
    if data is not block:
        block[:] = data


class Sink(Side, Protocol):
    """Writes or compares blocks of full tensors."""

    def put(self, state: StripeState, spans: Sequence[Span], block: Bytes, scratch: Scratch) -> None:
        """Write or compare a block: the bytes of spans, one after the other."""


class CopyJob:
    """A copy of stripes from a reader to sinks.

    Args:
        stripes: the stripes to copy.
        reader: reads the blocks.
        sinks: write or compare the blocks.
        on_problem: called for each IntegrityError, so that the copy continues; None to stop at the first.
        resume: returns the bytes of a stripe if it is already written, or else 0; None to copy all stripes.
        in_order: whether to begin stripes in their order.
    """

    def __init__(
        self,
        stripes: Sequence[Stripe],
        reader: Reader,
        sinks: Sequence[Sink] = (),
        on_problem: Callable[[IntegrityError], None] | None = None,
        *,
        resume: Callable[[int, Stripe, Scratch], int] | None = None,
        in_order: bool = False,
    ) -> None:
        self._stripes, self._reader, self._sinks = stripes, reader, sinks
        self._sides: list[Side] = [reader, *sinks]
        self._on_problem, self._resume, self._in_order = on_problem, resume, in_order
        self._numbers: Iterator[int] = iter(())
        self._done = 0
        self._is_stopping = False
        self._lock = threading.Lock()

    def run(self, *, threads: int | None = None, progress: Progress | None = None) -> None:
        """Copy all stripes with several threads; none of them keeps running after an error or Ctrl-C.

        Raises:
            IntegrityError: if the data has a problem and ``on_problem`` is None.
            OSError: if a file cannot be written.
        """
        from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait  # noqa: PLC0415 - slow; plans copy nothing
        from queue import SimpleQueue  # noqa: PLC0415

        threads = threads or default_threads()
        count, total = len(self._stripes), sum(span.stop - span.start for stripe in self._stripes for span in stripe)
        workers = min(threads, count, _MAX_WORKERS)
        is_remote = any(side.is_remote for side in self._sides)
        max_bytes = _REMOTE_BLOCKS_BYTES if is_remote else _MAX_BLOCKS_BYTES
        block_bytes = max(max_bytes // max(workers, 1) // mmap.PAGESIZE * mmap.PAGESIZE, _MIN_BLOCK_BYTES)
        num_kept = min(workers, _NUM_REMOTE_KEPT if is_remote else _NUM_KEPT)
        kept_bytes = REMOTE_KEPT_BYTES if is_remote else KEPT_BYTES // max(num_kept, 1)
        parts = SimpleQueue[Scratch]()
        for _ in range(num_kept):
            parts.put(Scratch(block_bytes, kept_bytes))
        self._numbers = iter(range(count)) if self._in_order else spread(count, threads)
        with ThreadPoolExecutor(threads, thread_name_prefix="shardconv") as pool:
            try:
                scratches = [Scratch(block_bytes, kept_bytes, _SharedParts(parts)) for _ in range(workers)]
                pending = {pool.submit(self._work, scratch) for scratch in scratches}
                while pending:
                    finished, pending = wait(pending, timeout=_REPORT_SECONDS, return_when=FIRST_COMPLETED)
                    for future in finished:
                        future.result()
                    if progress is not None:
                        progress(self._done, total)
            except BaseException:
                self._is_stopping = True
                for side in self._sides:
                    side.cancel()
                raise

    def _work(self, scratch: Scratch) -> None:
        number = self._next()
        while number is not None:
            following = self._next()
            try:
                self.copy_stripe(number, scratch)
            except IntegrityError as error:
                if self._on_problem is None:
                    raise
                with self._lock:
                    self._on_problem(error)
            finally:
                scratch.give_back()
            number = following

    def _next(self) -> int | None:
        """The number of the next stripe, which is read ahead."""
        with self._lock:
            number = None if self._is_stopping else next(self._numbers, None)
        if number is not None and self._resume is None:
            self._prefetch(number)
        return number

    def _prefetch(self, number: int) -> None:
        """Start to read a stripe. The calling thread copies stripes in the order in which it prefetched them."""
        for side in self._sides:
            side.prefetch(self._stripes[number])

    def copy_stripe(self, number: int, scratch: Scratch) -> None:
        """Copy one stripe with the buffers of the calling thread, unless it is already written."""
        stripe = self._stripes[number]
        if self._resume is not None:
            if written := self._resume(number, stripe, scratch):
                self._advance(written)
                return
            self._prefetch(number)  # which stripes are copied was not known before
        state = StripeState(number)
        sinks = [(sink, StripeState(number)) for sink in self._sinks]
        for spans in self._blocks(stripe, scratch.block_bytes):
            self._advance(self._copy_block(spans, state, sinks, scratch))
        self._finish(stripe, [(self._reader, state), *sinks])

    def _copy_block(
        self, spans: Sequence[Span], state: StripeState, sinks: Sequence[tuple[Sink, StripeState]], scratch: Scratch
    ) -> int:
        """Copy spans in one block; returns their bytes."""
        num_bytes = sum(span.stop - span.start for span in spans)
        block = scratch.take("block", num_bytes)
        if len(spans) == 1:
            block = self._reader.gather(state, spans[0], block, scratch)
        else:
            for span, data in parts_of(spans, block):
                fill(self._reader, state, span, data, scratch)
        for sink, sink_state in sinks:
            sink.put(sink_state, spans, block, scratch)
        return num_bytes

    def _advance(self, num_bytes: int) -> None:
        if self._is_stopping:
            raise InterruptedError("another thread failed, or the user interrupted the copy")
        with self._lock:
            self._done += num_bytes

    def _finish(self, stripe: Stripe, sides: Sequence[tuple[Side, StripeState]]) -> None:
        """Finish the stripe on the reader, then on the sinks, and report their problems together.

        A copy that stops at the first problem does not finish sinks after one of the reader: they would record that the
        stripe is written.
        """
        problems = []
        for side, state in sides:
            try:
                side.finish(state, stripe)
            except IntegrityError as error:
                if self._on_problem is None:
                    raise
                problems.append(error.message)
        if problems:
            raise IntegrityError("\n".join(problems))

    def _blocks(self, stripe: Stripe, max_bytes: int) -> Iterator[Sequence[Span]]:
        """Split a stripe into blocks; if rows are short, into blocks of full rows. Small tensors share a block."""
        spans: list[Span] = []
        room = 0
        for stripe_span in stripe:
            geometries = [side.tensors[stripe_span.tensor].geometry for side in self._sides]
            shards = max(len(geometry.shards) for geometry in geometries)
            size = min(max(BLOCK_BYTES, shards * BLOCK_BYTES_PER_SHARD), max_bytes)
            width = max((geometry.width for geometry in geometries if geometry.width <= size), default=1)
            for span in split_span(stripe_span, size, width):
                if span.stop - span.start > room or len(spans) == _MAX_SPANS:
                    if spans:
                        yield spans
                    spans, room = [], size
                spans.append(span)
                room -= span.stop - span.start
        if spans:
            yield spans
