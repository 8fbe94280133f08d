"""The checksum of a sample of a source's values, by which ranks and hosts notice that they read different sources.

Checkpoints of one model before and after a training have equal headers, and reading all values would take as long as
loading them. So some tensors of every kind are sampled: those whose names differ in numbers only are of one kind.
"""

from collections.abc import Iterable, Iterator

import xxhash

from shardconv.checkpoint.engine.copy import Reader, Scratch, Span, StripeState
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.source_reader import open_tensors
from shardconv.plan.matcher import pattern_for
from shardconv.support.errors import SourceError

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


def _sampled(source: Source) -> Iterator[int]:
    """Yield the numbers of some tensors of each kind."""
    kinds: dict[str, list[int]] = {}
    for number, name in enumerate(source.specs):
        kinds.setdefault(pattern_for(name), []).append(number)
    for numbers in kinds.values():
        yield from numbers[:: -(-len(numbers) // _NUM_TENSORS)]
