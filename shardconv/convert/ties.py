"""Tied parameters: the modules that share a parameter, inside and outside of a converted module."""

import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cache

import torch
from torch import nn


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module itself, by name."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def tied_modules(module: nn.Module, layers: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Find the other modules in ``module`` that share a parameter with one of the layers."""
    layers = list(layers)
    owned = {id(parameter) for layer in layers for parameter in own_parameters(layer).values()}
    return [
        (name, child)
        for name, child in module.named_modules()
        if not any(child is layer for layer in layers)
        and any(id(parameter) in owned for parameter in own_parameters(child).values())
    ]


def layer_label(module: nn.Module, name: str, layer: nn.Module) -> str:
    """Format the name of a layer for messages, with the names of the layers that it is tied to."""
    label = name or "the layer"
    tied = [other or type(child).__name__ for other, child in tied_modules(module, [layer])]
    return f"{label} (tied to {', '.join(tied)})" if tied else label


def owner_outside(module: nn.Module, parameters: Sequence[nn.Parameter]) -> nn.Module | None:
    """Find a module outside of ``module`` that holds one of the parameters; None if there is none.

    Args:
        module: a module.
        parameters: parameters of modules in it, without duplicates. Nothing but this list and the modules may refer to
            them.
    """
    inside = {id(child._parameters): child._parameters for child in module.modules()}  # noqa: SLF001 - who holds them
    owners = Counter(id(parameter) for held in inside.values() for parameter in held.values())
    counts = zip(parameters, _reference_counts(parameters), strict=True)
    held_elsewhere = [one for one, count in counts if count - owners[id(one)] > _references_without_owner()]
    if not held_elsewhere or _find_owner(held_elsewhere, inside.keys()) is None:
        return None
    gc.collect()  # the owner may be unreachable, in a reference cycle
    return _find_owner(held_elsewhere, inside.keys())


def _reference_counts(parameters: Sequence[nn.Parameter]) -> list[int]:
    return [sys.getrefcount(parameter) for parameter in parameters]


@cache
def _references_without_owner() -> int:
    """Count the references to a parameter that is in a list only, which depends on the version of Python."""
    return _reference_counts([nn.Parameter(torch.empty(0))])[0]


def _find_owner(parameters: Sequence[nn.Parameter], inside: Collection[int]) -> nn.Module | None:
    """Search all objects for a module outside that holds a parameter; takes tenths of a second."""
    found = [referrer for referrer in gc.get_referrers(*parameters) if isinstance(referrer, dict)]
    outside = {id(referrer) for referrer in found}.difference(inside)
    if not outside:
        return None
    modules = (one for one in gc.get_objects() if issubclass(type(one), nn.Module))
    return next((one for one in modules if id(vars(one).get("_parameters")) in outside), None)
