"""Options of several commands: names, types and help texts."""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TypedDict, TypeVar

import click

from shardconv.checkpoint.header import TARGET_DTYPES
from shardconv.checkpoint.paths import local_path
from shardconv.layouts.choice import LAYOUTS
from shardconv.layouts.external import SOURCE_LAYOUTS
from shardconv.plan.engines import ENGINES, SHARDCONV
from shardconv.storage.url import is_url

Command = TypeVar("Command", bound=Callable[..., object])


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


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order of ``--help``."""

    def add(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return add


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
    """A path, or the URL of a remote file or folder, which stays a text."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """See :class:`_LocalPath`."""
        return value if is_url(value) else super().convert(value, param, ctx)


#: A path that :data:`SOURCE` parses.
SourcePath = str | Path
PATH = _LocalPath(path_type=Path)
SOURCE = _SourcePath(path_type=Path)
common_options = together(
    click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object."),
    click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
)
output_options = together(
    click.option("-q", "--quiet", is_flag=True, help="Print no result for people and no progress."), common_options
)
ignore_option = click.option(
    "--ignore",
    metavar="PATTERN",
    multiple=True,
    help="Leave out the files of SRC that match this glob pattern. Repeatable.",
)


base_option = click.option(
    "--base",
    type=PATH,
    metavar="BASE",
    help="Shard SRC, a LoRA adapter, for this base model: a source, a split checkpoint or a config.json.",
)
from_option = click.option(
    "--from",
    "source_layout",
    type=click.Choice(SOURCE_LAYOUTS),
    help="Read rank files of another tool in this layout. [default: detect it]",
)


def engine_option(default: str) -> Callable[[Command], Command]:
    """``--for``; ``default`` is part of its help text."""
    text = f"Shard at the boundaries of this engine. [default: {default}]"
    return click.option("--for", "engine", type=click.Choice([*ENGINES, SHARDCONV.name]), help=text)


pad_option = click.option("--pad", is_flag=True, help="Pad heads and widths that tp does not divide with zeros.")
plan_options = together(
    click.option(
        "--rules",
        default="auto",
        metavar="NAME|FILE",
        help="Use this family, or try the rules of this plan file (TOML or JSON) before the family's. [default: the "
        "family of the config's model_type]",
    ),
    click.option("--replicate", metavar="NAME", multiple=True, help="Replicate this tensor. Repeatable."),
    click.option(
        "--head-dim",
        type=click.IntRange(min=1),
        metavar="N",
        help="Elements per attention head, for checkpoints without a config.",
    ),
    click.option(
        "--experts",
        type=click.Choice(["tensor", "expert"]),
        default="tensor",
        help="Shard each expert over all ranks, or distribute whole experts over ranks. [default: tensor]",
    ),
    engine_option("those of shardconv run"),
    pad_option,
    click.option("--config", type=PATH, help="Use this config.json instead of that of SRC."),
    click.option("--follow-links", is_flag=True, help="Follow links that lead out of their folder."),
    ignore_option,
    from_option,
)
write_options = together(
    click.option("--overwrite", is_flag=True, help="Replace what is at the destination."),
    click.option("--dry-run", is_flag=True, help="Plan and check, but write nothing."),
    click.option(
        "--resume", is_flag=True, help="Continue an interrupted run of this command, or start if there is none."
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        metavar="N",
        help="Copying threads. [default: processors, up to 8]",
    ),
)
checksum_option = click.option(
    "--checksums/--no-checksums", default=True, help="Compute checksums while copying. [default: on]"
)


def layout_option(default: str) -> Callable[[Command], Command]:
    """``--layout``; ``default`` is the end of its help text."""
    text = (
        "Write the source's tensor names (native), also with offsets for torch.distributed.checkpoint (dcp), or the "
        f"files of vLLM's sharded_state (vllm), or Meta's files (meta). {default}"
    )
    return click.option("--layout", type=click.Choice(LAYOUTS), help=text)


dtype_option = click.option(
    "--dtype",
    type=click.Choice([*TARGET_DTYPES]),
    help="Convert floating-point tensors to this data type, rounded to nearest, ties to even. [default: as in SRC]",
)
max_file_size_option = click.option(
    "--max-file-size",
    metavar="SIZE",
    help="Write larger rank files as several files with an index per rank. SIZE is a number of bytes, or such as 5GB.",
)
_TP = "Tensor parallel size: number of ranks."
tp_option = click.option("--tp", type=click.IntRange(min=1), required=True, metavar="N", help=_TP)
source_tp_option = click.option(
    "--tp", type=click.IntRange(min=1), metavar="N", help=f"{_TP} Required for a checkpoint that is not split."
)
