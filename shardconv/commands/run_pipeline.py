"""``shardconv run`` of a pipeline of diffusers: its options, processes and output."""

import os
import sys
from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shardconv.commands.command import GENERATION, OUTPUT, Option
from shardconv.commands.options import COUNT, PATH, PLAN_OPTIONS
from shardconv.files.folder import AnyPath
from shardconv.support.console import Console
from shardconv.support.errors import UsageError
from shardconv.support.exits import ImportPhase
from shardconv.support.formatting import counted

if TYPE_CHECKING:
    from shardconv.runtime.pipeline_run import PipelineRunReport

_OUTPUT = "Write the picture to this file; the number of the prompt follows its name if there are several."
#: Options of pipelines only.
PICTURE_OPTIONS = (
    Option(GENERATION, "--steps", "Number of denoising steps of a pipeline.", type=COUNT, metavar="N"),
    Option(GENERATION, "--height", "Height of the picture of a pipeline.", type=COUNT, metavar="PIXELS"),
    Option(GENERATION, "--width", "Width of the picture of a pipeline.", type=COUNT, metavar="PIXELS"),
    Option(OUTPUT, "-o --output", _OUTPUT, type=PATH, metavar="FILE"),
)
PICTURE_NAMES = frozenset(str(option.name) for option in PICTURE_OPTIONS)
#: Options of models that apply to pipelines, too.
_SHARED = frozenset({
    "src", "prompt", "seed", "device", "dtype", "dequantize", "adapter", "check", "verify", "tp", "as_json", "quiet",
    *(str(option.name) for option in PLAN_OPTIONS),
})  # fmt: skip


def refuse_options(names: Collection[str], reason: str) -> None:
    """Refuse options that the user passes, and that would be ignored.

    Raises:
        UsageError: if one of ``names`` was passed.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        is_given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if is_given and parameter.name in names:
            raise UsageError(f"{parameter.opts[0]} {reason}: remove it")


def run_pipeline(
    console: Console, folder: AnyPath, prompts: tuple[str, ...], values: dict[str, Any], plan: dict[str, Any]
) -> None:
    """Generate pictures with one process per rank; under torchrun, this process is one of them.

    Args:
        console: console of the command.
        folder: the pipeline.
        prompts: the prompts.
        values: options of the command.
        plan: options of the plan.
    """
    every = {str(parameter.name) for parameter in click.get_current_context().command.params}
    refuse_options(every - _SHARED - PICTURE_NAMES, f"does not apply to {folder}, a pipeline of diffusers")
    rank = int(os.environ["RANK"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None
    with ImportPhase() if rank is None else nullcontext():
        from shardconv.runtime.launch import join, launch, leave
        from shardconv.runtime.pipeline_run import PipelineOptions, check_pipeline_run
        from shardconv.runtime.pipeline_run import run_pipeline as run
    names = PICTURE_NAMES | (_SHARED & set(PipelineOptions.__struct_fields__))
    options = PipelineOptions(**{name: values[name] for name in names}, plan=plan)  # type: ignore[arg-type]
    if rank is None:
        sys.exit(launch(sys.argv[1:], check_pipeline_run(folder, prompts, options)))
    join()
    report = run(folder, prompts, options, partial(console.progress, "load") if rank == 0 else nullcontext)
    if rank == 0:
        _show(report, console)
    leave()
    if report.differences:
        sys.exit(3)


def _show(report: "PipelineRunReport", console: Console) -> None:
    """Print the report of a run: the files of the pictures on stdout."""
    console.report(report, list(report.files), quiet_lines=list(report.files))
    loaded = (
        f"{report.pipeline}: {counted(report.tp, 'rank')} on {report.device}, loaded in {report.load_seconds:.2f} s"
    )
    made = "" if report.seconds is None else f"; {counted(len(report.files), 'picture')} in {report.seconds:.2f} s"
    console.note([f"{loaded}{made}"])
    console.warn([*report.notes, *(f"differs: {line}" for line in report.differences or ())])
    if report.differences == ():
        console.note([
            "equal to the unsharded pipeline in float32, for this prompt: latents after one step differ by at most "
            f"{report.error:.0e} of the largest"
        ])  # fmt: skip
