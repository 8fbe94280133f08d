"""Run prompts through a checkpoint on all ranks; the first rank prints.

Owns the order of a run: checks, loading, outputs, comparison and report.
"""

import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from msgspec import Struct

from shardconv.checkpoint.split.loadable import Loadable, open_loadable
from shardconv.checkpoint.split.split_folders import file_differences
from shardconv.convert.converted_model import ConvertedModel
from shardconv.distributed.agreement import gather, is_first_rank
from shardconv.distributed.devices import device_module
from shardconv.files.folder import AnyPath
from shardconv.hf.package import hide_progress, hide_warnings
from shardconv.hf.tokenizer import check_tokenizer, text_streamer
from shardconv.plan.families.loading import model_type_of
from shardconv.runtime.comparison import check_unsharded, compare
from shardconv.runtime.device import rank_device
from shardconv.runtime.load import load
from shardconv.runtime.outputs import ModelRun, Outputs, RunOptions, TimedScores, compute_outputs
from shardconv.runtime.prompts import Codec, check_input, check_positions, default_ids, parse_ids
from shardconv.runtime.rank_tensors import refuse_quantized, require_quantized
from shardconv.runtime.ranks import check_config, find_model_class
from shardconv.support import Progress
from shardconv.support.errors import PlanWarning, RunError, UsageError, is_connection_error

#: Opens a progress display; see :func:`~shardconv.load`.
OpenProgress = Callable[[], AbstractContextManager[Progress | None]]


class RunReport(Struct, frozen=True):
    """Outputs and figures of a run. Times are measured on one rank.

    Attributes:
        path: the checkpoint.
        tp: tensor parallel size.
        ep: expert parallel size; 1 if each expert is sharded.
        device: device of this rank.
        prompts: the prompts.
        outputs: for each prompt its continuation, the tokens that fill its masks, or an embedding as JSON.
        load_seconds: time to load the model.
        load_bytes: size of the rank's file, or of the file that a split of the source would have.
        memory_bytes: peak memory of each rank; on the device if it is an accelerator.
        dequantized_bytes: size of this rank's tensors after quantized layers are dequantized; None if none are.
        first_token_seconds: time from the prompt to the first token; None if nothing is generated.
        tokens_per_second: tokens of all prompts per second, after the first token; None if nothing is generated.
        differences: with ``check``, the differences from the unsharded model; empty if there are none.
        error: with ``check``, the largest error of an output, relative to the largest output.
        notes: notes on the checkpoint and the run.
        adapter: the split adapter that was applied, also to the model of ``check``; None for none.
        stages: number of layers of each pipeline stage; empty for one stage.
    """

    path: str
    tp: int
    device: str
    prompts: tuple[str, ...]
    outputs: tuple[str, ...]
    load_seconds: float
    load_bytes: int
    memory_bytes: tuple[int, ...]
    dequantized_bytes: int | None
    first_token_seconds: float | None
    tokens_per_second: float | None
    differences: tuple[str, ...] | None
    error: float | None
    notes: tuple[str, ...]
    adapter: str | None = None
    stages: tuple[int, ...] = ()
    ep: int = 1

    @property
    def has_continuations(self) -> bool:
        """Whether the model generates tokens, rather than filling masks or encoding."""
        return self.first_token_seconds is not None


def check_run(checkpoint: Loadable, prompts: Sequence[str], options: RunOptions, rank: int | None = None) -> int:
    """Check everything that can be checked before processes are started and tensors are read.

    Args:
        checkpoint: the checkpoint to run.
        prompts: the prompts.
        options: the options.
        rank: the rank of this process; None to check the files of all ranks.

    Returns:
        The number of ranks.

    Raises:
        ShardconvError: if the run would fail.
    """
    path, manifest = checkpoint.path, checkpoint.manifest
    check_config(checkpoint)
    _refuse_diffusers(path, manifest.config or {})
    (require_quantized if options.dequantize else refuse_quantized)(manifest, path)
    if not options.token_ids:
        check_tokenizer(checkpoint.folder)
    for prompt in prompts if options.token_ids else ():
        parse_ids(prompt)
    if prompts:
        check_prompts(prompts)
    if options.check is not None:
        check_unsharded(options.check, path, manifest, dequantize=options.dequantize)
    checkpoint.check_ranks([each for each in range(manifest.num_ranks) if rank in {None, each}])
    rank_device(options.device)
    return manifest.num_ranks


def _refuse_diffusers(path: AnyPath, config: Mapping[str, object]) -> None:
    if "model_type" not in config and (kind := model_type_of(config)) is not None:
        raise RunError(
            f"{path}: is a {kind} of diffusers, which a pipeline calls: run the folder of the pipeline, or load this "
            "component in Python with shardconv.load"
        )


def check_prompts(prompts: Sequence[str]) -> None:
    """Refuse to run without a prompt, or with a prompt that is not text.

    Raises:
        UsageError: if all prompts are empty, or one is not UTF-8.
    """
    if not any(prompt.strip() for prompt in prompts):
        raise UsageError("no prompt given: pass --prompt TEXT, or write a prompt per line to stdin")
    for number, prompt in enumerate(prompts, 1):
        if not prompt.isascii() and any("\ud800" <= char <= "\udfff" for char in prompt):
            raise UsageError(f"prompt {number} is not UTF-8: convert it")


