"""Hooks of the documentation site.

They add the pages that lie outside of docs/, generate the reference of functions, reports and options, replace links to
files that are not pages by their paths, and add charts to the results of benchmarks.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import click

import shardconv
from shardconv.cli import cli
from tools.json_schemas import REPORTS
from tools.plots import with_charts

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
#: File of the repository to its page on the site.
PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "benchmarks/RESULTS.md": "project/results.md",
    "examples/README.md": "project/examples.md",
}
#: Purpose to the public names of ``shardconv``, in the order of their section on the page of functions and classes.
PURPOSES = {
    "Rewrite checkpoints": ("split", "merge", "reshard", "verify", "pad", "unpad", "WriteOptions"),
    "Plan": (
        "make_plan", "report_plan", "PlanOptions", "Plan", "Placement", "estimate_cost", "propose_plan", "prove",
        "check_source", "check_engine",
    ),
    "Load": ("load",),
    "Convert models": (
        "convert_model", "convert_parallel_linear", "convert_parallel_embedding", "gather_state_dict",
        "load_full_state_dict", "Policy", "Layer",
    ),
    "Build and train parallel models": (
        "init_parallel", "destroy_parallel", "ParallelLinear", "ColumnParallelLinear", "RowParallelLinear",
        "LoRALinear", "ParallelEmbedding", "VocabParallelEmbedding", "VocabParallelClassifier",
        "ParallelCrossEntropyLoss", "ParallelDropout", "clip_grad_norm_",
    ),
    "Errors and warnings": (
        "ShardconvError", "SourceError", "PlanError", "SplitCheckpointError", "IntegrityError", "PlanWarning",
    ),
}  # fmt: skip
#: Pages with tables that need the width of the table of contents.
_WIDE = {"models.md", "diffusion-models.md"}
#: Classes of the page of reports that no command prints with ``--json``, or only as a part of another.
_PARTS_OF_REPORTS = (
    "shardconv.checkpoint.operations.plan_report.TensorReport", "shardconv.plan.planner.PaddingReport",
    "shardconv.proof.ranks.Proof", "shardconv.runtime.estimate.TpCost", "shardconv.hf.names.ModelCheck",
    "shardconv.engines.check.EngineReport",
)  # fmt: skip
_ROLE = re.compile(r":\w+:`(?P<short>~?)(?P<name>[\w.]+)`")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - tests import this module without mkdocs

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def report_classes() -> list[str]:
    """The full names of the classes of reports."""
    return [*REPORTS.values(), *_PARTS_OF_REPORTS]


def _section(path: str, name: str) -> str:
    """The docstring of an object, under its name."""
    return f"::: {path}\n    options: {{heading: {name}}}"


def _api() -> Iterator[str]:
    """The docstrings of the public names, by purpose."""
    for purpose, names in PURPOSES.items():
        yield f"## {purpose}"
        yield from (_section(f"{getattr(shardconv, name).__module__}.{name}", name) for name in names)


def _reports() -> Iterator[str]:
    """The first line and a table of the fields of each class of reports."""
    for path in report_classes():
        module, _, name = path.rpartition(".")
        report = getattr(importlib.import_module(module), name)
        first = docstring_markdown(report.__doc__.partition("\n\n")[0])
        rows = [f"| `{field}` | {contents} |" for field, contents in fields_of(report).items()]
        yield "\n".join([f"## {name}\n\n{first} Defined in `{module}`.\n\n| field | contents |\n|---|---|", *rows])


def fields_of(report: type) -> dict[str, str]:
    """Field to description of a class and its bases, from the section of attributes in their docstrings."""
    found: dict[str, str] = {}
    for one in reversed(report.__mro__):
        section = inspect.cleandoc(one.__doc__ or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
        fields = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
        found |= {name: docstring_markdown(" ".join(text.split())) for name, text in fields}
    return found


def _options() -> Iterator[str]:
    """The help text of each command."""
    for name, command in sorted(cli.commands.items()):
        if not command.hidden:
            context = click.Context(
                command, info_name=f"shardconv {name}", max_content_width=100, terminal_width=100,
                **cli.context_settings,  # a command keeps the options for help of its first context
            )  # fmt: skip
            yield f"## shardconv {name}\n\n```text\n{command.get_help(context)}\n```"


#: Name in ``<!-- generated: NAME -->`` of a page to the function that generates the text.
_GENERATED = {"api": _api, "options": _options, "reports": _reports}


def with_reference(markdown: str) -> str:
    """A page with the parts of the reference that are generated from the code."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda match: "\n\n".join(_GENERATED[match[1]]()), markdown)


def on_page_markdown(markdown: str, *, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Resolve links between pages, generate the reference, and add charts to the results of benchmarks."""
    del config, files
    if page.file.src_uri in _WIDE:
        page.meta["hide"] = ["toc"]
    return with_charts(with_reference(site_links(markdown, page.file.src_uri)))


def site_links(markdown: str, page: str) -> str:
    """The text of a page with the links of the site.

    Args:
        markdown: the text, with links relative to its file in the repository.
        page: the page on the site.
    """
    of_page = {site: source for source, site in PAGES.items()}
    folder = PurePosixPath(of_page.get(page, f"docs/{page}")).parent

    def link(match: re.Match[str]) -> str:
        target, text, anchor = match["target"], match["text"], match["anchor"] or ""
        if "://" in target:
            return match[0]
        path = _resolved(folder / target)
        site = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if site is None:
            return text if text.strip("`") == path else f"{text} (`{path}`)"
        up = "../" * (len(PurePosixPath(page).parts) - 1)
        return f"[{text}]({up}{site}{anchor})"

    return _LINK.sub(link, markdown)


def _resolved(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def docstring_markdown(docstring: str) -> str:
    """A docstring with Sphinx's references as code, and its example under the heading that griffe knows."""
    text = _ROLE.sub(lambda role: f"`{role['name'].rpartition('.')[2] if role['short'] else role['name']}`", docstring)
    return re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
