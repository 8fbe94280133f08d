"""Modules that a package imports on first use."""

import subprocess
import sys

import pytest

from shardconv import engines, storage
from shardconv.checkpoint import arrays


@pytest.mark.parametrize("package", [arrays, storage], ids=["arrays", "storage"])
def test_module_is_imported_when_it_is_read(package):
    name = package.__all__[0]
    code = (
        f"import sys, {package.__name__} as package; name = '{package.__name__}.{name}'; "
        f"print(name in sys.modules, package.{name}.__name__ == name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("package", [arrays, engines, storage], ids=["arrays", "engines", "storage"])
def test_other_names_are_not_attributes(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' does not have an attribute 'other'"):
        _ = package.other
