"""``shardconv reshard``: write a split checkpoint for another tp or layout."""

from typing import Unpack

import click

from shardconv.commands.options import (
    SOURCE_PATH,
    SourcePath,
    WriteFlags,
    checksum_option,
    destination_option,
    engine_option,
    from_option,
    layout_option,
    max_file_size_option,
    output_options,
    pad_option,
    tp_option,
    write_options,
)
from shardconv.commands.sections import OneProcessCommand
from shardconv.commands.shared import (
    closing_notes,
    engine_note,
    layout_note,
    padding_notes,
    rank_files,
    source_progress,
    written,
)
from shardconv.support.console import Console
from shardconv.support.formatting import counted, size


class _ReshardFlags(WriteFlags):
    """Values of the options of ``shardconv reshard``."""

    tp: int
    engine: str | None
    pad: bool
    checksums: bool
    layout: str | None
    source_layout: str | None
    max_file_size: str | None


@click.command(
    cls=OneProcessCommand,
    epilog="shardconv reshard llama-tp8 --tp 4\nshardconv reshard llama-tp8 --tp 8 --layout vllm -o llama-vllm",
)
@click.argument("src", type=SOURCE_PATH, nargs=-1, required=True, metavar="DIR...")
@from_option
@tp_option
@engine_option("that of DIR, or of --layout")
@pad_option
@destination_option("DIR2", "Write this folder.", "NAME-tpN")
@layout_option("that of DIR")
@max_file_size_option
@checksum_option
@write_options
@output_options
def reshard(
    src: tuple[SourcePath, ...],
    output: SourcePath | None,
    *,
    as_json: bool,
    quiet: bool,
    **options: Unpack[_ReshardFlags],
) -> None:
    """Rewrite the split checkpoint DIR for another size or layout.

    DIR may also be a folder with rank files of another tool, or a URL.
    Several folders have some of the ranks each.
    """
    from shardconv.checkpoint.operations.reshard import reshard as run

    console = Console(as_json=as_json, quiet=quiet)
    with source_progress(console, "reshard") as progress:
        report = run(src, output, progress=progress, **options)
    verb = written(report, report.num_bytes)
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, {size(report.num_bytes)}, from "
            f"{counted(report.old_tp, 'rank')} to {report.tp}",
            f"{rank_files(report)}{layout_note(report.layout)}; {verb}",
            *padding_notes(report.padding),
            *report.notes,
            *closing_notes(report, options),
            *engine_note(report.layout),
        ],
    )
