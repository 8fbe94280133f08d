"""Parameters that lie over a mesh: put into a module, and found in one.

Stands on ``nn.Parameter`` of torch's DTensor, and on what :mod:`shardconv.layers` says of the shards of its own layers.
"""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from shardconv.layers.sharding import ParallelModule, description
from shardconv.tensor.sharded import from_global


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """Put an ``nn.Parameter`` of a DTensor in the place of a parameter.

    It replaces the parameter wherever ``module`` and its submodules hold it, so that what is tied stays tied. The new
    one has no gradient yet; an optimizer has to be made after it.

    Args:
        module: a module, or the root of several.
        name: of the parameter, as ``module.named_parameters`` has it: ``weight``, or ``mlp.up.weight``. Every rank has
            the same values.
        mesh: torch's mesh.
        placements: torch's, one for each axis. Sizes need not divide.

    Returns:
        The new parameter.

    Raises:
        ValueError: if there is no such parameter, it is sharded already, or it cannot lie so.
    """
    old = dict(module.named_parameters(remove_duplicate=False)).get(name)
    if old is None:
        raise ValueError(f"{type(module).__name__} has no parameter {name!r}")
    if isinstance(old, DTensor) or description(old) is not None:
        raise ValueError(f"{name} is sharded already: redistribute it, or shard that of the plain layer")
    new = nn.Parameter(from_global(old.detach(), mesh, placements), requires_grad=old.requires_grad)
    for child in module.modules():
        for own, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(child, own, new)
    return new


def named_sharded_parameters(
    module: nn.Module,
    prefix: str = "",
    recurse: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    """As ``module.named_parameters``, those that are sharded: each once, under the first of its names.

    These are parameters of DTensor that are not ``Replicate`` on every axis, and the shards of shardconv's own layers.

    Args:
        module: the module.
        prefix: of all names.
        recurse: whether to look into submodules.
    """
    seen: set[int] = set()
    for place, child in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        shards = dict(child.own_shards()) if isinstance(child, ParallelModule) else {}
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in seen and (name in shards or is_sharded(parameter)):
                seen.add(id(parameter))
                yield f"{place}.{name}" if place else name, parameter


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a DTensor that is not whole everywhere, or a shard of a layer of shardconv's."""
    if isinstance(parameter, DTensor):
        return any(not isinstance(placement, Replicate) for placement in parameter.placements)
    described = description(parameter)
    return described is not None and described[0].dim is not None
