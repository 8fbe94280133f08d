"""The shards of a placement, by numpy."""

import numpy as np

from shardconv.plan.placement import Padding, Placement


def shard_of(array: np.ndarray, placement: Placement, rank: int) -> np.ndarray:
    """The shard of a rank, with zeros in its padding."""
    if placement.dim is None:
        return array
    parts = [array.take(range(0), axis=placement.dim)]
    for entry in placement.ranks[rank]:
        if isinstance(entry, Padding):
            shape = list(array.shape)
            shape[placement.dim] = entry.size
            parts.append(np.zeros(shape, array.dtype))
        else:
            parts.append(array.take(range(entry.start, entry.stop), axis=placement.dim))
    return np.concatenate(parts, axis=placement.dim)
