"""Comparison of a run with the unsharded model, in float32."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from shardconv.checkpoint.adapters.split_adapter import SplitAdapter
from shardconv.checkpoint.operations.merge import merge
from shardconv.checkpoint.sources.quantization_files import config_with_quantization
from shardconv.checkpoint.sources.source import open_source
from shardconv.convert.protocols import ModelConfig, PretrainedModel
from shardconv.distributed.agreement import run_on_first
from shardconv.formats.detect import with_grids
from shardconv.hf.classes import model_class
from shardconv.hf.weights import load_unsharded
from shardconv.runtime.outputs import Inputs, ModelRun, Outputs, output_values, refuse_nan, without_padding
from shardconv.runtime.quantized_shards import Dequantizer
from shardconv.runtime.run_options import RunOptions
from shardconv.runtime.source_tensors import load_source
from shardconv.support.errors import RunError, one_line, option
from shardconv.support.temporary import temporary_folder

#: The largest relative error of float32 logits; ranks add up sums in another order.
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        differences: differences of outputs and greedy tokens; empty if there are none.
        error: the largest error of an output, relative to the largest output.
    """

    differences: tuple[str, ...]
    error: float


def compare(run: ModelRun, outputs: Outputs, folder: Path, source: Path) -> Comparison:
    """Compare outputs of a sharded model with those of the unsharded one, which the first rank loads.

    Args:
        run: the sharded model and its inputs. All ranks call it.
        outputs: its outputs.
        folder: the split checkpoint.
        source: the unsharded checkpoint.

    Raises:
        RunError: on all ranks, if the unsharded model cannot be loaded or run, or outputs are NaN.
    """
    given = _with_generated_tokens(run, outputs)
    values = output_values(run.model(**given))
    refuse_nan(without_padding(values, given))
    return run_on_first(partial(_compare_on_first, run, outputs, given, values, folder, source))


def _with_generated_tokens(run: ModelRun, outputs: Outputs) -> Inputs:
    """Return the inputs, with the generated tokens appended, or as decoder inputs."""
    inputs = run.inputs
    if outputs.tokens is None:
        return inputs
    if run.model.config.is_encoder_decoder:
        return {**inputs, "decoder_input_ids": outputs.tokens}
    new = outputs.tokens.shape[1] - inputs["attention_mask"].shape[1]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, new), value=1)
    return {"input_ids": outputs.tokens, "attention_mask": mask}


def _compare_on_first(
    run: ModelRun, outputs: Outputs, given: Inputs, values: Tensor, folder: Path, source: Path
) -> Comparison:
    """Compare ``values`` and greedy tokens with those of the unsharded model."""
    model, options = run.model, run.options
    dequantized = _dequantized(source, options) if options.dequantize else None
    unsharded: PretrainedModel = load_unsharded(
        model.unsharded_class,
        source,
        dequantized=dequantized,
        unused=options.unused,
        is_trusted=options.trust_remote_code,
    )
    if options.adapter is not None:
        _apply_adapter(unsharded, SplitAdapter.open(options.adapter, folder, model.axis.size).folder)
    unsharded = unsharded.to(model.device).eval()
    expected = output_values(unsharded(**given))
    if not model.config.is_encoder_decoder:
        values, expected = without_padding(values, given), without_padding(expected, given)
    error = float((values - expected).abs().max() / expected.abs().max())
    differences = []
    if not error <= _TOLERANCE:  # also if NaN
        differences.append(f"logits differ by {error:.1e} of the largest; {_TOLERANCE:.0e} are due to rounding")
        if options.dequantize and dequantized is None:
            differences[0] += f". {source} is not quantized: pass the quantized source that was split to --check"
    if outputs.tokens is not None and not options.temperature:
        tokens = unsharded.generate(**run.inputs, **run.generation_arguments())
        if not torch.equal(tokens, outputs.tokens):
            differences.append(f"greedy tokens differ from token {_first_difference(tokens, outputs.tokens)} on")
    return Comparison(tuple(differences), error)


def _apply_adapter(model: PretrainedModel, folder: Path) -> None:
    """Apply a split adapter to an unsharded model, in place, by PEFT.

    Raises:
        RunError: if PEFT is not installed, or does not load the adapter.
    """
    try:
        with _without_kernel_warning():
            peft = import_module("peft")
    except ImportError as error:
        raise RunError(
            f"--check with {option('adapters')} compares with PEFT, which is not installed: pip install peft"
        ) from error
    with temporary_folder() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT and transformers about each other
        merged = place / "adapter"
        merge(folder, merged)
        try:
            peft.PeftModel.from_pretrained(model, merged)
        except (RuntimeError, ValueError, TypeError) as error:
            raise RunError(f"{folder}: PEFT cannot apply the adapter: {one_line(error)}") from error


@contextmanager
def _without_kernel_warning() -> Iterator[None]:
    """Hide a warning of bitsandbytes, which PEFT imports, on an optional kernel: it reads like a failed check."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")

    def is_other(record: logging.LogRecord) -> bool:
        return not record.msg.startswith("Failed to load CPU gemm_4bit_forward")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _dequantized(folder: Path, options: RunOptions) -> tuple[ModelConfig, dict[str, Tensor]] | None:
    """Config and tensors of a quantized source as an unquantized model, in float32; None if it is not quantized."""
    source = open_source(folder)
    specs = with_grids(source.specs, config_with_quantization(source))
    if not any(spec.grid for spec in specs.values()):
        return None
    config = model_class(source.config or {}, folder, is_trusted=options.trust_remote_code).config
    return config, Dequantizer.of_source(specs, torch.float32).dequantize(load_source(source))


def _first_difference(one: Tensor, other: Tensor) -> int:
    """Return the first position where tokens [prompts, tokens] differ, or where the shorter ones end."""
    width = min(one.shape[1], other.shape[1])
    return int((one[:, :width] == other[:, :width]).all(0).long().cumprod(0).sum())
