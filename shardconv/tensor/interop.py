"""State dict of a converted model as DTensors, for torch's distributed checkpoints and other DTensor code.

| local tensor of a rank | mesh and placements of the DTensor |
|---|---|
| replicated | ranks: ``Replicate()`` |
| one interval, as of ``torch.chunk``; padding is left out | ranks: ``Shard(dim)`` |
| the same with replicas, such as fewer KV heads than ranks | (chunks, replicas): ``Shard(dim), Replicate()`` |
| other intervals, such as a fused [q; k; v] | ranks: ``Shard(dim)`` of a :class:`ChunkedShard` |
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardconv.distributed.groups import Axis, as_axis, current_groups, has_groups, new_members_group
from shardconv.layers.parallel_module import ParallelModule
from shardconv.plan.placement import Interval, Placement, intervals


class Chunk(NamedTuple):
    """A rectangular chunk of a full tensor.

    Attributes:
        offsets: start of the chunk in the full tensor, per dim.
        values: elements of the chunk; a view of the shard.
    """

    offsets: tuple[int, ...]
    values: Tensor

    @property
    def metadata(self) -> ChunkStorageMetadata:
        """Offsets and sizes in the format of torch's distributed checkpoints."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.values.shape)

    def new_empty(self, device: torch.device | None) -> Self:
        """Return the same chunk with uninitialized memory."""
        return self._replace(values=torch.empty_like(self.values, device=device))


class ChunkedShard(Tensor):
    """Shard of a tensor as a list of chunks of the full tensor, for use as the local tensor of a DTensor.

    Args:
        shard: [*], tensor with the shape, dtype and device of the shard.
        chunks: chunks of this rank; may be empty.
        device: device of the chunks, if it differs from the device of ``shard``.
    """

    chunks: tuple[Chunk, ...]

    def __new__(cls, shard: Tensor, chunks: Iterable[Chunk], device: torch.device | None = None) -> Self:
        """Create a shard; see the class for the arguments."""
        # the only way to create a tensor without storage; torch does not export it
        self: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, shard.shape, strides=shard.stride(), dtype=shard.dtype, device=device or shard.device
        )
        self.chunks = tuple(chunks)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # a class method, as torch documents it
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple["ChunkedShard", ...] = (),
        kwargs: Mapping[str, torch.device | None] = MappingProxyType({}),
    ) -> "ChunkedShard":
        """Support aliasing, and allocation for asynchronous saves.

        Raises:
            NotImplementedError: for any other operation.
        """
        if func in _ALIASING:
            return cls(args[0], args[0].chunks)
        if func is torch.ops.aten.new_empty.default:
            device = kwargs.get("device")
            return cls(args[0], (chunk.new_empty(device) for chunk in args[0].chunks), device)
        raise NotImplementedError(
            f"{func} is not supported: this rank holds several chunks of the full tensor, or padding, which DTensor "
            f"placements cannot describe. Use this DTensor with torch.distributed.checkpoint only; for full tensors "
            f"call shardconv.gather_state_dict(module)"
        )

    def __repr__(self) -> str:  # type: ignore[override] # torch's has an argument for its own use
        return f"ChunkedShard({[(chunk.offsets, tuple(chunk.values.shape)) for chunk in self.chunks]})"

    # --- interface of torch.distributed.checkpoint ---

    def __create_write_items__(self, fqn: str, object: Tensor) -> list[WriteItem]:
        """Return one write item per chunk.

        Args:
            fqn: name of the tensor.
            object: DTensor that contains this shard.
        """
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk.metadata, TensorProperties.create_from_tensor(chunk.values), object.size()
                ),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the offsets and sizes of the chunks to read."""
        return [chunk.metadata for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of a chunk, to save from or load into.

        Raises:
            ValueError: if this rank does not have the chunk.
        """
        for chunk in self.chunks:
            if torch.Size(chunk.offsets) == index.offset:
                return chunk.values
        raise ValueError(f"{index.fqn}: this rank does not have a chunk at offset {index.offset} (got {self!r})")


_ALIASING = {torch.ops.aten.view.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default}


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
    shape = torch.Size(placement.full_shape(value.shape))
    make = partial(DTensor.from_local, run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride())
    if chunks is None:
        return make(ChunkedShard(value, _chunks(value, placement, rank)), _mesh(axis, value), [Shard(dim)])
    interval, position = next(placement.local_intervals(rank), (Interval(0, 0), 0))
    local = value.narrow(dim, position, interval.size)
    if chunks == axis.size:
        return make(local, _mesh(axis, value), [Shard(dim)])
    return make(local, _replica_mesh(axis, value, chunks), [Shard(dim), Replicate()])


def num_chunks(placement: Placement) -> int | None:
    """Number of chunks of the dim if ``torch.chunk`` makes the same chunks, else None.

    Replicas of a chunk have to be on adjacent ranks, the same number for each chunk.
    """
    tp, size = placement.num_ranks, placement.size
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


def _chunks(shard: Tensor, placement: Placement, rank: int) -> Iterator[Chunk]:
    """Yield the chunks of a rank, split at the boundaries of all ranks: any two chunks are equal or disjoint."""
    dim = placement.dim
    assert dim is not None
    boundaries = sorted({bound for entries in placement.ranks for interval in intervals(entries) for bound in interval})
    for interval, position in placement.local_intervals(rank):
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
