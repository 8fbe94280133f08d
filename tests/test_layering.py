"""Imports between the packages of shardconv point downward, at the top of a module and in functions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardconv

PACKAGE = Path(shardconv.__file__).parent
#: Packages and modules from the bottom up: each may import itself and those before it.
LAYERS = [
    "lazy",
    "option_names",
    "errors",
    "parent",
    "rank_failures",
    "exits",
    "error_messages",
    "temporary",
    "formatting",
    "protocols",
    "storage",
    "dcp_listing",
    "torch_listing",
    "plan",
    "layouts",
    "formats",
    "checkpoint",
    "distributed",
    "layers",
    "tensor",
    "convert",
    "hf",
    "runtime",
    "engines",
    "proof",
    "progress",
    "html",
    "console",
    "commands",
    "cli",
    "__main__",
]
#: Pairs of a layer and one below it that it may not import.
APART = {
    ("distributed", "checkpoint"), ("layers", "checkpoint"), ("tensor", "checkpoint"), ("console", "checkpoint"),
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
    if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file():
        return part
    return getattr(shardconv, part).__module__.split(".")[1]


def modules_of(layer: str) -> list[Path]:
    return sorted((PACKAGE / layer).rglob("*.py")) or [PACKAGE / f"{layer}.py"]


def test_every_module_is_in_a_layer():
    """Except for shardconv/__init__.py, which imports public names on use."""
    modules = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert modules - {"__init__"} == set(LAYERS)


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


@pytest.mark.parametrize("layer", ["storage", "plan", "checkpoint", "html"])
def test_layers_do_not_import_torch(layer):
    wrong = [
        path.name for path in modules_of(layer) if any(name.split(".")[0] == "torch" for name in imported_names(path))
    ]
    assert wrong == []


def test_only_hf_imports_transformers():
    found = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] == "transformers" for name in imported_names(path))
    }
    assert found == {"hf"}


def test_only_the_console_module_prints():
    """Otherwise --json and -q would not apply. The other module is a script for a process of its own."""
    printing = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bprint\(|click\.(s?echo|secho)\(|sys\.stdout\.write", path.read_text())
    ]
    assert sorted(printing) == ["console.py", "torch_listing.py"]
