"""State dicts with full tensors, of modules whose parameters are sharded.

A full state dict has the names and shapes of the unsharded model at any tensor parallel size, so that training can
continue at another one.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from shardconv.layers import ParallelModule


def gather_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Gather the state dict of the unsharded model on every rank. All ranks have to call it.

    Args:
        module: a module, some of whose parameters are shards.

    Returns:
        Name to full tensor, in its original order and without padding, detached, on the device of the shard. Tied names
        have the same tensor. Tensors that are not sharded are those of ``module.state_dict()``.

    Example:
        >>> state = gather_state_dict(model)  # doctest: +SKIP
    """
    state: dict[str, Tensor] = module.state_dict()
    gathered: dict[Tensor, Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, ParallelModule):
            for name, _ in child.own_shards():
                parameter = child.own_tensor(name)
                if parameter not in gathered:
                    gathered[parameter] = child.gather_parameter(name).detach()
                state[f"{prefix}.{name}" if prefix else name] = gathered[parameter]
    return state


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True, assign: bool = False
) -> _IncompatibleKeys:
    """Load the state dict of the unsharded model: each rank keeps its shards.

    Args:
        module: a module, some of whose parameters are shards.
        state: name to full tensor.
        strict: as in ``nn.Module.load_state_dict``.
        assign: as there; tied parameters stay tied, unless ``state`` has different tensors for them.

    Returns:
        The missing and unexpected keys, as ``nn.Module.load_state_dict``.

    Raises:
        RuntimeError: the error of ``nn.Module.load_state_dict``, with the shapes of full tensors.
    """
    full: OrderedDict[str, Tensor] = OrderedDict(state)
    metadata = dict(getattr(state, "_metadata", {}))
    for prefix, _ in module.named_modules(remove_duplicate=False):
        metadata[prefix] = {**metadata.get(prefix, {}), "is_full": True}
    vars(full)["_metadata"] = metadata  # where torch keeps it, and passes it to children
    ties = _ties(module) if assign else []
    result = module.load_state_dict(full, strict=strict, assign=assign)
    for owners in ties:
        _tie(owners, state)
    return result


class _Owner(NamedTuple):
    """A module that holds a parameter, with the names of the parameter there and in the state dict."""

    module: nn.Module
    name: str
    key: str


def _ties(module: nn.Module) -> list[list[_Owner]]:
    """Find the owners of each parameter that several modules share."""
    owners: defaultdict[nn.Parameter, list[_Owner]] = defaultdict(list)
    for prefix, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            owners[parameter].append(_Owner(child, name, f"{prefix}.{name}" if prefix else name))
    return [found for found in owners.values() if len(found) > 1]


def _tie(owners: list[_Owner], state: Mapping[str, Tensor]) -> None:
    """Tie parameters again that torch replaced one by one, also those that are not in ``state``."""
    loaded = [owner for owner in owners if owner.key in state]
    if loaded and all(_is_same_tensor(state[loaded[0].key], state[owner.key]) for owner in loaded):
        parameter = loaded[0].module.get_parameter(loaded[0].name)
        for owner in owners:
            owner.module.register_parameter(owner.name, parameter)


def _is_same_tensor(one: Tensor, other: Tensor) -> bool:
    is_view = not one.is_meta and one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return one is other or (is_view and one.stride() == other.stride())
