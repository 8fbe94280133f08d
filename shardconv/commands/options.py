"""Options of several commands: names, types, headings and help texts."""

import math
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click

from shardconv.commands.sections import ADAPTERS, DISPLAY, OUTPUT, PLAN, SOURCE, Decorator, section, together
from shardconv.files.containers.safetensors import TARGET_DTYPES
from shardconv.files.paths import local_path
from shardconv.files.storage.url import is_url
from shardconv.layouts import LAYOUTS, SOURCE_LAYOUTS
from shardconv.plan.engines import ENGINES, SHARDCONV

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class SourceFlags(TypedDict):
    """Values of the options with which a source is read."""

    config: Path | None
    follow_links: bool
    ignore: tuple[str, ...]
    source_layout: str | None


class PlanFlags(SourceFlags):
    """Values of :data:`plan_options`."""

    rules: str
    replicate: tuple[str, ...]
    head_dim: int | None
    experts: str
    engine: str | None
    pad: bool


class WriteFlags(TypedDict):
    """Values of :data:`write_options`."""

    overwrite: bool
    dry_run: bool
    resume: bool
    threads: int | None


def collect_plan(function: Callable[..., None]) -> Callable[..., None]:
    """Pass the values of :data:`plan_options` as one argument, ``plan``."""

    @wraps(function)
    def collected(*arguments: object, **options: object) -> None:
        plan = {name: options.pop(name) for name in PlanFlags.__annotations__}
        function(*arguments, plan=plan, **options)

    return collected


class _LocalPath(click.Path):
    """A path that is not a URL."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Check the text before it becomes a Path, which would drop a slash of a URL."""
        return super().convert(local_path(os.fspath(value)), param, ctx)


class _SourcePath(_LocalPath):
    """A path of a source or destination, or the URL of one, which stays a text."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """See :class:`_LocalPath`."""
        return value if is_url(value) else super().convert(value, param, ctx)


class _Family(click.types.StringParamType):
    """A text that the shell completes with the names of families, and with model types or files.

    Args:
        has_files: whether it may also be a file; otherwise it may be a model type.
    """

    def __init__(self, *, has_files: bool) -> None:
        self._has_files = has_files

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        """The names that begin with ``incomplete``; files come first, as bash drops the items before them."""
        del ctx, param
        from click.shell_completion import CompletionItem

        from shardconv.plan.families.loading import list_families

        families = list_families().families
        kinds = [] if self._has_files else [kind for served in families.values() for kind in served]
        names = [name for name in dict.fromkeys([*families, *kinds]) if name.startswith(incomplete)]
        files = [CompletionItem(incomplete, type="file")] if self._has_files else []
        return files + [CompletionItem(name) for name in names]


class _Count(click.IntRange):
    """A positive integer."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The integer."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"got {value!r}, expected an integer from 1", param, ctx)


class _Tp(_Count):
    """A tensor parallel size."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        """The end of the error for a missing value."""
        del param, ctx
        return "shardconv plan SRC lists the supported sizes"


class Number(click.FloatRange):
    """A number from 0, up to ``maximum`` if it is given."""

    def __init__(self, maximum: float | None = None) -> None:
        super().__init__(min=0, max=maximum)

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; NaN is not one, although it is in every range of click."""
        try:
            number = float(super().convert(value, param, ctx))
        except click.BadParameter:
            number = math.nan
        if math.isnan(number):
            end = "" if self.max is None else f" to {self.max:g}"
            self.fail(f"got {value!r}, expected a number from 0{end}", param, ctx)
        return number


COUNT, TP = _Count(), _Tp()


#: A path that :data:`SOURCE` parses.
SourcePath = str | Path
PATH = _LocalPath(path_type=Path)
SOURCE_PATH = _SourcePath(path_type=Path)
FAMILY = _Family(has_files=False)
_RULES = _Family(has_files=True)

# --- display: every command -----------------------------------------------------------------------------------------

common_options = section(
    DISPLAY,
    click.option("--json", "as_json", is_flag=True, help="Print the result, or the error, as one JSON object."),
    click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
)
output_options = together(
    section(DISPLAY, click.option("-q", "--quiet", is_flag=True, help="Print neither the result nor progress.")),
    common_options,
)

# --- source ---------------------------------------------------------------------------------------------------------

follow_links_option = section(
    SOURCE, click.option("--follow-links", is_flag=True, help="Follow links that lead out of the folder of SRC.")
)
ignore_option = section(
    SOURCE,
    click.option(
        "--ignore",
        metavar="PATTERN",
        multiple=True,
        help="Leave out the files of SRC that match this glob pattern. Repeatable.",
    ),
)
from_option = section(
    SOURCE,
    click.option(
        "--from",
        "source_layout",
        type=click.Choice(SOURCE_LAYOUTS),
        help="Read rank files of another tool in this layout. [default: detect it]",
    ),
)

