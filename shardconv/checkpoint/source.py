"""Source checkpoints: a safetensors file, a Hugging Face folder, or a snapshot in the Hugging Face cache."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from shardconv.checkpoint.auxiliary import check_link, find_auxiliary, leave_out_weights, list_files
from shardconv.checkpoint.formats import ADAPTER_FILES, CONFIG_NAME, INDEX_SUFFIX, convert, is_weights, merge_adapter
from shardconv.checkpoint.header import TensorInfo, read_header
from shardconv.checkpoint.json_files import read_json
from shardconv.checkpoint.layout import MANIFEST_NAME
from shardconv.checkpoint.paths import absolute_path, hub_hint
from shardconv.checkpoint.source_files import (
    NUMBERED_NAME,
    SourceFile,
    find_weight_files,
    is_portable_name,
    read_files,
)
from shardconv.errors import SourceError, UsageError
from shardconv.plan.plan import TensorSpec


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be split.

    Attributes:
        path: the path that the user passed.
        is_folder: whether ``path`` is a folder.
        files: the source files, sorted by name.
        index: name and text of the index of the files, or None.
        config: contents of config.json, or None.
        auxiliary_files: name relative to the folder, with / as separator, to path.
        left_out: name to reason of all other files; names of hidden folders end with /.
        ignore: patterns of files that the user left out.
    """

    path: Path
    is_folder: bool
    files: tuple[SourceFile, ...]
    index: tuple[str, str] | None = None
    config: dict[str, object] | None = None
    auxiliary_files: Mapping[str, Path] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Name to dtype and shape of every tensor, in the order of the files and of their data."""
        return {name: TensorSpec(info.dtype, info.shape) for name, _, info in self.tensors()}

    @property
    def name(self) -> str:
        """The name of the file without its suffix, or of the folder; in a Hugging Face cache that of the model."""
        path = absolute_path(self.path)  # resolve() would give the name of a blob in the cache
        folder = path if path.is_dir() else path.parent
        if folder.parent.name == "snapshots":
            return folder.parent.parent.name.rpartition("--")[2]
        return path.name.removesuffix(".safetensors") if path.suffix == ".safetensors" else folder.name

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.header.data_bytes for file in self.files)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all files; where values differ, the first file takes precedence."""
        merged: dict[str, str] = {}
        for file in self.files:
            merged = {**(file.header.metadata or {}), **merged}
        return merged

    def tensors(self) -> Iterator[tuple[str, int, TensorInfo]]:
        """Name, index of the file, and position in the file of every tensor."""
        for number, file in enumerate(self.files):
            for name, info in file.header.tensors.items():
                yield name, number, info


def open_source(
    path: Path,
    *,
    config: Path | None = None,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    optional_ignore: tuple[str, ...] = (),
) -> Source:
    """Read the headers of a checkpoint, and check that its files are consistent.

    Args:
        path: a ``.safetensors`` file, an index file, or a folder.
        config: a config.json to use instead of the one next to the weights.
        follow_links: follow links that point outside of the folder.
        ignore: glob patterns, relative to the folder, of files to leave out; each must match a file.
        optional_ignore: further patterns, which may match nothing.

    Raises:
        SourceError: if a file is missing, damaged, ambiguous or outside of the folder, or the model may need weights
            that are not part of the checkpoint.
        UsageError: if a pattern of ``ignore`` matches nothing, or a file of the checkpoint.
    """
    if not path.exists():
        raise SourceError(f"{path}: does not exist{hub_hint(path)}")
    if path.is_dir():
        source = _open_folder(path, None, follow_links=follow_links, ignore=ignore, optional_ignore=optional_ignore)
    elif path.name.endswith(INDEX_SUFFIX):
        folder, name = path.parent, path.name
        source = _open_folder(folder, name, follow_links=follow_links, ignore=ignore, optional_ignore=optional_ignore)
    elif ignore:
        raise UsageError(f"--ignore {ignore[0]!r}: only applies to folders (got the file {path}): remove it")
    elif path.name in ADAPTER_FILES:
        raise SourceError(
            f"{path}: belongs to a PEFT adapter, and adapters cannot be split. {merge_adapter(path.parent)}"
        )
    elif path.suffix == ".safetensors":
        source = _open_file(path, follow_links=follow_links)
    else:
        raise SourceError(f"{path}: is not a .safetensors file. {convert(path.parent, [path.name])}")
    if config is not None:
        auxiliary_files = {**source.auxiliary_files, CONFIG_NAME: config}
        source = replace(source, config=read_json(config), auxiliary_files=auxiliary_files)
    _check_names(source)
    return source


