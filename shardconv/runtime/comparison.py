"""Comparison of a run with the unsharded model of a source: its checks before tensors are read, and in float32."""

import warnings
from contextlib import suppress
from functools import partial

import torch
from msgspec import Struct
from torch import Tensor, nn

from shardconv.checkpoint.adapters.adapter import adapter_folder
from shardconv.checkpoint.engine.layout import PADDING_NAME
from shardconv.checkpoint.operations.merge import merge
from shardconv.checkpoint.operations.verify import is_other_model, tensor_differences
from shardconv.checkpoint.sources.layout_files import detect_layout
from shardconv.checkpoint.sources.opening import open_source
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import read_values
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import is_split
from shardconv.convert.protocols import ModelConfig, PretrainedModel
from shardconv.distributed.agreement import run_on_first
from shardconv.files.folder import AnyPath, temporary_folder
from shardconv.files.paths import missing_hint
from shardconv.files.weight_formats import CONFIG_NAME, PYTORCH, SAFETENSORS, SOURCE_FORMATS
from shardconv.formats.detect import with_grids
from shardconv.hf.classes import model_class
from shardconv.hf.package import import_peft
from shardconv.hf.weights import load_unsharded
from shardconv.runtime.outputs import Inputs, ModelRun, Outputs, RunOptions, output_values, refuse_nan, without_padding
from shardconv.runtime.rank_tensors import Dequantizer, as_tensor
from shardconv.support.errors import RunError, SourceError, UsageError, one_line

#: The largest relative error of float32 logits; ranks add up sums in another order.
_TOLERANCE = 1e-4


class Comparison(Struct, frozen=True):
    """The result of a comparison.

    Attributes:
        differences: differences of outputs and greedy tokens; empty if there are none.
        error: the largest error of an output, relative to the largest output.
    """

    differences: tuple[str, ...]
    error: float


