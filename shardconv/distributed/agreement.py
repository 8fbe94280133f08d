"""Compare numbers over all ranks with one all-reduce."""

import torch
import torch.distributed as dist
import xxhash

from shardconv.distributed.groups import Axis
from shardconv.distributed.operations import reduce_from_tp


def same_on_all_ranks(digests: list[int], axis: Axis) -> list[bool]:
    """For each number, whether it is the same on all ranks: its maximum equals its minimum. All ranks call it."""
    values = torch.tensor([digests, [-digest for digest in digests]], device=axis.message_device)
    maxima = reduce_from_tp(values, op=dist.ReduceOp.MAX, group=axis)
    return [bool(same) for same in (maxima[0] == -maxima[1]).tolist()]


def digest(data: bytes | memoryview) -> int:
    """Return the hash of bytes as a positive int64, for :func:`same_on_all_ranks`."""
    return xxhash.xxh3_64_intdigest(data) >> 1
