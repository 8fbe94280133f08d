"""Checks of the source that ``--check`` compares with, before processes are started and tensors are read."""

from contextlib import suppress

from shardconv.checkpoint.operations.verify_external import is_other_model, tensor_differences
from shardconv.checkpoint.sources.layout_files import detect_layout
from shardconv.checkpoint.sources.quantization_files import config_with_quantization
from shardconv.checkpoint.sources.source import Source, open_source
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import is_split
from shardconv.checkpoint.split.padding_manifest import PADDING_NAME
from shardconv.files.folder import AnyPath
from shardconv.files.paths import missing_hint
from shardconv.files.weight_formats import CONFIG_NAME, MERGED, PYTORCH, SAFETENSORS, SOURCE_FORMATS
from shardconv.formats.detect import with_grids
from shardconv.support.errors import RunError, SourceError, UsageError

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
    if merged := next((phrase for phrase in manifest.derived if phrase.endswith(MERGED)), None):
        place = str(path)
        raise UsageError(
            f"{place}: {merged}, so that it differs from its source: remove --check, or check the merged model "
            f"(shardconv merge {place} -o MERGED; shardconv run MERGED --tp {manifest.tp} --check MERGED)"
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
        raise RunError(f"--check {folder}: is not a folder (expected that of the unsharded model)")
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
    """Check that tensors have the names and shapes of those that were split; dtypes do not matter in float32.

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
    return any(spec.grid for spec in with_grids(source.specs, config_with_quantization(source)).values())
