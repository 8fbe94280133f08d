"""Tensors that lie over a mesh: torch's DTensor made, and brought to another layout or another mesh.

Owns nothing: a sharded tensor is torch's DTensor. Which communications run is the business of
:mod:`shardconv.tensor.redistribution`, and how, of :class:`~shardconv.tensor.comm.CommSpec`.

Gradients lie as their tensors do, but those of partial sums are whole on every rank, as in torch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardconv.tensor.comm import Links
from shardconv.tensor.redistribution import layout_after, of_gradient, plan_redistribution
from shardconv.tensor.spec import Placements, check_placements, describe_mesh, local_shape, mesh_sizes


def from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, shape: Sequence[int] | None = None
) -> DTensor:
    """A DTensor from what each rank has; differentiable. Stands on :meth:`DTensor.from_local`.

    Args:
        local: this rank's shard, whole tensor, or summand. It is not compared with what the others have.
        mesh: torch's mesh.
        placements: torch's, one for each axis.
        shape: of the whole tensor, where shards differ in size as by :func:`torch.chunk`; by default all are alike.

    Raises:
        ValueError: if a tensor cannot lie so, or ``local`` is not what this rank has of one of that ``shape``.
    """
    whole = list(local.shape)
    if shape is None:
        checked = check_placements(whole, mesh, placements, uneven=True)
        for placement, size in zip(checked, mesh_sizes(mesh), strict=True):
            if isinstance(placement, Shard):
                whole[placement.dim] *= size
    else:
        whole = list(shape)
    checked = check_placements(whole, mesh, placements, uneven=shape is not None)
    expected = local_shape(whole, mesh_sizes(mesh), checked, _place(mesh))
    if expected != tuple(local.shape):
        raise ValueError(
            f"shape {whole} over {describe_mesh(mesh)}, {list(checked)}: rank {dist.get_rank()} has "
            f"{list(local.shape)}, not {list(expected)}"
        )
    return _labelled(local.contiguous(), mesh, checked, torch.Size(whole))


def from_global(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor from a tensor that every rank has; nothing is sent.

    As :func:`torch.distributed.tensor.distribute_tensor` with ``src_data_rank=None``, but differentiable anywhere in a
    graph: the gradient of the tensor is whole on every rank, for which backward gathers.

    Args:
        tensor: the same on every rank. Sizes need not divide: a rank takes what :func:`torch.chunk` gives it.
        mesh: torch's mesh.
        placements: torch's, one for each axis. Of a partial sum the first rank has the tensor, and the others zeros.

    Raises:
        ValueError: if the tensor cannot lie so.
    """
    return redistribute(from_local(tensor, mesh, [Replicate()] * mesh.ndim), placements)


def to_mesh(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """The same tensor over other processes: each has it whole, and keeps it; differentiable, and nothing is sent.

    Args:
        tensor: whole on every rank of its mesh.
        mesh: the other mesh. This process is in it, and all others that are have the same tensor.

    Raises:
        ValueError: if the tensor is not whole on every rank, or this process is not in the mesh.
    """
    if any(not isinstance(placement, Replicate) for placement in tensor.placements):
        raise ValueError(
            f"shape {list(tensor.shape)} over {describe_mesh(tensor.device_mesh)} is {list(tensor.placements)}: only "
            f"what is whole on every rank can go to {describe_mesh(mesh)}. redistribute(tensor, placements, mesh) "
            f"gathers it first"
        )
    _place(mesh)
    local = tensor.to_local(grad_placements=tensor.placements)
    return _labelled(local, mesh, (Replicate(),) * mesh.ndim, tensor.shape)


def redistribute(
    tensor: DTensor, placements: Sequence[Placement], mesh: DeviceMesh | None = None, *, links: Links = None
) -> DTensor:
    """The same tensor in another layout; differentiable, and all ranks of the mesh call it.

    As :meth:`DTensor.redistribute`, but by the cheapest communications of :func:`plan_redistribution`, with a real
    all-to-all on a CPU, and to partial sums, too. Values are the same, and gradients.

    Args:
        tensor: torch's DTensor.
        placements: torch's, one for each axis. Sizes need not divide.
        mesh: another mesh: the tensor is then made whole, relabelled by :func:`to_mesh`, and brought into its layout.
        links: what connects the ranks of the mesh: see :func:`plan_redistribution`.

    Returns:
        A new DTensor, contiguous; ``tensor`` itself where it lies so already.

    Raises:
        ValueError: if the tensor cannot lie so, or lies as this cannot read, or this process is not in the mesh.
    """
    if mesh is not None and mesh != tensor.device_mesh:
        whole = redistribute(tensor, [Replicate()] * tensor.device_mesh.ndim)
        return redistribute(to_mesh(whole, mesh), placements, links=links)
    mesh = tensor.device_mesh
    layout = check_placements(tensor.shape, mesh, tensor.placements, uneven=True)
    target = check_placements(tensor.shape, mesh, placements, uneven=True)
    if layout == target:
        return tensor
    _place(mesh)
    moved: DTensor = _Redistribute.apply(tensor, layout, target, links)
    return moved


class _Redistribute(torch.autograd.Function):
    """A tensor in another layout; its gradient goes from whatever layout it comes in to the tensor's."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, layout: Placements, target: Placements, links: Links) -> DTensor:
        ctx.layout, ctx.links = layout, links
        local = _moved(tensor.to_local(), tensor.device_mesh, tensor.shape, layout, target, links)
        return _labelled(local, tensor.device_mesh, target, tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None, None]:
        return redistribute(grad, of_gradient(ctx.layout), links=ctx.links), None, None, None


def _moved(
    local: Tensor, mesh: DeviceMesh, shape: torch.Size, layout: Placements, target: Placements, links: Links
) -> Tensor:
    """What this rank has in another layout; no gradient."""
    place = _place(mesh)
    for step in plan_redistribution(shape, local.dtype, mesh, layout, target, links):
        joined = [Replicate() if axis in step.axes else each for axis, each in enumerate(layout)]
        local = step.apply(local, mesh, shape=local_shape(shape, mesh_sizes(mesh), joined, place))
        layout = layout_after(layout, step)
    return local.contiguous()


def _labelled(local: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    labelled: DTensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return labelled


def _place(mesh: DeviceMesh) -> tuple[int, ...]:
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(f"this process, rank {dist.get_rank()} of the world, is not in {describe_mesh(mesh)}")
    return tuple(place)
