"""``shardconv merge``: write the source of a split checkpoint."""

from pathlib import Path
from typing import Unpack

import click

from shardconv.commands.notes import dry_run_notes
from shardconv.commands.options import PATH, WriteFlags, output_options, write_options
from shardconv.console import Console
from shardconv.formatting import rate, size


@click.command()
@click.argument("src", type=PATH, metavar="DIR")
@click.option(
    "-o", "--output", type=PATH, metavar="PATH", help="FILE.safetensors or folder. [default: NAME-merged here]"
)
@write_options
@output_options
def merge(src: Path, output: Path | None, *, as_json: bool, quiet: bool, **options: Unpack[WriteFlags]) -> None:
    """Merge the split checkpoint DIR into its source, byte for byte.

    DIR may also be a folder that vLLM saved with save_sharded_state.
    """
    from shardconv.checkpoint.merge import merge as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("merge") as progress:
        report = run(src, output, progress=progress, **options)
    origin = {
        True: "the source's bytes",
        False: "all tensors in one file",
        None: "as the source, but not verified (no checksums)",
    }[report.is_identical]
    origin = f"from rank files that {report.saved_by} saved" if report.saved_by else origin
    verb = "would be written" if report.dry_run else rate(report.num_bytes, report.seconds)
    line = f"{report.path}: {report.num_tensors} tensors, {size(report.num_bytes)}, {origin}; {verb}"
    lines = [line, *report.notes, *dry_run_notes(report, overwrite=options["overwrite"])]
    console.report(report, lines, quiet_warnings=[line] if report.is_identical is None else [])
