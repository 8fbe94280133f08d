"""A source from rank files of other tools: full tensors under the names of a Hugging Face checkpoint."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from shardconv.checkpoint.engine.layout import in_file_order
from shardconv.checkpoint.sources.dcp_files import read_dcp
from shardconv.checkpoint.sources.folder_files import SourceFolder, ignore_options
from shardconv.checkpoint.sources.full_tensors import read_full_tensors
from shardconv.checkpoint.sources.layout_files import is_hugging_face_index, rank_files, read_rank_files
from shardconv.checkpoint.sources.megatron_source import read_megatron
from shardconv.checkpoint.sources.meta_params import PARAMS_NAME, complete_config, known_config
from shardconv.checkpoint.sources.source import Source, SourceFile, with_quantization
from shardconv.checkpoint.sources.stored_tensors import StoredTensors
from shardconv.files.containers.safetensors import FLOAT_NAMES, build_header
from shardconv.files.folder import AnyPath, read_json
from shardconv.files.weight_formats import (
    ADAPTER_FILES,
    CONFIG_NAME,
    is_trainer_state,
    is_weights,
    refuse_sharded_state,
)
from shardconv.layouts import DCP, MEGATRON
from shardconv.layouts.layout_file import LayoutFile
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import SourceError, option
from shardconv.support.formatting import counted

#: Name and metadata of the file that a merge writes.
_FILE, _METADATA = "model.safetensors", {"format": "pt"}


def open_layout(
    folder: SourceFolder, layout: LayoutFile, config: dict[str, object] | None, *, is_asked: bool
) -> Source:
    """Open rank files of another tool.

    Args:
        folder: the folder.
        layout: of the files.
        config: the config that the user passed, or None.
        is_asked: whether the user asked for the layout.

    Raises:
        SourceError: if a file is missing, damaged or a link out of the folder, or a tensor is unknown or does not fit.
    """
    weights = [f"{folder.inner}{name}" for name in rank_files(layout, folder.inner_names)]
    if layout.engine is not None:
        refuse_sharded_state(folder.path, {*folder.names} - {*weights})
    left_out = _left_out(folder, weights, layout, is_asked=is_asked)
    auxiliary_files = folder.auxiliary([*weights, *left_out])
    if config is None and CONFIG_NAME in auxiliary_files:
        config = read_json(auxiliary_files[CONFIG_NAME])
    if layout.key in {DCP, MEGATRON}:
        specs, stored, missing = read_dcp(folder) if layout.key == DCP else read_megatron(folder, config)
        read = _Read(specs, stored, len(stored.files), config, missing)
    else:
        read = _read_ranks(folder, layout, weights, config, auxiliary_files)
    beside = f"{folder.inner}{layout.beside}"
    if auxiliary_files.pop(beside, None) is not None:
        is_params = layout.beside == PARAMS_NAME
        left_out[beside] = "its values are in config.json" if is_params else f"describes the files of {layout.title}"
    without = f", without {', '.join(read.missing)}" if read.missing else ""
    ordered = in_file_order(dict(sorted(read.specs.items())))
    header = build_header(((name, spec.dtype, spec.shape) for name, spec in ordered.items()), _METADATA)
    return Source(
        folder.path,
        is_folder=True,
        files=(SourceFile(_FILE, folder.path / _FILE, header),),
        converted_from=read.stored,
        config=read.config,
        auxiliary_files=auxiliary_files,
        left_out=left_out,
        ignore=folder.ignore,
        layout=layout.key,
        num_ranks=read.num_ranks,
        made_files={} if read.config is config else {CONFIG_NAME: json.dumps(read.config, indent=2) + "\n"},
        assumed=read.assumed,
        derived=(f"converted from {counted(len(read.stored.files), 'file')} of {layout.title}{without}",),
    )


class _Read(NamedTuple):
    """Contents of the files: full tensors, their config, the contents that are missing, and assumptions."""

    specs: dict[str, TensorSpec]
    stored: StoredTensors
    num_ranks: int
    config: dict[str, object] | None
    missing: tuple[str, ...]
    assumed: tuple[str, ...] = ()


def _read_ranks(
    folder: SourceFolder,
    layout: LayoutFile,
    weights: Sequence[str],
    config: dict[str, object] | None,
    auxiliary_files: Mapping[str, AnyPath],
) -> _Read:
    """Read the tensors of files that rules describe."""
    params = read_json(auxiliary_files[PARAMS_NAME]) if PARAMS_NAME in auxiliary_files else None
    if config is None and params is None and (layout.beside is not None or layout.engine is not None):
        needed = PARAMS_NAME if layout.beside == PARAMS_NAME else CONFIG_NAME
        raise SourceError(
            f"{folder.path}: does not have {needed}, which has the sizes of the model: copy it into the folder, or "
            f"pass the model's config.json ({option('config')})"
        )
    found = read_rank_files(folder, layout, weights)
    if layout.engine is not None:
        known = with_quantization(config, auxiliary_files, {}) or {}
    else:
        known = known_config(folder.path, params, config)
    specs, stored = read_full_tensors(folder.path, layout, found, known)
    made, assumed = config, _dtype_note(layout, config or {}, specs)
    if config is None and params is not None:
        made, assumed = complete_config(folder.path / PARAMS_NAME, params, specs)
    return _Read(specs, stored, len(found.ranks), made, layout.missing, assumed)


def _dtype_note(layout: LayoutFile, config: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """A note on tensors of another dtype than the config has, which an engine may have converted."""
    config_dtype = config.get("dtype", config.get("torch_dtype"))
    dtypes = sorted({spec.dtype for spec in specs.values()})
    found = [FLOAT_NAMES.get(dtype) for dtype in dtypes]
    if layout.engine is None or config_dtype not in FLOAT_NAMES.values() or found == [config_dtype]:
        return ()
    return (f"tensors are {', '.join(dtypes)}, but config.json has {config_dtype}: they may have been converted",)


def _left_out(folder: SourceFolder, weights: Collection[str], layout: LayoutFile, *, is_asked: bool) -> dict[str, str]:
    """Name to reason of all other files with weights."""
    of_layout = [
        name
        for name in folder.kept
        if name not in weights
        and name.startswith(folder.inner)
        and re.fullmatch(layout.others, name.removeprefix(folder.inner))
    ]
    others = [name for name in folder.kept if (is_weights(name) or name in ADAPTER_FILES) and name not in weights]
    reasons = dict.fromkeys(of_layout, f"of {layout.title}, without weights")
    reasons |= {name: "trainer state" for name in others if is_trainer_state(name)}
    indexes = [name for name in others if name.endswith(".index.json")]
    reasons |= {name: f"index of {layout.title}" for name in indexes if not is_hugging_face_index(name)}
    if layout.engine is not None:
        reasons |= dict.fromkeys(indexes, "index of another checkpoint")
    if not is_asked and (unknown := [name for name in others if name not in reasons]):
        raise SourceError(
            f"{folder.path}: holds weights or an adapter besides the files of {layout.title}: "
            f"{', '.join(unknown[:5])}: pass {ignore_options(unknown, folder.kept.keys() - {*unknown})}, or "
            f"{option(source_layout=layout.key)} to use those files only"
        )
    return folder.left_out | dict.fromkeys(others, f"not a file of --from {layout.key}") | reasons
