"""A source from rank files of other tools: full tensors under the names of a Hugging Face checkpoint."""

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple

from shardconv.checkpoint.engine.layout import MANIFEST_NAME, in_file_order
from shardconv.checkpoint.sources.dcp_files import METADATA_NAME, SUFFIX, read_dcp
from shardconv.checkpoint.sources.external_files import (
    FullTensors,
    detect_layout,
    is_hugging_face_index,
    rank_files,
    read_rank_files,
)
from shardconv.checkpoint.sources.external_tensors import full_tensors
from shardconv.checkpoint.sources.folder_files import FolderFiles, find_auxiliary, ignore_options
from shardconv.checkpoint.sources.meta_params import (
    PARAMS_NAME,
    ConfigWithAssumptions,
    complete_config,
    config_of_params,
    head_sizes,
)
from shardconv.checkpoint.sources.source_files import SourceFile
from shardconv.checkpoint.sources.source_reader import StoredFiles, Transform
from shardconv.files.containers.safetensors import build_header
from shardconv.files.folder import AnyPath
from shardconv.files.text_files import read_json
from shardconv.files.weight_formats import ADAPTER_FILES, CONFIG_NAME, is_trainer_state, is_weights
from shardconv.layouts.external import DCP_NAME, DCP_TITLE, META, external_layout
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import PlanError, SourceError, UsageError
from shardconv.support.formatting import counted

#: Name and metadata of the file that a merge writes.
_FILE, _METADATA = "model.safetensors", {"format": "pt"}


class ExternalSource(NamedTuple):
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
) -> ExternalSource | None:
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
    key = asked or detect(folder, names)
    if key is None or (asked is None and MANIFEST_NAME in names):
        return None
    weights = _weights(folder, key, names)
    title = DCP_TITLE if key == DCP_NAME else external_layout(key).title
    left_out = _left_out(folder, files, weights, title, key, asked)
    auxiliary_files = find_auxiliary(folder, files, [*weights, *left_out], follow_links=follow_links)
    if config is None and CONFIG_NAME in auxiliary_files:
        config = read_json(auxiliary_files[CONFIG_NAME])
    params = None
    if key != DCP_NAME and PARAMS_NAME in auxiliary_files:
        params = read_json(auxiliary_files[PARAMS_NAME])
    read = _read_dcp if key == DCP_NAME else _read_ranks
    found = read(_Folder(folder, key, weights, params, config, follow_links))
    beside = None if key == DCP_NAME else external_layout(key).beside
    if beside is not None and auxiliary_files.pop(beside, None) is not None:
        left_out |= {
            beside: "its values are in config.json" if beside == PARAMS_NAME else f"lists the files of {title}"
        }
    missing = f", without {' and '.join(found.missing)}" if found.missing else ""
    derived = f"converted from {counted(len(found.stored.paths), 'file')} of {title}{missing}"
    made_files = {} if found.made.config is config else {CONFIG_NAME: json.dumps(found.made.config, indent=2) + "\n"}
    return ExternalSource(
        _files(folder, found.tensors.specs), found.stored, found.tensors.transforms, (derived,), found.made.config,
        auxiliary_files, made_files, found.made.assumed, left_out, key, found.num_ranks,
    )  # fmt: skip


def detect(folder: AnyPath, names: Collection[str]) -> str | None:
    """The layout of the files of a folder; None for a Hugging Face checkpoint.

    Raises:
        SourceError: if the folder holds rank files without a file that is needed to read them.
    """
    if METADATA_NAME in names and any(name.endswith(SUFFIX) for name in names):
        return DCP_NAME
    layout = detect_layout(folder, names)
    return None if layout is None else layout.key


def _weights(folder: AnyPath, key: str, names: Collection[str]) -> list[str]:
    """The names of the rank files, with that of their metadata."""
    if key == DCP_NAME:
        files = sorted(name for name in names if name == METADATA_NAME or name.endswith(SUFFIX))
        is_there = METADATA_NAME in files
    else:
        files = rank_files(external_layout(key), names)
        is_there = bool(files)
    if not is_there:
        raise UsageError(f"{folder}: does not hold files of --from {key}: correct or remove --from")
    return files


