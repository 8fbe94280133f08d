"""State dict of a converted model as DTensors, for torch's distributed checkpoints and other DTensor code.

| local tensor of a rank | mesh and placements of the DTensor |
|---|---|
| replicated | ranks: ``Replicate()`` |
| one interval, as of ``torch.chunk``; padding is left out | ranks: ``Shard(dim)`` |
| the same with replicas, such as fewer KV heads than ranks | (chunks, replicas): ``Shard(dim), Replicate()`` |
| other intervals, such as a fused [q; k; v] | ranks: ``Shard(dim)`` of a :class:`~.chunked_shard.ChunkedShard` |
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardconv.distributed.groups import Axis, as_axis, current_groups, has_groups
from shardconv.distributed.new_groups import new_members_group
from shardconv.layers.parallel_module import ParallelModule
from shardconv.plan.placement import Interval, IntervalOrPadding, Placement, intervals
from shardconv.tensor.chunked_shard import Chunk, ChunkedShard


def as_dtensor(module: nn.Module) -> dict[str, DTensor]:
    """Return the state dict of a converted model as DTensors with the names and shapes of the unsharded model.

    The DTensors share memory with the parameters of the module, so loading into them loads into the module. They can be
    saved and loaded with :mod:`torch.distributed.checkpoint` at any tp, and loaded into the unsharded model by torch
    alone. They exclude padding, which stays zero in a converted model. All ranks have to call this function.

    Args:
        module: module with sharded parameters, as returned by :func:`shardconv.convert_model` and
            :func:`shardconv.load`.

    Returns:
        Name to :class:`torch.distributed.tensor.DTensor` of the full shape, with the mesh and placements in the table
        of this module's docstring. Existing DTensors are returned unchanged. Fused tensors can be saved and loaded, but
        not used for computation: ``full_tensor()`` raises an error.

    Raises:
        ValueError: if torch.distributed is not initialized, an entry is on the meta device or not a tensor.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> dcp.save({"model": as_dtensor(model)}, checkpoint_id="step-1000")  # doctest: +SKIP
        >>> dcp.load({"model": as_dtensor(model)}, checkpoint_id="step-1000")  # doctest: +SKIP
    """
    shards = {key: (placement, axis) for key, placement, axis in _shards(module)}
    axis = next((axis for _, axis in shards.values()), None) or as_axis()
    replicated = (Placement.replicated(axis.size), axis)
    state = module.state_dict()
    if wrong := [f"{key} is a {type(value).__name__}" for key, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{wrong[0]}, expected a tensor: save it separately")
    return {key: _dtensor(key, value, *shards.get(key, replicated)) for key, value in state.items()}


def _shards(module: nn.Module) -> Iterator[tuple[str, Placement, Axis]]:
    """Yield the state dict key, placement and axis of each shard."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, ParallelModule):
            for name, placement in child.own_shards():
                yield f"{prefix}.{name}" if prefix else name, placement, child.axis


def _dtensor(name: str, value: Tensor, placement: Placement, axis: Axis) -> DTensor:
    if isinstance(value, DTensor):
        return value
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device: convert a model with loaded weights, or use shardconv.load")
    if axis.group is None:
        raise ValueError(
            f"{name}: a DTensor requires a process group, even for one process: call "
            f"torch.distributed.init_process_group first, or use module.state_dict(), which is not sharded"
        )
    chunks = num_chunks(placement)
    dim, rank = placement.dim, axis.rank
    if (device_type := _mesh(axis, value).device_type) != value.device.type:
        raise ValueError(
            f"{name} is on {value.device}, but the mesh of its ranks is on {device_type}, so a DTensor would be a "
            f"copy: move the model there, or call shardconv.init_parallel(device_type={value.device.type!r})"
        )
    if dim is None or chunks == 1:
        return DTensor.from_local(value, _mesh(axis, value), [Replicate()], run_check=False)
    shape = torch.Size((*value.shape[:dim], placement.size, *value.shape[dim + 1 :]))
    make = partial(DTensor.from_local, run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride())
    if chunks is None:
        return make(ChunkedShard(value, _chunks(value, placement, rank)), _mesh(axis, value), [Shard(dim)])
    interval, position = next(_local_intervals(placement.ranks[rank]), (Interval(0, 0), 0))
    local = value.narrow(dim, position, interval.size)
    if chunks == axis.size:
        return make(local, _mesh(axis, value), [Shard(dim)])
    return make(local, _replica_mesh(axis, value, chunks), [Shard(dim), Replicate()])


