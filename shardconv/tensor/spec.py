"""How a tensor lies over a mesh: torch's placements, checked, and written as dim -> mesh axes.

Owns the rules of a layout. The placements are torch's ``Replicate``, ``Shard`` and ``Partial``, one for each axis of a
torch DeviceMesh; a dim that several axes shard is cut by the first axis first, each time as :func:`torch.chunk` cuts.
Knows nothing of data: nothing here communicates.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

Placements = tuple[Placement, ...]
#: An axis of a mesh, by its number or its name.
MeshAxis = int | str
#: A mesh, or where no ranks are needed the sizes of its axes.
MeshLike = DeviceMesh | Sequence[int]
_Value = TypeVar("_Value")


def mesh_sizes(mesh: MeshLike) -> tuple[int, ...]:
    """The sizes of a mesh's axes."""
    return tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else tuple(mesh)


def describe_mesh(mesh: MeshLike) -> str:
    """A mesh in a message: its axes with their sizes."""
    sizes = mesh_sizes(mesh)
    names = _names(mesh) or tuple(str(number) for number in range(len(sizes)))
    return "mesh (" + ", ".join(f"{name}: {size}" for name, size in zip(names, sizes, strict=True)) + ")"


def axis_number(mesh: MeshLike, axis: MeshAxis) -> int:
    """The number of a mesh axis.

    Args:
        mesh: torch's mesh, or its sizes.
        axis: the name of one of its axes, or its number, from the end if negative.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    ndim = len(mesh_sizes(mesh))
    if isinstance(axis, str):
        if axis in (names := _names(mesh)):
            return names.index(axis)
    elif -ndim <= axis < ndim:
        return axis % ndim
    raise ValueError(f"axis {axis!r} is not one of {describe_mesh(mesh)}")


def check_placements(
    shape: Sequence[int], mesh: MeshLike, placements: Sequence[Placement], *, uneven: bool = False
) -> Placements:
    """The placements, if a tensor can lie so; negative dims are counted from the start.

    Args:
        shape: of the whole tensor.
        mesh: torch's mesh, or its sizes.
        placements: torch's, one for each axis of the mesh.
        uneven: whether sizes may be that do not divide; ranks then hold what :func:`torch.chunk` gives them.

    Raises:
        ValueError: if there are too few or too many, one is of another kind, a dim is out of range or does not divide,
            or a partial is none of sums. The message names the shape and the mesh.
    """
    where, sizes = f"shape {list(shape)} over {describe_mesh(mesh)}", mesh_sizes(mesh)
    if len(placements) != len(sizes):
        raise ValueError(f"{where}: {len(placements)} placements for {len(sizes)} axes; give one for each")
    checked = tuple(_checked(placement, len(shape), where) for placement in placements)
    for dim, axes in {} if uneven else _shards(checked).items():
        parts = math.prod(sizes[axis] for axis in axes)
        if shape[dim] % parts:
            raise ValueError(
                f"{where}: dim {dim} of size {shape[dim]} does not divide by {parts}; pad it, or pass uneven=True for "
                f"the sizes of torch.chunk"
            )
    return checked


def placements_of(dims: Mapping[int, MeshAxis | Sequence[MeshAxis]], ndim: int, mesh: MeshLike) -> Placements:
    """Placements from a dict of dim to the mesh axes that shard it, as colossalai's ``dim_partition_dict``.

    Args:
        dims: dim, negative from the end, to axes by name or number; one axis may stand without a list.
        ndim: number of the tensor's dims.
        mesh: torch's mesh, or its sizes. An axis that is not in ``dims`` replicates.

    Raises:
        ValueError: if a dim or an axis is not there, an axis is used twice, or a dim's axes are not in the order of the
            mesh.

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
                f"dim {dim} over axes {axes}: torch cuts a dim by the axes of {describe_mesh(mesh)} in their order; "
                f"write them so, or make a mesh of another order"
            )
        for number in numbers:
            if placements[number] != Replicate():
                raise ValueError(f"axis {number} of {describe_mesh(mesh)} is used twice in {dict(dims)}")
            placements[number] = Shard(dim)
    return tuple(placements)


