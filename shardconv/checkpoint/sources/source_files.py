"""Weight files of a source: find them in a folder, with or without an index, and read headers of safetensors files.

File names in an index are untrusted input, and no link is followed out of the folder.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardconv.checkpoint.engine.layout import IDENTITY_KEY, MANIFEST_NAME
from shardconv.checkpoint.sources.folder_files import FolderFiles, refuse_adapter
from shardconv.checkpoint.sources.source_reader import StoredFiles, Transform
from shardconv.files.containers.safetensors import Header, read_header
from shardconv.files.folder import AnyPath
from shardconv.files.paths import check_link
from shardconv.files.text_files import parse_object, read_text
from shardconv.files.weight_formats import (
    CONFIG_NAME,
    NUMBERED_NAME,
    SAFETENSORS,
    SOURCE_FORMATS,
    WeightFormat,
    convert,
    is_trainer_state,
    is_weights,
    refuse_rank_files,
    refuse_sharded_state,
    single_name,
    variants,
    without_manifest,
    without_weights,
)
from shardconv.support.errors import SourceError, UsageError, option
from shardconv.support.formatting import counted

#: Maximum number of subfolders in a message.
_MAX_SUBFOLDERS = 5


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file of a source: its name in the folder, its path, and its header."""

    name: str
    path: AnyPath
    header: Header


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a checkpoint.

    Attributes:
        names: of the source files, sorted.
        index: name and text of their index, or None.
        weight_map: tensor to file, by the index; empty without one.
        format: of the files.
    """

    names: list[str]
    index: tuple[str, str] | None
    weight_map: dict[str, str]
    format: WeightFormat

    def index_path(self, folder: AnyPath) -> AnyPath | None:
        """The path of the index, or None."""
        return None if self.index is None else folder / self.index[0]


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a source, and the attributes of a ``Source`` that depend on them."""

    files: tuple[SourceFile, ...]
    index: tuple[str, str] | None = None
    index_path: AnyPath | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    stored: StoredFiles | None = None
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    derived: tuple[str, ...] = ()


def find_weight_files(
    folder: AnyPath, files: FolderFiles, given_index: str | None, *, follow_links: bool
) -> WeightFiles:
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
        raise SourceError(
            f"{folder}: is a split checkpoint: pass the source that was split, merge it (shardconv merge {folder}), or "
            f"change its size or layout (shardconv reshard {folder} --tp N)"
        )
    refuse_rank_files(folder, [given_index] if given_index else top_level)
    refuse_adapter(folder, top_level)
    refuse_sharded_state(folder, top_level)
    weight_format = _find_format([given_index] if given_index else top_level)
    if given_index is None:
        listed = _listed(folder, top_level, weight_format, follow_links=follow_links)
        _refuse_variants(folder, top_level.keys() - set(listed), weight_format)
    index_name = given_index or _find_index(folder, top_level, weight_format)
    if index_name is None:
        return WeightFiles([_find_single(folder, files.kept, weight_format)], None, {}, weight_format)
    _check_not_ignored(folder, [index_name], files.left_out)
    check_link(folder / index_name, folder, follow_links=follow_links)
    text = read_text(folder / index_name)
    weight_map = _weight_map(folder / index_name, text, weight_format)
    names = sorted(set(weight_map.values()))
    _check_not_ignored(folder, names, files.left_out)
    if given_index is None:
        _check_no_single(folder, index_name, names, top_level)
    return WeightFiles(names, (index_name, text), weight_map, weight_format)


def _check_not_ignored(folder: AnyPath, names: Collection[str], left_out: Mapping[str, str]) -> None:
    if name := next((name for name in names if name in left_out), None):
        raise UsageError(f"{folder / name}: is {left_out[name]}, but is a file of the checkpoint: change the pattern")


def _find_format(files: Collection[str]) -> WeightFormat:
    return next((one for one in SOURCE_FORMATS if any(map(one.has_or_lists, files))), SAFETENSORS)


def _listed(folder: AnyPath, names: Iterable[str], weight_format: WeightFormat, *, follow_links: bool) -> Iterator[str]:
    """Yield the files that the indexes of a folder list."""
    for path in (folder / name for name in names if weight_format.lists(name)):
        check_link(path, folder, follow_links=follow_links)
        yield from _weight_map(path, read_text(path), weight_format).values()


def _refuse_variants(folder: AnyPath, names: Collection[str], weight_format: WeightFormat) -> None:
    """Refuse several variants of a checkpoint: the default one is not always the one that a user wants."""
    found = [name for name in sorted(names) if weight_format.has_or_lists(name) and not NUMBERED_NAME.fullmatch(name)]
    if held := next(variants(found), None):
        raise SourceError(
            f"{folder}: holds {counted(len(held), 'variant')} of a checkpoint ({', '.join(held)}): pass one of these "
            f"files instead of the folder, or leave out all files of the others with {option('ignore')}"
        )


def _find_index(folder: AnyPath, files: Collection[str], weight_format: WeightFormat) -> str | None:
    indexes = [name for name in files if weight_format.lists(name)]
    indexes = [name for name in indexes if not name.startswith("consolidated.")] or indexes  # Mistral's other files
    if len(indexes) > 1:
        raise SourceError(
            f"{folder}: has several indexes (got {', '.join(indexes)}, expected one): pass one instead of the folder"
        )
    return indexes[0] if indexes else None


def _check_no_single(folder: AnyPath, index: str, names: list[str], files: Collection[str]) -> None:
    """Refuse a file next to an index of the same name: libraries differ in which of the two they load."""
    single = single_name(index)
    if single in files and single not in names:
        raise SourceError(f"{folder}: has both {single} and {index}: pass one of them instead of the folder")


