"""``shardconv run``: start one process per rank, or run one rank under torchrun; print text, or write pictures."""

import gc
import json
import os
import sys
from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shardconv.commands.command import CHECKS, GENERATION, MODEL, OUTPUT, Command, Flag, Option, chosen
from shardconv.commands.options import (
    COUNT,
    DTYPES,
    PATH,
    PLAN_OPTIONS,
    SOURCE_TP,
    SRC,
    STAGE_OPTIONS,
    Number,
    SourcePath,
    display_options,
)
from shardconv.commands.shared import num_ranks_of, stages_note
from shardconv.files.folder import AnyPath
from shardconv.files.paths import open_path
from shardconv.support.console import Console
from shardconv.support.errors import UsageError
from shardconv.support.exits import ImportPhase, default_signals
from shardconv.support.formatting import counted, size

if TYPE_CHECKING:
    from shardconv.checkpoint.split.loadable import Loadable
    from shardconv.runtime.outputs import RunOptions
    from shardconv.runtime.pipeline_run import PipelineRunReport
    from shardconv.runtime.run import RunReport

_PROMPT = "Continue this text. Repeatable. [default: lines of stdin]"
_IDS = 'Continue token ids, such as "1 2 3". Repeatable.'
_MAX_NEW_TOKENS = "Number of tokens to generate per prompt."
_TEMPERATURE = "Sample tokens at this temperature; 0 is greedy decoding. [default: 0]"
_DEVICE = "Run on cpu, cuda or xpu. [default: the accelerator where there is one]"
_DEQUANTIZE = "Load quantized layers as unquantized ones, in the data type of the model."
_ADAPTER = (
    "Apply this LoRA adapter: one that was split with the model, by its name, or the folder of one that was split "
    "alone."
)
_UNUSED = "Allow tensors that the model does not use. Repeatable."
_CHECK = "Compare with the unsharded model of this source, in float32."
_VERIFY = "Compare each rank file with its checksums. [default: on]"


_OUTPUT = "Write the picture to this file; the number of the prompt follows its name if there are several."
#: Options of pipelines only.
_PICTURE_OPTIONS = (
    Option(GENERATION, "--steps", "Number of denoising steps of a pipeline.", type=COUNT, metavar="N"),
    Option(GENERATION, "--height", "Height of the picture of a pipeline.", type=COUNT, metavar="PIXELS"),
    Option(GENERATION, "--width", "Width of the picture of a pipeline.", type=COUNT, metavar="PIXELS"),
    Option(OUTPUT, "-o --output", _OUTPUT, type=PATH, metavar="FILE"),
)
_PICTURE_NAMES = frozenset(str(option.name) for option in _PICTURE_OPTIONS)
#: Options of models that apply to pipelines, too.
_SHARED = frozenset({
    "src", "prompt", "seed", "device", "dtype", "dequantize", "adapter", "check", "verify", "tp", "as_json", "quiet",
    *(str(option.name) for option in PLAN_OPTIONS),
})  # fmt: skip


class _OneFolder(Command):
    """A command whose error for a second folder has the remedy for ranks in several folders."""

    def extra_remedy(self, options: Collection[str]) -> str:
        """See :class:`Command`."""
        del options
        return (
            "run takes one folder (or quotes around a prompt are missing): merge ranks in several folders first with "
            "shardconv merge, or start torchrun on each host with its folder"
        )


