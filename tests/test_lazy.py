"""Modules that a package imports on first use."""

import subprocess
import sys

import click
import pytest

from shardconv import commands, engines
from shardconv.checkpoint import engine, operations
from shardconv.cli import cli
from shardconv.files import containers, storage
from tests.support.checkpoints import DEMO


@pytest.mark.parametrize("package", [engine, operations, containers, storage, commands], ids=lambda one: one.__name__)
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


def test_command_does_not_import_others():
    code = (
        "import sys\n"
        "from shardconv import commands\n"
        "from shardconv.cli import cli\n"
        "cli.main(['plan', sys.argv[1], '-q'], standalone_mode=False)\n"
        "print([name for name in commands.__all__ if f'shardconv.commands.{name}' in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(DEMO)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['plan']"


def test_error_of_a_command_module_is_not_an_unknown_command(monkeypatch):
    def fail(name):
        raise KeyError(name)

    monkeypatch.delattr(commands, "split", raising=False)
    monkeypatch.setattr(commands, "__getattr__", fail)
    with pytest.raises(KeyError):
        cli.main(["split", "-h"], standalone_mode=False)
    with pytest.raises(click.exceptions.NoSuchCommand):
        cli.main(["splitt"], standalone_mode=False)