def dims_of(placements: Sequence[Placement]) -> dict[int, list[int]]:
    """The inverse of :func:`placements_of`: dim to the numbers of the axes that shard it.

    Raises:
        ValueError: of a placement that is neither ``Shard`` nor ``Replicate``: a dict of dims cannot say it.

    Example:
        >>> dims_of([Shard(1), Replicate(), Shard(1)])
        {1: [0, 2]}
    """
    for placement in placements:
        if type(placement) not in (Replicate, Shard):
            raise ValueError(f"{placement} in {list(placements)} is neither Shard nor Replicate; redistribute first")
    return _shards(placements)


def normalize_dims(ndim: int, dims: Mapping[int, _Value]) -> dict[int, _Value]:
    """The dict with dims counted from the start, in its order; a new one. Colossalai's ``convert_dim_partition_dict``.

    Args:
        ndim: number of the tensor's dims.
        dims: dim, negative from the end, to anything.

    Raises:
        ValueError: if a dim is out of range, or there twice.

    Example:
        >>> normalize_dims(2, {-1: [0], 0: [1]})
        {1: [0], 0: [1]}
    """
    found: dict[int, _Value] = {}
    for dim, value in dims.items():
        number = _dim_number(dim, ndim, f"in {dict(dims)}")
        if number in found:
            raise ValueError(f"dim {number} of {ndim} is there twice in {dict(dims)}; merge_dims puts such together")
        found[number] = value
    return found


def merge_dims(ndim: int, dims: Mapping[int, Sequence[_Value]]) -> dict[int, list[_Value]]:
    """The dict with dims counted from the start, and what stands under the same dim put together in its order.

    Colossalai's ``merge_same_dim_mesh_list``; dict and lists are new.

    Args:
        ndim: number of the tensor's dims.
        dims: dim, negative from the end, to a list.

    Raises:
        ValueError: if a dim is out of range.

    Example:
        >>> merge_dims(2, {1: [0], -1: [1]})
        {1: [0, 1]}
    """
    found: dict[int, list[_Value]] = {}
    for dim, values in dims.items():
        found.setdefault(_dim_number(dim, ndim, f"in {dict(dims)}"), []).extend(values)
    return found


def local_shape(
    shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement], place: Sequence[int]
) -> tuple[int, ...]:
    """The shape of what a rank holds.

    Args:
        shape: of the whole tensor.
        sizes: of the mesh.
        placements: one for each axis; only ``Shard`` counts.
        place: of the rank in the mesh. No rank has more along any dim than the first.
    """
    local = list(shape)
    for placement, size, index in zip(placements, sizes, place, strict=True):
        if isinstance(placement, Shard):
            whole = local[placement.dim]
            step = -(-whole // size)
            local[placement.dim] = min(step, max(whole - index * step, 0))
    return tuple(local)


def _names(mesh: MeshLike) -> tuple[str, ...]:
    return mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()


def _checked(placement: Placement, ndim: int, where: str) -> Placement:
    if type(placement) is Replicate:
        return placement
    if type(placement) is Shard:
        return Shard(_dim_number(placement.dim, ndim, f"in {placement}, {where}"))
    if type(placement) is not Partial:
        raise ValueError(f"{where}: {placement} is none of Replicate, Shard and Partial; redistribute with torch first")
    if placement.reduce_op != "sum":
        raise ValueError(f"{where}: only sums can be partial, not {placement.reduce_op}; reduce it with torch first")
    return placement


def _dim_number(dim: int, ndim: int, where: str) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim {dim} {where} is out of range for {ndim} dims")
    return dim % ndim


def _shards(placements: Sequence[Placement]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            found.setdefault(placement.dim, []).append(axis)
    return found
