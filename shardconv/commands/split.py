"""``shardconv split``: write one rank file per rank."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from shardconv.commands.options import (
    PATH,
    SOURCE_PATH,
    PlanFlags,
    SourcePath,
    WriteFlags,
    base_option,
    checksum_option,
    destination_option,
    dtype_option,
    layout_option,
    max_file_size_option,
    output_options,
    plan_options,
    tp_option,
    write_options,
)
from shardconv.commands.sections import ADAPTERS, CHECKS, OUTPUT, Command, section
from shardconv.commands.shared import (
    CHECK_MODEL,
    adapter_notes,
    check_source,
    closing_notes,
    engine_note,
    layout_note,
    model_notes,
    notes,
    padding_notes,
    rank_files,
    source_progress,
    written,
)
from shardconv.support.console import Console
from shardconv.support.exits import ImportPhase
from shardconv.support.formatting import size

if TYPE_CHECKING:
    from shardconv.checkpoint.output.team import Team


class _SplitFlags(PlanFlags, WriteFlags):
    """Values of the options of ``shardconv split`` that :func:`shardconv.split` has, too."""

    tp: int
    ranks: str | None
    checksums: bool
    dtype: str | None
    max_file_size: str | None
    base: Path | None
    adapters: tuple[Path, ...]
    merge_adapter: bool


@click.command(
    cls=Command,
    epilog="shardconv split llama --tp 8\n"
    "shardconv split hf://org/llama --tp 8 -o llama-tp8\n"
    "shardconv split llama --tp 8 --layout vllm --max-file-size 5GB\n"
    "shardconv split llama --tp 8 --dry-run",
)
@click.argument("src", type=SOURCE_PATH)
@tp_option
@plan_options
@base_option
@section(
    ADAPTERS,
    click.option(
        "--adapter",
        "adapters",
        type=PATH,
        multiple=True,
        metavar="ADAPTER",
        help="Split this LoRA adapter with SRC, into adapters/NAME of the output. Repeatable.",
    ),
    click.option("--merge-adapter", is_flag=True, help="Merge the adapter into the weights, as PEFT does."),
)
@destination_option("DIR", "Write this folder.", "NAME-tpN")
@layout_option("native")
@dtype_option(OUTPUT)
@max_file_size_option
@section(
    OUTPUT,
    click.option(
        "--ranks",
        metavar="RANKS",
        help="Write the files of these ranks only, such as 8-15 or 0,2,5-7. [default: all ranks]",
    ),
)
@checksum_option
@write_options
@section(CHECKS, click.option("--check-model", is_flag=True, help=CHECK_MODEL))
@output_options
def split(
    src: SourcePath,
    output: SourcePath | None,
    *,
    as_json: bool,
    quiet: bool,
    check_model: bool,
    layout: str | None,
    **options: Unpack[_SplitFlags],
) -> None:
    """Split the checkpoint SRC into one file per rank.

    SRC is a .safetensors or PyTorch file, an index, a folder, or the URL of one.
    """
    from shardconv.checkpoint.operations.split import split as run

    with _team() as team:
        console = Console(as_json=as_json, quiet=quiet or not team.is_first)
        checked = check_source(src, options) if check_model and team.is_first else None
        with source_progress(console, "split") as progress:
            report = run(src, output, layout=layout or "native", progress=progress, team=team, **options)
    if not team.is_first:
        return
    num_bytes = report.source_bytes if len(report.ranks) == report.tp else sum(report.rank_bytes)
    verb = written(report, num_bytes)
    warnings = notes(report.assumed, report.left_out)
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, {size(report.source_bytes)}, family {report.family}",
            f"{rank_files(report)}{layout_note(report.layout)}; {verb}",
            *adapter_notes(report.adapters),
            *report.derived,
            *padding_notes(report.padding),
            *closing_notes(report, options),
            *engine_note(report.layout),
            *warnings,
            *model_notes(checked),
        ],
        quiet_warnings=notes(report.assumed, {}),
    )


def _team() -> "AbstractContextManager[Team]":
    """The processes that torchrun started for this split; this process alone without torchrun."""
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        from shardconv.checkpoint.output.team import Team

        return nullcontext(Team())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings of lost connections have a page each
    with ImportPhase():
        from shardconv.runtime.split_team import join
    return join()
