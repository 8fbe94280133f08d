"""Errors, exit codes, the console and imports on first use for every package. Imports no other package."""

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

#: Called with the finished amount of an activity, in bytes or as a count, and with the total.
Progress = Callable[[int, int], None]


def modules_on_use(package: str, names: Sequence[str]) -> Callable[[str], ModuleType]:
    """The ``__getattr__`` of a package: import one of its modules when the attribute with its name is first read.

    Callers write ``package.module.function()``, so that a module is imported by the call that needs it.

    Args:
        package: its full name.
        names: of these modules.
    """

    def module_on_use(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module {package!r} does not have an attribute {name!r}", name=name)
        return importlib.import_module(f"{package}.{name}")

    return module_on_use
