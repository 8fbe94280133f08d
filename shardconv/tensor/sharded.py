"""Create DTensors, and redistribute them to other placements or another mesh.

:mod:`shardconv.tensor.redistribution` plans the collectives, and :class:`~shardconv.tensor.comm.CommSpec` runs them.
Gradients have the placements of their tensors; the gradient of a partial sum is replicated, as in torch.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardconv.distributed.operations import with_gradient
from shardconv.layers.parallel_module import ParallelModule, description
from shardconv.tensor.comm import Links
from shardconv.tensor.redistribution import gradient_placements, layout_after, plan_redistribution
from shardconv.tensor.spec import Placements, check_placements, coordinate_in, describe_mesh, local_shape, mesh_sizes


def from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, shape: Sequence[int] | None = None
) -> DTensor:
    """Create a DTensor from the local tensors of the ranks. Differentiable; uses :meth:`DTensor.from_local`.

    Args:
        local: shard, replica or summand of this rank. It is not compared with other ranks.
        mesh: torch's mesh.
        placements: torch's placements, one per mesh axis.
        shape: shape of the full tensor, if shards differ in size as of :func:`torch.chunk`; by default all shards have
            the shape of ``local``.

    Raises:
        ValueError: if the placements are invalid, or ``local`` does not have this rank's local shape of ``shape``.
    """
    full = list(local.shape)
    if shape is None:
        checked = check_placements(full, mesh, placements, uneven=True)
        for placement, size in zip(checked, mesh_sizes(mesh), strict=True):
            if isinstance(placement, Shard):
                full[placement.dim] *= size
    else:
        full = list(shape)
    checked = check_placements(full, mesh, placements, uneven=shape is not None)
    expected = local_shape(full, mesh_sizes(mesh), checked, coordinate_in(mesh))
    if expected != tuple(local.shape):
        raise ValueError(
            f"shape {full} over {describe_mesh(mesh)}, {list(checked)}: local tensor of global rank {dist.get_rank()} "
            f"has shape {list(local.shape)}, expected {list(expected)}"
        )
    return _wrap_local(local.contiguous(), mesh, checked, torch.Size(full))


def from_global(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Create a DTensor from a replicated tensor, without communication.

    Like :func:`torch.distributed.tensor.distribute_tensor` with ``src_data_rank=None``, but differentiable with respect
    to non-leaf tensors: the backward pass gathers the gradient, so it is the full one on every rank.

    Args:
        tensor: full tensor, the same on every rank. Sizes need not be divisible: it is sharded as by
            :func:`torch.chunk`.
        mesh: torch's mesh.
        placements: torch's placements, one per mesh axis. For ``Partial``, the first rank keeps the tensor and the
            others get zeros.

    Raises:
        ValueError: if the placements are invalid.
    """
    return redistribute(from_local(tensor, mesh, [Replicate()] * mesh.ndim), placements)


