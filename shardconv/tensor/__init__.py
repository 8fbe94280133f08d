"""Sharded tensors over torch's DTensor: specs, redistribution, hooks, and what communication costs."""

from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardconv.tensor.comm import CommSpec, Cost
from shardconv.tensor.link import LinkReport, Timing, fit_link, measure_link
from shardconv.tensor.parameters import named_sharded_parameters, shard_parameter
from shardconv.tensor.redistribution import plan_redistribution, redistribution_cost
from shardconv.tensor.sharded import from_global, from_local, redistribute, to_mesh
from shardconv.tensor.spec import check_placements, dims_of, merge_dims, normalize_dims, placements_of

__all__ = [
    "CommSpec",
    "Cost",
    "LinkReport",
    "Partial",
    "Replicate",
    "Shard",
    "Timing",
    "check_placements",
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
]
