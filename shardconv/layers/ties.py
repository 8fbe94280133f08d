"""Parameters that several modules share.

Owns which modules share a parameter with which, inside of a module and outside of it.
"""

import gc
from collections.abc import Iterable, Sequence

from torch import nn


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module itself, by name."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def tied_modules(module: nn.Module, layers: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Other modules in ``module`` that share a parameter with one of the layers."""
    layers = list(layers)
    owned = {id(parameter) for layer in layers for parameter in own_parameters(layer).values()}
    return [
        (name, child)
        for name, child in module.named_modules()
        if not any(child is layer for layer in layers)
        and any(id(parameter) in owned for parameter in own_parameters(child).values())
    ]


def layer_label(module: nn.Module, name: str, layer: nn.Module) -> str:
    """The name of a layer, and of those that it is tied to, for messages."""
    label = name or "the layer"
    tied = [other or type(child).__name__ for other, child in tied_modules(module, [layer])]
    return f"{label} (tied to {', '.join(tied)})" if tied else label


def owner_outside(module: nn.Module, parameters: Sequence[nn.Parameter]) -> nn.Module | None:
    """A module outside of ``module`` that holds one of the parameters."""
    if _owner_outside(module, parameters) is None:
        return None
    gc.collect()  # it may be in a cycle that nothing refers to
    return _owner_outside(module, parameters)


def _owner_outside(module: nn.Module, parameters: Sequence[nn.Parameter]) -> nn.Module | None:
    inside = {id(child._parameters) for child in module.modules()}  # noqa: SLF001 - what holds parameters
    found = [referrer for referrer in gc.get_referrers(*parameters) if isinstance(referrer, dict)]
    outside = {id(referrer) for referrer in found} - inside
    if not outside:
        return None
    modules = (one for one in gc.get_objects() if issubclass(type(one), nn.Module))
    return next((one for one in modules if id(vars(one).get("_parameters")) in outside), None)
