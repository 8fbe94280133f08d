"""Read the tensors of a source, wherever its files store them: in full, or a sample of their values."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain

import xxhash

from shardconv.checkpoint import engine
from shardconv.checkpoint.engine.copy import Edits, Reader, Scratch, Shards, Span, Stripe, StripeState, fill
from shardconv.checkpoint.engine.geometry import Geometry, Run, ShardRows
from shardconv.checkpoint.engine.layout import edits_of
from shardconv.checkpoint.engine.shards import ShardReader
from shardconv.checkpoint.sources.source import Source, StoredTensors
from shardconv.files.containers.safetensors import num_bytes
from shardconv.files.fileio import Bytes
from shardconv.files.input_files import InputFiles
from shardconv.plan.families.matcher import pattern_for
from shardconv.plan.plan import Plan, TensorSpec
from shardconv.support.errors import IntegrityError, SourceError

#: The remedy for rank files of another tool with different replicas.
_CONVERT_AGAIN = "copy the folder again, or convert the model again from its source"
#: Bytes of the buffers for tensors that are computed.
_BLOCK_BYTES = 4 << 20


def open_tensors(
    source: Source, tensors: Mapping[str, TensorSpec], plan: Plan | None, *, for_report: bool = False
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
    found = () if plan is None else ((name, edits_of(name, spec, plan)) for name, spec in tensors.items())
    edits = {name: edit for name, edit in found if edit is not None}
    return _open(source.stored, tensors, edits, for_report=for_report)


def read_values(stored: StoredTensors, tensors: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Bytes]]:
    """Yield name and bytes of tensors, each in memory of its own.

    Args:
        stored: has their positions.
        tensors: name to dtype and shape of the tensors.

    Raises:
        SourceError: if a file does not match its header, was changed since its tensors were listed, or cannot be read.
    """
    if not tensors:
        return
    reader, inputs = _open(stored, tensors, {})
    state, scratch = StripeState(0), Scratch(_BLOCK_BYTES)
    with inputs:
        for number, name in enumerate(tensors):
            data = memoryview(bytearray(reader.tensors[number].geometry.num_bytes))
            if data:
                fill(reader, state, Span(number, 0, len(data)), data, scratch)
            if state.problem:
                raise SourceError(state.problem)
            yield name, data
        inputs.check_unchanged()


def _open(
    stored: StoredTensors,
    tensors: Mapping[str, TensorSpec],
    edits: Mapping[str, Edits],
    *,
    for_report: bool = False,
) -> tuple[Reader, InputFiles]:
    """Open the files, with a reader of these tensors, whose values are compared with the edits."""
    shards = {name: stored.shards[name] for name in (stored.shards if stored.layers else tensors)}
    for name, edit in edits.items():
        if stored.transform_of(name) is None:
            shards[name] = shards[name]._replace(edits=edit)
    inputs = stored.open()
    reader = ShardReader(
        tuple(shards.values()),
        inputs,
        labels=[file.path.name for file in stored.files],
        names=list(shards),
        remedy="" if for_report else f": {_CONVERT_AGAIN}",
    )
    return _TransformedReader(reader, list(shards), stored, tensors, edits) if stored.layers else reader, inputs


class _TransformedReader:
    """A reader of tensors of which some are computed.

    Args:
        reader: of the stored tensors.
        names: their names, in its order.
        stored: has the transforms.
        tensors: name to dtype and shape of the tensors to read, in order.
        edits: name to edits of tensors whose values are compared with their grid.
    """

    def __init__(
        self,
        reader: Reader,
        names: Sequence[str],
        stored: StoredTensors,
        tensors: Mapping[str, TensorSpec],
        edits: Mapping[str, Edits],
    ) -> None:
        self._reader, self._layers, self.is_remote = reader, stored.layers, reader.is_remote
        self._numbers = {name: number for number, name in enumerate(names)}
        self._names = list(tensors)
        self.tensors: Sequence[Shards] = [
            _computed(num_bytes(*spec[:2]), transform.unit, edits.get(name))
            if (transform := stored.transform_of(name)) is not None
            else reader.tensors[self._numbers[name]]
            for name, spec in tensors.items()
        ]

    def gather(self, state: StripeState, span: Span, block: Bytes, scratch: Scratch, /) -> Bytes:
        """Read the bytes of a span.

        Returns:
            As :meth:`Reader.gather`.
        """
        name = self._names[span.tensor]
        if not self._layer(len(self._layers), name):
            return self._reader.gather(state, span._replace(tensor=self._numbers[name]), block, scratch)
        self._fill(len(self._layers), state, scratch, name, span.start, block)
        edits = self.tensors[span.tensor].edits
        if edits is not None:
            state.problem = state.problem or engine.arrays.unexpected(block, edits, span.start)
        return block

    def _fill(self, count: int, state: StripeState, scratch: Scratch, name: str, start: int, block: Bytes) -> None:
        """Fill a block with the bytes of a tensor from ``start`` on, by the first ``count`` layers."""
        count = self._layer(count, name)
        inner = scratch.nested(f"layer {count}")
        if count:
            read = partial(self._fill, count - 1, state, inner)
            self._layers[count - 1][name].fill(block, start, read, scratch)
        else:
            stored = Span(self._numbers[name], start, start + len(block))
            fill(self._reader, state, stored, block, inner)

    def _layer(self, count: int, name: str) -> int:
        """The number of the last one of the first ``count`` layers that computes a tensor; 0 for a stored tensor."""
        return next((number for number in range(count, 0, -1) if name in self._layers[number - 1]), 0)

    def prefetch(self, stripe: Iterable[Span]) -> None:
        """Prefetch the stored ranges of which a stripe consists, or is computed."""
        count = len(self._layers)
        ranges = (self._stored(count, self._names[span.tensor], span.start, span.stop) for span in stripe)
        self._reader.prefetch(chain.from_iterable(ranges))

    def _stored(self, count: int, name: str, start: int, stop: int) -> Iterator[Span]:
        """Yield the stored ranges that the first ``count`` layers read for a range of a tensor."""
        if not (count := self._layer(count, name)):
            yield Span(self._numbers[name], start, stop)
            return
        for inner in self._layers[count - 1][name].reads(start, stop):
            yield from self._stored(count - 1, *inner)

    def cancel(self) -> None:
        """Cancel pending requests."""
        self._reader.cancel()

    def finish(self, state: StripeState, _stripe: Stripe, /) -> None:
        """Check the stripe.

        Raises:
            IntegrityError: if replicas differ, padding is not zero, or values differ from their grid.
        """
        if state.problem:
            raise IntegrityError(state.problem)


def _computed(size: int, unit: int, edits: Edits | None) -> Shards:
    """The shards of a computed tensor of ``size`` bytes with rows of ``unit`` bytes."""
    return _in_units(size, unit) if edits is None else _in_units(size, unit)._replace(edits=edits)


@lru_cache
def _in_units(size: int, unit: int) -> Shards:
    """The shards of a computed tensor without edits. Equal ones are one object, as models have many such tensors."""
    if unit == 0 or size % unit:
        unit = size
    rows = ShardRows.of_runs(unit, unit, [Run(0, 0, unit, is_replica=False)] if unit else [])
    return Shards(Geometry(size, unit, (rows,)), (), ())


# --- a sample of the values -----------------------------------------------------------------------------------------
#
# By its checksum, ranks and hosts notice that they read different sources. Checkpoints of one model before and after a
# training have equal headers, and reading all values would take as long as loading them. So some tensors of every kind
# are sampled. Tensors whose names differ in numbers only are of one kind; those that an adapter is merged into are of
# another one.

#: Maximum tensors of a kind, and bytes of each.
_NUM_TENSORS, _NUM_BYTES = 32, 512
#: The sample of a tensor begins at a multiple of this, and thereby at an element.
_ALIGNMENT = 16


def sample_checksum(source: Source) -> str:
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


def checksum_of_tensors(reader: Reader, numbers: Iterable[int], state: StripeState, count: int = 1) -> str:
    """Compute the checksum of the values in the middle of each of ``count`` parts of these tensors of a reader."""
    running, scratch = xxhash.xxh3_128(), Scratch(_NUM_BYTES)
    spans = tuple(
        span for number in numbers for span in _middles(number, reader.tensors[number].geometry.num_bytes, count)
    )
    reader.prefetch(spans)
    for span in spans:
        running.update(reader.gather(state, span, scratch.take("sample", span.stop - span.start), scratch))
    return running.hexdigest()


def _middles(number: int, size: int, count: int) -> Iterator[Span]:
    """Yield the sampled ranges of a tensor of ``size`` bytes, unless it is empty."""
    room = max(size - _NUM_BYTES, 0)
    for start in dict.fromkeys(room * (2 * at + 1) // (2 * count) // _ALIGNMENT * _ALIGNMENT for at in range(count)):
        if size:
            yield Span(number, start, min(start + _NUM_BYTES, size))


def _sampled(source: Source) -> Iterator[int]:
    """Yield the numbers of some tensors of each kind."""
    kinds: dict[tuple[str, type], list[int]] = {}
    for number, name in enumerate(source.specs):
        kinds.setdefault((pattern_for(name), type(source.stored.transform_of(name))), []).append(number)
    for numbers in kinds.values():
        yield from numbers[:: -(-len(numbers) // _NUM_TENSORS)]