def num_chunks(placement: Placement) -> int | None:
    """Number of chunks of the dim if they are those of ``torch.chunk``, else None.

    Replicas of a chunk have to be on adjacent ranks, the same number for each chunk.
    """
    tp, size = placement.tp, placement.size
    if placement.dim is None or tp == 1:
        return 1
    by_rank = [intervals(entries) for entries in placement.ranks]
    for num_chunks in {tp, tp // by_rank.count(by_rank[0])}:
        width = -(-size // num_chunks)
        starts = [rank * num_chunks // tp * width for rank in range(tp)]
        chunks = [[Interval(start, min(start + width, size))] if start < size else [] for start in starts]
        if tp % num_chunks == 0 and chunks == by_rank:
            return num_chunks
    return None


def _local_intervals(entries: tuple[IntervalOrPadding, ...]) -> Iterator[tuple[Interval, int]]:
    """Yield each interval of a rank, and its start in the local shard."""
    position = 0
    for entry in entries:
        if isinstance(entry, Interval):
            yield entry, position
        position += entry.size


def _chunks(shard: Tensor, placement: Placement, rank: int) -> Iterator[Chunk]:
    """Yield the chunks of a rank, split at the boundaries of all ranks: any two chunks are equal or disjoint."""
    dim = placement.dim
    assert dim is not None
    boundaries = sorted({bound for entries in placement.ranks for interval in intervals(entries) for bound in interval})
    for interval, position in _local_intervals(placement.ranks[rank]):
        inside = [bound for bound in boundaries if interval.start <= bound <= interval.stop]
        for start, stop in pairwise(inside):
            offsets = tuple(start if other == dim else 0 for other in range(shard.ndim))
            yield Chunk(offsets, shard.narrow(dim, position + start - interval.start, stop - start))


def _mesh(axis: Axis, tensor: Tensor) -> DeviceMesh:
    """Mesh of the ranks: the tensor dim of :func:`shardconv.init_parallel`'s mesh if it matches, else a new mesh.

    A mesh of another device type does not match: the DTensor would be a copy.
    """
    groups = current_groups() if has_groups() else None
    if groups is not None and groups.mesh is not None and groups.tensor.group is axis.group:
        tensor_mesh = groups.mesh["tensor"]
        if tensor_mesh.device_type == tensor.device.type:
            return tensor_mesh
    assert axis.group is not None
    return DeviceMesh.from_group(axis.group, tensor.device.type, mesh_dim_names=(axis.name,))


#: Process group to its (chunks, replicas) meshes by number of chunks and device type. Each mesh creates two groups.
_replica_meshes: WeakKeyDictionary[ProcessGroup, dict[tuple[int, str], DeviceMesh]] = WeakKeyDictionary()


def _replica_mesh(axis: Axis, tensor: Tensor, num_chunks: int) -> DeviceMesh:
    """Mesh (chunks, replicas) of the ranks."""
    assert axis.group is not None
    meshes, key = _replica_meshes.setdefault(axis.group, {}), (num_chunks, tensor.device.type)
    if key not in meshes:
        rows = torch.tensor(axis.ranks).view(num_chunks, -1)
        row, column = divmod(axis.rank, rows.shape[1])
        members = (rows[:, column].tolist(), rows[row].tolist())
        # only members take part: other ranks of the world may not have this tensor
        groups = [new_members_group(ranks) for ranks in members]
        names = (f"{axis.name}_chunks", f"{axis.name}_replicas")
        meshes[key] = DeviceMesh.from_group(groups, tensor.device.type, rows, mesh_dim_names=names)
    return meshes[key]
