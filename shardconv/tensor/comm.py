"""One communication between the ranks of a mesh axis: run it on a rank's tensor, or say what it costs.

Owns :class:`CommSpec`. Stands on torch's groups and collectives by :mod:`shardconv.distributed`, and on the formulas of
:mod:`shardconv.tensor.cost`; knows nothing of which communication is needed, nor of DTensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardconv.distributed import Axis, as_axis, copy_to_tp, reduce_from_tp
from shardconv.distributed.block_collectives import (
    Grid,
    exchange_blocks,
    gather_blocks,
    place_block,
    place_full,
    reduce_scatter_blocks,
    take_block,
)
from shardconv.distributed.new_groups import group_over
from shardconv.tensor.cost import ROUNDS, Link, collective_time
from shardconv.tensor.spec import MeshAxis, MeshLike, axis_number, describe_mesh, mesh_sizes

#: What connects the ranks: the same on all axes, or for each axis by its name or number; None for ``Link()``.
Links = Link | Mapping[MeshAxis, Link] | Mapping[int, Link] | Mapping[str, Link] | None

_Run = Callable[[Tensor, Axis, Grid, Grid], Tensor]


class _Kind(NamedTuple):
    """A collective: what runs, what its gradient runs, and which dims it has to be told."""

    run: _Run
    backward: str
    needs: tuple[str, ...] = ()


_GATHER, _SHARD = "gather_dims", "shard_dims"
_KINDS = {
    "all_gather": _Kind(lambda x, axis, had, _: gather_blocks(x, axis, had), "chunk", (_GATHER,)),
    "all_reduce": _Kind(lambda x, axis, *_: reduce_from_tp(x, group=axis), "identity"),
    "reduce_scatter": _Kind(lambda x, axis, _, gets: reduce_scatter_blocks(x, axis, gets), "all_gather", (_SHARD,)),
    "all_to_all": _Kind(exchange_blocks, "all_to_all", (_GATHER, _SHARD)),
    "chunk": _Kind(lambda x, axis, _, gets: take_block(x, axis, gets), "all_gather", (_SHARD,)),
    "copy": _Kind(lambda x, axis, *_: copy_to_tp(x, group=axis), "all_reduce"),
    "to_partial": _Kind(lambda x, axis, *_: place_full(x, axis), "identity"),
    "shard_to_partial": _Kind(lambda x, axis, had, _: place_block(x, axis, had), "chunk", (_GATHER,)),
}


class Cost(NamedTuple):
    """Seconds.

    Attributes:
        forward: of what runs forward.
        backward: of what its gradient runs.
        total: both.
    """

    forward: float
    backward: float
    total: float


@dataclass(frozen=True, init=False)
class CommSpec:
    """One communication over one mesh axis, or over several at once: these are then flattened, the first outermost.

    | collective | a rank has | and gets | gradient | colossalai |
    |---|---|---|---|---|
    | all_gather | its block | the whole | its block | GATHER_FWD_SPLIT_BWD; over several axes MIXGATHER_FWD_SPLIT_BWD |
    | chunk | the whole | its block | all_gather | SPLIT_FWD_GATHER_BWD |
    | all_to_all | its block by ``gather_dims`` | its block by ``shard_dims`` | the reverse | ALL2ALL_FWD_ALL2ALL_BWD |
    | all_reduce | a summand | the sum | as it is | ALLREDUCE_FWD_IDENTITY_BWD |
    | copy | the whole | the whole | all_reduce | IDENTITY_FWD_ALLREDUCE_BWD |
    | reduce_scatter | a summand | its block of the sum | all_gather | |
    | to_partial | the whole | a summand of it: the whole on the first rank, zeros else | as it is | |
    | shard_to_partial | its block | a summand of the whole: its block among zeros | its block | |

    Blocks are those of :func:`torch.chunk`, cut for one axis after the other. Behind an all_gather and an all_reduce
    all ranks have to compute the same, up to the same loss.

    Attributes:
        collective: one of the table.
        axes: mesh axes, by name or number.
        gather_dims: for each axis the dim of the tensor that becomes whole.
        shard_dims: for each axis the dim that is cut.
        num_bytes: of the largest tensor that a rank has before or after; only costs need it.

    Raises:
        ValueError: if the collective is none of these, an axis is there twice, or there are more or fewer dims than
            axes where the collective needs them, or any where it does not.

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
        """Run it; all ranks of the axes call it.

        Args:
            local: what this rank has, a plain tensor.
            mesh: torch's mesh, with the axes.
            shape: of the tensor that the ranks of the axes share, where blocks differ in size; by default all have
                blocks of the size of ``local``.

        Returns:
            What the rank gets, a plain tensor: a new one, except over a single rank.

        Raises:
            ValueError: if a dim or an axis is not there, ``local`` is not this rank's block of ``shape``, or this
                process is not in the mesh.
        """
        axis = axis_over(mesh, self.axes)
        sizes = tuple(mesh.size(axis_number(mesh, name)) for name in self.axes)
        gathered, cut = self._dims_in(local, self.gather_dims), self._dims_in(local, self.shard_dims)
        whole = list(local.shape)
        for dim, size in zip(gathered, sizes if gathered else (), strict=True):
            whole[dim] *= size
        whole = whole if shape is None else list(shape)
        had = Grid(tuple(whole), sizes if gathered else (), gathered)
        if (expected := had.block_shape(axis.rank)) != tuple(local.shape):
            raise ValueError(
                f"{self.collective} over {describe_mesh(mesh)}: rank {axis.rank} has shape {list(local.shape)}, and "
                f"its block of {whole} is {list(expected)}"
            )
        if axis.size == 1:
            return local
        return _KINDS[self.collective].run(local, axis, had, Grid(tuple(whole), sizes if cut else (), cut))

    def cost(self, mesh: MeshLike, links: Links = None, *, forward_only: bool = False) -> Cost:
        """Seconds that it takes by the alpha-beta model; what needs no message takes none.

        Args:
            mesh: torch's mesh, or its sizes.
            links: what connects the ranks. Several axes at once are as slow as the slowest of them.
            forward_only: whether there is no gradient to come.

        Raises:
            ValueError: if an axis is not in the mesh, or has no link.
        """
        numbers = [axis_number(mesh, axis) for axis in self.axes]
        ranks = math.prod(mesh_sizes(mesh)[number] for number in numbers)
        link = _flattened(mesh, numbers, links)
        names = self.collective, "none" if forward_only else _KINDS[self.collective].backward
        forward, backward = (
            collective_time(name, self.num_bytes, ranks, link) if name in ROUNDS else 0.0 for name in names
        )
        return Cost(forward, backward, forward + backward)

    def communicates(self, mesh: MeshLike) -> tuple[bool, bool]:
        """Whether messages are sent: forward, and backward."""
        is_alone = all(mesh_sizes(mesh)[axis_number(mesh, axis)] == 1 for axis in self.axes)
        names = self.collective, _KINDS[self.collective].backward
        return names[0] in ROUNDS and not is_alone, names[1] in ROUNDS and not is_alone

    def _check(self) -> None:
        if self.collective not in _KINDS:
            raise ValueError(f"collective {self.collective!r} is none of {', '.join(_KINDS)}")
        if not self.axes or len(set(self.axes)) < len(self.axes):
            raise ValueError(f"{self.collective} over axes {list(self.axes)}: give at least one, and none twice")
        for name, dims in ((_GATHER, self.gather_dims), (_SHARD, self.shard_dims)):
            expected = len(self.axes) if name in _KINDS[self.collective].needs else 0
            if len(dims) != expected:
                raise ValueError(
                    f"{self.collective} over axes {list(self.axes)} takes {expected} {name}, not {list(dims)}"
                )

    def _dims_in(self, local: Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
        for dim in dims:
            if not -local.ndim <= dim < local.ndim:
                raise ValueError(f"{self.collective}: dim {dim} is out of range for shape {list(local.shape)}")
        return tuple(dim % local.ndim for dim in dims)


def axis_over(mesh: DeviceMesh, axes: Sequence[MeshAxis]) -> Axis:
    """This process's ranks along mesh axes, the first axis outermost; all of these call it.

    Torch's own group where it has the ranks in this order, else one that is made once.

    Args:
        mesh: torch's mesh.
        axes: by name or number.

    Raises:
        ValueError: if an axis is not there, or this process is not in the mesh.
    """
    numbers, place = [axis_number(mesh, axis) for axis in axes], mesh.get_coordinate()
    if place is None:
        raise ValueError(f"this process, rank {dist.get_rank()} of the world, is not in {describe_mesh(mesh)}")
    order = [*numbers, *(number for number in range(mesh.ndim) if number not in numbers)]
    ranks_at = mesh.mesh.permute(order)
    for number in reversed(order[len(numbers) :]):
        ranks_at = ranks_at[..., place[number]]
    ranks = ranks_at.flatten().tolist()
    if len(numbers) == 1 and dist.get_process_group_ranks(mesh.get_group(numbers[0])) == ranks:
        return as_axis(mesh.get_group(numbers[0]))
    return as_axis(group_over(ranks))


def links_by_axis(mesh: MeshLike, links: Links) -> dict[int, Link]:
    """For each axis that is known its link, by its number.

    Raises:
        ValueError: if a link is for an axis that the mesh does not have, or is none.
    """
    for link in links.values() if isinstance(links, Mapping) else (links,):
        if not isinstance(link, Link | None):
            raise ValueError(f"{type(link).__name__} is no Link; of what measure_link gives, take .link")  # noqa: TRY004 - as all else of links
    if isinstance(links, Mapping):
        return {axis_number(mesh, axis): link for axis, link in links.items()}
    return dict.fromkeys(range(len(mesh_sizes(mesh))), links or Link())


def _flattened(mesh: MeshLike, numbers: Sequence[int], links: Links) -> Link:
    by_axis = links_by_axis(mesh, links)
    if missing := [number for number in numbers if number not in by_axis]:
        raise ValueError(f"there is no link for axis {missing[0]} of {describe_mesh(mesh)}")
    found = [by_axis[number] for number in numbers]
    return Link(max(link.alpha for link in found), max(link.beta for link in found))