def to_mesh(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """Move a replicated DTensor to another mesh. Differentiable; no communication.

    Args:
        tensor: DTensor that is replicated over its mesh.
        mesh: mesh that contains this process; all its ranks hold the same tensor.

    Raises:
        ValueError: if the tensor is not replicated, or this process is not in the mesh.
    """
    if any(not isinstance(placement, Replicate) for placement in tensor.placements):
        raise ValueError(
            f"tensor of shape {list(tensor.shape)} over {describe_mesh(tensor.device_mesh)} has placements "
            f"{list(tensor.placements)}, expected Replicate to move it to {describe_mesh(mesh)}: use "
            f"redistribute(tensor, placements, mesh), which gathers it first"
        )
    coordinate_in(mesh)
    local = tensor.to_local(grad_placements=tensor.placements)
    return _wrap_local(local, mesh, (Replicate(),) * mesh.ndim, tensor.shape)


def redistribute(
    tensor: DTensor, placements: Sequence[Placement], mesh: DeviceMesh | None = None, *, links: Links = None
) -> DTensor:
    """Redistribute a DTensor to other placements. Differentiable; all ranks of the mesh call it.

    Like :meth:`DTensor.redistribute`, but runs the cheapest collectives found by :func:`plan_redistribution`, uses a
    real all-to-all on CPU, and also redistributes to ``Partial``. Values and gradients are the same.

    Args:
        tensor: torch's DTensor.
        placements: torch's placements, one per mesh axis. Sizes need not be divisible.
        mesh: another mesh. The tensor is replicated, moved by :func:`to_mesh`, and then redistributed.
        links: link between the ranks of the mesh; see :func:`plan_redistribution`.

    Returns:
        A new, contiguous DTensor; ``tensor`` itself if it has these placements already.

    Raises:
        ValueError: if the old or new placements are invalid, or this process is not in the mesh.
    """
    if mesh is not None and mesh != tensor.device_mesh:
        replicated = redistribute(tensor, [Replicate()] * tensor.device_mesh.ndim)
        return redistribute(to_mesh(replicated, mesh), placements, links=links)
    mesh = tensor.device_mesh
    layout = check_placements(tensor.shape, mesh, tensor.placements, uneven=True)
    target = check_placements(tensor.shape, mesh, placements, uneven=True)
    if layout == target:
        return tensor
    coordinate_in(mesh)
    run = partial(_redistributed, layout=layout, target=target, links=links)
    return with_gradient(tensor, run, partial(redistribute, placements=gradient_placements(layout), links=links))


def _redistributed(tensor: DTensor, layout: Placements, target: Placements, links: Links) -> DTensor:
    """Redistribute without autograd."""
    local, mesh, shape = tensor.to_local(), tensor.device_mesh, tensor.shape
    for step in plan_redistribution(shape, local.dtype, mesh, layout, target, links):
        gathered = [Replicate() if axis in step.axes else placement for axis, placement in enumerate(layout)]
        local = step.apply(local, mesh, shape=local_shape(shape, mesh_sizes(mesh), gathered, coordinate_in(mesh)))
        layout = layout_after(layout, step.collective, step.axes, step.shard_dims)
    return _wrap_local(local.contiguous(), mesh, target, shape)


def _wrap_local(local: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    dtensor: DTensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return dtensor


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """Replace a parameter by an ``nn.Parameter`` that is a DTensor.

    Replaces it wherever ``module`` and its submodules hold it, so tied parameters stay tied. The gradient of the new
    parameter is None; create the optimizer afterwards.

    Args:
        module: module that contains the parameter, at any depth.
        name: name of the parameter as in ``module.named_parameters``, such as ``mlp.up.weight``. Its values are the
            same on every rank.
        mesh: torch's mesh.
        placements: torch's placements, one per mesh axis. Sizes need not be divisible.

    Returns:
        The new parameter.

    Raises:
        ValueError: if the parameter does not exist or is sharded already, or the placements are invalid for it.
    """
    old = dict(module.named_parameters(remove_duplicate=False)).get(name)
    if old is None:
        raise ValueError(
            f"{type(module).__name__} does not have a parameter {name!r}: pass a name of named_parameters()"
        )
    if isinstance(old, DTensor) or description(old) is not None:
        raise ValueError(f"{name} is sharded already: redistribute it, or shard the parameter of the unsharded module")
    new = nn.Parameter(from_global(old.detach(), mesh, placements), requires_grad=old.requires_grad)
    for child in module.modules():
        for local_name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(child, local_name, new)
    return new


def named_sharded_parameters(
    module: nn.Module,
    prefix: str = "",
    recurse: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the sharded parameters of ``module.named_parameters``, each once, under its first name.

    Sharded parameters are DTensors that are not ``Replicate`` on every axis, and the shards of shardconv's layers.

    Args:
        module: module to search.
        prefix: prefix of all names.
        recurse: include the parameters of submodules.
    """
    seen: set[int] = set()
    for path, child in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        shards = dict(child.own_shards()) if isinstance(child, ParallelModule) else {}
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in seen and (name in shards or is_sharded(parameter)):
                seen.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a DTensor that is not fully replicated, or a shard of a shardconv layer."""
    if isinstance(parameter, DTensor):
        return any(not isinstance(placement, Replicate) for placement in parameter.placements)
    shard = description(parameter)
    return shard is not None and shard[0].dim is not None
