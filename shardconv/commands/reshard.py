"""``shardconv reshard``: write a split checkpoint for another tp or layout."""

from typing import Any

import click

from shardconv.commands.command import OneProcessCommand
from shardconv.commands.options import (
    CHECKSUMS,
    EP,
    MAX_FILE_SIZE,
    PAD,
    SPLIT_SOURCE,
    STAGE_OPTIONS,
    TP,
    WRITE_OPTIONS,
    SourcePath,
    destination_option,
    display_options,
    engine_option,
    layout_option,
)
from shardconv.commands.shared import (
    engine_note,
    num_ranks_of,
    padding_notes,
    rank_files,
    show_written,
    source_progress,
)
from shardconv.support.console import Console
from shardconv.support.formatting import counted


@click.command(
    cls=OneProcessCommand,
    params=[
        *SPLIT_SOURCE,
        TP,
        *STAGE_OPTIONS,
        EP,
        engine_option("as in DIR, or the engine of --layout"),
        PAD,
        destination_option("DIR2", "Write this folder.", "NAME-tpN"),
        layout_option("as in DIR"),
        MAX_FILE_SIZE,
        CHECKSUMS,
        *WRITE_OPTIONS,
        *display_options(),
    ],
    epilog="shardconv reshard llama-tp8 --tp 4\nshardconv reshard llama-tp8 --tp 8 --layout vllm -o llama-vllm",
)
def reshard(console: Console, src: tuple[SourcePath, ...], output: SourcePath | None, **options: Any) -> None:
    """Rewrite the split checkpoint DIR for another size or layout.

    DIR may also be a folder with rank files of another tool, or a URL.
    Pass all folders if each has only some ranks.
    """
    from shardconv.checkpoint.operations.reshard import reshard as run

    with source_progress(console, "reshard") as progress:
        report = run(src, output, progress=progress, **options)
    old_ranks = max(report.old_tp, report.old_ep) * report.old_pp
    show_written(
        console,
        report,
        f"from {counted(old_ranks, 'rank')} to {num_ranks_of(report)}\n{rank_files(report)}",
        options,
        num_bytes=report.num_bytes,
        lines=[*padding_notes(report.padding), *report.notes, *engine_note(report.layout)],
    )
