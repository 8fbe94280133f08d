"""Process groups on top of torch's DeviceMesh, and differentiable operations between their ranks."""

from shardconv.distributed.groups import (
    Axis,
    GroupLike,
    ParallelGroups,
    as_axis,
    current_groups,
    destroy_parallel,
    init_parallel,
)
from shardconv.distributed.operations import copy_to_tp, gather_from_tp, reduce_from_tp, scatter_to_tp

__all__ = [
    "Axis",
    "GroupLike",
    "ParallelGroups",
    "as_axis",
    "copy_to_tp",
    "current_groups",
    "destroy_parallel",
    "gather_from_tp",
    "init_parallel",
    "reduce_from_tp",
    "scatter_to_tp",
]
