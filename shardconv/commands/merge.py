"""``shardconv merge``: write the source of a split checkpoint."""

from typing import Any

import click

from shardconv.commands.command import OneProcessCommand
from shardconv.commands.options import SPLIT_SOURCE, WRITE_OPTIONS, SourcePath, destination_option, display_options
from shardconv.commands.shared import adapter_notes, show_written, source_progress
from shardconv.support.console import Console

_OUTPUT = destination_option(
    "PATH", "Write this folder, or one file if the name ends with .safetensors.", "NAME-merged"
)


@click.command(
    cls=OneProcessCommand,
    params=[*SPLIT_SOURCE, _OUTPUT, *WRITE_OPTIONS, *display_options()],
    epilog="shardconv merge llama-tp8\nshardconv merge llama-tp8 -o llama.safetensors --overwrite",
)
def merge(console: Console, src: tuple[SourcePath, ...], output: SourcePath | None, **options: Any) -> None:
    """Merge the split checkpoint DIR into its source, byte for byte.

    DIR may also be a folder with rank files of another tool, such as vLLM's save_sharded_state, or a URL.
    Pass all folders if each has only some ranks.
    """
    from shardconv.checkpoint.operations.merge import merge as run

    with source_progress(console, "merge") as progress:
        report = run(src, output, progress=progress, **options)
    origin = {
        True: "the source's bytes",
        False: "all tensors in one file",
        None: "as the source, but not verified (no checksums)",
    }[report.is_identical]
    show_written(
        console,
        report,
        "; ".join(report.derived) or origin,
        options,
        num_bytes=report.num_bytes,
        is_warning=report.is_identical is None,
        lines=[*adapter_notes(report.adapters), *report.notes],
        quiet_warnings=report.notes,
    )
