"""The commands: options in, one library call, one report out.

No logic, and no import of numpy or torch before a command runs.
"""

import gc
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from shardconv import __version__
from shardconv.commands.options import (
    CHECK_MODEL,
    PATH,
    checksum_option,
    engine_option,
    ignore_option,
    layout_option,
    output_options,
    pad_option,
    plan_options,
    tp_option,
    write_options,
)
from shardconv.commands.pad import pad as pad_command
from shardconv.commands.pad import unpad as unpad_command
from shardconv.commands.plan import check_source
from shardconv.commands.plan import plan as plan_command
from shardconv.commands.run import run as run_command
from shardconv.commands.words import (
    counted,
    dry_run_notes,
    engine_note,
    layout_note,
    model_notes,
    notes,
    padding_notes,
    rate,
    sizes,
)
from shardconv.console import Console, describe, open_streams, show_error, size
from shardconv.parent import PARENT, end_with_parent
from shardconv.plan.engines import ENGINES
from shardconv.signals import Terminated, default_signals, ignore_signals, raise_on_signals

#: Differences that are shown to people.
_MAX_LINES = 20


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="shardconv %(version)s")
def cli() -> None:
    """Split safetensors checkpoints into tensor-parallel shards, one per rank, and merge them back byte for byte."""


@cli.command()
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
    plan: Path | None,
    check_model: bool,
    layout: str | None,
    **options: Any,  # noqa: ANN401
) -> None:
    """Split the checkpoint SRC (a .safetensors file, an index, or a folder) for N ranks."""
    from shardconv.checkpoint.split import split as run

    console = Console(as_json=as_json, quiet=quiet)
    checked = check_source(src, options) if check_model else None
    with console.progress("split") as progress:
        report = run(src, output, plan=plan or "auto", layout=layout or "native", progress=progress, **options)
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


@cli.command()
@click.argument("src", type=PATH, metavar="DIR")
@click.option(
    "-o", "--output", type=PATH, metavar="PATH", help="FILE.safetensors or folder. [default: NAME-merged here]"
)
@write_options
@output_options
def merge(src: Path, output: Path | None, *, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401
    """Merge the split checkpoint DIR into its source again, byte for byte.

    DIR may also be a folder that vLLM saved with save_sharded_state.
    """
    from shardconv.checkpoint.merge import merge as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("merge") as progress:
        report = run(src, output, progress=progress, **options)
    same = {
        True: "the source's bytes",
        False: "all tensors in one file",
        None: "as the source, but there are no checksums to tell",
    }[report.is_identical]
    same = f"from rank files that {report.saved_by} saved" if report.saved_by else same
    verb = "would be written" if report.dry_run else rate(report.num_bytes, report.seconds)
    line = f"{report.path}: {report.num_tensors} tensors, {size(report.num_bytes)}, {same}; {verb}"
    lines = [line, *report.notes, *dry_run_notes(report, overwrite=options["overwrite"])]
    console.report(report, lines, quiet_warnings=[line] if report.is_identical is None else [])


@cli.command()
@click.argument("src", type=PATH, metavar="DIR")
@tp_option
@click.option("-o", "--output", type=PATH, metavar="DIR2", help="Folder to write. [default: NAME-tpN here]")
@engine_option("those of DIR, or of --layout")
@pad_option
@write_options
@checksum_option
@layout_option("[default: that of DIR]")
@output_options
def reshard(src: Path, output: Path | None, *, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401
    """Rewrite the split checkpoint DIR for another number of ranks or layout."""
    from shardconv.checkpoint.reshard import reshard as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("reshard") as progress:
        report = run(src, output, progress=progress, **options)
    verb = "would be written" if report.dry_run else rate(sum(report.rank_bytes), report.seconds)
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, from {counted(report.old_tp, 'rank')} to {report.tp}",
            f"{counted(report.tp, 'rank file')} of {sizes(report.rank_bytes)}{layout_note(report.layout)}; {verb}",
            *padding_notes(report.padding),
            *report.notes,
            *dry_run_notes(report, overwrite=options["overwrite"]),
            *engine_note(report.layout),
        ],
    )


