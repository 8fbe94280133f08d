"""Run: prompts through a split checkpoint, on all ranks at once; rank 0 prints.

Owns what a model does with a prompt: a text generator continues it, a masked language model fills in its masks, and
what only encodes gives embeddings.
"""

import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardconv.checkpoint.copy import Progress
from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.manifest import read_manifest
from shardconv.checkpoint.paths import hub_hint
from shardconv.checkpoint.verify import auxiliary_differences
from shardconv.errors import PlanWarning, RunError, ShardconvError, SplitCheckpointError, is_connection_error, one_line
from shardconv.hf.package import hide_progress, hide_warnings
from shardconv.hf.tokenizer import check_tokenizer, text_streamer
from shardconv.hf.weights import load_unsharded
from shardconv.runtime.device import rank_device
from shardconv.runtime.load import check_config, load
from shardconv.runtime.prompts import (
    Codec,
    IdCodec,
    TextCodec,
    check_input,
    check_positions,
    default_ids,
    parse_ids,
)

#: Words that are shown for a mask.
_TOP = 5
#: What float32 logits may differ by: sums are taken rank by rank.
_ALLOWED = 1e-4


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run did, as one rank saw it.

    Attributes:
        path: the split checkpoint.
        tp: number of ranks.
        device: of the rank.
        prompts: what was given.
        outputs: what came of each: the text that follows, the text with its masks filled in, or an embedding as JSON.
        load_seconds: from the call to the loaded model.
        load_bytes: bytes of the rank's file.
        memory_bytes: for each rank the most memory that it took, of the device where that is a GPU.
        first_token_seconds: from the prompt to the first token; None where nothing is generated.
        tokens_per_second: of all prompts together, after the first token; None where nothing is generated.
        differences: with ``check``, how the unsplit model differs; empty where it does not.
        error: with ``check``, how far the largest of its numbers is from the unsplit model's, by the largest of those.
        notes: what is to be said of the run.
    """

    path: str
    tp: int
    device: str
    prompts: tuple[str, ...]
    outputs: tuple[str, ...]
    load_seconds: float
    load_bytes: int
    memory_bytes: tuple[int, ...]
    first_token_seconds: float | None
    tokens_per_second: float | None
    differences: tuple[str, ...] | None
    error: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run.

    Attributes:
        max_new_tokens: the most tokens that follow a prompt.
        temperature: 0 for the likeliest token, else what the logits are divided by before one is drawn.
        seed: of the drawing.
        device: ``cpu`` or ``cuda``; None for cuda where there is one.
        chat: put prompts into the model's chat template.
        check: an unsplit checkpoint to compare with, both in float32, or None.
        dtype: of the values, as ``bfloat16``; None for that of the checkpoint.
        verify: check each rank's file against its checksums first.
        unused: patterns of tensors that the model need not use.
        trust_remote_code: run code that the checkpoint brings for its model or tokenizer.
        token_ids: prompts are token ids, as ``1 2 3``, and so are outputs; with ``check`` some are made if there is
            no prompt.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    device: str | None = None
    chat: bool = False
    check: Path | None = None
    dtype: str | None = None
    verify: bool = True
    unused: tuple[str, ...] = ()
    trust_remote_code: bool = False
    token_ids: bool = False


def check_run(path: Path, prompts: Sequence[str], options: RunOptions) -> int:
    """Check what can be checked before any process is started and any file is read.

    Returns:
        The number of ranks.

    Raises:
        ShardconvError: if something is missing.
    """
    manifest = read_manifest(path)
    check_config(path, manifest.config)
    if not options.token_ids:
        check_tokenizer(path)
    for prompt in prompts if options.token_ids else ():
        parse_ids(prompt)
    if prompts and not any(prompt.strip() for prompt in prompts):
        raise RunError("--prompt is empty: give it some text, or leave it out and give a line of stdin each")
    if prompts:
        check_prompts(prompts)
    if options.check is not None and not options.check.is_dir():
        raise RunError(
            f"{options.check}: there is no such folder; --check takes that of the unsplit checkpoint"
            f"{hub_hint(options.check)}"
        )
    if options.check is not None and not (options.check / CONFIG_NAME).is_file():
        raise RunError(
            f"--check {options.check}: does not have a config.json: give the folder of the unsplit checkpoint"
        )
    if missing := next((file for file in manifest.rank_paths(path) if not file.exists()), None):
        raise SplitCheckpointError(f"{missing}: is missing")
    rank_device(options.device)
    return manifest.tp


def run_rank(
    path: Path,
    prompts: Sequence[str],
    options: RunOptions,
    write: Callable[[str], None],
    progress: Callable[[], AbstractContextManager[Progress | None]] = nullcontext,
) -> RunReport:
    """Run prompts on this rank; all ranks call it.

    Args:
        path: the split checkpoint.
        prompts: given to the first rank; the others take its.
        options: how to run.
        write: takes the text of a single prompt while it comes, on the first rank.
        progress: opens what shows the progress of loading, see :func:`~shardconv.load`.

    Returns:
        The report; the times are the rank's own.

    Raises:
        RunError: if the checkpoint does not have a tokenizer that text needs, or the model gives nothing for a prompt.
        ShardconvError: as :func:`~shardconv.load`.
    """
    hide_progress()
    is_first = _is_first()
    if not is_first:
        hide_warnings()  # the first rank prints them
    manifest = read_manifest(path)
    trusted = options.trust_remote_code
    codec: Codec = IdCodec() if options.token_ids else TextCodec(path, is_trusted=trusted, is_chat=options.chat)
    began = time.perf_counter()
    dtype = "float32" if options.check is not None else options.dtype
    with progress() as show, warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # among the notes
        model = load(
            path,
            device=options.device,
            dtype=None if dtype is None else getattr(torch, dtype),
            verify=options.verify,
            unused=options.unused,
            trust_remote_code=trusted,
            progress=show,
        )
    load_seconds = time.perf_counter() - began
    check_input(model)
    prompts = _everywhere([prompt for prompt in prompts if prompt.strip()])
    notes = [f"assumed: {sentence}" for sentence in manifest.plan.assumed]
    notes += auxiliary_differences(manifest, path) if options.verify else []
    if not prompts and options.token_ids and options.check is not None:
        prompts = [default_ids(model)]
        notes.append("without a tokenizer and a prompt, the models are compared on token ids over the whole vocabulary")
    check_prompts(prompts)
    inputs = {name: value.to(model.device) for name, value in codec.encode(prompts, model).items()}
    check_positions(model, inputs["input_ids"].shape[1], options.max_new_tokens)
    clock = _Clock(codec.tokenizer, write if is_first and len(prompts) == 1 else None)
    differences, error = None, None
    with torch.inference_mode():
        with _plan_file_is_told(path, manifest.request.plan_file):
            outputs = _answer(model, codec, inputs, options, clock)
        if options.check is not None:
            differences, error = _compare(model, codec, inputs, outputs, options, is_first=is_first)
    memory = _everyones(_peak_memory(model.device))
    return RunReport(
        path=str(path),
        tp=manifest.tp,
        device=str(model.device),
        prompts=tuple(prompts),
        outputs=tuple(outputs.texts),
        load_seconds=load_seconds,
        load_bytes=manifest.rank_layout.file_bytes[0],
        memory_bytes=tuple(memory),
        first_token_seconds=clock.first_token_seconds,
        tokens_per_second=clock.tokens_per_second(len(prompts)),
        differences=differences,
        error=error,
        notes=(*notes, *_notes(model, outputs, is_unverified=options.verify and manifest.checksums is None)),
    )


def _is_first() -> bool:
    """Whether this is the first rank, also before the ranks are connected."""
    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def check_prompts(prompts: Sequence[str]) -> None:
    """Refuse to run without a prompt, or with one that is not text.

    Raises:
        RunError: if there is none, or one is not UTF-8.
    """
    if not any(prompt.strip() for prompt in prompts):
        raise RunError("there is no prompt: give --prompt TEXT, or a line of stdin for each")
    for number, prompt in enumerate(prompts, 1):
        if not prompt.isascii() and any("\ud800" <= char <= "\udfff" for char in prompt):
            raise RunError(f"prompt {number} is not UTF-8: convert it")


@contextmanager
def _plan_file_is_told(path: Path, plan_file: tuple[str, str] | None) -> Iterator[None]:
    """What a model says whose parts do not fit together is no internal error where a user's plan file cut it."""
    try:
        yield
    except RuntimeError as error:
        if plan_file is None or isinstance(error, torch.OutOfMemoryError) or is_connection_error(error):
            raise
        raise RunError(
            f"{path}: cut by {plan_file[0]}, the model does not run; shardconv plan --prove tells whether that is the "
            f"plan's fault: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Outputs:
    texts: list[str]
    tokens: Any = None


class _Clock:
    """A streamer of transformers that takes the time, and writes a single prompt's text as it comes."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None] | None) -> None:
        self._texts = None if tokenizer is None or write is None else text_streamer(tokenizer, write)
        self._times: list[float] = []

    def put(self, value: Any) -> None:
        """Take the prompt, and then token after token."""
        self._times.append(time.perf_counter())
        if self._texts is not None:
            self._texts.put(value)

    def end(self) -> None:
        """The last token was taken."""
        if self._texts is not None:
            self._texts.end()

    @property
    def first_token_seconds(self) -> float | None:
        return self._times[1] - self._times[0] if len(self._times) > 1 else None

    def tokens_per_second(self, prompts: int) -> float | None:
        steps = len(self._times) - 2
        return prompts * steps / (self._times[-1] - self._times[1]) if steps > 0 else None


def _generation(codec: Codec, options: RunOptions) -> dict[str, Any]:
    """The arguments of ``generate`` that options determine."""
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    padding = {} if codec.tokenizer is None else {"pad_token_id": codec.tokenizer.pad_token_id}
    one_by_one = {"num_beams": 1, "num_return_sequences": 1, "penalty_alpha": None}  # whatever generation_config says
    return {"max_new_tokens": options.max_new_tokens, **one_by_one, **sampling, **padding}


def _answer(model: Any, codec: Codec, inputs: dict[str, Any], options: RunOptions, clock: _Clock) -> _Outputs:
    if model.can_generate():
        torch.manual_seed(options.seed)
        try:
            tokens = model.generate(
                **inputs, **_generation(codec, options), streamer=clock, logits_processor=[_refuse_nan_scores]
            )
        except (TypeError, ValueError) as error:
            raise RunError(f"a {type(model).__name__} does not generate from token ids: {one_line(error)}") from error
        prompt = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        return _Outputs(codec.decode(tokens[:, prompt:]), tokens)
    output = model(**inputs)
    refuse_nan(_of_tokens(_numbers(output), inputs))
    if type(model).__name__.endswith("ForMaskedLM"):
        ids = output.logits.argmax(-1)
        return _Outputs(codec.decode(ids) if codec.tokenizer is None else _fill(codec.tokenizer, inputs, output.logits))
    if "last_hidden_state" in output:
        mask = inputs["attention_mask"].unsqueeze(-1)
        means = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
        return _Outputs([json.dumps([round(x, 6) for x in mean]) for mean in means.float().tolist()])
    raise RunError(
        f"a {type(model).__name__} gives {', '.join(output.keys())}, and neither text nor embeddings: call it from "
        f"Python, as shardconv.load(...) gives it"
    )


def _refuse_nan_scores(_: Any, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor of transformers that passes scores (prompts, vocabulary) on as they are."""
    refuse_nan(scores)
    return scores


def refuse_nan(numbers: torch.Tensor) -> None:
    """Refuse outputs that are not numbers, of which tokens would be chosen all the same.

    Raises:
        RunError: if one is NaN.
    """
    if numbers.isnan().any():
        raise RunError(
            "the outputs of the model are NaN: a tensor of the checkpoint holds NaN, or its dtype overflows. Compare "
            "with the source by shardconv verify --against SRC, or run in --dtype float32"
        )


def _fill(tokenizer: Any, inputs: Any, logits: Any) -> list[str]:
    """The likeliest words for each mask."""
    if tokenizer.mask_token is None or not (inputs["input_ids"] == tokenizer.mask_token_id).any(1).all():
        raise RunError(f"this model fills in masks: put {tokenizer.mask_token} into each prompt")
    lines = []
    for ids, row in zip(inputs["input_ids"], logits, strict=True):
        places = (ids == tokenizer.mask_token_id).nonzero().flatten()
        chances, tokens = row[places].float().softmax(-1).topk(_TOP, -1)
        words = [
            ", ".join(f"{tokenizer.decode([token])} {chance:.3f}" for token, chance in zip(*pair, strict=True))
            for pair in zip(tokens.tolist(), chances.tolist(), strict=True)
        ]
        lines.append("; ".join(words))
    return lines


def _compare(
    model: Any, codec: Codec, inputs: Any, outputs: _Outputs, options: RunOptions, *, is_first: bool
) -> tuple[tuple[str, ...], float | None]:
    """How the unsplit model's numbers and greedy tokens differ; the first rank asks it, while the others wait."""
    given = dict(inputs)
    if model.can_generate() and model.config.is_encoder_decoder:
        given["decoder_input_ids"] = outputs.tokens
    elif model.can_generate():
        new = outputs.tokens.shape[1] - given["attention_mask"].shape[1]
        mask = torch.nn.functional.pad(given["attention_mask"], (0, new), value=1)
        given = {"input_ids": outputs.tokens, "attention_mask": mask}
    ours = _numbers(model(**given))
    refuse_nan(_of_tokens(ours, given))
    found: list[Any] = ["", None]
    if is_first:
        try:
            found = ["", *_differences(model, codec, inputs, given, ours, outputs, options)]
        except Exception as error:  # noqa: BLE001 - whatever it was: the other ranks wait for the result
            found = [str(error) if isinstance(error, ShardconvError) else f"{type(error).__name__}: {error}", None]
    problem, largest, *differences = _everywhere(found)
    if problem:
        raise RunError(problem)
    return tuple(differences), largest


def _differences(
    model: Any, codec: Codec, inputs: Any, given: Any, ours: Any, outputs: _Outputs, options: RunOptions
) -> list[Any]:
    """The largest error of the numbers, and in words how they and the greedy tokens differ."""
    assert options.check is not None
    plain = load_unsharded(
        model.plain_class, options.check, unused=options.unused, is_trusted=options.trust_remote_code
    )
    plain = plain.to(model.device).eval()
    theirs = _numbers(plain(**given))
    if not model.config.is_encoder_decoder:
        ours, theirs = _of_tokens(ours, given), _of_tokens(theirs, given)
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    found: list[Any] = [error]
    if not error <= _ALLOWED:
        found.append(f"logits differ by {error:.1e} of the largest; {_ALLOWED:.0e} are due to rounding")
    if model.can_generate() and not options.temperature:
        expected = plain.generate(**inputs, **_generation(codec, options))
        if not torch.equal(expected, outputs.tokens):
            width = min(expected.shape[1], outputs.tokens.shape[1])
            same = (expected[:, :width] == outputs.tokens[:, :width]).all(0).long().cumprod(0).sum()
            found.append(f"greedy tokens differ from token {int(same)} on")
    return found


def _of_tokens(numbers: torch.Tensor, inputs: Any) -> torch.Tensor:
    """Outputs without those of padding, which nobody reads."""
    mask = inputs.get("attention_mask")
    if mask is None or numbers.dim() != 3 or numbers.shape[:2] != mask.shape:
        return numbers
    return numbers[mask.bool()]


def _notes(model: Any, outputs: _Outputs, *, is_unverified: bool) -> Iterator[str]:
    if is_unverified:
        yield "the rank files were not verified: the split checkpoint has no checksums"
    positions = getattr(model.config, "max_position_embeddings", None)
    if not model.can_generate() or model.config.is_encoder_decoder or not isinstance(positions, int):
        return
    if (tokens := outputs.tokens.shape[1]) > positions:
        yield f"{tokens} tokens are more than the {positions} that the model is made for"


def _numbers(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.logits if "logits" in output else output.last_hidden_state
    return found


def _everywhere(value: list[Any]) -> list[Any]:
    """What the first rank has."""
    if not dist.is_initialized():
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, 0)
    return list(box[0])


def _everyones(value: int) -> list[int]:
    if not dist.is_initialized():
        return [value]
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