# --- plan -----------------------------------------------------------------------------------------------------------

_TP = "Tensor parallel size: the number of ranks."
tp_option = section(PLAN, click.option("--tp", type=TP, required=True, metavar="N", help=_TP))
source_tp_option = section(
    PLAN, click.option("--tp", type=COUNT, metavar="N", help=f"{_TP} Required if SRC is not a split checkpoint.")
)


base_option = section(
    ADAPTERS,
    click.option(
        "--base",
        type=PATH,
        metavar="BASE",
        help="Shard SRC, a LoRA adapter, for this base model: a source, a split checkpoint or a config.json.",
    ),
)


def engine_option(default: str) -> Decorator:
    """``--for``; ``default`` is part of its help text."""
    text = f"Shard at the boundaries of this engine. [default: {default}]"
    return section(PLAN, click.option("--for", "engine", type=click.Choice([*ENGINES, SHARDCONV.name]), help=text))


pad_option = section(
    PLAN, click.option("--pad", is_flag=True, help="Pad heads and widths that do not divide by tp with zeros.")
)
plan_options = together(
    section(
        PLAN,
        click.option(
            "--rules",
            type=_RULES,
            default="auto",
            metavar="NAME|FILE",
            help="Use this family, or try the rules of this plan file (TOML or JSON) before those of the family. "
            "[default: the family of the config's model_type]",
        ),
        click.option(
            "--replicate", metavar="NAME", multiple=True, help="Replicate this tensor, or a pattern. Repeatable."
        ),
        click.option(
            "--head-dim", type=COUNT, metavar="N", help="Elements per attention head, for SRC without a config."
        ),
        click.option(
            "--experts",
            type=click.Choice(["tensor", "expert"]),
            default="tensor",
            help="Shard each expert over all ranks, or distribute whole experts over ranks. [default: tensor]",
        ),
    ),
    engine_option("shardconv run"),
    pad_option,
    section(SOURCE, click.option("--config", type=PATH, help="Read this config.json instead of that of SRC.")),
    follow_links_option,
    ignore_option,
    from_option,
)

# --- output ---------------------------------------------------------------------------------------------------------


def destination_option(metavar: str, text: str, default: str) -> Decorator:
    """``-o``; ``default`` is the name in the current folder."""
    text = f"{text} A URL of an object store is allowed. [default: {default}, here]"
    return section(OUTPUT, click.option("-o", "--output", type=SOURCE_PATH, metavar=metavar, help=text))


write_options = section(
    OUTPUT,
    click.option("--overwrite", is_flag=True, help="Replace what is at the destination."),
    click.option("--dry-run", is_flag=True, help="Plan and check, but write nothing."),
    click.option(
        "--resume", is_flag=True, help="Continue an interrupted run of this command, or start if there is none."
    ),
    click.option(
        "--threads", type=COUNT, metavar="N", help="Number of copying threads. [default: processors, at most 8]"
    ),
)
checksum_option = section(
    OUTPUT,
    click.option("--checksums/--no-checksums", default=True, help="Compute checksums while copying. [default: on]"),
)


def layout_option(default: str) -> Decorator:
    """``--layout``; ``default`` is the end of its help text."""
    text = (
        "Write the tensor names of SRC (native), with offsets for torch.distributed.checkpoint (dcp), or the files of "
        f"vLLM's sharded_state (vllm) or of Meta (meta). [default: {default}]"
    )
    return section(OUTPUT, click.option("--layout", type=_Layout(LAYOUTS), help=text))


class _Layout(click.Choice[str]):
    """A layout, with an error that names the one with vLLM's name."""

    def get_invalid_choice_message(self, value: object, ctx: click.Context | None) -> str:
        """The error for another text."""
        message = super().get_invalid_choice_message(value, ctx)
        return f"{message.rstrip('.')} (vLLM's sharded_state is --layout vllm)" if value == "sharded_state" else message


def dtype_option(heading: str) -> Decorator:
    """``--dtype`` of a split."""
    text = "Convert floating-point tensors to this data type, rounded to nearest, ties to even. [default: as in SRC]"
    return section(heading, click.option("--dtype", type=click.Choice([*TARGET_DTYPES]), help=text))


max_file_size_option = section(
    OUTPUT,
    click.option(
        "--max-file-size",
        metavar="SIZE",
        help="Write larger rank files as several files, with an index per rank. SIZE is such as 5GB or 5GiB.",
    ),
)
