"""Imports of SGLang on a CPU: packages with kernels, none of which a loader calls, are replaced by empty modules."""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch._inductor.select_algorithm  # noqa: F401 - before triton seems to be installed

from tools.torchvision import declare_operators

REPLACED = {"IPython", "sgl_kernel", "triton"}


class EmptyModule(ModuleType):
    """A module in which any name is a class, or a module that decorates functions."""

    __path__ = ()
    __version__ = "99"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else EmptyModule(name)

    def __call__(self, *arguments, **options):
        return arguments[0] if arguments and callable(arguments[0]) else self


class Finder(MetaPathFinder, Loader):
    """Finds the replaced packages."""

    def find_spec(self, fullname, path=None, target=None):
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in REPLACED else None

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        pass


sys.path.append(str(Path(__file__).parents[3] / ".venv" / "vision"))
declare_operators()
sys.meta_path.insert(0, Finder())
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when SGLang is imported
