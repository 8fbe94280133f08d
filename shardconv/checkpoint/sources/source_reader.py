"""Open the tensors of a source, wherever its files store them, and compute those that are stored in another form.

A plain source stores each tensor where the header of its file says. Other sources (PyTorch files, rank files of other
tools) say where with :class:`StoredFiles`, and have a :class:`Transform` for each tensor whose bytes are computed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import xxhash

from shardconv.checkpoint.engine import arrays
from shardconv.checkpoint.engine.copy import Reader, Scratch, Shards, Span, Stripe, StripeState
from shardconv.checkpoint.engine.geometry import Geometry, Run, ShardRows
from shardconv.checkpoint.engine.layout import edits_of, lay_out_source
from shardconv.checkpoint.engine.shards import ShardReader
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.fileio import Bytes
from shardconv.files.folder import AnyPath
from shardconv.files.input_files import FileState, InputFiles
from shardconv.plan.families.matcher import pattern_for
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.support.errors import IntegrityError, SourceError

if TYPE_CHECKING:
    from shardconv.checkpoint.sources.source import Source

#: The remedy for rank files of another tool with different replicas.
_CONVERT_AGAIN = "copy the folder again, or convert the model again from its source"
#: Fills a buffer with the bytes of a stored tensor from an offset on.
ReadStored = Callable[[str, int, Bytes], None]


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """Files that store the tensors of a source at other positions than headers of safetensors files say.

    Attributes:
        paths: of the files.
        prefixes: for each file its expected first bytes, which may be empty.
        sizes: for each file its size in bytes.
        tensors: name to dtype and shape of each stored tensor.
        shards: name to the positions of its shards in the files.
        states: for each file its state when the positions were read; empty if prefixes have them.
    """

    paths: tuple[AnyPath, ...]
    prefixes: tuple[bytes, ...]
    sizes: tuple[int, ...]
    tensors: Mapping[str, TensorSpec]
    shards: Mapping[str, Shards]
    states: tuple[FileState | None, ...] = ()

    @classmethod
    def listed(
        cls,
        paths: Sequence[AnyPath],
        states: tuple[FileState, ...],
        tensors: Mapping[str, TensorSpec],
        shards: Mapping[str, Shards],
    ) -> "StoredFiles":
        """Files without a prefix that has the positions, which were read when the files had these states."""
        sizes = tuple(state.size for state in states)
        return cls(tuple(paths), (b"",) * len(sizes), sizes, tensors, shards, states)


class Transform(Protocol):
    """Computes the bytes of a tensor of a source from those of stored tensors.

    Attributes:
        unit: ranges of bytes are read once if they begin and end at multiples of this.
    """

    @property
    def unit(self) -> int:
        """See the class."""

    def fill(self, block: Bytes, start: int, read: ReadStored, scratch: Scratch) -> None:
        """Fill a block with the bytes of the tensor from ``start`` on."""


@dataclass(frozen=True, slots=True)
class ComposedTransform:
    """A transform of tensors that are computed themselves.

    Attributes:
        outer: computes the tensor.
        inner: name to transform of the tensors that ``outer`` reads and that are not stored in the form that it reads.
        unit: see :class:`Transform`.
    """

    outer: Transform
    inner: Mapping[str, Transform]
    unit: int

    def fill(self, block: Bytes, start: int, read: ReadStored, scratch: Scratch) -> None:
        """Fill a block with the bytes of the tensor from ``start`` on."""

        def read_computed(name: str, at: int, buffer: Bytes) -> None:
            if (transform := self.inner.get(name)) is None:
                read(name, at, buffer)
            else:
                transform.fill(buffer, at, read, scratch.nested("inner"))

        self.outer.fill(block, start, read_computed, scratch)


def stored_files(source: "Source") -> StoredFiles:
    """Where the headers of the files of a plain source say that its tensors are."""
    headers = [file.header for file in source.files]
    layout = lay_out_source(headers, source.specs)
    shards = dict(zip(source.specs, layout.shards, strict=True))
    return StoredFiles(source.paths, tuple(layout.prefixes), tuple(layout.file_bytes), source.specs, shards)


def open_tensors(
    source: "Source", tensors: Mapping[str, TensorSpec], plan: Plan | None, *, for_report: bool = False
) -> tuple[Reader, InputFiles]:
    """Open the files of a source.

    Args:
        source: the source.
        tensors: name to dtype and shape of its tensors, in the order of the reader.
        plan: their placements, to compare values that follow from grids; None if they are known to be right.
        for_report: whether messages about replicas are for a report, which has a remedy for all.

    Returns:
        The reader of the tensors, and its files, which the caller closes.

    Raises:
        SourceError: if a file does not match its header.
    """
    if source.stored is None:
        layout = lay_out_source([file.header for file in source.files], tensors, plan)
        inputs = InputFiles(source.paths, layout.prefixes, layout.file_bytes)
        stored_names, shards = list(tensors), layout.shards
    else:
        stored = source.stored
        inputs = InputFiles(stored.paths, stored.prefixes, stored.sizes, stored.states)
        stored_names, shards = list(stored.shards), tuple(stored.shards.values())
        if plan is not None:
            shards = tuple(
                one._replace(edits=edits_of(name, tensors[name], plan))
                if name in tensors and name not in source.transforms
                else one
                for name, one in stored.shards.items()
            )
    remedy = "" if for_report else f": {_CONVERT_AGAIN}"
    reader = ShardReader(shards, inputs, labels=[path.name for path in source.paths], names=stored_names, remedy=remedy)
    if source.stored is None and not source.transforms:
        return reader, inputs
    return TransformedReader(reader, stored_names, tensors, source.transforms, plan), inputs


class TransformedReader:
    """A reader of tensors that are stored in another order, or computed from stored tensors.

    Args:
        stored: the reader of the stored tensors.
        stored_names: their names, in its order.
        tensors: name to dtype and shape of the tensors to read, in order.
        transforms: name to transform; all other tensors are stored under their names.
        plan: their placements, to compare values that follow from grids; None if they are known to be right.
    """

    def __init__(
        self,
        stored: Reader,
        stored_names: Sequence[str],
        tensors: Mapping[str, TensorSpec],
        transforms: Mapping[str, Transform],
        plan: Plan | None,
    ) -> None:
        self._stored = stored
        self._numbers = {name: number for number, name in enumerate(stored_names)}
        self._names = list(tensors)
        self._transforms = transforms
        self.tensors: Sequence[Shards] = [self._shards(name, spec, plan) for name, spec in tensors.items()]

    def _shards(self, name: str, spec: TensorSpec, plan: Plan | None) -> Shards:
        transform = self._transforms.get(name)
        if transform is None:
            return self._stored.tensors[self._numbers[name]]
        size = num_bytes(spec.dtype, spec.shape)
        edits = None if plan is None else edits_of(name, spec, plan)
        return Shards(_in_units(size, transform.unit), (), (), edits)

    def gather(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch, /) -> None:
        """Fill a block with the bytes of a span."""
        name = self._names[span.tensor]
        read = partial(self._read, state, scratch)
        if (transform := self._transforms.get(name)) is None:
            read(name, span.start, block)
        else:
            transform.fill(block, span.start, read, scratch)
            if (edits := self.tensors[span.tensor].edits) is not None:
                state.problem = state.problem or arrays.edits.difference(block, edits, span.start)

    def _read(self, state: StripeState, scratch: Scratch, name: str, start: int, buffer: Bytes) -> None:
        span = Span(self._numbers[name], start, start + len(buffer))
        self._stored.gather(state, span, buffer, scratch.nested("stored"))

    def prefetch(self, stripe: Stripe) -> None:
        """Ask the operating system to read ahead what a stripe stores unchanged."""
        spans = (span for span in stripe if self._names[span.tensor] not in self._transforms)
        self._stored.prefetch(tuple(span._replace(tensor=self._numbers[self._names[span.tensor]]) for span in spans))

    def cancel(self) -> None:
        """Cancel what threads are waiting for."""
        self._stored.cancel()

    def finish(self, state: StripeState, _stripe: Stripe, /) -> None:
        """Check the stripe.

        Raises:
            IntegrityError: if replicas differ, padding is not zero, or values differ from their grid.
        """
        if state.problem:
            raise IntegrityError(state.problem)


def _in_units(size: int, unit: int) -> Geometry:
    """The geometry of a full tensor of ``size`` bytes with rows of ``unit`` bytes."""
    if unit == 0 or size % unit:
        unit = size
    rows = ShardRows.of_runs(unit, unit, [Run(0, 0, unit, is_replica=False)] if unit else [])
    return Geometry(size, unit, (rows,))


# --- a sample of the values -----------------------------------------------------------------------------------------
#
# By its checksum, ranks and hosts notice that they read different sources. Checkpoints of one model before and after a
# training have equal headers, and reading all values would take as long as loading them. So some tensors of every kind
# are sampled: those whose names differ in numbers only are of one kind.

#: Maximum tensors of a kind, and bytes of each.
_NUM_TENSORS, _NUM_BYTES = 32, 512
#: The sample of a tensor begins at a multiple of this, and thereby at an element.
_ALIGNMENT = 16


def sample_checksum(source: "Source") -> str:
    """Compute the checksum of the values in the middle of some tensors.

    Raises:
        SourceError: if a file of the source does not match its header, or cannot be read.
    """
    reader, files = open_tensors(source, source.specs, None)
    state = StripeState(0)
    with files:
        checksum = checksum_of_tensors(reader, _sampled(source), state)
    if state.problem:
        raise SourceError(state.problem)
    return checksum


def checksum_of_tensors(reader: Reader, numbers: Iterable[int], state: StripeState) -> str:
    """Compute the checksum of the values in the middle of these tensors of a reader."""
    running, scratch = xxhash.xxh3_128(), Scratch(_NUM_BYTES)
    spans = tuple(span for number in numbers for span in _middle(number, reader.tensors[number].geometry.num_bytes))
    reader.prefetch(spans)
    for span in spans:
        block = scratch.take("sample", span.stop - span.start)
        reader.gather(state, span, block, scratch)
        running.update(block)
    return running.hexdigest()


def _middle(number: int, size: int) -> Iterator[Span]:
    """Yield the sampled range of a tensor of ``size`` bytes, unless it is empty."""
    start = max(size - _NUM_BYTES, 0) // 2 // _ALIGNMENT * _ALIGNMENT
    if size:
        yield Span(number, start, min(start + _NUM_BYTES, size))


def _sampled(source: "Source") -> Iterator[int]:
    """Yield the numbers of some tensors of each kind."""
    kinds: dict[str, list[int]] = {}
    for number, name in enumerate(source.specs):
        kinds.setdefault(pattern_for(name), []).append(number)
    for numbers in kinds.values():
        yield from numbers[:: -(-len(numbers) // _NUM_TENSORS)]
