"""``shardconv split``: write one rank file per rank."""

from pathlib import Path
from typing import Unpack

import click

from shardconv.commands.check_source import CHECK_MODEL, check_source
from shardconv.commands.notes import dry_run_notes, engine_note, layout_note, model_notes, notes, padding_notes
from shardconv.commands.options import (
    PATH,
    PlanFlags,
    WriteFlags,
    checksum_option,
    layout_option,
    output_options,
    plan_options,
    tp_option,
    write_options,
)
from shardconv.console import Console
from shardconv.formatting import counted, rate, size, sizes


class _SplitFlags(PlanFlags, WriteFlags):
    """Values of the options of ``shardconv split`` that :func:`shardconv.split` has, too."""

    tp: int
    checksums: bool


@click.command()
@click.argument("src", type=PATH)
@tp_option
@click.option("-o", "--output", type=PATH, metavar="DIR", help="Folder to write. [default: NAME-tpN here]")
@plan_options
@write_options
@checksum_option
@layout_option("[default: native]")
@click.option("--check-model", is_flag=True, help=CHECK_MODEL)
@output_options
def split(
    src: Path,
    output: Path | None,
    *,
    as_json: bool,
    quiet: bool,
    check_model: bool,
    layout: str | None,
    **options: Unpack[_SplitFlags],
) -> None:
    """Split the checkpoint SRC (a .safetensors file, an index, or a folder) for N ranks."""
    from shardconv.checkpoint.split import split as run

    console = Console(as_json=as_json, quiet=quiet)
    checked = check_source(src, options) if check_model else None
    with console.progress("split") as progress:
        report = run(src, output, layout=layout or "native", progress=progress, **options)
    verb = "would be written" if report.dry_run else rate(report.source_bytes, report.seconds)
    warnings = notes(report.assumed, report.left_out)
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, {size(report.source_bytes)}, family {report.family}",
            f"{counted(report.tp, 'rank file')} of {sizes(report.rank_bytes)}{layout_note(report.layout)}; {verb}",
            *padding_notes(report.padding),
            *dry_run_notes(report, overwrite=options["overwrite"]),
            *engine_note(report.layout),
            *warnings,
            *model_notes(checked),
        ],
        quiet_warnings=notes(report.assumed, {}),
    )