@click.command(
    cls=_OneFolder,
    params=[
        SRC,
        SOURCE_TP,
        *STAGE_OPTIONS,
        *PLAN_OPTIONS,
        Option(GENERATION, "--prompt", _PROMPT, multiple=True, metavar="TEXT"),
        Option(GENERATION, "--token-ids", _IDS, multiple=True, metavar="IDS"),
        Option(GENERATION, "--max-new-tokens", _MAX_NEW_TOKENS, type=COUNT, default=64, show_default=True, metavar="N"),
        Option(GENERATION, "--temperature", _TEMPERATURE, type=Number(float, 0), default=0.0, metavar="T"),
        Option(GENERATION, "--seed", "Seed of sampled tokens.", type=int, default=0, show_default=True, metavar="N"),
        Flag(GENERATION, "--chat", "Apply the model's chat template to the prompts."),
        *_PICTURE_OPTIONS,
        Option(MODEL, "--device", _DEVICE, metavar="DEVICE"),
        Option(MODEL, "--dtype", "Run in this data type. [default: as stored]", type=DTYPES),
        Flag(MODEL, "--dequantize", _DEQUANTIZE),
        Option(MODEL, "--adapter", _ADAPTER, type=PATH, metavar="NAME|DIR"),
        Option(MODEL, "--unused", _UNUSED, multiple=True, metavar="PATTERN"),
        Flag(MODEL, "--trust-remote-code", "Run Python code of the checkpoint."),
        Option(CHECKS, "--check", _CHECK, type=PATH, metavar="SRC"),
        Flag(CHECKS, "--verify/--no-verify", _VERIFY),
        *display_options("Print only the generated text; for several prompts, a JSON string per line."),
    ],
    epilog='shardconv run llama-tp8 --prompt "The capital of France is"\n'
    'shardconv run llama --tp 8 --chat --prompt "Hello"\n'
    'shardconv run llama-tp8 --prompt "Hello" --check llama\n'
    'shardconv run flux-tp8 --prompt "a cat" --steps 20 -o cat.png\n'
    'torchrun --nproc-per-node 8 -m shardconv run llama-tp8 --prompt "Hello"',
)
def run(
    console: Console,
    src: SourcePath,
    prompt: tuple[str, ...],
    token_ids: tuple[str, ...],
    *,
    steps: int | None,
    height: int | None,
    width: int | None,
    output: Path | None,
    **values: Any,
) -> None:
    """Run the model of SRC with one process per rank. Under torchrun, this process is one of them.

    SRC is a split checkpoint, or with --tp a source: a .safetensors file, an index, a folder, or the URL of one.
    The options under Source and Plan are for sources, because a split checkpoint stores its plan. A pipeline of
    diffusers writes a picture for each prompt.
    """
    gc.enable()  # disabled by __main__.py; models have reference cycles
    from shardconv.checkpoint.sources.pipeline import is_pipeline

    plan, folder = chosen(values, PLAN_OPTIONS), open_path(src)
    rank = int(os.environ["RANK"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None
    if values["check"] is not None and values["dtype"] not in {None, "fp32"}:
        raise UsageError(f"--check compares in float32 (got --dtype {values['dtype']}): leave out --dtype")
    if is_pipeline(folder):
        pictures = {"steps": steps, "height": height, "width": width, "output": output}
        if values["pp"] not in {None, 1} or values["stages"]:
            raise UsageError("a pipeline of diffusers does not have pipeline stages: remove --pp and --stages")
        _run_pipeline(console, folder, prompt, {**values, **pictures}, plan, rank)
        return
    if token_ids and (prompt or values["chat"]):
        raise UsageError(f"--token-ids replaces {'--prompt' if prompt else '--chat'}: give one of the two")
    options = {"plan": plan, **{name: value for name, value in values.items() if name not in plan}}
    if rank is not None:
        default_signals()  # a rank has nothing to clean up
    checkpoint = _open(folder, options)
    _refuse_options(_PICTURE_NAMES, "applies to pipelines of diffusers only")
    with ImportPhase() if rank is None else nullcontext():
        from shardconv.runtime.launch import launch
        from shardconv.runtime.run import check_run
    given = _run_options(folder, prompt, token_ids, options)
    num_ranks = check_run(checkpoint, prompt or token_ids, given, rank)
    if rank is None:
        sys.exit(launch(sys.argv[1:], num_ranks))
    _run_rank(folder, prompt or token_ids, given, console, is_first=rank == 0)


def _open(path: AnyPath, options: dict[str, Any]) -> "Loadable":
    """Open the checkpoint, and check the adapter, without torch: errors of paths do not wait for its import."""
    from shardconv.checkpoint.adapters.adapter import SplitAdapter
    from shardconv.checkpoint.split.loadable import open_loadable

    checkpoint = open_loadable(
        path, tp=options["tp"], pp=options["pp"], stages=options["stages"], options=options["plan"]
    )
    if options["adapter"] is not None:
        SplitAdapter.open(options["adapter"], path, checkpoint.manifest)
    return checkpoint


def _run_options(
    src: AnyPath, prompt: tuple[str, ...], token_ids: tuple[str, ...], options: dict[str, Any]
) -> "RunOptions":
    """The options; a check without prompt and tokenizer uses token ids."""
    from shardconv.hf.tokenizer import has_tokenizer
    from shardconv.runtime.outputs import RunOptions

    is_check_alone = not prompt and options["check"] is not None and not options["chat"]
    uses_token_ids = bool(token_ids) or (is_check_alone and not has_tokenizer(src if src.is_dir() else src.parent))
    return RunOptions(**options, token_ids=uses_token_ids)


def _run_rank(
    folder: AnyPath, prompts: tuple[str, ...], options: "RunOptions", console: Console, *, is_first: bool
) -> None:
    """Run one rank in this process; the first rank reads stdin and prints the report."""
    from shardconv.runtime.launch import join, leave
    from shardconv.runtime.run import check_prompts, run_rank

    if is_first and not prompts and not options.token_ids:
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")  # as Python decodes arguments
        prompts = tuple(text.splitlines())
        check_prompts(prompts)
    join()
    progress = partial(console.progress, "load") if is_first else nullcontext
    report = run_rank(folder, prompts, options, console.stream, progress)
    if is_first:
        show_report(report, console, is_text=not options.token_ids, temperature=options.temperature)
    leave()
    if report.differences:
        sys.exit(3)


def show_report(report: "RunReport", console: Console, *, is_text: bool, temperature: float) -> None:
    """Print the report, except for the text of a single prompt, which was printed while it was generated."""
    if is_text and len(report.outputs) == 1 and report.has_continuations:
        console.report(report, [])
    else:
        console.report(report, _output_lines(report), quiet_lines=_quiet_lines(report, is_text=is_text))
    console.note(_figures(report))
    console.warn([*report.notes, *(f"differs: {line}" for line in report.differences or ())])
    if report.differences == ():
        console.note([_verdict(report, temperature)])


def _output_lines(report: "RunReport") -> list[str]:
    """The outputs; with several continuations, each after its prompt."""
    if not report.has_continuations or len(report.outputs) == 1:
        return list(report.outputs)
    return [f"> {prompt}\n{text}\n" for prompt, text in zip(report.prompts, report.outputs, strict=True)]


def _quiet_lines(report: "RunReport", *, is_text: bool) -> list[str]:
    """A line for each prompt; generated text, which may have several lines, as a JSON string."""
    is_any_text = is_text and report.has_continuations
    return [json.dumps(text, ensure_ascii=False) if is_any_text else text for text in report.outputs]


def _verdict(report: "RunReport", temperature: float) -> str:
    """The line for a check that found no differences."""
    tokens = "; greedy tokens are equal" if report.has_continuations and not temperature else ""
    adapter = "" if report.adapter is None else f" with the adapter {report.adapter}, by PEFT,"
    return (
        f"equal to the unsharded model{adapter} in float32, for this input: outputs differ by at most "
        f"{report.error:.0e} of the largest{tokens}"
    )


def _figures(report: "RunReport") -> list[str]:
    """Times, speeds and memory, one line for loading and one for generating."""
    memory = ", ".join(map(size, report.memory_bytes))
    lines = [
        f"{counted(num_ranks_of(report), 'rank')} on {report.device}{stages_note(report.stages)}: "
        f"{size(report.load_bytes)} per rank loaded in "
        f"{report.load_seconds:.2f} s, {size(report.load_bytes / report.load_seconds)}/s; peak memory per rank {memory}"
    ]
    if report.dequantized_bytes is not None:
        dtype = "" if report.differences is None else ", in float32 for --check"
        lines.append(
            f"dequantized while loading: {size(report.dequantized_bytes)} of parameters per rank{dtype}; activations "
            f"are not quantized"
        )
    if report.first_token_seconds is not None:
        speed = f", then {report.tokens_per_second:.1f} tokens/s" if report.tokens_per_second else ""
        lines.append(f"first token after {report.first_token_seconds:.3f} s{speed}")
    return lines


# --- pipelines of diffusers -------------------------------------------------------------------------------------------


def _refuse_options(names: Collection[str], reason: str) -> None:
    """Refuse options that the user passes, and that would be ignored.

    Raises:
        UsageError: if one of ``names`` was passed.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        is_given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if is_given and parameter.name in names:
            raise UsageError(f"{parameter.opts[0]} {reason}: remove it")


def _run_pipeline(
    console: Console,
    folder: AnyPath,
    prompts: tuple[str, ...],
    values: dict[str, Any],
    plan: dict[str, Any],
    rank: int | None,
) -> None:
    """Generate pictures with one process per rank; under torchrun, this process is ``rank``."""
    every = {str(parameter.name) for parameter in click.get_current_context().command.params}
    _refuse_options(every - _SHARED - _PICTURE_NAMES, f"does not apply to {folder}, a pipeline of diffusers")
    with ImportPhase() if rank is None else nullcontext():
        from shardconv.runtime.launch import join, launch, leave
        from shardconv.runtime.pipeline_run import PipelineOptions, check_pipeline_run, run_pipeline
    names = _PICTURE_NAMES | (_SHARED & set(PipelineOptions.__struct_fields__))
    options = PipelineOptions(**{name: values[name] for name in names}, plan=plan)  # type: ignore[arg-type]
    if rank is None:
        sys.exit(launch(sys.argv[1:], check_pipeline_run(folder, prompts, options)))
    join()
    report = run_pipeline(folder, prompts, options, partial(console.progress, "load") if rank == 0 else nullcontext)
    if rank == 0:
        _show_pictures(report, console)
    leave()
    if report.differences:
        sys.exit(3)


def _show_pictures(report: "PipelineRunReport", console: Console) -> None:
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
