"""A converted model's state dict as DTensors, for all of torch that takes those: its distributed checkpoints above all.

Owns which placements of a plan are placements of DTensor. Knows nothing of models and files.

| a rank holds | DTensor on |
|---|---|
| the whole tensor | the ranks: ``Replicate()`` |
| one interval, as ``torch.chunk`` cuts; zeros behind it are left out | the ranks: ``Shard(dim)`` |
| the same with copies, as of fewer kv heads than ranks | (chunks, copies): ``Shard(dim), Replicate()`` |
| any other pieces, as of a fused [q; k; v] | the ranks: ``Shard(dim)`` of a :class:`~.pieces.ChunkedShard` |
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardconv.distributed.groups import Axis, as_axis, current_groups, has_groups
from shardconv.distributed.new_groups import new_members_group
from shardconv.layers.sharding import ParallelModule
from shardconv.plan.placement import Interval, Piece, Placement, intervals
from shardconv.tensor.chunked_shard import Chunk, ChunkedShard


def as_dtensor(module: nn.Module) -> dict[str, DTensor]:
    """The state dict of a converted model under the plain model's names and shapes, as DTensors.

    They share memory with the module's own parameters, so what is loaded into them is loaded into the module, and they
    go to and from :mod:`torch.distributed.checkpoint` at any tp, and by torch alone into the plain model. Padding is in
    none of them; it stays as it is, zeros in a converted model. All ranks have to call it.

    Args:
        module: a module, some of whose parameters are shards, as :func:`shardconv.convert_model` and
            :func:`shardconv.load` give it.

    Returns:
        Name to :class:`torch.distributed.tensor.DTensor` of the full shape, on the mesh of the ranks that hold the
        shards; the table of this module's docstring says with which placements. What is a DTensor already stays as
        it is. Fused tensors can be saved and loaded, but refuse to compute: ``full_tensor()`` of one raises.

    Raises:
        ValueError: if there is no process group, a tensor has no memory, or something in the state dict is no tensor.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> dcp.save({"model": as_dtensor(model)}, checkpoint_id="step-1000")  # doctest: +SKIP
        >>> dcp.load({"model": as_dtensor(model)}, checkpoint_id="step-1000")  # doctest: +SKIP
    """
    cut = {key: (placement, axis) for key, placement, axis in _shards(module)}
    whole_axis = next((axis for _, axis in cut.values()), None) or as_axis()
    whole = (Placement.replicated(whole_axis.size), whole_axis)
    return {key: _dtensor(key, value, *cut.get(key, whole)) for key, value in module.state_dict().items()}


def _shards(module: nn.Module) -> Iterator[tuple[str, Placement, Axis]]:
    """Name in the state dict, placement and ranks of each shard."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, ParallelModule):
            for name, placement in child.own_shards():
                yield f"{prefix}.{name}" if prefix else name, placement, child.axis


def _dtensor(name: str, value: Any, placement: Placement, axis: Axis) -> DTensor:
    if isinstance(value, DTensor):
        return value
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise ValueError(f"{name}: is a {kind}, and no tensor: store it beside the DTensors")  # noqa: TRY004 - as below
    if value.is_meta:
        raise ValueError(f"{name}: has no memory: convert a model that has its values, or use shardconv.load")
    if axis.group is None:
        raise ValueError(
            "a DTensor needs a process group, of one process, too: call torch.distributed.init_process_group first; or "
            "take module.state_dict(), which is not cut"
        )
    num_chunks = _num_chunks(placement)
    dim, rank = placement.dim, axis.rank
    if (of_mesh := _mesh(axis, value).device_type) != value.device.type:
        raise ValueError(
            f"{name}: is on {value.device}, and the mesh of its ranks on {of_mesh}, where a DTensor would be a copy: "
            f"move the model there, or call shardconv.init_parallel(device_type={value.device.type!r})"
        )
    if dim is None or num_chunks == 1:
        return DTensor.from_local(value, _mesh(axis, value), [Replicate()], run_check=False)
    shape = torch.Size((*value.shape[:dim], placement.size, *value.shape[dim + 1 :]))
    make = partial(DTensor.from_local, run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride())
    if num_chunks is None:
        return make(ChunkedShard(value, _chunks(value, placement, rank)), _mesh(axis, value), [Shard(dim)])
    held, position = next(_held(placement.ranks[rank]), (Interval(0, 0), 0))
    local = value.narrow(dim, position, held.size)
    if num_chunks == axis.size:
        return make(local, _mesh(axis, value), [Shard(dim)])
    return make(local, _mesh_of_copies(axis, value, num_chunks), [Shard(dim), Replicate()])


