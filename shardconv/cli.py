"""The commands: options in, one library call, one report out.

No logic, and no import of numpy or torch before a command runs.
"""

import gc
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from shardconv import __version__
from shardconv.console import Console, Terminated, describe, ranges, show_error, signals_later, size

if TYPE_CHECKING:
    from shardconv.checkpoint.planning import PlanReport, TensorReport
    from shardconv.checkpoint.verify import VerifyReport
    from shardconv.plan.resolve import BlockedTp
    from shardconv.proof.prove import ProofReport
    from shardconv.runtime.run import RunReport

Command = TypeVar("Command", bound=Callable[..., Any])


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def add(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return add


#: Differences that are shown to people.
_MAX_LINES = 20

_PATH = click.Path(path_type=Path)
_common_options = _options(
    click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object."),
    click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."),
)
_output_options = _options(
    click.option("-q", "--quiet", is_flag=True, help="Print no result for people and no progress."), _common_options
)
_plan_options = _options(
    click.option("--plan", type=_PATH, help="TOML or JSON file with rules that come before the family's."),
    click.option("--family", metavar="NAME", help="Use this family, whatever the config says."),
    click.option("--replicate", metavar="NAME", multiple=True, help="Put this tensor whole on every rank. Repeatable."),
    click.option("--head-dim", type=click.IntRange(min=1), metavar="N", help="Head size, if no config says it."),
    click.option(
        "--experts",
        type=click.Choice(["tensor", "expert"]),
        default="tensor",
        help="Cut each expert over all ranks, or deal experts out. [default: tensor]",
    ),
    click.option("--config", type=_PATH, help="config.json to use instead of the one beside the weights."),
    click.option("--follow-links", is_flag=True, help="Read files that are links out of their folder."),
)
_write_options = _options(
    click.option("--overwrite", is_flag=True, help="Replace what is at the destination."),
    click.option("--dry-run", is_flag=True, help="Plan and check, write nothing."),
    click.option(
        "--threads", type=click.IntRange(min=1), metavar="N", help="Threads that copy. [default: processors, up to 8]"
    ),
)
_checksum_option = click.option(
    "--checksums/--no-checksums", default=True, help="Take checksums while the data passes. [default: on]"
)
_tp_option = click.option("--tp", type=click.IntRange(min=1), required=True, metavar="N", help="Number of ranks.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="shardconv %(version)s")
def cli() -> None:
    """Split safetensors checkpoints into tensor-parallel shards, one per rank, and merge them back byte for byte."""


@cli.command()
@click.argument("src", type=_PATH)
@_tp_option
@click.option("-o", "--output", type=_PATH, metavar="DIR", help="Folder to write. [default: NAME-tpN here]")
@_plan_options
@_write_options
@_checksum_option
@click.option("--dcp", is_flag=True, help="Let torch.distributed.checkpoint read the rank files, too.")
@_output_options
def split(src: Path, output: Path | None, *, as_json: bool, quiet: bool, plan: Path | None, **options: Any) -> None:  # noqa: ANN401
    """Split the checkpoint SRC (a .safetensors file, an index, or a folder) for N ranks."""
    from shardconv.checkpoint.split import split as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("split") as progress:
        report = run(src, output, plan=plan or "auto", progress=progress, **options)
    verb = "would be written" if report.dry_run else _rate(report.source_bytes, report.seconds)
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, {size(report.source_bytes)}, family {report.family}",
            f"{_count(report.tp, 'rank file')} of {_sizes(report.rank_bytes)}; {verb}",
            *_notes(report.assumed, report.left_out),
        ],
    )


@cli.command()
@click.argument("src", type=_PATH, metavar="DIR")
@click.option(
    "-o", "--output", type=_PATH, metavar="PATH", help="FILE.safetensors or folder. [default: NAME-merged here]"
)
@_write_options
@_output_options
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
    verb = "would be written" if report.dry_run else _rate(report.num_bytes, report.seconds)
    console.report(report, [f"{report.path}: {report.num_tensors} tensors, {size(report.num_bytes)}, {same}; {verb}"])


