"""Run pipelines: every rank generates; the first one writes the pictures and compares with the unsharded pipeline."""

import inspect
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from msgspec import Struct, field
from torch import Tensor, nn

from shardconv.checkpoint.engine.layout import ADAPTERS
from shardconv.checkpoint.sources.pipeline import is_pipeline, open_pipeline
from shardconv.checkpoint.sources.planning import PlanOptions
from shardconv.checkpoint.split.loadable import refuse_other_sizes, unapplied
from shardconv.checkpoint.split.split_pipeline import is_split_pipeline, open_split_pipeline
from shardconv.distributed.agreement import gather, is_first_rank, run_on_first
from shardconv.files.folder import AnyPath
from shardconv.files.weight_formats import INDEX_NAME
from shardconv.hf.diffusion import build_pipeline
from shardconv.hf.package import hide_progress, hide_warnings, import_diffusers
from shardconv.runtime.comparison import apply_adapter
from shardconv.runtime.load import load
from shardconv.runtime.pipeline import adapted_components
from shardconv.support import Progress
from shardconv.support.errors import OutputError, RunError, SourceError, UsageError, one_line, option

#: The largest relative error of float32 latents after one step; ranks add up sums in another order.
_TOLERANCE = 1e-4
#: Suffix to format of pictures.
_SUFFIXES = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".gif": "GIF", ".webp": "WEBP"}


class PipelineOptions(Struct, frozen=True):
    """Options of the run of a pipeline.

    Attributes:
        output: the file of the picture; of several prompts, their numbers follow its name. None for none.
        steps: number of denoising steps; None for the default of the pipeline.
        seed: seed of the noise.
        height: of the picture in pixels; None for the default of the pipeline.
        width: of the picture in pixels; None for the default of the pipeline.
        device: such as ``cpu`` or ``cuda``; None for the accelerator where there is one.
        dtype: dtype of the models, such as ``bf16``; None as they are stored.
        dequantize: load quantized layers as unquantized ones.
        adapter: the name of a split adapter to apply, also to the pipeline of ``check``; None for none.
        check: the unsharded pipeline to compare with, in float32; None for no comparison.
        verify: check files against their checksums while they are read.
        tp: tensor parallel size of a source; None for a split pipeline.
        plan: how a source is read and planned.
    """

    output: Path | None = None
    steps: int | None = None
    seed: int = 0
    height: int | None = None
    width: int | None = None
    device: str | None = None
    dtype: str | None = None
    dequantize: bool = False
    adapter: Path | None = None
    check: Path | None = None
    verify: bool = True
    tp: int | None = None
    plan: PlanOptions = field(default_factory=PlanOptions)


class PipelineRunReport(Struct, frozen=True):
    """Pictures and figures of the run of a pipeline. Times are measured on one rank.

    Attributes:
        path: the pipeline.
        pipeline: its class.
        tp: tensor parallel size.
        device: device of this rank.
        prompts: the prompts.
        files: the pictures that were written.
        load_seconds: time to load the pipeline.
        seconds: time to generate the pictures; None if none were.
        differences: with ``check``, the differences from the unsharded pipeline; empty if there are none.
        error: with ``check``, the largest error of the latents after one step, relative to the largest latent.
        notes: adapters that are not applied.
    """

    path: str
    pipeline: str
    tp: int
    device: str
    prompts: tuple[str, ...]
    files: tuple[str, ...]
    load_seconds: float
    seconds: float | None
    differences: tuple[str, ...] | None
    error: float | None
    notes: tuple[str, ...]