class _Folder(NamedTuple):
    """The files of another tool: the names of the weights, params.json, the user's or the folder's config."""

    path: AnyPath
    layout: str
    weights: Collection[str]
    params: dict[str, object] | None
    config: dict[str, object] | None
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
    layout, params = external_layout(folder.layout), folder.params
    if folder.config is None and params is None and layout.beside is not None:
        needed = PARAMS_NAME if layout.beside == PARAMS_NAME else CONFIG_NAME
        raise SourceError(
            f"{folder.path}: does not have {needed}, which has the sizes of the model: copy it into the folder, or "
            f"pass the model's config.json (--config)"
        )
    found = read_rank_files(folder.path, layout, folder.weights, follow_links=folder.follow_links)
    tensors = full_tensors(folder.path, layout, found, _known_config(folder))
    made = ConfigWithAssumptions(folder.config, ())
    if folder.config is None and params is not None:
        shapes = {name: spec.shape for name, spec in tensors.specs.items()}
        dtype = tensors.specs["model.embed_tokens.weight"].dtype
        made = complete_config(folder.path / PARAMS_NAME, params, shapes, dtype)
    stored = StoredFiles(found.paths, found.prefixes, found.sizes, tensors.stored, tensors.shards, found.states)
    return _Read(tensors, stored, made, len(found.ranks), layout.missing)


def _files(folder: AnyPath, specs: Mapping[str, TensorSpec]) -> tuple[SourceFile, ...]:
    ordered = in_file_order(dict(sorted(specs.items())))
    header = build_header(((name, spec.dtype, spec.shape) for name, spec in ordered.items()), _METADATA)
    return (SourceFile(_FILE, folder / _FILE, header),)


def _left_out(
    folder: AnyPath, files: FolderFiles, weights: Collection[str], title: str, key: str, asked: str | None
) -> dict[str, str]:
    """Name to reason of all other files with weights."""
    others = [name for name in files.kept if (is_weights(name) or name in ADAPTER_FILES) and name not in weights]
    reasons = {name: "trainer state" for name in others if is_trainer_state(name)}
    reasons |= {
        name: f"index of {title}" for name in others if name.endswith(".index.json") and not is_hugging_face_index(name)
    }
    if asked is None and (unknown := [name for name in others if name not in reasons]):
        raise SourceError(
            f"{folder}: holds weights or an adapter besides the files of {title}: {', '.join(unknown[:5])}: pass "
            f"{ignore_options(unknown, files.kept.keys() - {*unknown})}, or --from {key} to use those files only"
        )
    return files.left_out | dict.fromkeys(others, f"not a file of --from {key}") | reasons


def _known_config(folder: _Folder) -> dict[str, object]:
    """The config with the values of params.json; null in the config states nothing.

    Raises:
        SourceError: if the two differ.
    """
    stated = {field: value for field, value in (folder.config or {}).items() if value is not None}
    if folder.params is None:
        return _with_heads(folder, stated)
    expected = config_of_params(folder.path / PARAMS_NAME, folder.params)
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
        if field in stated and stated[field] != expected[field]:
            raise SourceError(
                f"{folder.path}: {field} is {stated[field]!r:.40} in the config (expected {expected[field]!r:.40} by "
                f"{PARAMS_NAME}): pass the config of this model"
            )
    return expected | stated


def _with_heads(folder: _Folder, config: dict[str, object]) -> dict[str, object]:
    """A config with the fields of heads that its class has defaults for, if it is that of a Llama."""
    if config.get("model_type") not in external_layout(META).model_types:
        return config
    try:
        sizes = head_sizes(config)
    except PlanError as error:
        raise SourceError(f"{folder.path}: {error}") from error
    return {"num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim} | config