def _num_chunks(placement: Placement) -> int | None:
    """How many chunks of the dim there are, if they are those of ``torch.chunk``; else None.

    With copies, each is on as many ranks, next to each other.
    """
    tp, size = placement.tp, placement.size
    if placement.dim is None or tp == 1:
        return 1
    held = [intervals(pieces) for pieces in placement.ranks]
    for num_chunks in {tp, tp // held.count(held[0])}:
        width = -(-size // num_chunks)
        starts = [rank * num_chunks // tp * width for rank in range(tp)]
        chunks = [[Interval(start, min(start + width, size))] if start < size else [] for start in starts]
        if tp % num_chunks == 0 and chunks == held:
            return num_chunks
    return None


def _held(pieces: tuple[Piece, ...]) -> Iterator[tuple[Interval, int]]:
    """Each interval of a rank, and where it begins in the rank's shard."""
    position = 0
    for piece in pieces:
        if isinstance(piece, Interval):
            yield piece, position
        position += piece.size


def _chunks(shard: Tensor, placement: Placement, rank: int) -> Iterator[Chunk]:
    """The chunks of a rank, cut wherever any rank's interval begins or ends: so two ranks' are equal or apart."""
    dim = placement.dim
    assert dim is not None
    edges = sorted({edge for pieces in placement.ranks for piece in intervals(pieces) for edge in piece})
    for held, position in _held(placement.ranks[rank]):
        inside = [edge for edge in edges if held.start <= edge <= held.stop]
        for start, stop in pairwise(inside):
            offsets = tuple(start if own == dim else 0 for own in range(shard.ndim))
            yield Chunk(offsets, shard.narrow(dim, position + start - held.start, stop - start))


def _mesh(axis: Axis, tensor: Tensor) -> DeviceMesh:
    """The ranks as a mesh: that of :func:`shardconv.init_parallel` where they are its tensor axis.

    On a mesh of another kind of device the tensor would be a copy.
    """
    groups = current_groups() if has_groups() else None
    if groups is not None and groups.mesh is not None and groups.tensor.group is axis.group:
        tensor_mesh = groups.mesh["tensor"]
        if tensor_mesh.device_type == tensor.device.type:
            return tensor_mesh
    assert axis.group is not None
    return DeviceMesh.from_group(axis.group, tensor.device.type, mesh_dim_names=(axis.name,))


#: Of each group its meshes of copies, by how many chunks they have and the kind of device: each costs two groups.
_meshes: WeakKeyDictionary[Any, dict[tuple[int, str], DeviceMesh]] = WeakKeyDictionary()


def _mesh_of_copies(axis: Axis, tensor: Tensor, num_chunks: int) -> DeviceMesh:
    """The ranks as a mesh (chunks, copies)."""
    known, key = _meshes.setdefault(axis.group, {}), (num_chunks, tensor.device.type)
    if key not in known:
        rows = torch.tensor(axis.ranks).view(num_chunks, -1)
        row, column = divmod(axis.rank, rows.shape[1])
        members = (rows[:, column].tolist(), rows[row].tolist())
        # among those who are in them only: other ranks of the world may have no such tensor
        groups = [new_members_group(ranks) for ranks in members]
        names = (f"{axis.name}_chunks", f"{axis.name}_copies")
        known[key] = DeviceMesh.from_group(groups, tensor.device.type, rows, mesh_dim_names=names)
    return known[key]