def check_pipeline_run(path: AnyPath, prompts: Sequence[str], options: PipelineOptions) -> int:
    """Check everything that can be checked before processes are started and tensors are read.

    Returns:
        The tensor parallel size.

    Raises:
        ShardconvError: if the run would fail.
    """
    import_diffusers()
    if not prompts:
        raise UsageError("no prompt given: pass --prompt TEXT")
    if options.output is None and options.check is None:
        raise UsageError(f"the file of the picture is missing: pass {option(dst='picture.png')}")
    if options.output is not None:
        _check_output(options.output, len(prompts))
    if options.check is not None and (not is_pipeline(options.check) or is_split_pipeline(options.check)):
        raise SourceError(f"{options.check}: is not an unsharded pipeline ({INDEX_NAME}): pass the source of the split")
    if is_split_pipeline(path):
        pipeline = open_split_pipeline([path])
        refuse_other_sizes(path, option(tp=pipeline.tp), {"tp": pipeline.tp}, {"tp": options.tp})
        if options.adapter is not None:
            adapted_components(pipeline, options.adapter)
        return pipeline.tp
    open_pipeline(path, components=options.plan.get("components", ()), ignore=options.plan.get("ignore", ()))
    if options.tp is None:
        raise UsageError(f"{path}: is not split: pass {option('tp')}, or split it (shardconv split {path} --tp N)")
    return options.tp


def _check_output(path: Path, count: int) -> None:
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"{path}: is not a picture (expected {', '.join(_SUFFIXES)}): change {option('dst')}")
    if existing := next((file for file in _files(path, count) if file.exists()), None):
        raise OutputError(f"{existing}: exists: choose another file with {option('dst')}")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{path.parent}: is not a folder: create it, or choose another file with {option('dst')}")


def _files(path: Path, count: int) -> list[Path]:
    """The file of each picture."""
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{number}") for number in range(count)]


def run_pipeline(
    path: AnyPath,
    prompts: Sequence[str],
    options: PipelineOptions,
    progress: Callable[[], AbstractContextManager[Progress | None]] = nullcontext,
) -> PipelineRunReport:
    """Generate a picture for each prompt on this rank; all ranks call it, and the first one writes the files.

    Args:
        path: the split pipeline, or the source.
        prompts: the prompts; all ranks use the prompts of the first rank.
        options: the options.
        progress: opens a progress display of loading.

    Raises:
        RunError: if the pipeline does not support the arguments.
        ShardconvError: as :func:`~shardconv.load`.
    """
    hide_progress()
    if not is_first_rank():
        hide_warnings()  # the first rank prints them
    import_diffusers()  # before loading, which is timed
    began = time.perf_counter()
    with progress() as show:
        pipeline = load(
            path, tp=options.tp, device=options.device, dtype="fp32" if options.check else options.dtype,
            dequantize=options.dequantize, adapter=options.adapter, verify=options.verify, progress=show,
            **options.plan,
        )  # fmt: skip
    load_seconds, prompts = time.perf_counter() - began, gather([*prompts])[0]
    files, seconds = list[Path](), None
    if options.output is not None:
        began = time.perf_counter()
        pictures = _generate(pipeline, prompts, options, output_type="pil")
        seconds, files = time.perf_counter() - began, _files(options.output, len(prompts))
        run_on_first(partial(_write, pictures, files))
    error = None
    if options.check is not None:
        found = _latents(pipeline, prompts, options)
        error = run_on_first(partial(_compare, found, path, options.check, prompts, options))
    return PipelineRunReport(
        path=str(path),
        pipeline=type(pipeline).__name__,
        tp=torch.distributed.get_world_size(),
        device=str(pipeline.device),
        prompts=tuple(prompts),
        files=tuple(map(str, files)),
        load_seconds=load_seconds,
        seconds=seconds,
        differences=None if error is None else tuple(_differences(error)),
        error=error,
        notes=_notes(path, options),
    )


def _notes(path: AnyPath, options: PipelineOptions) -> tuple[str, ...]:
    """A note on adapters that are not applied."""
    is_noted = options.adapter is None and is_split_pipeline(path)
    note = unapplied(open_split_pipeline([path]).adapters) if is_noted else ""
    return (note,) if note else ()


