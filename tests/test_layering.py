"""Imports between the packages of shardconv point downward, at the top of a module and in functions."""

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import shardconv
from tools.code_lines import imported

PACKAGE = Path(shardconv.__file__).parent
#: Packages and modules from the bottom up: each may import itself and those before it.
LAYERS = [
    "support", "plan.placement", "plan.grid", "plan.families", "plan", "files", "layouts", "formats",
    "checkpoint.engine", "checkpoint.sources", "checkpoint.split", "checkpoint.adapters", "checkpoint.output",
    "checkpoint.operations",
    "distributed", "layers", "tensor", "policies", "convert", "hf", "runtime", "engines", "proof", "html", "commands",
    "cli", "__main__",
]  # fmt: skip
#: Pairs of a layer and one below it that it may not import.
APART = {
    *product(("distributed", "layers", "tensor"), (layer for layer in LAYERS if layer.startswith("checkpoint"))),
    ("proof", "engines"),
    *(("html", layer) for layer in LAYERS[LAYERS.index("distributed") : LAYERS.index("html")]),
}  # fmt: skip


def imported_names(path: Path) -> Iterator[str]:
    """The full names that a module imports, without those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))


def layer_of(name: str) -> str:
    """The layer of the module that defines a name."""
    part = name.split(".")[1]
    if not ((PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()):
        name = getattr(shardconv, part).__module__
    found = [layer for layer in LAYERS if f"{name}.".startswith(f"shardconv.{layer}.")]
    assert found, f"{name}: is not in a layer"
    return found[0]


def modules_of(layer: str) -> list[Path]:
    path = PACKAGE / layer.replace(".", "/")
    return sorted(path.rglob("*.py")) or [path.with_suffix(".py")]


def test_every_module_is_in_a_layer():
    """Except for those that import public names or modules on use."""
    modules = set(PACKAGE.rglob("*.py")) - {path for layer in LAYERS for path in modules_of(layer)}
    assert {path.relative_to(PACKAGE).as_posix() for path in modules} == {"__init__.py", "checkpoint/__init__.py"}


def test_every_module_is_imported():
    """Except for packages, and entry points."""
    paths = {path.relative_to(PACKAGE.parent).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    modules = {".".join(path.parts) for path in paths if path.name != "__init__"}
    unused = modules.difference(*(imported(path.read_text(), modules) for path in paths.values()))
    assert unused == {"shardconv.__main__", "shardconv.engines.vllm_plugin"}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downward(layer):
    allowed = {name for name in LAYERS[: LAYERS.index(layer) + 1] if (layer, name) not in APART}
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules_of(layer)
        for name in imported_names(path)
        if name.startswith("shardconv.") and name != "shardconv.__version__" and layer_of(name) not in allowed
    }
    assert wrong == set()


@pytest.mark.parametrize("layer", [*LAYERS[: LAYERS.index("distributed")], "html"])
def test_layers_do_not_import_torch(layer):
    importing = {
        path.name for path in modules_of(layer) if any(name.split(".")[0] == "torch" for name in imported_names(path))
    }
    assert importing == set()


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_only_hf_imports(library):
    found = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] == library for name in imported_names(path))
    }
    assert found == {"hf"}


def test_only_the_console_module_prints():
    """Otherwise --json and -q would not apply. The other module is a script for a process of its own."""
    printing = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bprint\(|click\.(s?echo|secho)\(|sys\.stdout\.write", path.read_text())
    ]
    assert sorted(printing) == ["files/containers/unpickle.py", "support/console.py"]
