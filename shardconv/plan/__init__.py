"""Plans: the sharded dim of every tensor of a checkpoint, as plain data and pure functions."""

import sys
from types import ModuleType
from typing import NoReturn


class _Package(ModuleType):
    """This package, which is easily taken for a function, as its command has the same name."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Name the functions."""
        raise TypeError("shardconv.plan is a package: use shardconv.make_plan, or shardconv.report_plan for its report")


sys.modules[__name__].__class__ = _Package
