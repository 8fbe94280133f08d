"""The commands: options in, one library call, one report out.

No logic, and no import of numpy or torch before a command runs.
"""

import gc
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from shardconv import __version__
from shardconv.commands.options import (
    CHECK_MODEL,
    PATH,
    checksum_option,
    common_options,
    ignore_option,
    output_options,
    plan_options,
    tp_option,
    write_options,
)
from shardconv.commands.plan import check_source
from shardconv.commands.plan import plan as plan_command
from shardconv.commands.words import counted, dry_run_notes, model_notes, notes, rate, sizes
from shardconv.console import Console, describe, show_error, size
from shardconv.parent import PARENT, end_with_parent
from shardconv.signals import ImportPhase, Terminated, default_signals, ignore_signals, raise_on_signals

if TYPE_CHECKING:
    from shardconv.checkpoint.verify import VerifyReport
    from shardconv.runtime.run import RunReport

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
@click.option("--dcp", is_flag=True, help="Let torch.distributed.checkpoint read the rank files, too.")
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
    **options: Any,  # noqa: ANN401
) -> None:
    """Split the checkpoint SRC (a .safetensors file, an index, or a folder) for N ranks."""
    from shardconv.checkpoint.split import split as run

    console = Console(as_json=as_json, quiet=quiet)
    checked = check_source(src, options) if check_model else None
    with console.progress("split") as progress:
        report = run(src, output, plan=plan or "auto", progress=progress, **options)
    verb = "would be written" if report.dry_run else rate(report.source_bytes, report.seconds)
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, {size(report.source_bytes)}, family {report.family}",
            f"{counted(report.tp, 'rank file')} of {sizes(report.rank_bytes)}; {verb}",
            *dry_run_notes(report, overwrite=options["overwrite"]),
            *notes(report.assumed, report.left_out),
            *model_notes(checked),
        ],
    )


@cli.command()
@click.argument("src", type=PATH, metavar="DIR")
@click.option(
    "-o", "--output", type=PATH, metavar="PATH", help="FILE.safetensors or folder. [default: NAME-merged here]"
)
@write_options
@output_options
def merge(src: Path, output: Path | None, *, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401
    """Merge the split checkpoint DIR into its source again, byte for byte."""
    from shardconv.checkpoint.merge import merge as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("merge") as progress:
        report = run(src, output, progress=progress, **options)
    same = {
        True: "the source's bytes",
        False: "all tensors in one file",
        None: "as the source, but there are no checksums to tell",
    }[report.is_identical]
    verb = "would be written" if report.dry_run else rate(report.num_bytes, report.seconds)
    line = f"{report.path}: {report.num_tensors} tensors, {size(report.num_bytes)}, {same}; {verb}"
    console.report(report, [line, *dry_run_notes(report, overwrite=options["overwrite"])])


@cli.command()
@click.argument("src", type=PATH, metavar="DIR")
@tp_option
@click.option("-o", "--output", type=PATH, metavar="DIR2", help="Folder to write. [default: NAME-tpN here]")
@write_options
@checksum_option
@output_options
def reshard(src: Path, output: Path | None, *, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401
    """Rewrite the split checkpoint DIR for another number of ranks."""
    from shardconv.checkpoint.reshard import reshard as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("reshard") as progress:
        report = run(src, output, progress=progress, **options)
    verb = "would be written" if report.dry_run else rate(sum(report.rank_bytes), report.seconds)
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, from {counted(report.old_tp, 'rank')} to {report.tp}",
            f"{counted(report.tp, 'rank file')} of {sizes(report.rank_bytes)}; {verb}",
            *dry_run_notes(report, overwrite=options["overwrite"]),
        ],
    )


