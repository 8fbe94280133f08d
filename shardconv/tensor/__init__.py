"""Sharded tensors on top of torch's DTensor: layouts, redistribution, hooks and communication cost."""

from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardconv.tensor.comm import CommSpec, Cost
from shardconv.tensor.cost import Link, LinkReport, Timing, collective_time, fit_link, measure_link
from shardconv.tensor.hooks import ParamHook, use_param_hooks
from shardconv.tensor.interop import as_dtensor
from shardconv.tensor.sharded import (
    from_global,
    from_local,
    named_sharded_parameters,
    plan_redistribution,
    redistribute,
    redistribution_cost,
    shard_parameter,
    to_mesh,
)
from shardconv.tensor.spec import check_placements, dims_of, merge_dims, normalize_dims, placements_of

__all__ = [
    "CommSpec",
    "Cost",
    "Link",
    "LinkReport",
    "ParamHook",
    "Partial",
    "Replicate",
    "Shard",
    "Timing",
    "as_dtensor",
    "check_placements",
    "collective_time",
    "dims_of",
    "fit_link",
    "from_global",
    "from_local",
    "measure_link",
    "merge_dims",
    "named_sharded_parameters",
    "normalize_dims",
    "placements_of",
    "plan_redistribution",
    "redistribute",
    "redistribution_cost",
    "shard_parameter",
    "to_mesh",
    "use_param_hooks",
]
