"""Compare numbers over all ranks with one all-reduce."""

import torch
import torch.distributed as dist
import xxhash

from shardconv.distributed.groups import Axis
from shardconv.distributed.operations import reduce_from_tp


def is_alike(digests: list[int], axis: Axis) -> list[bool]:
    """Return for each number whether it is the same on all ranks. All ranks call it."""
    # numbers are equal if their maximum is their minimum
    values = torch.tensor([digests, [-digest for digest in digests]], device=axis.message_device)
    maxima = reduce_from_tp(values, op=dist.ReduceOp.MAX, group=axis)
    return [bool(same) for same in (maxima[0] == -maxima[1]).tolist()]


def digest(data: bytes | memoryview) -> int:
    """Return the hash of bytes as a positive int64, for :func:`is_alike`."""
    return xxhash.xxh3_64_intdigest(data) >> 1
