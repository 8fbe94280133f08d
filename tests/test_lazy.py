"""Modules that a package imports on first use."""

import subprocess
import sys

import pytest

from shardconv import engines
from shardconv.checkpoint import engine, operations
from shardconv.files import containers, storage


@pytest.mark.parametrize("package", [engine, operations, containers, storage], ids=lambda one: one.__name__)
def test_module_is_imported_when_it_is_read(package):
    code = (
        f"import sys, {package.__name__} as package\n"
        "for name in package.__all__:\n"
        "    path = f'{package.__name__}.{name}'\n"
        "    print(path in sys.modules, end=' ')\n"
        "    assert getattr(package, name) is sys.modules[path]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"  # modules import one another


def test_package_of_engines_does_not_import_them():
    """vLLM reads the environment when it is imported."""
    code = "import sys, shardconv.engines; print(sorted({'vllm', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", [engine, engines, storage], ids=["engine", "engines", "storage"])
def test_other_names_are_not_attributes(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' does not have an attribute 'other'"):
        _ = package.other
