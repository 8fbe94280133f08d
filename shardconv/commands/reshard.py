"""``shardconv reshard``: write a split checkpoint for another tp or layout."""

from pathlib import Path
from typing import Unpack

import click

from shardconv.commands.notes import dry_run_notes, engine_note, layout_note, padding_notes, rank_files
from shardconv.commands.options import (
    PATH,
    SOURCE,
    SourcePath,
    WriteFlags,
    checksum_option,
    engine_option,
    from_option,
    layout_option,
    max_file_size_option,
    output_options,
    pad_option,
    tp_option,
    write_options,
)
from shardconv.console import Console
from shardconv.formatting import counted, rate


class _ReshardFlags(WriteFlags):
    """Values of the options of ``shardconv reshard``."""

    tp: int
    engine: str | None
    pad: bool
    checksums: bool
    layout: str | None
    source_layout: str | None
    max_file_size: str | None


@click.command()
@click.argument("src", type=SOURCE, nargs=-1, required=True, metavar="DIR...")
@tp_option
@click.option("-o", "--output", type=PATH, metavar="DIR2", help="Folder to write. [default: NAME-tpN here]")
@engine_option("those of DIR, or of --layout")
@pad_option
@from_option
@write_options
@checksum_option
@layout_option("[default: that of DIR]")
@max_file_size_option
@output_options
def reshard(
    src: tuple[SourcePath, ...], output: Path | None, *, as_json: bool, quiet: bool, **options: Unpack[_ReshardFlags]
) -> None:
    """Rewrite the split checkpoint DIR, or rank files of another tool, for another tensor parallel size or layout.

    Several folders have some of the ranks each.
    """
    from shardconv.checkpoint.reshard import reshard as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("reshard") as progress:
        report = run(src, output, progress=progress, **options)
    verb = "would be written" if report.dry_run else rate(sum(report.rank_bytes), report.seconds)
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, from {counted(report.old_tp, 'rank')} to {report.tp}",
            f"{rank_files(report)}{layout_note(report.layout)}; {verb}",
            *padding_notes(report.padding),
            *report.notes,
            *dry_run_notes(report, overwrite=options["overwrite"]),
            *engine_note(report.layout),
        ],
    )
