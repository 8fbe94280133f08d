"""``shardconv split``: write one rank file per rank."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from shardconv.commands.command import ADAPTERS, OUTPUT, CopyCommand, Flag, Option
from shardconv.commands.options import (
    BASE,
    CHECKSUMS,
    MAX_FILE_SIZE,
    MEGATRON_OPTIONS,
    PATH,
    PLAN_OPTIONS,
    SRC,
    STAGE_OPTIONS,
    TP,
    WRITE_OPTIONS,
    SourcePath,
    check_model_option,
    destination_option,
    display_options,
    dtype_option,
    layout_option,
)
from shardconv.commands.shared import (
    adapter_notes,
    check_source,
    engine_note,
    model_notes,
    notes,
    num_ranks_of,
    padding_notes,
    rank_files,
    show_written,
    source_progress,
)
from shardconv.support.console import Console
from shardconv.support.exits import ImportPhase

if TYPE_CHECKING:
    from shardconv.checkpoint.output.writer import Team

_ADAPTER = "Split this LoRA adapter with SRC, into adapters/NAME of the output. Repeatable."
_RANKS = "Write the files of these ranks only, such as 8-15 or 0,2,5-7. [default: all ranks]"


@click.command(
    cls=CopyCommand,
    params=[
        SRC,
        TP,
        *STAGE_OPTIONS,
        *PLAN_OPTIONS,
        BASE,
        Option(ADAPTERS, "--adapter adapters", _ADAPTER, type=PATH, multiple=True, metavar="ADAPTER"),
        Flag(ADAPTERS, "--merge-adapter", "Merge the adapter into the weights, as PEFT does."),
        destination_option("DIR", "Write this folder.", "NAME-tpN"),
        layout_option("native", "native"),
        *MEGATRON_OPTIONS,
        dtype_option(OUTPUT),
        MAX_FILE_SIZE,
        Option(OUTPUT, "--ranks", _RANKS, metavar="RANKS"),
        CHECKSUMS,
        *WRITE_OPTIONS,
        check_model_option(),
        *display_options(),
    ],
    epilog="shardconv split llama --tp 8\n"
    "shardconv split hf://org/llama --tp 8 -o llama-tp8\n"
    "shardconv split llama --tp 8 --layout vllm --max-file-size 5GB\n"
    "shardconv split llama --tp 8 --pp 2\n"
    "shardconv split llama --layout megatron -o llama-megatron\n"
    "shardconv split llama --tp 8 --dry-run",
)
def split(console: Console, src: SourcePath, output: SourcePath | None, *, check_model: bool, **options: Any) -> None:
    """Split the checkpoint SRC into one file per rank.

    SRC is a .safetensors or PyTorch file, an index, a folder, or the URL of one.
    """
    from shardconv.checkpoint.operations.split import split as run

    with _team() as team:
        console.quiet |= not team.is_first
        checked = check_source(src, options) if check_model and team.is_first else None
        with source_progress(console, "split") as progress:
            report = run(src, output, progress=progress, team=team, **options)
    if not team.is_first:
        return
    show_written(
        console,
        report,
        f"family {report.family}\n{rank_files(report)}",
        options,
        num_bytes=report.source_bytes,
        copied_bytes=None if len(report.ranks) == num_ranks_of(report) else sum(report.rank_bytes),
        lines=[
            *adapter_notes(report.adapters),
            *report.derived,
            *padding_notes(report.padding),
            *engine_note(report.layout),
            *notes(report.assumed, report.left_out),
            *model_notes(checked),
        ],
        quiet_warnings=notes(report.assumed, {}),
    )


def _team() -> "AbstractContextManager[Team]":
    """The processes that torchrun started for this split; this process alone without torchrun."""
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        from shardconv.checkpoint.output.writer import Team

        return nullcontext(Team())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings of lost connections have a page each
    with ImportPhase():
        from shardconv.runtime.split_team import join
    return join()
