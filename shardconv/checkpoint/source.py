"""The source: a safetensors file, a Hugging Face folder with one file or several parts, or a snapshot in its cache.

Owns what lies where in a checkpoint on disk. A file name that comes out of an index is not trusted, and no link is
followed out of the folder. Knows nothing of plans or ranks.
"""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from shardconv.checkpoint.header import Header, TensorInfo, read_header
from shardconv.checkpoint.layout import MANIFEST_NAME
from shardconv.checkpoint.paths import hub_hint, leads_out
from shardconv.errors import SourceError
from shardconv.plan.plan import TensorSpec

INDEX_SUFFIX = ".safetensors.index.json"
CONFIG_NAME = "config.json"

_PART_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
#: Endings of files that hold weights, or list them: they are never side files.
_WEIGHT_SUFFIXES = (
    ".safetensors", INDEX_SUFFIX, ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack",
    ".onnx", ".onnx_data", ".npz", ".tflite", ".distcp",
)  # fmt: skip
_MAX_JSON_BYTES = 512 * 2**20


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
        left_out: names of files with weights that are no part of this checkpoint, and, with a / behind, of hidden
            folders.
    """

    path: Path
    is_folder: bool
    parts: tuple[Part, ...]
    index: tuple[str, str] | None = None
    config: dict[str, Any] | None = None
    side_files: Mapping[str, Path] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

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


def open_source(path: Path, *, config: Path | None = None, follow_links: bool = False) -> Source:
    """Read the headers of a checkpoint, and check that its files fit together.

    Args:
        path: a ``.safetensors`` file, an index file, or a folder.
        config: a config.json to use instead of the one beside the weights.
        follow_links: read files that are links to outside of the folder.

    Raises:
        SourceError: if something is missing, damaged, ambiguous or outside of the folder.
    """
    if not path.exists():
        raise SourceError(f"{path}: there is no such file or folder{hub_hint(path)}")
    if path.is_dir():
        source = _open_folder(path, None, follow_links=follow_links)
    elif path.name.endswith(INDEX_SUFFIX):
        source = _open_folder(path.parent, path.name, follow_links=follow_links)
    elif path.suffix == ".safetensors":
        source = _open_file(path, follow_links=follow_links)
    else:
        raise SourceError(
            f"{path}: is no .safetensors file; convert other formats first, for example with save_pretrained"
        )
    if config is not None:
        source = _with_config(source, config)
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
        if any(name.endswith(_WEIGHT_SUFFIXES) or name == MANIFEST_NAME for name in names):
            return None
        path = path / CONFIG_NAME
    if path.suffix != ".json" or path.name.endswith(_WEIGHT_SUFFIXES) or not path.is_file():
        return None
    _check_link(path, path.parent, follow_links=follow_links)
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


def _with_config(source: Source, config: Path) -> Source:
    return Source(
        source.path, source.is_folder, source.parts, source.index, read_json(config),
        {**source.side_files, CONFIG_NAME: config}, source.left_out,
    )  # fmt: skip


def _open_file(path: Path, *, follow_links: bool) -> Source:
    match = _PART_NAME.fullmatch(path.name)
    if match and int(match["count"]) > 1:
        raise SourceError(f"{path}: is one part of {int(match['count'])}: name their folder, or the index over them")
    part = Part(path.name, path, read_header(path))
    beside = path.parent / CONFIG_NAME
    if not os.path.lexists(beside):
        return Source(path, is_folder=False, parts=(part,))
    _check_link(beside, path.parent, follow_links=follow_links)
    return Source(path, is_folder=False, parts=(part,), config=read_json(beside), side_files={CONFIG_NAME: beside})


def _open_folder(folder: Path, index_name: str | None, *, follow_links: bool) -> Source:
    try:
        files = {path.name: path for path in sorted(folder.iterdir()) if not path.is_dir()}
    except OSError as error:
        raise SourceError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if MANIFEST_NAME in files:
        raise SourceError(f"{folder}: is a split checkpoint, no source: merge it, or reshard it for another tp")
    weights = [name for name in files if name.endswith(".safetensors")]
    is_named = index_name is not None
    index_name = index_name or _find_index(folder, files)
    if index_name is None:
        names = [_find_single(folder, weights)]
        index = None
    else:
        _check_link(files[index_name], folder, follow_links=follow_links)
        index = (index_name, _read_text(files[index_name]))
        weight_map = _weight_map(files[index_name], index[1])
        names = sorted(set(weight_map.values()))
        if not is_named:
            _check_no_stale_part(folder, names, weights)
    parts = tuple(_open_part(folder, name, follow_links=follow_links) for name in names)
    _check_unique(folder, parts)
    if index is not None:
        _check_index(folder / index[0], weight_map, parts)
    side_files, left_out = _side_files(folder, set(names), follow_links=follow_links)
    if index is not None:
        left_out = [name for name in left_out if name != index[0]]
    config = read_json(side_files[CONFIG_NAME]) if CONFIG_NAME in side_files else None
    return Source(folder, True, parts, index, config, side_files, tuple(left_out))  # noqa: FBT003 - it is_folder


def _find_index(folder: Path, files: Mapping[str, Path]) -> str | None:
    indexes = [name for name in files if name.endswith(INDEX_SUFFIX)]
    if not indexes:
        return None
    if len(indexes) > 1:
        raise SourceError(
            f"{folder}: has several indexes ({', '.join(indexes)}): name the one you mean instead of the folder"
        )
    single = indexes[0].removesuffix(".index.json")
    if single in files:
        raise SourceError(f"{folder}: has both {single} and {indexes[0]}: name the one you mean instead of the folder")
    return indexes[0]


def _find_single(folder: Path, weights: list[str]) -> str:
    if "model.safetensors" in weights:
        return "model.safetensors"
    if len(weights) == 1 and not _PART_NAME.fullmatch(weights[0]):
        return weights[0]
    if not weights and (folder / "snapshots").is_dir():
        raise SourceError(f"{folder}: is a model in a Hugging Face cache: name a folder in its snapshots/")
    if not weights:
        raise SourceError(
            f"{folder}: holds no .safetensors file; convert other formats first, for example with save_pretrained"
        )
    if any(_PART_NAME.fullmatch(name) for name in weights):
        raise SourceError(f"{folder}: holds parts ({weights[0]}, ...) and no index over them (*{INDEX_SUFFIX})")
    raise SourceError(
        f"{folder}: holds several checkpoints ({', '.join(weights)}): name the file you mean instead of the folder"
    )


def _open_part(folder: Path, name: str, *, follow_links: bool) -> Part:
    path = folder / name
    if not path.exists():
        raise SourceError(f"{folder}: part {name} is missing")
    _check_link(path, folder, follow_links=follow_links)
    return Part(name, path, read_header(path))


def _weight_map(path: Path, text: str) -> dict[str, str]:
    data = _parse_object(path, text)
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


def _check_no_stale_part(folder: Path, names: list[str], weights: list[str]) -> None:
    stems = {match["stem"] for name in names if (match := _PART_NAME.fullmatch(name))}
    for name in weights:
        match = _PART_NAME.fullmatch(name)
        if name not in names and match and match["stem"] in stems:
            raise SourceError(
                f"{folder}: part {name} is not in the index: remove it, or name the index file instead of the folder"
            )


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
            where = f"it is in {actual[name]}" if name in actual else "it is in no part"
            raise SourceError(f"{path}: tensor {name} should be in {part}, and {where}")
    if missing := next((name for name in actual if name not in weight_map), None):
        raise SourceError(f"{path}: tensor {missing} of {actual[missing]} is not in the index")


def _side_files(folder: Path, parts: set[str], *, follow_links: bool) -> tuple[dict[str, Path], list[str]]:
    side_files: dict[str, Path] = {}
    left_out: list[str] = []
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if name in parts:
            continue
        if path.name.startswith(".") and path.is_dir():
            left_out.append(f"{name}/")
            continue
        if name.endswith(_WEIGHT_SUFFIXES):
            left_out.append(name)
            continue
        _check_link(path, folder, follow_links=follow_links)
        if not path.is_file():
            raise SourceError(f"{path}: is no regular file (a pipe, a link to a folder or to nowhere): remove it first")
        side_files[name] = path
    return side_files, left_out


def _walk(folder: Path) -> Iterator[Path]:
    """Every file under a folder; for a hidden folder or a link to one itself, and nothing that is in it."""

    def refuse(error: OSError) -> NoReturn:
        raise SourceError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for root, folders, files in os.walk(folder, onerror=refuse):
        paths = [Path(root, name) for name in sorted(folders)]
        yield from (path for path in paths if path.name.startswith(".") or path.is_symlink())
        folders[:] = [path.name for path in paths if not path.name.startswith(".")]
        yield from (Path(root, name) for name in sorted(files))


def _check_link(path: Path, folder: Path, *, follow_links: bool) -> None:
    if not follow_links and leads_out(path, folder):
        raise SourceError(f"{path}: is a link out of its folder; pass --follow-links if that is meant")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        SourceError: if the file cannot be read or holds something else.
    """
    return _parse_object(path, _read_text(path))


def _read_text(path: Path) -> str:
    try:
        status = path.stat()
        if stat.S_ISFIFO(status.st_mode):
            raise SourceError(f"{path}: is no regular file")  # to read it could wait for ever
        if status.st_size > _MAX_JSON_BYTES:
            raise SourceError(f"{path}: is too large for what it should be")
        return path.read_bytes().decode()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: is not UTF-8") from error


def _parse_object(path: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise SourceError(f"{path}: is no JSON object")
    return data