def standalone_config(path: Path, *, follow_links: bool = False) -> dict[str, object] | None:
    """Read a config without weights: ``path`` is the config, or a folder that holds it. None for all other paths.

    Raises:
        SourceError: if it cannot be read, or is a link out of its folder.
    """
    if path.is_dir():
        try:
            names = [child.name for child in path.iterdir()]
        except OSError:
            return None  # open_source reports the error
        if any(is_weights(name) or name == MANIFEST_NAME for name in names):
            return None
        path = path / CONFIG_NAME
    if path.suffix != ".json" or is_weights(path.name) or not path.is_file():
        return None
    check_link(path, path.parent, follow_links=follow_links)
    config = read_json(path)
    if path.name == CONFIG_NAME and not isinstance(config.get("model_type"), str):
        raise SourceError(f"{path}: does not have a model_type or weights next to it: add one of them")
    return config if isinstance(config.get("model_type"), str) else None


def _check_names(source: Source) -> None:
    """Refuse file names that would be refused when they are read from a manifest."""
    index = [] if source.index is None else [source.index[0]]
    for name in (*(file.name for file in source.files), *index, *source.auxiliary_files):
        if not all(is_portable_name(folder_or_file) for folder_or_file in name.split("/")):
            raise SourceError(f"{source.path}: the name of file {name!r:.100} is not valid on every system: rename it")


def _open_file(path: Path, *, follow_links: bool) -> Source:
    match = NUMBERED_NAME.fullmatch(path.name)
    if match and int(match["count"]) > 1:
        raise SourceError(
            f"{path}: is one of {int(match['count'])} files of a checkpoint: pass their folder or their index instead"
        )
    file = SourceFile(path.name, path, read_header(path))
    config = path.parent / CONFIG_NAME
    if not os.path.lexists(config):
        return Source(path, is_folder=False, files=(file,))
    check_link(config, path.parent, follow_links=follow_links)
    return Source(path, is_folder=False, files=(file,), config=read_json(config), auxiliary_files={CONFIG_NAME: config})


def _open_folder(
    folder: Path,
    index_name: str | None,
    *,
    follow_links: bool,
    ignore: tuple[str, ...],
    optional_ignore: tuple[str, ...],
) -> Source:
    folder_files = list_files(folder, ignore, optional_ignore)
    found = find_weight_files(folder, folder_files, index_name, follow_links=follow_links)
    files = read_files(folder, found, follow_links=follow_links)
    checkpoint_names = [*found.names, *([found.index[0]] if found.index else [])]
    shapes = {name: info.shape for file in files for name, info in file.header.tensors.items()}
    auxiliary_files = find_auxiliary(folder, folder_files, checkpoint_names, follow_links=follow_links)
    left_out = folder_files.left_out | leave_out_weights(
        folder, folder_files, checkpoint_names, None if index_name else shapes, follow_links=follow_links
    )
    config = read_json(auxiliary_files[CONFIG_NAME]) if CONFIG_NAME in auxiliary_files else None
    return Source(
        folder, is_folder=True, files=files, index=found.index, config=config, auxiliary_files=auxiliary_files,
        left_out=dict(sorted(left_out.items())), ignore=tuple(dict.fromkeys([*optional_ignore, *ignore])),
    )  # fmt: skip
