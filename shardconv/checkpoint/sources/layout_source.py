"""A source from rank files of other tools: full tensors under the names of a Hugging Face checkpoint."""

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple

from shardconv.checkpoint.engine.layout import MANIFEST_NAME, in_file_order
from shardconv.checkpoint.sources.dcp_files import read_dcp
from shardconv.checkpoint.sources.folder_files import FolderFiles, find_auxiliary, ignore_options
from shardconv.checkpoint.sources.full_tensors import read_full_tensors
from shardconv.checkpoint.sources.layout_files import (
    FullTensors,
    detect_layout,
    is_hugging_face_index,
    rank_files,
    read_rank_files,
)
from shardconv.checkpoint.sources.meta_params import (
    PARAMS_NAME,
    ConfigWithAssumptions,
    complete_config,
    known_config,
)
from shardconv.checkpoint.sources.quantization_files import with_quantization
from shardconv.checkpoint.sources.source_files import SourceFile
from shardconv.checkpoint.sources.source_reader import StoredFiles, Transform
from shardconv.files.containers.safetensors import FLOAT_NAMES, build_header
from shardconv.files.folder import AnyPath
from shardconv.files.text_files import read_json
from shardconv.files.weight_formats import (
    ADAPTER_FILES,
    CONFIG_NAME,
    is_trainer_state,
    is_weights,
    refuse_sharded_state,
)
from shardconv.layouts import SOURCE_LAYOUTS
from shardconv.layouts.layout_file import LayoutFile, layout_file
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import SourceError, UsageError, option
from shardconv.support.formatting import counted

#: Name and metadata of the file that a merge writes.
_FILE, _METADATA = "model.safetensors", {"format": "pt"}


class LayoutSource(NamedTuple):
    """Attributes of a :class:`~shardconv.checkpoint.sources.source.Source` from rank files of another tool."""

    files: tuple[SourceFile, ...]
    stored: StoredFiles
    transforms: Mapping[str, Transform]
    derived: tuple[str, ...]
    config: dict[str, object] | None
    auxiliary_files: dict[str, AnyPath]
    made_files: dict[str, str]
    assumed: tuple[str, ...]
    left_out: dict[str, str]
    layout: str
    num_ranks: int


def open_external(
    folder: AnyPath, files: FolderFiles, asked: str | None, config: dict[str, object] | None, *, follow_links: bool
) -> LayoutSource | None:
    """Open rank files of another tool; None if the folder does not hold any.

    Args:
        folder: the folder.
        files: its files.
        asked: the layout that the user asked for, or None.
        config: the config that the user passed, or None.
        follow_links: whether files may be links out of the folder.

    Raises:
        SourceError: if a file is missing, damaged or a link out of the folder, or a tensor is unknown or does not fit.
        UsageError: if the layout is unknown, or the folder does not hold files of it.
    """
    names = [name for name, path in files.kept.items() if "/" not in name and not path.is_dir()]
    if (layout := _layout(folder, names, asked)) is None:
        return None
    weights = rank_files(layout, names)
    if layout.engine is not None:
        refuse_sharded_state(folder, {*names} - {*weights})
    left_out = _left_out(folder, files, weights, layout, asked)
    auxiliary_files = find_auxiliary(folder, files, [*weights, *left_out], follow_links=follow_links)
    if config is None and CONFIG_NAME in auxiliary_files:
        config = read_json(auxiliary_files[CONFIG_NAME])
    params = read_json(auxiliary_files[PARAMS_NAME]) if PARAMS_NAME in auxiliary_files else None
    found = _Folder(folder, layout, weights, params, config, auxiliary_files, follow_links)
    read = _read_ranks(found) if layout.groups else _read_dcp(found)
    if layout.beside is not None and auxiliary_files.pop(layout.beside, None) is not None:
        is_params = layout.beside == PARAMS_NAME
        left_out[layout.beside] = "its values are in config.json" if is_params else f"lists the files of {layout.title}"
    missing = f", without {' and '.join(read.missing)}" if read.missing else ""
    derived = f"converted from {counted(len(read.stored.paths), 'file')} of {layout.title}{missing}"
    made_files = {} if read.made.config is config else {CONFIG_NAME: json.dumps(read.made.config, indent=2) + "\n"}
    return LayoutSource(
        _files(folder, read.tensors.specs), read.stored, read.tensors.transforms, (derived,), read.made.config,
        auxiliary_files, made_files, read.made.assumed, left_out, layout.key, read.num_ranks,
    )  # fmt: skip


