"""Count the code of each package: files, lines of code, and modules with one importer.

    python -m tools.code_lines [COMMIT]

Docstrings, comments and blank lines are not counted, except in tests. With a commit, the table compares it
with the working tree.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path, PurePath

PACKAGE = "shardconv"
#: Tokens that are not code.
_NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip


def code_lines(text: str) -> int:
    """The number of lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def imported(text: str, modules: set[str]) -> set[str]:
    """The modules of the package that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found & modules


def sources(commit: str | None) -> dict[PurePath, str]:
    """Path to text of the Python files of the package and of the tests, in a commit or in the working tree."""
    if commit is None:
        return {path: path.read_text() for root in (PACKAGE, "tests") for path in Path(root).rglob("*.py")}
    names = _git("ls-tree", "-r", "--name-only", commit, PACKAGE, "tests").splitlines()
    return {PurePath(name): _git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}


def counts(texts: dict[PurePath, str]) -> dict[str, Counter[str]]:
    """Package to its numbers of files and lines, and of modules that one other module imports."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    modules = {".".join(path.with_suffix("").parts): path for path in texts if path.parts[0] == PACKAGE}
    importers = Counter(name for path in modules.values() for name in imported(texts[path], set(modules)))
    for name, path in modules.items():
        row = Counter(files=1, lines=code_lines(texts[path]), one_importer=int(importers[name] == 1))
        for package in (path.parts[1] if len(path.parts) > 2 else "(top)", "all"):
            rows[package].update(row)
    tests = [text for path, text in texts.items() if path.parts[0] == "tests"]
    rows["tests"].update(files=len(tests), lines=sum(text.count("\n") for text in tests))
    return rows


def main() -> None:
    """Print a table in Markdown."""
    tables = [counts(sources(commit)) for commit in [*sys.argv[1:2], None]]
    keys = ("files", "lines", "one_importer")
    print("| package |" + " files | lines | one importer |" * len(tables))
    print("|---|" + "--:|" * 3 * len(tables))
    for package in [*sorted({*tables[0], *tables[-1]} - {"all", "tests"}), "all", "tests"]:
        print(f"| {package} |", *(f"{table[package][key]:,} |" for table in tables for key in keys))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