def _generate(pipeline: Any, prompts: Sequence[str], options: PipelineOptions, **arguments: object) -> Any:
    """The result of a pipeline of diffusers: a picture, latents or frames for each prompt."""
    given = {"num_inference_steps": options.steps, "height": options.height, "width": options.width, **arguments}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"prompt": [*prompts], "return_dict": False}
    given["generator"] = torch.Generator().manual_seed(options.seed)  # of the CPU: all devices get the same noise
    _check_arguments(pipeline, given)
    pipeline.set_progress_bar_config(disable=True)
    try:
        with _checked_inputs(pipeline):
            return pipeline(**given)[0]
    except RuntimeError as error:
        _refuse_dtypes(pipeline, error)
        raise


def _refuse_dtypes(pipeline: Any, error: RuntimeError) -> None:
    """Raise the error of a pipeline with the dtypes of its components, if these differ."""
    models = {name: one for name, one in pipeline.components.items() if isinstance(one, nn.Module)}
    dtypes = {name: str(one.dtype).removeprefix("torch.") for name, one in models.items()}
    if len({*dtypes.values()}) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise RunError(
            f"{type(pipeline).__name__}: its components have several dtypes ({listed}): {one_line(error)}: pass "
            f"{option('dtype')}"
        ) from error


def _checked_inputs(pipeline: Any) -> AbstractContextManager[Any]:
    """Name the argument in errors of ``check_inputs``, or in all errors of a pipeline without this method."""
    if not hasattr(pipeline, "check_inputs"):
        return _named(pipeline)
    return patch.object(pipeline, "check_inputs", _named(pipeline)(pipeline.check_inputs))


@contextmanager
def _named(pipeline: Any) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RunError(f"{type(pipeline).__name__}: {one_line(error)}: correct the option") from error


def _check_arguments(pipeline: Any, given: Mapping[str, object]) -> None:
    """Refuse a pipeline that does not take the given arguments, or needs others."""
    parameters = inspect.signature(pipeline.__call__).parameters.values()
    names = [one.name for one in parameters]
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if other := next((name for name in given if name not in names), None):
        raise RunError(
            f"{type(pipeline).__name__} does not take {other} (expected one of {', '.join(names)}): remove the option, "
            "or load the pipeline in Python and call it"
        )
    if missing := next((name for name in needed if name not in given), None):
        raise RunError(
            f"{type(pipeline).__name__} needs {missing} besides a prompt: load the pipeline in Python and call it"
        )


def _latents(pipeline: Any, prompts: Sequence[str], options: PipelineOptions) -> Tensor:
    """The latents after one step."""
    found: Tensor = _generate(pipeline, prompts, options, output_type="latent", num_inference_steps=1)
    return found.float().cpu()


def _compare(found: Tensor, path: AnyPath, source: Path, prompts: Sequence[str], options: PipelineOptions) -> float:
    """The largest error relative to the largest latent of the unsharded pipeline."""
    unsharded = build_pipeline(source / INDEX_NAME, {}, torch.float32)
    if options.adapter is not None:
        for name in adapted_components(open_split_pipeline([path]), options.adapter):
            apply_adapter(getattr(unsharded, name), path / name / ADAPTERS / options.adapter)
    expected = _latents(unsharded, prompts, options)
    if found.shape != expected.shape:
        raise RunError(
            f"{source}: is another pipeline: its latents have shape {list(expected.shape)}, not the shape of the run"
        )
    return float((found - expected).abs().max() / expected.abs().max())


def _differences(error: float) -> list[str]:
    is_equal = error <= _TOLERANCE  # NaN is not
    return (
        [] if is_equal else [f"latents after one step: differ by {error:.0e} of the largest (at most {_TOLERANCE:.0e})"]
    )


def _write(pictures: Sequence[Any], files: Sequence[Path]) -> None:
    """Write a picture, or the frames of a video, to each file."""
    for picture, path in zip(pictures, files, strict=True):
        first, *others = picture if isinstance(picture, list) else [picture]
        kind = _SUFFIXES[path.suffix.lower()]
        if others and kind == "JPEG":
            raise UsageError(f"{path}: holds one picture, and the pipeline makes videos: choose .gif, .png or .webp")
        encoded = io.BytesIO()
        first.save(encoded, kind, **({"save_all": True, "append_images": others} if others else {}))
        try:
            with path.open("xb") as file:
                file.write(encoded.getbuffer())
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
