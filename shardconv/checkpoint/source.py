"""Source checkpoints: a safetensors file, a Hugging Face folder with one or several files, or a snapshot in its cache.

File names in an index are untrusted input, and no link is followed out of the folder.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardconv.checkpoint.auxiliary import (
    FolderFiles,
    check_link,
    find_auxiliary,
    leave_out_weights,
    list_files,
    refuse_adapter,
)
from shardconv.checkpoint.formats import (
    ADAPTER_FILES,
    CONFIG_NAME,
    INDEX_SUFFIX,
    convert,
    is_weights,
    merge_adapter,
    refuse_sharded_state,
)
from shardconv.checkpoint.header import Header, TensorInfo, read_header
from shardconv.checkpoint.json_files import parse_object, read_json, read_text
from shardconv.checkpoint.layout import MANIFEST_NAME
from shardconv.checkpoint.paths import hub_hint
from shardconv.errors import SourceError, UsageError
from shardconv.plan.plan import TensorSpec

#: The name of one of several files of a checkpoint.
_NUMBERED_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file of a source: its name in the folder, its path, and its header."""

    name: str
    path: Path
    header: Header


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
    config: dict[str, Any] | None = None
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
        path = Path(os.path.abspath(self.path))  # noqa: PTH100 - resolve() would give the name of a cache's blob
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


def standalone_config(path: Path, *, follow_links: bool = False) -> dict[str, Any] | None:
    """Read a config without weights: ``path`` is the config, or a folder that holds it. None for all other paths.

    Raises:
        SourceError: if it cannot be read, or is a link out of its folder.
    """
    if path.is_dir():
        try:
            names = os.listdir(path)  # noqa: PTH208 - names are wanted
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
        raise SourceError(f"{path}: does not have a model_type, and there are no weights next to it: add one of them")
    return config if isinstance(config.get("model_type"), str) else None


def _check_names(source: Source) -> None:
    """Refuse file names that would be refused when they are read from a manifest."""
    index = [] if source.index is None else [source.index[0]]
    for name in (*(file.name for file in source.files), *index, *source.auxiliary_files):
        if not all(is_portable_name(folder_or_file) for folder_or_file in name.split("/")):
            raise SourceError(f"{source.path}: the name of file {name!r:.100} is not valid on every system: rename it")


def _open_file(path: Path, *, follow_links: bool) -> Source:
    match = _NUMBERED_NAME.fullmatch(path.name)
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
    names, index, weight_map = _find_checkpoint(folder, folder_files, index_name, follow_links=follow_links)
    files = tuple(_read_file(folder, name, index, follow_links=follow_links) for name in names)
    _check_unique(folder, files)
    if index is not None:
        _check_index(folder / index[0], weight_map, files)
    checkpoint_names = [*names, *([index[0]] if index else [])]
    shapes = {name: info.shape for file in files for name, info in file.header.tensors.items()}
    auxiliary_files = find_auxiliary(folder, folder_files, checkpoint_names, follow_links=follow_links)
    left_out = folder_files.left_out | leave_out_weights(
        folder, folder_files, checkpoint_names, None if index_name else shapes, follow_links=follow_links
    )
    config = read_json(auxiliary_files[CONFIG_NAME]) if CONFIG_NAME in auxiliary_files else None
    return Source(
        folder, is_folder=True, files=files, index=index, config=config, auxiliary_files=auxiliary_files,
        left_out=dict(sorted(left_out.items())), ignore=tuple(dict.fromkeys([*optional_ignore, *ignore])),
    )  # fmt: skip


def _find_checkpoint(
    folder: Path, files: FolderFiles, given_index: str | None, *, follow_links: bool
) -> tuple[list[str], tuple[str, str] | None, dict[str, str]]:
    """Names of the source files; name and text of their index, or None; its weight map."""
    top_level = {name: path for name, path in files.kept.items() if "/" not in name and not path.is_dir()}
    if MANIFEST_NAME in top_level:
        raise SourceError(f"{folder}: is a split checkpoint: merge it, or reshard it for another tp, layout or engine")
    refuse_adapter(folder, top_level)
    refuse_sharded_state(folder, top_level)
    index_name = given_index or _find_index(folder, top_level)
    if index_name is None:
        return [_find_single(folder, files.kept)], None, {}
    _check_not_ignored(folder, [index_name], files.left_out)
    check_link(folder / index_name, folder, follow_links=follow_links)
    text = read_text(folder / index_name)
    weight_map = _weight_map(folder / index_name, text)
    names = sorted(set(weight_map.values()))
    _check_not_ignored(folder, names, files.left_out)
    if given_index is None:
        _check_no_single(folder, index_name, names, top_level)
    return names, (index_name, text), weight_map


