"""The ranges of full tensors that the shards of some ranks are made of: only these are read."""

from collections.abc import Iterator, Sequence

from shardconv.checkpoint.engine.copy import Shards, Span, Stripe


def held_stripes(stripes: Sequence[Stripe], tensors: Sequence[Shards]) -> list[Stripe]:
    """The stripes without the ranges of which no shard holds a byte; the same stripes if there are shards of all ranks.

    Args:
        stripes: of the full tensors.
        tensors: the shards of each tensor.
    """
    return [tuple(_held(stripe, tensors)) for stripe in stripes]


def _held(stripe: Stripe, tensors: Sequence[Shards]) -> Iterator[Span]:
    for span in stripe:
        for start, stop in tensors[span.tensor].geometry.held(span.start, span.stop):
            yield Span(span.tensor, start, stop)
