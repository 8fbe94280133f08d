"""The checksum of a sample of a source's values, by which ranks and hosts notice that they read different sources.

Checkpoints of one model before and after a training have equal headers, and reading all values would take as long as
loading them. So some tensors of every kind are sampled: those whose names differ in numbers only are of one kind.
"""

from collections.abc import Iterator, Sequence

import xxhash

from shardconv.checkpoint.copy import Scratch, Span, StripeState
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.source_reader import open_tensors
from shardconv.errors import SourceError
from shardconv.plan.matcher import pattern_for

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
    running, state, scratch = xxhash.xxh3_128(), StripeState(0), Scratch(_NUM_BYTES)
    with files:
        spans = tuple(_spans(source, [shards.geometry.num_bytes for shards in reader.tensors]))
        reader.prefetch(spans)
        for span in spans:
            block = scratch.take("sample", span.stop - span.start)
            reader.gather(state, span, block, scratch)
            running.update(block)
    if state.problem:
        raise SourceError(state.problem)
    return running.hexdigest()


def _spans(source: Source, sizes: Sequence[int]) -> Iterator[Span]:
    """Yield the middle of some tensors of each kind; ``sizes`` has the bytes of all tensors."""
    kinds: dict[str, list[int]] = {}
    for number, name in enumerate(source.specs):
        if sizes[number]:
            kinds.setdefault(pattern_for(name), []).append(number)
    for numbers in kinds.values():
        for number in numbers[:: -(-len(numbers) // _NUM_TENSORS)]:
            start = max(sizes[number] - _NUM_BYTES, 0) // 2 // _ALIGNMENT * _ALIGNMENT
            yield Span(number, start, min(start + _NUM_BYTES, sizes[number]))
