"""Compare dequantized shards of quantized weights with shards of the dequantized weights.

Dequantizing the shard of a weight must give the shard of the dequantized weight. Weights with equal grids and
placements are one kind, of which one is compared. It has random values, and in a dim that is not sharded only a few
blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import lcm

import torch
from torch import Tensor

from shardconv.convert.model import DTYPE_NAMES
from shardconv.layers.sharding import take_shard
from shardconv.plan.grid import GROUP_INDEX, PLAIN, SCALE, SHAPE, VALUES, ZERO_POINT, Grid
from shardconv.plan.placement import Placement
from shardconv.plan.plan import Plan, TensorPlan, TensorSpec
from shardconv.runtime.rank_tensors import Stored, dequantize, is_readable

#: Blocks of a dim that is not sharded.
_BLOCKS = 2
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

#: The stored tensors of a weight, by name.
_Weight = dict[str, TensorSpec]


def grid_differences(tensors: Mapping[str, TensorSpec], weights: Plan, stored: Plan) -> Iterator[tuple[str, str]]:
    """Yield the name of a weight of each kind, and the difference of its shards; "" if there is none.

    Args:
        tensors: of the source, with grids.
        weights: the plan of the unquantized weights.
        stored: the plan of the stored tensors, for as many ranks.
    """
    layers: dict[str, _Weight] = {}
    for name, spec in tensors.items():
        if spec.grid is not None and spec.grid.axes:
            layers.setdefault(spec.grid.logical_name(name), {})[name] = spec
    kinds: dict[object, str] = {}
    for name, layer in layers.items():
        placed = [(stored.tensors[each].placement, stored.tensors[each].edits) for each in layer]
        kinds.setdefault((weights.placement(name), *layer.values(), *placed), name)
    for name in kinds.values():
        if not all(is_readable(spec.grid) for spec in layers[name].values() if spec.grid is not None):
            continue  # packed for the kernels of one GPU
        planned = {each: stored.tensors[each] for each in layers[name]}
        yield name, _difference(layers[name], weights.placement(name), planned)


def _difference(layer: _Weight, placement: Placement, planned: Mapping[str, TensorPlan]) -> str:
    grids = {name: spec.grid for name, spec in layer.items() if spec.grid is not None}
    shape = _reduced([*grids.values()], placement)
    generator = torch.Generator().manual_seed(0)
    groups = max((size for spec in layer.values() for size in _group_counts(spec)), default=1)
    full = {name: _random(spec, shape, groups, generator) for name, spec in layer.items()}
    expected = dequantize([Stored(full[name], grid) for name, grid in grids.items()], shape, torch.float32)
    for rank in range(placement.num_ranks):
        shards = {name: Stored(_shard(tensor, planned[name], rank), grids[name]) for name, tensor in full.items()}
        if problem := _shard_difference(shards, take_shard(expected, placement, rank)):
            return f"rank {rank} of {placement.num_ranks} has {problem}"
    return ""


def _shard_difference(shards: Mapping[str, Stored], expected: Tensor) -> str:
    """Compare the stored tensors of a rank with its shard of the dequantized weight; return the difference, or ""."""
    if not expected.numel():  # the rank does not have this weight
        has_values = any(one.tensor.numel() for one in shards.values() if one.grid.role == VALUES)
        return "values of a weight, but no shard of it in the plan" if has_values else ""
    for name, (tensor, grid) in shards.items():
        if grid.content != PLAIN and not torch.equal(tensor, _integers(grid, expected.shape).to(tensor.dtype)):
            return f"integers of another shard in {name}"
    found = dequantize([*shards.values()], expected.shape, torch.float32)
    return "" if torch.equal(found, expected) else "values of another shard"


def _reduced(grids: list[Grid], placement: Placement) -> tuple[int, ...]:
    """The shape of the weight, with a few blocks in each dim that is not sharded."""
    dims = [dim for grid in grids for dim in grid.dims]
    return tuple(
        size if at == placement.dim else min(size, _BLOCKS * lcm(*(dim.elements for dim in dims if dim.dim == at)))
        for at, size in enumerate(grids[0].shape)
    )


def _group_counts(spec: TensorSpec) -> Iterator[int]:
    """Yield the number of groups, for scales and zero points of groups that are not consecutive."""
    if spec.grid is not None and spec.grid.role in (SCALE, ZERO_POINT):
        yield from (size for size, dim in zip(spec.shape, spec.grid.dims, strict=True) if dim.dim is None)


def _random(spec: TensorSpec, shape: tuple[int, ...], groups: int, generator: torch.Generator) -> Tensor:
    """A stored tensor of a weight of this shape, with random values where its format does not determine them."""
    assert spec.grid is not None
    grid, dtype = spec.grid, _DTYPES[spec.dtype]
    if grid.content != PLAIN:
        return _integers(grid, shape).to(dtype)
    sizes = [
        size if dim.dim is None else -(-shape[dim.dim] // dim.elements) * dim.entries
        for size, dim in zip(spec.shape, grid.dims, strict=True)
    ]
    if grid.role == GROUP_INDEX:
        return torch.randint(groups, sizes, generator=generator).to(dtype)
    if dtype.is_floating_point:
        return (torch.rand(sizes, generator=generator) + 0.5).to(dtype)
    if grid.numbers == "e8m0":
        return torch.randint(120, 134, sizes, generator=generator).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, sizes, generator=generator, dtype=torch.int64).to(dtype)


def _integers(grid: Grid, shape: Sequence[int]) -> Tensor:
    """The integers of a tensor whose values follow from the shape of the weight, or of a shard."""
    if grid.content == SHAPE:
        return torch.tensor([*shape])
    assert grid.content == GROUP_INDEX
    size = shape[grid.dims[-1].dim or 0]
    return torch.arange(size) // (grid.group or size or 1)


def _shard(tensor: Tensor, planned: TensorPlan, rank: int) -> Tensor:
    shard = take_shard(tensor, planned.placement, rank)
    return shard if planned.edits is None else shard - torch.tensor(planned.edits[rank], dtype=shard.dtype)
