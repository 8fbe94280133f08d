"""The checksum of a sample of a source's values, by which ranks notice that they read different sources.

Checkpoints of one model before and after a training have equal headers, and reading all values would take as long as
loading them. So some tensors of every kind are sampled: those whose names differ in numbers only are of one kind.
"""

import xxhash

from shardconv.checkpoint.copy import Scratch, Span, StripeState
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
    running, state, scratch = xxhash.xxh3_128(), StripeState(0), Scratch(_NUM_BYTES)
    with files:
        for numbers in kinds.values():
            for number in numbers[:: -(-len(numbers) // _NUM_TENSORS)]:
                size = reader.tensors[number].geometry.num_bytes
                start = max(size - _NUM_BYTES, 0) // 2
                block = scratch.take("sample", min(size, _NUM_BYTES))
                if len(block):
                    reader.gather(state, Span(number, start, start + len(block)), block, scratch)
                    running.update(block)
    if state.problem:
        raise SourceError(state.problem)
    return running.hexdigest()