def run_rank(
    path: AnyPath,
    prompts: Sequence[str],
    options: RunOptions,
    write: Callable[[str], None],
    progress: OpenProgress = nullcontext,
) -> RunReport:
    """Run prompts on this rank; all ranks call it.

    Args:
        path: the split checkpoint, or the source.
        prompts: the prompts; all ranks use the prompts of the first rank.
        options: the options.
        write: called on the first rank with the text of a single prompt as it is generated.
        progress: opens a progress display of loading.

    Returns:
        The report, with the times of this rank.

    Raises:
        RunError: if text needs a tokenizer that the checkpoint does not have, or the model does not support a prompt.
        ShardconvError: as :func:`~shardconv.load`.
    """
    hide_progress()
    if not is_first_rank():
        hide_warnings()  # the first rank prints them
    checkpoint = open_loadable(path, tp=options.tp, pp=options.pp, stages=options.stages, options=options.plan)
    manifest, codec = checkpoint.manifest, _codec(checkpoint.folder, options)
    with suppress(RunError):  # load raises it, too
        find_model_class(checkpoint, is_trusted=options.trust_remote_code)  # imports its module, which is not loading
    began = time.perf_counter()
    model = _load(path, options, progress)
    load_seconds = time.perf_counter() - began
    check_input(model)
    prompts = gather([prompt for prompt in prompts if prompt.strip()])[0]
    is_default = not prompts and options.token_ids and options.check is not None
    prompts = [default_ids(model)] if is_default else prompts
    run = _encode(model, codec, prompts, options)
    is_written = write is not None and codec.tokenizer is not None and is_first_rank() and len(prompts) == 1
    scores, streamer = TimedScores(), text_streamer(codec.tokenizer, write) if is_written else None
    with torch.inference_mode():
        with explain_errors(path, manifest.request.plan_file):
            outputs = compute_outputs(run, scores, streamer)
        comparison = None if options.check is None else compare(run, outputs, path, options.check)
    return RunReport(
        path=str(path),
        tp=manifest.tp,
        ep=manifest.plan.ep,
        stages=manifest.plan.num_layers,
        device=str(model.device),
        prompts=tuple(prompts),
        outputs=tuple(outputs.texts),
        load_seconds=load_seconds,
        load_bytes=manifest.rank_layout.rank_bytes[0],
        memory_bytes=tuple(gather(_peak_memory(model.device))),
        dequantized_bytes=sum(one.nbytes for one in model.parameters()) if options.dequantize else None,
        first_token_seconds=scores.first_token_seconds,
        tokens_per_second=scores.tokens_per_second(len(prompts)),
        differences=None if comparison is None else comparison.differences,
        error=None if comparison is None else comparison.error,
        adapter=None if options.adapter is None else str(options.adapter),
        notes=tuple(_notes(checkpoint, run, outputs, is_default=is_default)),
    )


def _codec(path: AnyPath, options: RunOptions) -> Codec:
    if options.token_ids:
        return Codec(None)
    return Codec.of_text(path, is_trusted=options.trust_remote_code, is_chat=options.chat)


def _load(path: AnyPath, options: RunOptions, progress: OpenProgress) -> ConvertedModel:
    dtype = "fp32" if options.check is not None else options.dtype
    with progress() as show, warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # reported as notes
        model: ConvertedModel = load(
            path,
            tp=options.tp,
            pp=options.pp,
            stages=options.stages,
            device=options.device,
            dtype=dtype,
            verify=options.verify,
            dequantize=options.dequantize,
            adapter=options.adapter,
            unused=options.unused,
            trust_remote_code=options.trust_remote_code,
            progress=show,
            **options.plan,
        )
    return model


@contextmanager
def explain_errors(path: AnyPath, plan_file: tuple[str, str] | None) -> Iterator[None]:
    """Explain errors of torch in a model that was sharded by a user's plan file, which may be the cause.

    Args:
        path: the checkpoint.
        plan_file: name and content of the plan file; None if there is none.

    Raises:
        RunError: instead of a RuntimeError, if there is a plan file.
    """
    try:
        yield
    except RuntimeError as error:
        if plan_file is None or isinstance(error, torch.OutOfMemoryError) or is_connection_error(error):
            raise
        raise RunError(
            f"{path}: the model does not run as {plan_file[0]} shards it: {error}. Check the plan file with shardconv "
            f"plan --prove"
        ) from error


def _encode(model: ConvertedModel, codec: Codec, prompts: Sequence[str], options: RunOptions) -> ModelRun:
    check_prompts(prompts)
    inputs = {name: value.to(model.device) for name, value in codec.encode(prompts, model).items()}
    check_positions(model, inputs["input_ids"].shape[1], options.max_new_tokens)
    return ModelRun(model, codec, inputs, options)


def _notes(checkpoint: Loadable, run: ModelRun, outputs: Outputs, *, is_default: bool) -> Iterator[str]:
    """Yield notes on the checkpoint and on the outputs; ``is_default`` is whether the prompt is the default one."""
    manifest, is_verified = checkpoint.manifest, run.options.verify and checkpoint.source is None
    yield from (f"assumed: {sentence}" for sentence in manifest.plan.assumed)
    if run.options.adapter is None and checkpoint.adapter_note:
        yield checkpoint.adapter_note
    if is_verified:
        yield from file_differences(manifest.auxiliary_files, checkpoint.path)
    if is_default:
        yield "no tokenizer and no prompt: the models are compared on token ids over the whole vocabulary"
    if is_verified and manifest.checksums is None:
        yield "the rank files were not verified: the split checkpoint does not have checksums"
    config = run.model.config
    positions = getattr(config, "max_position_embeddings", None)
    if outputs.tokens is None or config.is_encoder_decoder or not isinstance(positions, int):
        return
    if (tokens := outputs.tokens.shape[1]) > positions:
        yield f"{tokens} tokens are more than the {positions} that the model is made for"


def _peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes of this process, or on its accelerator."""
    if (module := device_module(device)) is not None:
        return int(module.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
