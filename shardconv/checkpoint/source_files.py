"""Weight files of a source: find them in a folder, with or without an index, and read their headers.

File names in an index are untrusted input, and no link is followed out of the folder.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardconv.checkpoint.auxiliary import FolderFiles, check_link, refuse_adapter
from shardconv.checkpoint.formats import INDEX_SUFFIX, convert, is_weights, refuse_sharded_state
from shardconv.checkpoint.header import Header, read_header
from shardconv.checkpoint.json_files import parse_object, read_text
from shardconv.checkpoint.layout import MANIFEST_NAME
from shardconv.errors import SourceError, UsageError

#: The name of one of several files of a checkpoint.
NUMBERED_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file of a source: its name in the folder, its path, and its header."""

    name: str
    path: Path
    header: Header


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a checkpoint.

    Attributes:
        names: of the source files, sorted.
        index: name and text of their index, or None.
        weight_map: tensor to file, by the index; empty without one.
    """

    names: list[str]
    index: tuple[str, str] | None
    weight_map: dict[str, str]


def find_weight_files(folder: Path, files: FolderFiles, given_index: str | None, *, follow_links: bool) -> WeightFiles:
    """Find the weight files of the checkpoint in a folder.

    Args:
        folder: the folder.
        files: its files.
        given_index: the name of the index that the user passed; None if it passed the folder.
        follow_links: whether the index may be a link out of the folder.

    Raises:
        SourceError: if the files are not those of exactly one checkpoint, or its index is not valid.
        UsageError: if the user left out a file of the checkpoint.
    """
    top_level = {name: path for name, path in files.kept.items() if "/" not in name and not path.is_dir()}
    if MANIFEST_NAME in top_level:
        raise SourceError(f"{folder}: is a split checkpoint: merge it, or reshard it for another tp, layout or engine")
    refuse_adapter(folder, top_level)
    refuse_sharded_state(folder, top_level)
    index_name = given_index or _find_index(folder, top_level)
    if index_name is None:
        return WeightFiles([_find_single(folder, files.kept)], None, {})
    _check_not_ignored(folder, [index_name], files.left_out)
    check_link(folder / index_name, folder, follow_links=follow_links)
    text = read_text(folder / index_name)
    weight_map = _weight_map(folder / index_name, text)
    names = sorted(set(weight_map.values()))
    _check_not_ignored(folder, names, files.left_out)
    if given_index is None:
        _check_no_single(folder, index_name, names, top_level)
    return WeightFiles(names, (index_name, text), weight_map)


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
    if any(NUMBERED_NAME.fullmatch(name) for name in weights):
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


def read_files(folder: Path, found: WeightFiles, *, follow_links: bool) -> tuple[SourceFile, ...]:
    """Read the headers of the weight files, and check that each tensor is in the file that the index lists.

    Raises:
        SourceError: if a file is missing, damaged or outside of the folder, or the index does not fit.
    """
    files = tuple(_read_file(folder, name, found.index, follow_links=follow_links) for name in found.names)
    _check_unique(folder, files)
    if found.index is not None:
        _check_index(folder / found.index[0], found.weight_map, files)
    return files


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