def _layout(folder: AnyPath, names: Collection[str], asked: str | None) -> LayoutFile | None:
    """The layout that the user asked for, or that of the files; a folder with a manifest is not of another tool."""
    if asked is None:
        layout = detect_layout(folder, names)
        return None if MANIFEST_NAME in names else layout
    if asked not in SOURCE_LAYOUTS:
        raise UsageError(f"layout {asked!r} of rank files is unknown (expected one of {', '.join(SOURCE_LAYOUTS)})")
    layout = layout_file(asked)
    if not rank_files(layout, names):
        raise UsageError(
            f"{folder}: does not hold files of {option(source_layout=asked)}: correct or remove "
            f"{option('source_layout')}"
        )
    return layout


class _Folder(NamedTuple):
    """The files of another tool: the names of the weights, params.json, the user's or the folder's config."""

    path: AnyPath
    layout: LayoutFile
    weights: Collection[str]
    params: dict[str, object] | None
    config: dict[str, object] | None
    auxiliary_files: Mapping[str, AnyPath]
    follow_links: bool


class _Read(NamedTuple):
    """Full tensors, their files, the config, and what the files do not have."""

    tensors: FullTensors
    stored: StoredFiles
    made: ConfigWithAssumptions
    num_ranks: int
    missing: tuple[str, ...]


def _read_dcp(folder: _Folder) -> _Read:
    found = read_dcp(folder.path, follow_links=folder.follow_links)
    stored = StoredFiles.listed(found.paths, found.states, found.tensors.stored, found.tensors.shards)
    return _Read(found.tensors, stored, ConfigWithAssumptions(folder.config, ()), len(found.paths), found.left_out)


def _read_ranks(folder: _Folder) -> _Read:
    layout, params = folder.layout, folder.params
    if folder.config is None and params is None and (layout.beside is not None or layout.engine is not None):
        needed = PARAMS_NAME if layout.beside == PARAMS_NAME else CONFIG_NAME
        raise SourceError(
            f"{folder.path}: does not have {needed}, which has the sizes of the model: copy it into the folder, or "
            f"pass the model's config.json ({option('config')})"
        )
    found = read_rank_files(folder.path, layout, folder.weights, follow_links=folder.follow_links)
    if layout.engine is not None:
        config = with_quantization(folder.config, folder.auxiliary_files, {}) or {}
    else:
        config = known_config(folder.path, folder.params, folder.config)
    tensors = read_full_tensors(folder.path, layout, found, config)
    made = ConfigWithAssumptions(folder.config, _dtype_note(folder, tensors.specs))
    if folder.config is None and params is not None:
        shapes = {name: spec.shape for name, spec in tensors.specs.items()}
        dtype = tensors.specs["model.embed_tokens.weight"].dtype
        made = complete_config(folder.path / PARAMS_NAME, params, shapes, dtype)
    stored = StoredFiles(found.paths, found.prefixes, found.sizes, tensors.stored, tensors.shards, found.states)
    return _Read(tensors, stored, made, len(found.ranks), layout.missing)


def _dtype_note(folder: _Folder, specs: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """A note on tensors of another dtype than the config has, which an engine may have converted."""
    config = folder.config or {}
    config_dtype = config.get("dtype", config.get("torch_dtype"))
    dtypes = sorted({spec.dtype for spec in specs.values()})
    found = [FLOAT_NAMES.get(dtype) for dtype in dtypes]
    if folder.layout.engine is None or config_dtype not in FLOAT_NAMES.values() or found == [config_dtype]:
        return ()
    return (f"tensors are {', '.join(dtypes)}, but config.json has {config_dtype}: they may have been converted",)


def _files(folder: AnyPath, specs: Mapping[str, TensorSpec]) -> tuple[SourceFile, ...]:
    ordered = in_file_order(dict(sorted(specs.items())))
    header = build_header(((name, spec.dtype, spec.shape) for name, spec in ordered.items()), _METADATA)
    return (SourceFile(_FILE, folder / _FILE, header),)


def _left_out(
    folder: AnyPath, files: FolderFiles, weights: Collection[str], layout: LayoutFile, asked: str | None
) -> dict[str, str]:
    """Name to reason of all other files with weights."""
    others = [name for name in files.kept if (is_weights(name) or name in ADAPTER_FILES) and name not in weights]
    reasons = {name: "trainer state" for name in others if is_trainer_state(name)}
    indexes = [name for name in others if name.endswith(".index.json")]
    reasons |= {name: f"index of {layout.title}" for name in indexes if not is_hugging_face_index(name)}
    if layout.engine is not None:
        reasons |= dict.fromkeys(indexes, "index of another checkpoint")
    if asked is None and (unknown := [name for name in others if name not in reasons]):
        raise SourceError(
            f"{folder}: holds weights or an adapter besides the files of {layout.title}: {', '.join(unknown[:5])}: "
            f"pass {ignore_options(unknown, files.kept.keys() - {*unknown})}, or {option(source_layout=layout.key)} to "
            "use those files only"
        )
    return files.left_out | dict.fromkeys(others, f"not a file of --from {layout.key}") | reasons
