"""One collective over mesh axes: :class:`CommSpec` runs it on local tensors and estimates its cost.

Uses the collectives of :mod:`shardconv.distributed` and the formulas of :mod:`shardconv.tensor.cost`. Local tensors are
``torch.Tensor``, not DTensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardconv.distributed import Axis, as_axis, copy_to_tp, reduce_from_tp
from shardconv.distributed.groups import group_over
from shardconv.distributed.operations import (
    BlockGrid,
    exchange_blocks,
    gather_blocks,
    place_block,
    place_full,
    reduce_scatter_blocks,
    take_block,
)
from shardconv.tensor.cost import ROUNDS, Link, collective_time
from shardconv.tensor.spec import MeshAxis, MeshLike, axis_number, coordinate_in, describe_mesh, mesh_sizes

#: One link for all axes, or a link per axis by name or number; None for ``Link()``.
Links = Link | Mapping[MeshAxis, Link] | Mapping[int, Link] | Mapping[str, Link] | None

_Run = Callable[[Tensor, Axis, BlockGrid, BlockGrid], Tensor]


class _Kind(NamedTuple):
    """Implementation of a collective, the collective of its backward, and its required dims arguments."""

    run: _Run
    backward: str
    dims_arguments: tuple[str, ...] = ()


_GATHER, _SHARD = "gather_dims", "shard_dims"
_KINDS = {
    "all_gather": _Kind(lambda x, axis, source, _: gather_blocks(x, axis, source), "chunk", (_GATHER,)),
    "all_reduce": _Kind(lambda x, axis, *_: reduce_from_tp(x, group=axis), "identity"),
    "reduce_scatter": _Kind(lambda x, axis, _, target: reduce_scatter_blocks(x, axis, target), "all_gather", (_SHARD,)),
    "all_to_all": _Kind(exchange_blocks, "all_to_all", (_GATHER, _SHARD)),
    "chunk": _Kind(lambda x, axis, _, target: take_block(x, axis, target), "all_gather", (_SHARD,)),
    "copy": _Kind(lambda x, axis, *_: copy_to_tp(x, group=axis), "all_reduce"),
    "to_partial": _Kind(lambda x, axis, *_: place_full(x, axis), "identity"),
    "shard_to_partial": _Kind(lambda x, axis, source, _: place_block(x, axis, source), "chunk", (_GATHER,)),
}


class Cost(NamedTuple):
    """Communication cost in seconds.

    Attributes:
        forward: seconds in the forward pass.
        backward: seconds in the backward pass.
        total: sum of both.
    """

    forward: float
    backward: float
    total: float


@dataclass(frozen=True, init=False)
class CommSpec:
    """A collective over one mesh axis, or over several axes flattened into one with the first outermost.

    | collective | input | output | backward | colossalai |
    |---|---|---|---|---|
    | all_gather | block | full tensor | chunk | GATHER_FWD_SPLIT_BWD; several axes MIXGATHER_FWD_SPLIT_BWD |
    | chunk | full tensor | block | all_gather | SPLIT_FWD_GATHER_BWD |
    | all_to_all | block by ``gather_dims`` | block by ``shard_dims`` | all_to_all | ALL2ALL_FWD_ALL2ALL_BWD |
    | all_reduce | summand | sum | identity | ALLREDUCE_FWD_IDENTITY_BWD |
    | copy | full tensor | full tensor | all_reduce | IDENTITY_FWD_ALLREDUCE_BWD |
    | reduce_scatter | summand | block of the sum | all_gather | |
    | to_partial | full tensor | summand: full tensor on rank 0, zeros on the others | identity | |
    | shard_to_partial | block | summand: block in a tensor of zeros | chunk | |

    Blocks are made by :func:`torch.chunk`, for one axis after the other. After an all_gather or all_reduce,
    all ranks have to compute the same values and the same loss.

    Attributes:
        collective: name from the table.
        axes: mesh axes, by name or number.
        gather_dims: tensor dim that each axis gathers.
        shard_dims: tensor dim that each axis shards.
        num_bytes: bytes of the larger of a rank's input and output; used by :meth:`cost` only.

    Raises:
        ValueError: if the collective is unknown, an axis occurs twice, or the number of dims is not the number of axes
            (0 for dims that the collective does not use).

    Example:
        >>> CommSpec("all_gather", 0, gather_dims=1, num_bytes=8_000_000_000).cost((4,), Link(alpha=0.0, beta=1e-9))
        Cost(forward=6.0, backward=0.0, total=6.0)
    """

    collective: str
    axes: tuple[MeshAxis, ...]
    gather_dims: tuple[int, ...]
    shard_dims: tuple[int, ...]
    num_bytes: int

    def __init__(
        self,
        collective: str,
        axes: MeshAxis | Sequence[MeshAxis],
        *,
        gather_dims: int | Sequence[int] = (),
        shard_dims: int | Sequence[int] = (),
        num_bytes: int = 0,
    ) -> None:
        values = {
            "collective": collective,
            "axes": (axes,) if isinstance(axes, int | str) else tuple(axes),
            "gather_dims": (gather_dims,) if isinstance(gather_dims, int) else tuple(gather_dims),
            "shard_dims": (shard_dims,) if isinstance(shard_dims, int) else tuple(shard_dims),
            "num_bytes": num_bytes,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def apply(self, local: Tensor, mesh: DeviceMesh, *, shape: Sequence[int] | None = None) -> Tensor:
        """Run the collective. All ranks of the axes call it.

        Args:
            local: local tensor of this rank.
            mesh: torch's mesh, with the axes.
            shape: shape of the tensor that the ranks of the axes share, if their blocks differ in size; by default all
                blocks have the shape of ``local``.

        Returns:
            The output of this rank; a new tensor, except over a single rank.

        Raises:
            ValueError: if a dim or axis does not exist, ``local`` does not have the shape of this rank's block, or
                this process is not in the mesh.
        """
        axis = axis_over(mesh, self.axes)
        sizes = tuple(mesh.size(axis_number(mesh, name)) for name in self.axes)
        gather_dims, shard_dims = self._dims_in(local, self.gather_dims), self._dims_in(local, self.shard_dims)
        full = list(local.shape)
        for dim, size in zip(gather_dims, sizes if gather_dims else (), strict=True):
            full[dim] *= size
        full = full if shape is None else list(shape)
        source = BlockGrid(tuple(full), sizes if gather_dims else (), gather_dims)
        if (expected := source.block_shape(axis.rank)) != tuple(local.shape):
            raise ValueError(
                f"{self.collective} over {describe_mesh(mesh)}: local tensor of rank {axis.rank} has shape "
                f"{list(local.shape)}, expected {list(expected)} of {full}"
            )
        if axis.size == 1:
            return local
        target = BlockGrid(tuple(full), sizes if shard_dims else (), shard_dims)
        return _KINDS[self.collective].run(local, axis, source, target)

    def cost(self, mesh: MeshLike, links: Links = None, *, forward_only: bool = False) -> Cost:
        """Estimate the communication cost by the alpha-beta model; 0 if no message is sent.

        Args:
            mesh: torch's mesh, or its sizes.
            links: link between the ranks. A collective over several axes uses the slowest of their links.
            forward_only: omit the backward pass.

        Raises:
            ValueError: if an axis is not in the mesh, or does not have a link.
        """
        numbers = [axis_number(mesh, axis) for axis in self.axes]
        ranks = math.prod(mesh_sizes(mesh)[number] for number in numbers)
        link = _flattened_link(mesh, numbers, links)
        names = self.collective, "none" if forward_only else _KINDS[self.collective].backward
        forward, backward = (
            collective_time(name, self.num_bytes, ranks, link) if name in ROUNDS else 0.0 for name in names
        )
        return Cost(forward, backward, forward + backward)

    def communicates(self, mesh: MeshLike) -> tuple[bool, bool]:
        """Whether messages are sent in the forward pass, and in the backward pass."""
        is_single_rank = all(mesh_sizes(mesh)[axis_number(mesh, axis)] == 1 for axis in self.axes)
        names = self.collective, _KINDS[self.collective].backward
        return names[0] in ROUNDS and not is_single_rank, names[1] in ROUNDS and not is_single_rank

    def _check(self) -> None:
        if self.collective not in _KINDS:
            raise ValueError(f"collective {self.collective!r} is unknown: use one of {', '.join(_KINDS)}")
        if not self.axes or len(set(self.axes)) < len(self.axes):
            raise ValueError(
                f"{self.collective} over axes {list(self.axes)} is invalid: pass at least one axis, each once"
            )
        for name, dims in ((_GATHER, self.gather_dims), (_SHARD, self.shard_dims)):
            expected = len(self.axes) if name in _KINDS[self.collective].dims_arguments else 0
            if len(dims) != expected:
                raise ValueError(
                    f"{self.collective} over axes {list(self.axes)}: {name} is {list(dims)}, expected {expected} dims"
                )

    def _dims_in(self, local: Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
        for dim in dims:
            if not -local.ndim <= dim < local.ndim:
                raise ValueError(f"{self.collective}: dim {dim} is out of range for shape {list(local.shape)}")
        return tuple(dim % local.ndim for dim in dims)


def axis_over(mesh: DeviceMesh, axes: Sequence[MeshAxis]) -> Axis:
    """Flatten mesh axes, the first outermost, into one axis of this process. All ranks of the result call it.

    Uses torch's group if it has the ranks in this order, else a new cached one.

    Args:
        mesh: torch's mesh.
        axes: axes by name or number.

    Raises:
        ValueError: if an axis does not exist, or this process is not in the mesh.
    """
    numbers, coordinate = [axis_number(mesh, axis) for axis in axes], coordinate_in(mesh)
    order = [*numbers, *(number for number in range(mesh.ndim) if number not in numbers)]
    ranks_at = mesh.mesh.permute(order)
    for number in reversed(order[len(numbers) :]):
        ranks_at = ranks_at[..., coordinate[number]]
    ranks = ranks_at.flatten().tolist()
    if len(numbers) == 1 and dist.get_process_group_ranks(mesh.get_group(numbers[0])) == ranks:
        return as_axis(mesh.get_group(numbers[0]))
    return as_axis(group_over(ranks))


def links_by_axis(mesh: MeshLike, links: Links) -> dict[int, Link]:
    """Axis number to link, for each axis that has one.

    Raises:
        ValueError: if an axis is not in the mesh, or a value is not a :class:`~shardconv.tensor.cost.Link`.
    """
    values = links.values() if isinstance(links, Mapping) else (links,)
    if wrong := [type(link).__name__ for link in values if not isinstance(link, Link | None)]:
        raise ValueError(f"links: got {wrong[0]}, expected Link: use .link of a LinkReport")
    if isinstance(links, Mapping):
        return {axis_number(mesh, axis): link for axis, link in links.items()}
    return dict.fromkeys(range(len(mesh_sizes(mesh))), links or Link())


def _flattened_link(mesh: MeshLike, numbers: Sequence[int], links: Links) -> Link:
    by_axis = links_by_axis(mesh, links)
    if missing := [number for number in numbers if number not in by_axis]:
        raise ValueError(f"axis {missing[0]} of {describe_mesh(mesh)} does not have a link: add it to links")
    selected = [by_axis[number] for number in numbers]
    return Link(max(link.alpha for link in selected), max(link.beta for link in selected))