def _check_not_ignored(folder: Path, names: Collection[str], left_out: Mapping[str, str]) -> None:
    if name := next((name for name in names if name in left_out), None):
        raise UsageError(f"{folder / name}: is {left_out[name]}, but is a file of the checkpoint: change the pattern")


def _find_index(folder: Path, files: Collection[str]) -> str | None:
    indexes = [name for name in files if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise SourceError(
            f"{folder}: has several indexes (got {', '.join(indexes)}, expected one): pass one instead of the folder"
        )
    return indexes[0] if indexes else None


def _check_no_single(folder: Path, index: str, names: list[str], files: Collection[str]) -> None:
    """Refuse a file next to an index of the same name: libraries differ in which of the two they load."""
    single = index.removesuffix(".index.json")
    if single in files and single not in names:
        raise SourceError(f"{folder}: has both {single} and {index}: pass one of them instead of the folder")


def _find_single(folder: Path, files: Collection[str]) -> str:
    weights = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    if "model.safetensors" in weights:
        return "model.safetensors"
    if any(_NUMBERED_NAME.fullmatch(name) for name in weights):
        raise SourceError(
            f"{folder}: holds files of a checkpoint ({weights[0]}, ...) without their index (*{INDEX_SUFFIX}): "
            f"download the folder again"
        )
    if len(weights) > 1:
        raise SourceError(
            f"{folder}: holds several checkpoints ({', '.join(weights)}): pass one of the files instead of the folder"
        )
    if not weights:
        raise SourceError(f"{folder}: {_no_weights(folder, files)}")
    return weights[0]


def _no_weights(folder: Path, files: Collection[str]) -> str:
    """The problem and the remedy for a folder without a safetensors file."""
    if (folder / "snapshots").is_dir():
        return "is a model in a Hugging Face cache: pass a folder in its snapshots/"
    subfolders = {name.rpartition("/")[0] for name in files if name.endswith(".safetensors")}
    if subfolders:
        return f"holds no .safetensors file, but its subfolders do ({', '.join(sorted(subfolders))}): pass one of them"
    others = [name for name in files if is_weights(name) and "/" not in name]
    if others:
        return f"holds {others[0]}, but no .safetensors file. {convert(folder, others)}"
    return "holds no .safetensors file and no weights in another known format"


def _read_file(folder: Path, name: str, index: tuple[str, str] | None, *, follow_links: bool) -> SourceFile:
    path = folder / name
    if not path.exists():
        remedy = f", but {index[0]} lists it: download the folder again" if index else ""
        raise SourceError(f"{folder}: {name} is missing{remedy}")
    check_link(path, folder, follow_links=follow_links)
    return SourceFile(name, path, read_header(path))


def _weight_map(path: Path, text: str) -> dict[str, str]:
    data = parse_object(path, text)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: does not have a weight_map")
    tensor_in = {name if isinstance(name, str) else "": tensor for tensor, name in weight_map.items()}
    for name, tensor in tensor_in.items():
        if not is_portable_name(name) or not name.endswith(".safetensors"):
            raise SourceError(
                f"{path}: tensor {tensor!r} has an invalid file name (got {weight_map[tensor]!r:.100}, expected "
                f"a .safetensors file in the same folder)"
            )
    return weight_map


def is_portable_name(name: str) -> bool:
    """Whether an untrusted name is a plain file name, without folders, on every system."""
    return name not in {"", ".", ".."} and not re.search(r"[/\\:\x00-\x1f\ud800-\udfff]", name)


def _check_unique(folder: Path, files: tuple[SourceFile, ...]) -> None:
    seen: dict[str, str] = {}
    for file in files:
        for name in file.header.tensors:
            if name in seen:
                raise SourceError(f"{folder}: tensor {name} is in both {seen[name]} and {file.name}")
            seen[name] = file.name


def _check_index(path: Path, weight_map: Mapping[str, str], files: tuple[SourceFile, ...]) -> None:
    file_of = {name: file.name for file in files for name in file.header.tensors}
    for name, expected in weight_map.items():
        if (got := file_of.get(name)) != expected:
            raise SourceError(
                f"{path}: tensor {name} is in {got or 'no file of the index'} (expected {expected}): {_remedy(files)}"
            )
    if missing := next((name for name in file_of if name not in weight_map), None):
        count = sum(name not in weight_map for name in file_of)
        others = f", nor are {count - 1} more tensors" if count > 1 else ""
        raise SourceError(
            f"{path}: tensor {missing} of {file_of[missing]} is not in the index{others}: {_remedy(files)}"
        )


def _remedy(files: tuple[SourceFile, ...]) -> str:
    """The remedy for an index and files that do not belong to the same checkpoint."""
    again = "the index was not written with these files, so download both again"
    return f"{again}, or pass {files[0].path} instead" if len(files) == 1 else again
