"""``shardconv split``: write one rank file per rank."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from shardconv.commands.check_source import CHECK_MODEL, check_source
from shardconv.commands.notes import (
    dry_run_notes,
    engine_note,
    layout_note,
    model_notes,
    notes,
    padding_notes,
    rank_files,
)
from shardconv.commands.options import (
    PATH,
    SOURCE,
    PlanFlags,
    SourcePath,
    WriteFlags,
    base_option,
    checksum_option,
    dtype_option,
    layout_option,
    max_file_size_option,
    output_options,
    plan_options,
    tp_option,
    write_options,
)
from shardconv.console import Console
from shardconv.exits import ImportPhase
from shardconv.formatting import counted, rate, size

if TYPE_CHECKING:
    from shardconv.checkpoint.team import Team


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


@click.command()
@click.argument("src", type=SOURCE)
@tp_option
@click.option(
    "--ranks",
    metavar="RANKS",
    help="Write the files of these ranks only, such as 8-15 or 0,2,5-7. [default: all ranks]",
)
@click.option("-o", "--output", type=PATH, metavar="DIR", help="Folder to write. [default: NAME-tpN here]")
@base_option
@click.option(
    "--adapter",
    "adapters",
    type=PATH,
    multiple=True,
    metavar="ADAPTER",
    help="Split this LoRA adapter of SRC, too, into adapters/NAME of the output. Repeatable.",
)
@click.option("--merge-adapter", is_flag=True, help="Merge the adapter into the weights instead, as PEFT does.")
@plan_options
@write_options
@checksum_option
@layout_option("[default: native]")
@dtype_option
@max_file_size_option
@click.option("--check-model", is_flag=True, help=CHECK_MODEL)
@output_options
def split(
    src: SourcePath,
    output: Path | None,
    *,
    as_json: bool,
    quiet: bool,
    check_model: bool,
    layout: str | None,
    **options: Unpack[_SplitFlags],
) -> None:
    """Split the checkpoint SRC (a .safetensors or PyTorch file, an index, a folder, or a URL of one) for N ranks."""
    from shardconv.checkpoint.split import split as run

    with _team() as team:
        console = Console(as_json=as_json, quiet=quiet or not team.is_first)
        checked = check_source(src, options) if check_model and team.is_first else None
        with console.progress("split") as progress:
            report = run(src, output, layout=layout or "native", progress=progress, team=team, **options)
    if not team.is_first:
        return
    verb = "would be written" if report.dry_run else rate(sum(report.rank_bytes), report.seconds)
    warnings = notes(report.assumed, report.left_out)
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, {size(report.source_bytes)}, family {report.family}",
            f"{rank_files(report)}{layout_note(report.layout)}; {verb}",
            *(
                [f"with {counted(len(report.adapters), 'adapter')}: {', '.join(report.adapters)}"]
                * bool(report.adapters)
            ),
            *report.derived,
            *padding_notes(report.padding),
            *dry_run_notes(report, overwrite=options["overwrite"]),
            *engine_note(report.layout),
            *warnings,
            *model_notes(checked),
        ],
        quiet_warnings=notes(report.assumed, {}),
    )


def _team() -> "AbstractContextManager[Team]":
    """The processes that torchrun started for this split; this process alone without torchrun."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        from shardconv.checkpoint.team import Team

        return nullcontext(Team())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings of lost connections have a page each
    with ImportPhase():
        from shardconv.runtime.split_team import join
    return join()