@cli.command()
@click.argument("src", type=PATH, metavar="DIR")
@click.option("--against", type=PATH, metavar="SRC", help="Compare every byte with this source, too.")
@click.option("--follow-links", is_flag=True, help="Read files of SRC that are links out of their folder.")
@ignore_option
@click.option(
    "--engine",
    type=click.Choice(list(ENGINES)),
    help="Compare with the model that this engine, if it is installed, constructs on each rank, too.",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads that read.")
@output_options
def verify(src: Path, *, engine: str | None, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401
    """Prove the split checkpoint DIR bit for bit, against its checksums and its source. Exits 3 on a difference."""
    from shardconv.checkpoint.verify import verify as run

    console = Console(as_json=as_json, quiet=quiet)
    found = None
    if engine is not None:
        from shardconv.engines.check import check_engine

        found = check_engine(src)
    with console.progress("verify") as progress:
        report = run(src, progress=progress, **options)
    is_only_engine = not report.differences  # whose differences have remedies of their own
    if found is not None:
        checked = (*report.checked, f"{found.engine} {found.version}")
        report = replace(report, checked=checked, differences=(*report.differences, *found.differences))
    made = f"saved by {report.saved_by}" if report.saved_by else "split with --no-checksums"
    shown, more = report.differences[:_MAX_LINES], len(report.differences) - _MAX_LINES
    lines = [
        f"{report.path}: {counted(report.tp, 'rank')}, {report.num_tensors} tensors, {size(report.num_bytes)}"
        f"{layout_note(report.layout)}",
        f"checked: {', '.join(report.checked)}",
        *notes((), report.left_out),
    ]
    warnings = [
        *(f"{name}: is in the folder, and not part of this split checkpoint" for name in report.other_weights),
        *([] if report.has_checksums else [f"there are no checksums: it was {made}"]),
        *(f"DIFFERENT  {line}" for line in shown),
        *([f"... and {more} more (--json has all)"] if more > 0 else []),
    ]
    is_sure = report.has_checksums or report.is_compared
    if report.differences and not is_only_engine:
        remedy = "use the source" if report.saved_by else "split the source again, or put back what was changed"
        warnings.append(f"different: {remedy}")
    elif not is_sure:
        warnings.append("nothing is wrong that shows without checksums; --against SRC compares every byte")
    verdict = ["correct"] if is_sure and not report.differences else []
    console.report(report, [*lines, *warnings, *verdict], quiet_warnings=warnings)
    if report.differences:
        sys.exit(3)


cli.add_command(pad_command)
cli.add_command(plan_command)
cli.add_command(run_command)
cli.add_command(unpad_command)


@cli.command(hidden=True)
@click.argument("folder", type=PATH)
def prove_rank(folder: Path) -> None:
    """Be a rank of a proof."""
    gc.enable()
    from shardconv.proof.prove import prove_rank as run
    from shardconv.runtime.launch import join, leave

    join()
    run(folder)
    leave()


def _end_rank(error: BaseException) -> int:
    """Say what went wrong on a rank; gives the exit code. Those that were started here leave it to be said once."""
    from shardconv.runtime.launch import is_launched, tell

    is_others = _is_others(error)
    if is_launched():
        message, code = describe(error)
        tell(message, is_others=is_others)
        return code
    return 1 if is_others else show_error(error, as_json="--json" in sys.argv)


def _is_others(error: BaseException) -> bool:
    """Whether another process says it better: one that failed or was lost, or the first where all say the same."""
    from shardconv.errors import PeerError, WorldSizeError, is_lost

    if isinstance(error, WorldSizeError):
        return os.environ["RANK"] != "0"
    return isinstance(error, PeerError) or is_lost(error)


def main() -> NoReturn:
    """Run the command line, and exit."""
    if PARENT in os.environ:
        default_signals()
    else:
        raise_on_signals()
    end_with_parent()
    open_streams()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's linear algebra would start threads that nobody uses
    gc.disable()  # headers and plans are many objects and no cycles; looking for some takes as long as the plan itself
    code: Any = 0
    try:
        cli.main(prog_name="shardconv", standalone_mode=False)
    except SystemExit as exit_:
        code = exit_.code
    except (Exception, KeyboardInterrupt, Terminated) as error:
        ignore_signals()
        if "--debug" in sys.argv:
            raise
        code = _code_of(error)
        if os.environ.get("RANK"):
            _exit_at_once(code)
    ignore_signals()
    sys.exit(code)


def _exit_at_once(code: int) -> NoReturn:
    """Exit without destructors: those of a connected process group abort if its threads are still running."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _code_of(error: BaseException) -> int:
    """Print the message for an exception; gives the exit code."""
    if isinstance(error, click.Abort) and error.__cause__ is not None:
        error = error.__cause__  # click's for KeyboardInterrupt and for EOFError
    if os.environ.get("RANK"):
        return _end_rank(error)
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads it any more
    return show_error(error, as_json="--json" in sys.argv)
