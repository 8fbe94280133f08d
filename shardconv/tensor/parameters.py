"""Shard a parameter of a module as a DTensor, and list the sharded parameters of a module."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from shardconv.layers.parallel_module import ParallelModule, description
from shardconv.tensor.sharded import from_global


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