@cli.command()
@click.argument("src", type=_PATH, metavar="DIR")
@_tp_option
@click.option("-o", "--output", type=_PATH, metavar="DIR2", help="Folder to write. [default: NAME-tpN here]")
@_write_options
@_checksum_option
@_output_options
def reshard(src: Path, output: Path | None, *, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401
    """Rewrite the split checkpoint DIR for another number of ranks."""
    from shardconv.checkpoint.reshard import reshard as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("reshard") as progress:
        report = run(src, output, progress=progress, **options)
    verb = "would be written" if report.dry_run else _rate(sum(report.rank_bytes), report.seconds)
    console.report(
        report,
        [
            f"{report.path}: {report.num_tensors} tensors, from {_count(report.old_tp, 'rank')} to {report.tp}",
            f"{_count(report.tp, 'rank file')} of {_sizes(report.rank_bytes)}; {verb}",
        ],
    )


@cli.command()
@click.argument("src", type=_PATH, metavar="DIR")
@click.option("--against", type=_PATH, metavar="SRC", help="Compare every byte with this source, too.")
@click.option("--follow-links", is_flag=True, help="Read files of SRC that are links out of their folder.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads that read.")
@_output_options
def verify(src: Path, *, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401
    """Prove the split checkpoint DIR bit for bit, against its checksums and its source. Exits 3 on a difference."""
    from shardconv.checkpoint.verify import verify as run

    console = Console(as_json=as_json, quiet=quiet)
    with console.progress("verify") as progress:
        report = run(src, progress=progress, **options)
    shown, more = report.differences[:_MAX_LINES], len(report.differences) - _MAX_LINES
    lines = [
        f"{report.path}: {_count(report.tp, 'rank')}, {report.num_tensors} tensors, {size(report.num_bytes)}",
        f"checked: {', '.join(report.checked)}",
        *([] if report.has_checksums else ["there are no checksums: it was split with --no-checksums"]),
        *(f"DIFFERENT  {line}" for line in shown),
        *([f"... and {more} more (--json has all)"] if more > 0 else []),
        "different: split the source again, or put back what was changed" if report.differences else _correct(report),
    ]
    console.report(report, lines)
    if report.differences:
        sys.exit(3)


@cli.command()
@click.argument("src", type=_PATH, metavar="DIR")
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
@click.option("--check", type=_PATH, metavar="SRC", help="Compare with this unsplit checkpoint, in float32.")
@click.option(
    "--verify/--no-verify", default=True, show_default=True, help="Check each rank's file against its checksums first."
)
@click.option("--trust-remote-code", is_flag=True, help="Run code that the checkpoint brings for its model.")
@click.option("-q", "--quiet", is_flag=True, help="Print the text only: no figures and no progress.")
@_common_options
def run(src: Path, prompt: tuple[str, ...], *, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401
    """Run the split checkpoint DIR, one process a rank: starts them, or joins them when torchrun did."""
    gc.enable()
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        _run_rank(src, prompt, Console(as_json=as_json, quiet=quiet), options)
    else:
        with signals_later():
            from shardconv.runtime.launch import launch
            from shardconv.runtime.run import RunOptions, check_run
        sys.exit(launch(sys.argv[1:], check_run(src, prompt, RunOptions(**options))))


def _run_rank(src: Path, prompt: tuple[str, ...], console: Console, options: dict[str, Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # a rank has nothing to put away
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
        f"{_count(report.tp, 'rank')} on {report.device}: {size(report.load_bytes)} a rank loaded in "
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


@cli.command()
@click.argument("src", type=_PATH)
@click.option("--tp", type=click.IntRange(min=1), metavar="N", help="Number of ranks. [default: legal sizes only]")
@click.option("--all", "show_all", is_flag=True, help="A line for every tensor, not for every group alike.")
@click.option("--prove", is_flag=True, help="Split a small model of this shape and compare it with the plain one.")
@click.option("--propose", is_flag=True, help="Print a plan file, proposed from the modules of a small model.")
@_plan_options
@_output_options
def plan(
    src: Path,
    *,
    as_json: bool,
    quiet: bool,
    plan: Path | None,
    show_all: bool,
    prove: bool,
    propose: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Show how SRC would be cut, why, and for which numbers of ranks it can be. Reads headers and config only."""
    from shardconv.checkpoint.planning import report_plan

    console = Console(as_json=as_json, quiet=quiet)
    if propose:
        from shardconv.proof.prove import propose_plan

        gc.enable()
        console.stream(propose_plan(src, config=options["config"]))
        return
    if prove:
        _prove(src, console, plan=plan or "auto", **options)
        return
    report = report_plan(src, plan=plan or "auto", **options)
    console.report(report, _plan_lines(report))
    if report.tp is not None:
        console.table(
            ("tensor", "count", "dtype", "shape", "shard", "placement", "why"), _plan_rows(report, show_all=show_all)
        )


def _prove(src: Path, console: Console, *, tp: int | None, **options: Any) -> None:  # noqa: ANN401
    """Exits 3 where the small model is not the plain one."""
    gc.enable()
    with signals_later():
        from shardconv.proof.prove import prove
    report = prove(src, **options) if tp is None else prove(src, tps=(tp,), **options)
    console.report(report, _proof_lines(report))
    if not report.is_proven:
        sys.exit(3)


def _proof_lines(report: "ProofReport") -> list[str]:
    numel = f"{report.num_parameters:,} random numbers"
    lines = [f"{report.source}: family {report.family}, tried on a small {report.model} of {numel}"]
    for proof in report.proofs:
        tokens = {True: ", greedy tokens equal", False: ", greedy tokens DIFFERENT", None: ""}[proof.tokens]
        gradients = "" if proof.gradient is None else f", gradients to {proof.gradient:.0e}"
        lines.append(
            f"tp {proof.tp}: {'right' if proof.is_right else 'DIFFERENT'}: outputs to {proof.output:.0e}{gradients} of "
            f"the largest{tokens}; {proof.cut:.0%} of the bytes of matrices are cut"
        )
    lines += [f"not tried: {text}" for text in report.skipped]
    lines += [f"not reached, as the small model has no such tensor: {name}" for name in report.unreached]
    return [*lines, "proven" if report.is_proven else "not proven: do not split by this plan"]


@cli.command(hidden=True)
@click.argument("folder", type=_PATH)
def prove_rank(folder: Path) -> None:
    """Be a rank of a proof."""
    gc.enable()
    from shardconv.proof.prove import prove_rank as run
    from shardconv.runtime.launch import join, leave

    join()
    run(folder)
    leave()


def _plan_lines(report: "PlanReport") -> list[str]:
    lines = [f"{report.source}: {report.num_tensors} tensors, {size(report.num_bytes)}, family {report.family}"]
    lines += _notes(report.assumed, report.left_out)
    lines.append(f"legal tp: {', '.join(map(str, report.legal_tp)) or 'none'}")
    blocks: dict[str, list[BlockedTp]] = {}
    for blocked in report.blocked_tp:
        blocks.setdefault(blocked.tensor, []).append(blocked)
    for tensor, sizes in blocks.items():
        lines.append(f"not legal: {ranges([blocked.tp for blocked in sizes])}; {tensor}: {sizes[0].reason}")
    if report.tp is not None:
        lines += [f"tp {report.tp}: {_sizes(report.rank_bytes)} a rank", ""]
    return lines


def _plan_rows(report: "PlanReport", *, show_all: bool) -> list[tuple[str, ...]]:
    groups: dict[tuple[Any, ...], list[TensorReport]] = {}
    for tensor in report.tensors:
        name = tensor.name if show_all else re.sub(r"\.\d+(?=\.)", ".*", tensor.name)
        groups.setdefault((name, tensor.dtype, tensor.shape, tensor.placement, tensor.reason), []).append(tensor)
    return [_plan_row(key[0], tensors[0], len(tensors)) for key, tensors in groups.items()]


def _plan_row(name: str, tensor: "TensorReport", count: int) -> tuple[str, ...]:
    shards = " ".join(dict.fromkeys(map(_shape, tensor.shard_shapes)))
    return name, str(count), tensor.dtype, _shape(tensor.shape), shards, tensor.placement, tensor.reason


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _notes(assumed: tuple[str, ...], left_out: tuple[str, ...]) -> list[str]:
    notes = [f"assumed: {sentence}" for sentence in assumed]
    return [*notes, f"left out, as no part of this checkpoint: {', '.join(left_out)}"] if left_out else notes


def _sizes(rank_bytes: tuple[int, ...]) -> str:
    low, high = size(min(rank_bytes)), size(max(rank_bytes))
    return low if low == high else f"{low} to {high}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{seconds:.1f} s, {size(num_bytes / seconds)}/s"


def _terminate(*_: object) -> NoReturn:
    raise Terminated


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
    from shardconv.errors import PeerError, WorldSizeError

    if isinstance(error, WorldSizeError):
        return os.environ["RANK"] != "0"
    is_lost = isinstance(error, RuntimeError) and re.search("(gloo|nccl|[Cc]onnection|TCPStore|FileStore)", str(error))
    return isinstance(error, PeerError) or bool(is_lost)


def main() -> NoReturn:
    """Run the command line, and exit."""
    debug = "--debug" in sys.argv
    signal.signal(signal.SIGTERM, _terminate)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's linear algebra would start threads that nobody uses
    gc.disable()  # headers and plans are many objects and no cycles; looking for some takes as long as the plan itself
    try:
        sys.exit(cli.main(prog_name="shardconv", standalone_mode=False) or 0)
    except (Exception, KeyboardInterrupt, Terminated) as error:
        if debug:
            raise
        if os.environ.get("RANK"):
            sys.exit(_end_rank(error))
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads it any more
        sys.exit(show_error(error, as_json="--json" in sys.argv))