def compare(run: ModelRun, outputs: Outputs, folder: AnyPath, source: AnyPath) -> Comparison:
    """Compare outputs of a sharded model with the unsharded one, which the first rank loads.

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
    run: ModelRun, outputs: Outputs, given: Inputs, values: Tensor, folder: AnyPath, source: AnyPath
) -> Comparison:
    """Compare ``values`` and greedy tokens with the unsharded model."""
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
        apply_adapter(unsharded, adapter_folder(options.adapter, folder))
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


def apply_adapter(model: nn.Module, folder: AnyPath) -> None:
    """Apply a split adapter to an unsharded model, in place, by PEFT.

    Raises:
        RunError: if PEFT is not installed, or does not load the adapter.
    """
    peft = import_peft()
    with temporary_folder() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT and transformers about each other
        merged = place / "adapter"
        merge(folder, merged)
        try:
            peft.PeftModel.from_pretrained(model, merged)
        except (RuntimeError, ValueError, TypeError) as error:
            raise RunError(f"{folder}: PEFT cannot apply the adapter: {one_line(error)}") from error


def _dequantized(folder: AnyPath, options: RunOptions) -> tuple[ModelConfig, dict[str, Tensor]] | None:
    """Config and tensors of a quantized source as an unquantized model, in float32; None if it is not quantized."""
    source = open_source(folder)
    specs = with_grids(source.specs, source.config_with_quantization())
    if not any(spec.grid for spec in specs.values()):
        return None
    config = model_class(source.config or {}, folder, is_trusted=options.trust_remote_code).config
    return config, Dequantizer.of_source(specs, torch.float32).dequantize(load_source(source))


def _first_difference(one: Tensor, other: Tensor) -> int:
    """Return the first position where tokens [prompts, tokens] differ, or where the shorter ones end."""
    width = min(one.shape[1], other.shape[1])
    return int((one[:, :width] == other[:, :width]).all(0).long().cumprod(0).sum())


_REMEDY = "pass the source that was split"


def check_unsharded(folder: AnyPath, path: AnyPath, manifest: Manifest, *, dequantize: bool) -> None:
    """Check that a folder may have the unsharded model of a checkpoint.

    Args:
        folder: of ``--check``.
        path: of the checkpoint, for messages.
        manifest: of the checkpoint.
        dequantize: whether the model is dequantized.

    Raises:
        UsageError: if an adapter was merged into the checkpoint, so that no source is its unsharded model.
        RunError: if transformers does not load the folder, or it is of another model.
    """
    _check_folder(folder)
    if manifest.merged_adapter is not None:
        place = str(path)
        raise UsageError(
            f"{place}: the adapter {manifest.merged_adapter} is merged into it, so that it differs from its source: "
            f"remove --check, or check the merged model (shardconv merge {place} -o MERGED; shardconv run MERGED "
            f"--tp {manifest.tp} --check MERGED)"
        )
    if not dequantize:
        _check_names(folder)
    with suppress(SourceError):  # transformers loads folders that shardconv refuses to split, and reports its errors
        _check_tensors(open_source(folder, optional_ignore=manifest.ignore), manifest, dequantize=dequantize)


def _check_folder(folder: AnyPath) -> None:
    """Check that the folder may have an unsharded checkpoint."""
    if not folder.exists():
        raise RunError(f"--check {folder}: does not exist{missing_hint(folder, takes_url=False)}")
    if not folder.is_dir():
        raise RunError(f"--check {folder}: is not a folder (expected the folder of the unsharded model)")
    if is_split(folder):
        raise RunError(
            f"--check {folder}: is a split checkpoint (expected the unsharded model): pass the source that it was "
            f"split from, or merge it first (shardconv merge {folder} -o DIR)"
        )
    if (layout := detect_layout(folder, [path.name for path in folder.iterdir()])) is not None:
        raise RunError(
            f"--check {folder}: holds rank files of another tool ({layout.key}), which transformers does not load: "
            f"merge them first (shardconv merge {folder} -o DIR), and pass --check DIR"
        )
    if not (folder / CONFIG_NAME).is_file():
        raise RunError(f"--check {folder}: does not have a config.json: pass the folder of the unsharded model")


def _check_names(folder: AnyPath) -> None:
    """Check that PyTorch files in the folder have names with which transformers loads them."""
    names = {path.name for path in folder.iterdir()}
    found = {name for one in SOURCE_FORMATS for name in (one.single, f"{one.single}.index.json")}
    others = sorted(filter(PYTORCH.has, names))
    if others and not names & found:
        raise RunError(
            f"--check {folder}: holds {others[0]}, which transformers does not load (expected {PYTORCH.single} or "
            f"{SAFETENSORS.single}): pass the result of shardconv split {folder} --tp 1 -o DIR, and shardconv merge DIR"
        )


def _check_tensors(source: Source, manifest: Manifest, *, dequantize: bool) -> None:
    """Check that tensors have the names and shapes of the split ones; dtypes do not matter in float32.

    A model does not use every tensor of its files, and transformers renames some, so other names alone are accepted
    if the shapes are equal. Padded checkpoints have other shapes than their source, and dequantized models other
    tensors than a quantized one.
    """
    is_padded = PADDING_NAME in manifest.auxiliary_files or PADDING_NAME in source.auxiliary_files
    if is_padded or (dequantize and not _is_quantized(source)):
        return
    own, other = manifest.source_tensors, source.specs
    specs = {name: spec._replace(dtype=other[name].dtype) if name in other else spec for name, spec in own.items()}
    is_renamed = sorted(spec.shape for spec in own.values()) == sorted(spec.shape for spec in other.values())
    if is_other_model(specs, source) and not is_renamed:
        raise RunError(f"--check {tensor_differences(specs, source)[0]}: {_REMEDY}")
    if changed := [name for name, spec in own.items() if name in other and spec.shape != other[name].shape]:
        raise RunError(f"--check {source.path}: is another model ({_describe(changed, manifest, source)}): {_REMEDY}")


def _describe(changed: list[str], manifest: Manifest, source: Source) -> str:
    """The first tensor with another shape, and the number of others."""
    name, more = changed[0], f", and {len(changed) - 1} more" * (len(changed) > 1)
    found, expected = list(source.specs[name].shape), list(manifest.source_tensors[name].shape)
    return f"{name}: got shape {found}, expected {expected}{more}"


def _is_quantized(source: Source) -> bool:
    """Whether a source has quantized tensors."""
    return any(spec.grid for spec in with_grids(source.specs, source.config_with_quantization()).values())


def load_source(source: Source) -> dict[str, Tensor]:
    """Load the tensors of a source into memory.

    Raises:
        SourceError: if a file was changed since the source was opened.
    """
    values = read_values(source.stored, source.specs)
    return {name: as_tensor(name, *source.specs[name][:2], data) for name, data in values}