@cli.command()
@click.argument("src", type=PATH, metavar="DIR")
@click.option("--against", type=PATH, metavar="SRC", help="Compare every byte with this source, too.")
@click.option("--follow-links", is_flag=True, help="Read files of SRC that are links out of their folder.")
@ignore_option
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads that read.")
@output_options
def verify(src: Path, *, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401
    """Prove the split checkpoint DIR bit for bit, against its checksums and its source. Exits 3 on a difference."""
    from shardconv.checkpoint.verify import verify as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("verify") as progress:
        report = run(src, progress=progress, **options)
    shown, more = report.differences[:_MAX_LINES], len(report.differences) - _MAX_LINES
    lines = [
        f"{report.path}: {counted(report.tp, 'rank')}, {report.num_tensors} tensors, {size(report.num_bytes)}",
        f"checked: {', '.join(report.checked)}",
        *notes((), report.left_out),
        *([] if report.has_checksums else ["there are no checksums: it was split with --no-checksums"]),
        *(f"DIFFERENT  {line}" for line in shown),
        *([f"... and {more} more (--json has all)"] if more > 0 else []),
        "different: split the source again, or put back what was changed" if report.differences else _correct(report),
    ]
    console.report(report, lines)
    if report.differences:
        sys.exit(3)


@cli.command()
@click.argument("src", type=PATH, metavar="DIR")
@click.option(
    "--prompt", multiple=True, metavar="TEXT", help="What to go on with. Repeatable. [default: lines of stdin]"
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, metavar="N")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, help="0 takes the likeliest token. [default: 0]"
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of the tokens that are drawn.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is one]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of the values. [default: as they are stored]",
)
@click.option("--chat", is_flag=True, help="Put prompts into the model's chat template.")
@click.option("--check", type=PATH, metavar="SRC", help="Compare with this unsplit checkpoint, in float32.")
@click.option(
    "--verify/--no-verify", default=True, show_default=True, help="Check each rank's file against its checksums first."
)
@click.option("--trust-remote-code", is_flag=True, help="Run code that the checkpoint brings for its model.")
@click.option("-q", "--quiet", is_flag=True, help="Print the text only: no figures and no progress.")
@common_options
def run(src: Path, prompt: tuple[str, ...], *, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401
    """Run the split checkpoint DIR, one process a rank: starts them, or joins them when torchrun did."""
    gc.enable()
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        _run_rank(src, prompt, Console(as_json=as_json, quiet=quiet), options)
    else:
        with ImportPhase():
            from shardconv.runtime.launch import launch
            from shardconv.runtime.run import RunOptions, check_run
        sys.exit(launch(sys.argv[1:], check_run(src, prompt, RunOptions(**options))))


def _run_rank(src: Path, prompt: tuple[str, ...], console: Console, options: dict[str, Any]) -> None:
    default_signals()  # a rank has nothing to clean up
    from shardconv.runtime.launch import join, leave
    from shardconv.runtime.run import RunOptions, check_run, run_rank

    check_run(src, prompt, RunOptions(**options))
    join()
    is_first = os.environ["RANK"] == "0"
    prompts = prompt or (tuple(sys.stdin.read().splitlines()) if is_first else ())
    progress = partial(console.progress, "load") if is_first else nullcontext
    report = run_rank(src, prompts, RunOptions(**options), console.stream, progress)
    if is_first:
        console.report(report, _answers(report))
        console.note([*_figures(report), *report.notes])
        if report.differences is not None:
            console.note(
                [f"DIFFERENT  {line}" for line in report.differences] or [_equal(report, options["temperature"])]
            )
    leave()
    if report.differences:
        sys.exit(3)


def _answers(report: "RunReport") -> list[str]:
    """What is still to be printed: all but the text of a single prompt, which was printed as it came."""
    if report.first_token_seconds is None:
        return list(report.outputs)
    if len(report.outputs) == 1:
        return []
    return [f"> {prompt}\n{text}\n" for prompt, text in zip(report.prompts, report.outputs, strict=True)]


def _equal(report: "RunReport", temperature: float) -> str:
    tokens = "" if report.first_token_seconds is None or temperature else ", and greedy tokens"
    return f"equal to the unsplit model for this, in float32: numbers to {report.error:.0e} of the largest{tokens}"


def _figures(report: "RunReport") -> list[str]:
    memory = ", ".join(map(size, report.memory_bytes))
    lines = [
        f"{counted(report.tp, 'rank')} on {report.device}: {size(report.load_bytes)} a rank loaded in "
        f"{report.load_seconds:.2f} s, {size(report.load_bytes / report.load_seconds)}/s; peak memory of each {memory}"
    ]
    if report.first_token_seconds is not None:
        speed = f", then {report.tokens_per_second:.1f} tokens/s" if report.tokens_per_second else ""
        lines.append(f"first token after {report.first_token_seconds:.3f} s{speed}")
    return lines


def _correct(report: "VerifyReport") -> str:
    if report.has_checksums or report.is_compared:
        return "correct"
    return "nothing is wrong that shows without checksums; --against SRC compares every byte"


cli.add_command(plan_command)


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
    ignore_signals()
    sys.exit(code)


def _code_of(error: BaseException) -> int:
    """Print the message for an exception; gives the exit code."""
    if isinstance(error, click.Abort) and error.__cause__ is not None:
        error = error.__cause__  # click's for KeyboardInterrupt and for EOFError
    if os.environ.get("RANK"):
        return _end_rank(error)
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads it any more
    return show_error(error, as_json="--json" in sys.argv)
