"""The source: a safetensors file, a Hugging Face folder with one file or several parts, or a snapshot in its cache.

Owns what lies where in a checkpoint on disk. A file name that comes out of an index is not trusted, and no link is
followed out of the folder. Knows nothing of plans or ranks.
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
    leave_out_weights,
    list_files,
    refuse_adapter,
    take_auxiliary,
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

_PART_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a source: its name in the folder, where it is, and its header."""

    name: str
    path: Path
    header: Header


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be split.

    Attributes:
        path: what the user named.
        is_folder: whether that was a folder.
        parts: the safetensors files, sorted by name.
        index: name and text of the index over the parts; None where there is none.
        config: what config.json holds; None where there is none.
        side_files: name in the folder (with / between folders) to path, of all that holds no weights.
        left_out: name, of hidden folders with a / behind, to why it is left out, of all files that are neither.
        ignore: patterns of files that the user left out.
    """

    path: Path
    is_folder: bool
    parts: tuple[Part, ...]
    index: tuple[str, str] | None = None
    config: dict[str, Any] | None = None
    side_files: Mapping[str, Path] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Name to dtype and shape of every tensor, in the order of the parts and of their data."""
        return {name: TensorSpec(info.dtype, info.shape) for name, _, info in self.tensors()}

    @property
    def name(self) -> str:
        """The name of the file or folder, without the file's ending; in a Hugging Face cache the model's."""
        path = Path(os.path.abspath(self.path))  # noqa: PTH100 - resolve() would give the name of a cache's blob
        folder = path if path.is_dir() else path.parent
        if folder.parent.name == "snapshots":
            return folder.parent.parent.name.rpartition("--")[2]
        return path.name.removesuffix(".safetensors") if path.suffix == ".safetensors" else folder.name

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.header.data_bytes for part in self.parts)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all parts; where two differ, the first counts."""
        merged: dict[str, str] = {}
        for part in self.parts:
            merged = {**(part.header.metadata or {}), **merged}
        return merged

    def tensors(self) -> Iterator[tuple[str, int, TensorInfo]]:
        """Name, number of the part, and place in it, of every tensor."""
        for number, part in enumerate(self.parts):
            for name, info in part.header.tensors.items():
                yield name, number, info


def open_source(
    path: Path,
    *,
    config: Path | None = None,
    follow_links: bool = False,
    ignore: tuple[str, ...] = (),
    may_ignore: tuple[str, ...] = (),
) -> Source:
    """Read the headers of a checkpoint, and check that its files fit together.

    Args:
        path: a ``.safetensors`` file, an index file, or a folder.
        config: a config.json to use instead of the one beside the weights.
        follow_links: read files that are links to outside of the folder.
        ignore: glob patterns, relative to the folder, of files to leave out; each has to match one.
        may_ignore: further patterns, which need not.

    Raises:
        SourceError: if something is missing, damaged, ambiguous or outside of the folder, or there are weights of which
            it is not known whether the model needs them.
        UsageError: if a pattern of ``ignore`` matches nothing, or a file of the checkpoint.
    """
    if not path.exists():
        raise SourceError(f"{path}: there is no such file or folder{hub_hint(path)}")
    if path.is_dir():
        source = _open_folder(path, None, follow_links=follow_links, ignore=ignore, may_ignore=may_ignore)
    elif path.name.endswith(INDEX_SUFFIX):
        folder, name = path.parent, path.name
        source = _open_folder(folder, name, follow_links=follow_links, ignore=ignore, may_ignore=may_ignore)
    elif ignore:
        raise UsageError(f"--ignore {ignore[0]!r}: is for folders, and {path} is a file, beside which nothing is read")
    elif path.name in ADAPTER_FILES:
        raise SourceError(f"{path}: is of a PEFT adapter, and adapters cannot be split. {merge_adapter(path.parent)}")
    elif path.suffix == ".safetensors":
        source = _open_file(path, follow_links=follow_links)
    else:
        raise SourceError(f"{path}: is not a .safetensors file. {convert(path.parent, [path.name])}")
    if config is not None:
        side_files = {**source.side_files, CONFIG_NAME: config}
        source = replace(source, config=read_json(config), side_files=side_files)
    _check_names(source)
    return source


def config_alone(path: Path, *, follow_links: bool = False) -> dict[str, Any] | None:
    """What a config says that is named without weights: itself, or a folder that has none; None for all else.

    Raises:
        SourceError: if it cannot be read, or is a link out of its folder.
    """
    if path.is_dir():
        try:
            names = os.listdir(path)  # noqa: PTH208 - names are wanted
        except OSError:
            return None  # as open_source says
        if any(is_weights(name) or name == MANIFEST_NAME for name in names):
            return None
        path = path / CONFIG_NAME
    if path.suffix != ".json" or is_weights(path.name) or not path.is_file():
        return None
    check_link(path, path.parent, follow_links=follow_links)
    config = read_json(path)
    if path.name == CONFIG_NAME and not isinstance(config.get("model_type"), str):
        raise SourceError(
            f"{path}: there are no weights beside it, and it has no model_type, which would name the model"
        )
    return config if isinstance(config.get("model_type"), str) else None


def _check_names(source: Source) -> None:
    """Refuse names that a manifest would not be trusted with when it is read again."""
    index = [] if source.index is None else [source.index[0]]
    for name in (*(part.name for part in source.parts), *index, *source.side_files):
        if not all(is_plain_name(folder_or_file) for folder_or_file in name.split("/")):
            raise SourceError(f"{source.path}: file {name!r:.100} has a name that not every system can have: rename it")


def _open_file(path: Path, *, follow_links: bool) -> Source:
    match = _PART_NAME.fullmatch(path.name)
    if match and int(match["count"]) > 1:
        raise SourceError(f"{path}: is one part of {int(match['count'])}: name their folder, or the index over them")
    part = Part(path.name, path, read_header(path))
    beside = path.parent / CONFIG_NAME
    if not os.path.lexists(beside):
        return Source(path, is_folder=False, parts=(part,))
    check_link(beside, path.parent, follow_links=follow_links)
    return Source(path, is_folder=False, parts=(part,), config=read_json(beside), side_files={CONFIG_NAME: beside})


def _open_folder(
    folder: Path, index_name: str | None, *, follow_links: bool, ignore: tuple[str, ...], may_ignore: tuple[str, ...]
) -> Source:
    files = list_files(folder, ignore, may_ignore)
    names, index, weight_map = _choose(folder, files, index_name, follow_links=follow_links)
    parts = tuple(_open_part(folder, name, index, follow_links=follow_links) for name in names)
    _check_unique(folder, parts)
    if index is not None:
        _check_index(folder / index[0], weight_map, parts)
    own = [*names, *([index[0]] if index else [])]
    shapes = {name: info.shape for part in parts for name, info in part.header.tensors.items()}
    side_files = take_auxiliary(folder, files, own, follow_links=follow_links)
    left_out = files.left_out | leave_out_weights(
        folder, files, own, None if index_name else shapes, follow_links=follow_links
    )
    config = read_json(side_files[CONFIG_NAME]) if CONFIG_NAME in side_files else None
    return Source(
        folder, is_folder=True, parts=parts, index=index, config=config, side_files=side_files,
        left_out=dict(sorted(left_out.items())), ignore=tuple(dict.fromkeys([*may_ignore, *ignore])),
    )  # fmt: skip


def _choose(
    folder: Path, files: FolderFiles, named_index: str | None, *, follow_links: bool
) -> tuple[list[str], tuple[str, str] | None, dict[str, str]]:
    """The names of a checkpoint's files; name and text of the index over them if there is one; its weight map."""
    here = {name: path for name, path in files.kept.items() if "/" not in name and not path.is_dir()}
    if MANIFEST_NAME in here:
        raise SourceError(f"{folder}: is a split checkpoint: merge it, or reshard it for another tp, layout or engine")
    refuse_adapter(folder, here)
    refuse_sharded_state(folder, here)
    index_name = named_index or _find_index(folder, here)
    if index_name is None:
        return [_find_single(folder, files.kept)], None, {}
    _check_not_ignored(folder, [index_name], files.left_out)
    check_link(folder / index_name, folder, follow_links=follow_links)
    text = read_text(folder / index_name)
    weight_map = _weight_map(folder / index_name, text)
    names = sorted(set(weight_map.values()))
    _check_not_ignored(folder, names, files.left_out)
    if named_index is None:
        _check_no_single(folder, index_name, names, here)
    return names, (index_name, text), weight_map