def _find_single(folder: AnyPath, files: Collection[str], weight_format: WeightFormat) -> str:
    weights = [name for name in files if weight_format.has(name) and "/" not in name]
    if weight_format.single in weights:
        return weight_format.single
    if any(NUMBERED_NAME.fullmatch(name) for name in weights):
        raise SourceError(
            f"{folder}: holds files of a checkpoint ({weights[0]}, ...) without their index "
            f"(*{weight_format.suffixes[0]}.index*.json): download the folder again"
        )
    if len(weights) > 1:
        raise SourceError(
            f"{folder}: holds several checkpoints ({', '.join(weights)}): pass one of the files instead of the folder"
        )
    if not weights:
        raise SourceError(f"{folder}: {_no_weights(folder, files)}")
    return weights[0]


def _no_weights(folder: AnyPath, files: Collection[str]) -> str:
    """The problem and the remedy for a folder without a safetensors file."""
    if (folder / "snapshots").is_dir():
        return "is a model in a Hugging Face cache: pass a folder in its snapshots/"
    held = {name.rpartition("/")[0] for name in files for one in SOURCE_FORMATS if one.has(name)}
    if held:
        sources_first = sorted(held, key=lambda name: (f"{name}/{MANIFEST_NAME}" in files, name))
        more = f" and {len(held) - _MAX_SUBFOLDERS} more" if len(held) > _MAX_SUBFOLDERS else ""
        subfolders = f"{', '.join(sources_first[:_MAX_SUBFOLDERS])}{more}"
        return f"holds no weights that can be split, but its subfolders do ({subfolders}): pass one of them"
    others = [name for name in files if is_weights(name) and "/" not in name and not is_trainer_state(name)]
    if others:
        return f"holds {others[0]}, but no .safetensors or PyTorch file. {convert(folder, others)}"
    if CONFIG_NAME in files:
        return f"holds a config without weights: {without_weights(folder)}"
    return (
        "holds no .safetensors or PyTorch file and no weights in another known format: pass the folder of a model, or "
        "one of its weight files"
    )


def read_safetensors(folder: AnyPath, found: WeightFiles, *, follow_links: bool) -> Weights:
    """Read the headers of safetensors files.

    Raises:
        SourceError: if a file is missing, damaged or outside of the folder, or is a rank file, or the index does not
            fit.
    """
    paths = weight_paths(folder, found, follow_links=follow_links)
    files = tuple(SourceFile(name, path, read_header(path)) for name, path in zip(found.names, paths, strict=True))
    if shard := next((file for file in files if IDENTITY_KEY in (file.header.metadata or {})), None):
        raise SourceError(without_manifest(folder, shard.name))
    check_files(folder, found, files)
    return Weights(files, found.index, found.index_path(folder))


def weight_paths(folder: AnyPath, found: WeightFiles, *, follow_links: bool) -> list[AnyPath]:
    """The paths of the weight files.

    Raises:
        SourceError: if a file is missing, or a link out of the folder.
    """
    paths = [folder / name for name in found.names]
    for path in paths:
        if not path.exists():
            remedy = f", but {found.index[0]} lists it: download the folder again" if found.index else ""
            raise SourceError(f"{folder}: {path.name} is missing{remedy}")
        check_link(path, folder, follow_links=follow_links)
    return paths


def check_files(folder: AnyPath, found: WeightFiles, files: Sequence[SourceFile]) -> None:
    """Check that each tensor is in one file, which is that in the index.

    Raises:
        SourceError: if not.
    """
    _check_unique(folder, files)
    if found.index is not None:
        _check_index(folder / found.index[0], found.weight_map, files)


def _weight_map(path: AnyPath, text: str, weight_format: WeightFormat) -> dict[str, str]:
    data = parse_object(path, text)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: does not have a weight_map")
    tensor_in = {name if isinstance(name, str) else "": tensor for tensor, name in weight_map.items()}
    for name, tensor in tensor_in.items():
        if not is_portable_name(name) or not name.endswith(weight_format.suffixes):
            raise SourceError(
                f"{path}: tensor {tensor!r} has an invalid file name (got {weight_map[tensor]!r:.100}, expected "
                f"a file in the same folder that ends with {' or '.join(weight_format.suffixes)})"
            )
    return weight_map


def with_total_size(text: str, total: int) -> str:
    """The text of an index with another total size in bytes."""
    index = json.loads(text)
    if isinstance(index.get("metadata"), dict) and "total_size" in index["metadata"]:
        index["metadata"]["total_size"] = total
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def is_portable_name(name: str) -> bool:
    """Whether an untrusted name is a plain file name, without folders, on every system."""
    return name not in {"", ".", ".."} and not re.search(r"[/\\:\x00-\x1f\ud800-\udfff]", name)


def _check_unique(folder: AnyPath, files: Sequence[SourceFile]) -> None:
    seen: dict[str, str] = {}
    for file in files:
        for name in file.header.tensors:
            if name in seen:
                raise SourceError(f"{folder}: tensor {name} is in both {seen[name]} and {file.name}")
            seen[name] = file.name


def _check_index(path: AnyPath, weight_map: Mapping[str, str], files: Sequence[SourceFile]) -> None:
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


def _remedy(files: Sequence[SourceFile]) -> str:
    """The remedy for an index and files that do not belong to the same checkpoint."""
    again = "the index was not written with these files, so download both again"
    return f"{again}, or pass {files[0].path} instead" if len(files) == 1 else again
