"""Every example in a docstring of the layers runs in one process and has the documented output."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest
import torch

import shardconv
import shardconv.convert
import shardconv.distributed
import shardconv.layers
import shardconv.tensor

PACKAGES = [shardconv.distributed, shardconv.layers, shardconv.tensor, shardconv.convert]
MODULES = [
    importlib.import_module(f"{package.__name__}.{module.name}")
    for package in PACKAGES
    for module in pkgutil.iter_modules(package.__path__)
]


def public(module: ModuleType) -> dict[str, object]:
    """The public classes and functions that a module defines."""
    return {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples(module):
    names = {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
    names |= {name: thing for each in MODULES for name, thing in public(each).items()}
    failed, _ = doctest.testmod(module, extraglobs={**names, "torch": torch})
    shardconv.distributed.destroy_parallel()
    assert failed == 0


def test_public_layers_have_examples():
    """Only functions for use between layers may lack them."""
    named = [getattr(shardconv.layers, name) for name in shardconv.layers.__all__]
    classes = [thing for thing in named if isinstance(thing, type)]
    functions = [getattr(shardconv.layers.functional, name) for name in shardconv.layers.functional.__all__]
    functions += [shardconv.init_parallel, shardconv.convert_parallel_linear, shardconv.convert_parallel_embedding]
    lacking = [thing.__name__ for thing in classes + functions if ">>> " not in (thing.__doc__ or "")]
    assert lacking == ["ParallelModule"]
