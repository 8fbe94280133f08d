"""Hooks of the documentation site.

They add the pages that lie outside of docs/ and the generated ones, replace links to files that are not pages by their
paths, and add charts to the results of benchmarks.
"""

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import click

import shardconv
from shardconv.cli import cli
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
#: Generated pages, to their introductions.
_API, _OPTIONS = "api.md", "command-line.md"
_INTRODUCTIONS = {
    _API: "# Functions and classes\n\nThe public names of `shardconv`, with their docstrings. [Python API](python.md) "
    "introduces them; [reports](reports.md) lists the fields of reports.",
    _OPTIONS: "# Options of each command\n\nThe output of `shardconv COMMAND --help`. [Commands](commands.md) explains "
    "the options.",
}
_ROLE = re.compile(r":\w+:`(?P<short>~?)(?P<name>[\w.]+)`")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - tests import this module without mkdocs

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    for page, parts in ((_API, _api()), (_OPTIONS, _options())):
        files.append(File.generated(config, page, content="\n\n".join([_INTRODUCTIONS[page], *parts])))
    return files


def _api() -> list[str]:
    """A section for each public name."""
    objects = {name: getattr(shardconv, name) for name in dir(shardconv) if not name.startswith("_")}
    return [f"::: {one.__module__}.{name}\n    options: {{heading: {name}}}" for name, one in objects.items()]


def _options() -> list[str]:
    """A section for each command, with its help text."""
    sections = []
    for name, command in sorted(cli.commands.items()):
        if not command.hidden:
            context = click.Context(command, info_name=f"shardconv {name}", max_content_width=100, terminal_width=100)
            sections.append(f"## shardconv {name}\n\n```text\n{command.get_help(context)}\n```")
    return sections


def on_page_markdown(markdown: str, *, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Resolve links between pages, and add charts to the results of benchmarks."""
    del config, files
    return with_charts(site_links(markdown, page.file.src_uri))


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