def _check_not_ignored(folder: Path, names: Collection[str], left_out: Mapping[str, str]) -> None:
    if name := next((name for name in names if name in left_out), None):
        raise UsageError(f"{folder / name}: is {left_out[name]}, and is a file of the checkpoint: change the pattern")


def _find_index(folder: Path, files: Collection[str]) -> str | None:
    indexes = [name for name in files if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise SourceError(
            f"{folder}: has several indexes ({', '.join(indexes)}): name the one you mean instead of the folder"
        )
    return indexes[0] if indexes else None


def _check_no_single(folder: Path, index: str, names: list[str], files: Collection[str]) -> None:
    """Refuse a file beside an index of the same name: libraries differ in which of the two they load."""
    single = index.removesuffix(".index.json")
    if single in files and single not in names:
        raise SourceError(f"{folder}: has both {single} and {index}: name the one you mean instead of the folder")


def _find_single(folder: Path, files: Collection[str]) -> str:
    weights = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    if "model.safetensors" in weights:
        return "model.safetensors"
    if any(_PART_NAME.fullmatch(name) for name in weights):
        raise SourceError(
            f"{folder}: holds files of a checkpoint ({weights[0]}, ...) and no index over them (*{INDEX_SUFFIX}): "
            f"download the folder again"
        )
    if len(weights) > 1:
        raise SourceError(
            f"{folder}: holds several checkpoints ({', '.join(weights)}): name the file you mean instead of the folder"
        )
    if not weights:
        raise SourceError(f"{folder}: {_no_weights(folder, files)}")
    return weights[0]


def _no_weights(folder: Path, files: Collection[str]) -> str:
    """Why a folder without a safetensors file is not a checkpoint, and what to do."""
    if (folder / "snapshots").is_dir():
        return "is a model in a Hugging Face cache: name a folder in its snapshots/"
    below = {name.rpartition("/")[0] for name in files if name.endswith(".safetensors")}
    if below:
        return f"holds no .safetensors file, but folders in it do ({', '.join(sorted(below))}): name one of them"
    others = [name for name in files if is_weights(name) and "/" not in name]
    if others:
        return f"holds {others[0]}, and no .safetensors file. {convert(folder, others)}"
    return "holds no .safetensors file, nor weights in another format that is known"


def _open_part(folder: Path, name: str, index: tuple[str, str] | None, *, follow_links: bool) -> Part:
    path = folder / name
    if not path.exists():
        lists = f", and {index[0]} lists it: download the folder again" if index else ""
        raise SourceError(f"{folder}: {name} is missing{lists}")
    check_link(path, folder, follow_links=follow_links)
    return Part(name, path, read_header(path))


def _weight_map(path: Path, text: str) -> dict[str, str]:
    data = parse_object(path, text)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: has no weight_map")
    tensor_in = {name if isinstance(name, str) else "": tensor for tensor, name in weight_map.items()}
    for name, tensor in tensor_in.items():
        if not is_plain_name(name) or not name.endswith(".safetensors"):
            raise SourceError(
                f"{path}: {tensor!r} is mapped to {weight_map[tensor]!r:.100}, which is no part of this folder"
            )
    return weight_map


def is_plain_name(name: str) -> bool:
    """Whether a name from a file is that of a file right in its folder, on any system."""
    return name not in {"", ".", ".."} and not re.search(r"[/\\:\x00-\x1f\ud800-\udfff]", name)


def _check_unique(folder: Path, parts: tuple[Part, ...]) -> None:
    seen: dict[str, str] = {}
    for part in parts:
        for name in part.header.tensors:
            if name in seen:
                raise SourceError(f"{folder}: tensor {name} is in both {seen[name]} and {part.name}")
            seen[name] = part.name


def _check_index(path: Path, weight_map: Mapping[str, str], parts: tuple[Part, ...]) -> None:
    actual = {name: part.name for part in parts for name in part.header.tensors}
    for name, part in weight_map.items():
        if actual.get(name) != part:
            where = f"it is in {actual[name]}" if name in actual else "it is in no file of the index"
            raise SourceError(f"{path}: tensor {name} should be in {part}, and {where}: {_remedy(parts)}")
    if missing := next((name for name in actual if name not in weight_map), None):
        count = sum(name not in weight_map for name in actual)
        others = f", nor are {count - 1} more tensors" if count > 1 else ""
        raise SourceError(
            f"{path}: tensor {missing} of {actual[missing]} is not in the index{others}: {_remedy(parts)}"
        )


def _remedy(parts: tuple[Part, ...]) -> str:
    """What to do where an index and its files are not of one checkpoint."""
    again = "the index was not written with these files, so download both again"
    return f"{again}, or name {parts[0].path} instead" if len(parts) == 1 else again
