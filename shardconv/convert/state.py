"""To and from the state dict of the plain model.

A full state dict has the plain model's names and shapes, whatever the tp, so a checkpoint that was saved at one tp
continues at another.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardconv.layers import ParallelModule


def gather_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict that the plain model would have; all ranks have to call it, and all get it.

    Args:
        module: a module, some of whose parameters are shards.

    Returns:
        Name to full tensor, in its original order and without padding, detached, on the device of the shard. What is no
        shard is as ``module.state_dict()`` has it.

    Example:
        >>> state = gather_state_dict(model)  # doctest: +SKIP
    """
    state: dict[str, Any] = module.state_dict()
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, ParallelModule):
            for name, _ in child.own_shards():
                key = f"{prefix}.{name}" if prefix else name
                state[key] = child.gather_parameter(name).detach()
    return state


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True, assign: bool = False
) -> Any:
    """Load the state dict of the plain model: each rank keeps its shards.

    Args:
        module: a module, some of whose parameters are shards.
        state: name to full tensor.
        strict: as ``nn.Module.load_state_dict``'s.
        assign: likewise.

    Returns:
        What ``nn.Module.load_state_dict`` returns: missing and unexpected keys.

    Raises:
        RuntimeError: torch's own, for missing, unexpected and misshaped keys; shapes in it are those of full tensors.
    """
    full: OrderedDict[str, Tensor] = OrderedDict(state)
    metadata = dict(getattr(state, "_metadata", {}))
    for prefix, _ in module.named_modules(remove_duplicate=False):
        metadata[prefix] = {**metadata.get(prefix, {}), "is_full": True}
    full._metadata = metadata  # type: ignore[attr-defined] # noqa: SLF001 - where torch keeps it, and hands it down
    return module.load_state_dict(full, strict=strict, assign=assign)
