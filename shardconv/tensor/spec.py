"""Layouts of sharded tensors: torch's placements, checked, and converted to and from dim -> mesh axes.

A layout is one ``Replicate``, ``Shard`` or ``Partial`` for each axis of a torch DeviceMesh. If several axes shard the
same dim, the first axis splits it first, and each split is made by :func:`torch.chunk`. Nothing here communicates.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

Placements = tuple[Placement, ...]
#: Number or name of a mesh axis.
MeshAxis = int | str
#: A mesh, or the sizes of its axes where no process groups are needed.
MeshLike = DeviceMesh | Sequence[int]
_Value = TypeVar("_Value")


def mesh_sizes(mesh: MeshLike) -> tuple[int, ...]:
    """Sizes of the axes of a mesh."""
    return tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else tuple(mesh)


def describe_mesh(mesh: MeshLike) -> str:
    """Format a mesh for an error message, such as ``mesh (data: 2, tensor: 4)``."""
    sizes = mesh_sizes(mesh)
    names = _names(mesh) or tuple(str(number) for number in range(len(sizes)))
    return "mesh (" + ", ".join(f"{name}: {size}" for name, size in zip(names, sizes, strict=True)) + ")"


def axis_number(mesh: MeshLike, axis: MeshAxis) -> int:
    """Return the number of a mesh axis.

    Args:
        mesh: torch's mesh, or its sizes.
        axis: name of an axis, or its number; negative numbers count from the end.

    Raises:
        ValueError: if the mesh does not have the axis.
    """
    ndim = len(mesh_sizes(mesh))
    if isinstance(axis, str):
        if axis in (names := _names(mesh)):
            return names.index(axis)
    elif -ndim <= axis < ndim:
        return axis % ndim
    raise ValueError(f"axis {axis!r} is not an axis of {describe_mesh(mesh)}")


def coordinate_in(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the coordinate of this process in a mesh.

    Raises:
        ValueError: if it is not in the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"global rank {dist.get_rank()} is not in {describe_mesh(mesh)}: call this only on ranks of the mesh"
        )
    return tuple(coordinate)


def check_placements(
    shape: Sequence[int], mesh: MeshLike, placements: Sequence[Placement], *, uneven: bool = False
) -> Placements:
    """Check placements, and return them with nonnegative dims.

    Args:
        shape: shape of the full tensor.
        mesh: torch's mesh, or its sizes.
        placements: torch's placements, one per mesh axis.
        uneven: allow sizes that are not divisible; shards then have the sizes of :func:`torch.chunk`.

    Raises:
        ValueError: if the number of placements is wrong, a placement has an unsupported type, a dim is out of range or
            not divisible, or a ``Partial`` is not a sum. The message contains the shape and the mesh.
    """
    where, sizes = f"shape {list(shape)} over {describe_mesh(mesh)}", mesh_sizes(mesh)
    if len(placements) != len(sizes):
        raise ValueError(f"{where}: got {len(placements)} placements for {len(sizes)} axes: pass one per axis")
    checked = tuple(_checked(placement, len(shape), where) for placement in placements)
    for dim, axes in {} if uneven else _shards(checked).items():
        num_shards = math.prod(sizes[axis] for axis in axes)
        if shape[dim] % num_shards:
            raise ValueError(
                f"{where}: dim {dim} of size {shape[dim]} is not divisible by {num_shards}: pad it, or pass "
                f"uneven=True for shards as of torch.chunk"
            )
    return checked


def placements_of(dims: Mapping[int, MeshAxis | Sequence[MeshAxis]], ndim: int, mesh: MeshLike) -> Placements:
    """Convert a dict of dim to mesh axes, such as colossalai's ``dim_partition_dict``, to placements.

    Args:
        dims: dim to the axes that shard it, by name or number; a single axis needs no list. Negative dims count from
            the end.
        ndim: number of dims of the tensor.
        mesh: torch's mesh, or its sizes. Axes that are not in ``dims`` replicate.

    Raises:
        ValueError: if a dim or axis does not exist, an axis is used twice, or the axes of a dim are not in the order
            of the mesh.

    Example:
        >>> placements_of({0: "data", -1: ["tensor"]}, 2, mesh)  # doctest: +SKIP
        (Shard(dim=0), Shard(dim=1))
    """
    listed = {dim: [axes] if isinstance(axes, int | str) else list(axes) for dim, axes in dims.items()}
    placements: list[Placement] = [Replicate()] * len(mesh_sizes(mesh))
    for dim, axes in merge_dims(ndim, listed).items():
        numbers = [axis_number(mesh, axis) for axis in axes]
        if numbers != sorted(numbers):
            raise ValueError(
                f"dim {dim} has axes {axes} in another order than {describe_mesh(mesh)}: torch shards a dim in mesh "
                f"order, so reorder the axes or use a mesh with another order"
            )
        for number in numbers:
            if placements[number] != Replicate():
                raise ValueError(
                    f"axis {number} of {describe_mesh(mesh)} is used twice in {dict(dims)}: use each axis once"
                )
            placements[number] = Shard(dim)
    return tuple(placements)


def dims_of(placements: Sequence[Placement]) -> dict[int, list[int]]:
    """Convert placements to a dict of dim to mesh axis numbers; the inverse of :func:`placements_of`.

    Raises:
        ValueError: if a placement is neither ``Shard`` nor ``Replicate``; the dict cannot represent it.

    Example:
        >>> dims_of([Shard(1), Replicate(), Shard(1)])
        {1: [0, 2]}
    """
    for placement in placements:
        if type(placement) not in (Replicate, Shard):
            raise ValueError(
                f"{placement} in {list(placements)} is neither Shard nor Replicate: redistribute the tensor first"
            )
    return _shards(placements)


def normalize_dims(ndim: int, dims: Mapping[int, _Value]) -> dict[int, _Value]:
    """Return a copy of a dict with nonnegative dims as keys, in the same order.

    Colossalai's ``convert_dim_partition_dict``.

    Args:
        ndim: number of dims of the tensor.
        dims: dim to any value. Negative dims count from the end.

    Raises:
        ValueError: if a dim is out of range or occurs twice.

    Example:
        >>> normalize_dims(2, {-1: [0], 0: [1]})
        {1: [0], 0: [1]}
    """
    normalized: dict[int, _Value] = {}
    for dim, value in dims.items():
        number = _dim_number(dim, ndim, f"in {dict(dims)}")
        if number in normalized:
            raise ValueError(f"dim {number} occurs twice in {dict(dims)}: merge the entries with merge_dims")
        normalized[number] = value
    return normalized


def merge_dims(ndim: int, dims: Mapping[int, Sequence[_Value]]) -> dict[int, list[_Value]]:
    """Return a copy of a dict with nonnegative dims as keys, concatenating the lists of equal dims.

    Colossalai's ``merge_same_dim_mesh_list``.

    Args:
        ndim: number of dims of the tensor.
        dims: dim to a list, which is copied. Negative dims count from the end.

    Raises:
        ValueError: if a dim is out of range.

    Example:
        >>> merge_dims(2, {1: [0], -1: [1]})
        {1: [0, 1]}
    """
    merged: dict[int, list[_Value]] = {}
    for dim, values in dims.items():
        merged.setdefault(_dim_number(dim, ndim, f"in {dict(dims)}"), []).extend(values)
    return merged


def local_shape(
    shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of a rank's local tensor.

    Args:
        shape: shape of the full tensor.
        sizes: shape of the mesh.
        placements: one per mesh axis; only ``Shard`` changes the shape.
        coordinate: coordinate of the rank in the mesh. Coordinate 0 has the largest shard along every axis.
    """
    local = list(shape)
    for placement, size, index in zip(placements, sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            full = local[placement.dim]
            step = -(-full // size)
            local[placement.dim] = min(step, max(full - index * step, 0))
    return tuple(local)


def _names(mesh: MeshLike) -> tuple[str, ...]:
    return mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()


def _checked(placement: Placement, ndim: int, where: str) -> Placement:
    if type(placement) is Replicate:
        return placement
    if type(placement) is Shard:
        return Shard(_dim_number(placement.dim, ndim, f"in {placement}, {where}"))
    if type(placement) is not Partial:
        raise ValueError(f"{where}: {placement} is not Replicate, Shard or Partial: redistribute with torch first")
    if placement.reduce_op != "sum":
        raise ValueError(
            f"{where}: Partial has reduce_op {placement.reduce_op!r}, expected 'sum': reduce it with torch first"
        )
    return placement


def _dim_number(dim: int, ndim: int, where: str) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim {dim} {where} is out of range for {ndim} dims")
    return dim % ndim


def _shards(placements: Sequence[Placement]) -> dict[int, list[int]]:
    axes: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            axes.setdefault(placement.dim, []).append(axis)
    return axes
