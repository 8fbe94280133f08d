"""The checksum of a sample of a source's values, by which ranks notice that they read different sources.

Checkpoints of one model before and after a training have equal headers, and reading all values would take as long as
loading them. So some tensors of every kind are sampled: those whose names differ in numbers only are of one kind.
"""

from collections.abc import Iterable
from itertools import chain

import xxhash

from shardconv.checkpoint.copy import Reader, Scratch, Span, StripeState
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.source_reader import open_tensors
from shardconv.errors import SourceError
from shardconv.plan.matcher import pattern_for

#: Maximum tensors of a kind, and bytes of each.
_NUM_TENSORS, _NUM_BYTES = 32, 512


def sample_checksum(source: Source) -> str:
    """Compute the checksum of the values in the middle of some tensors.

    Raises:
        SourceError: if a file of the source does not match its header, or cannot be read.
    """
    kinds: dict[str, list[int]] = {}
    for number, name in enumerate(source.specs):
        kinds.setdefault(pattern_for(name), []).append(number)
    reader, files = open_tensors(source, source.specs, None)
    state = StripeState(0)
    with files:
        found = [numbers[:: -(-len(numbers) // _NUM_TENSORS)] for numbers in kinds.values()]
        checksum = checksum_of_tensors(reader, chain.from_iterable(found), state)
    if state.problem:
        raise SourceError(state.problem)
    return checksum


def checksum_of_tensors(reader: Reader, numbers: Iterable[int], state: StripeState) -> str:
    """Compute the checksum of the values in the middle of these tensors of a reader."""
    running, scratch = xxhash.xxh3_128(), Scratch(_NUM_BYTES)
    spans = [_middle(number, reader.tensors[number].geometry.num_bytes) for number in numbers]
    reader.prefetch(tuple(spans))
    for span in spans:
        block = scratch.take("sample", span.stop - span.start)
        if len(block):
            reader.gather(state, span, block, scratch)
            running.update(block)
    return running.hexdigest()


def _middle(number: int, size: int) -> Span:
    """The bytes in the middle of tensor ``number``, which has ``size`` bytes."""
    start = max(size - _NUM_BYTES, 0) // 2
    return Span(number, start, start + min(size, _NUM_BYTES))
