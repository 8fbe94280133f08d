"""``shardconv merge``: write the source of a split checkpoint."""

from typing import Unpack

import click

from shardconv.commands.options import (
    SOURCE_PATH,
    SourcePath,
    WriteFlags,
    destination_option,
    from_option,
    output_options,
    write_options,
)
from shardconv.commands.sections import OneProcessCommand
from shardconv.commands.shared import adapter_notes, closing_notes, source_progress, written
from shardconv.support.console import Console
from shardconv.support.formatting import size


class _MergeFlags(WriteFlags):
    """Values of the options of ``shardconv merge``."""

    source_layout: str | None


@click.command(
    cls=OneProcessCommand,
    epilog="shardconv merge llama-tp8\nshardconv merge llama-tp8 -o llama.safetensors --overwrite",
)
@click.argument("src", type=SOURCE_PATH, nargs=-1, required=True, metavar="DIR...")
@from_option
@destination_option("PATH", "Write this folder, or one file if the name ends with .safetensors.", "NAME-merged")
@write_options
@output_options
def merge(
    src: tuple[SourcePath, ...],
    output: SourcePath | None,
    *,
    as_json: bool,
    quiet: bool,
    **options: Unpack[_MergeFlags],
) -> None:
    """Merge the split checkpoint DIR into its source, byte for byte.

    DIR may also be a folder that vLLM saved with save_sharded_state, one with rank files of another tool, or a URL.
    Several folders have some of the ranks each.
    """
    from shardconv.checkpoint.operations.merge import merge as run

    console = Console(as_json=as_json, quiet=quiet)
    with source_progress(console, "merge") as progress:
        report = run(src, output, progress=progress, **options)
    origin = {
        True: "the source's bytes",
        False: "all tensors in one file",
        None: "as the source, but not verified (no checksums)",
    }[report.is_identical]
    origin = "; ".join(report.derived) or origin
    verb = written(report, report.num_bytes)
    line = f"{report.path}: {report.num_tensors} tensors, {size(report.num_bytes)}, {origin}; {verb}"
    lines = [
        line,
        *adapter_notes(report.adapters),
        *report.notes,
        *closing_notes(report, options),
    ]
    console.report(report, lines, quiet_warnings=[line] if report.is_identical is None else [])
