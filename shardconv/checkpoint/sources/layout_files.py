"""Rank files of other tools in a folder: their names, and the positions of each rank's tensors.

Names and contents are untrusted input.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardconv.checkpoint.engine.copy import Shards
from shardconv.checkpoint.sources.source_reader import Transform
from shardconv.files.containers.safetensors import read_header
from shardconv.files.containers.torch_files import TorchTensor, read_torch_files
from shardconv.files.folder import AnyPath
from shardconv.files.input_files import FileState, file_states
from shardconv.files.paths import check_link
from shardconv.files.weight_formats import (
    NUMBERED_NAME,
    PYTORCH,
    SOURCE_FORMATS,
    is_index,
    is_trainer_state,
    is_weights,
)
from shardconv.layouts import SOURCE_LAYOUTS
from shardconv.layouts.layout_file import LayoutFile, layout_file
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import SourceError, option
from shardconv.support.formatting import counted

_AGAIN = "copy the folder again"
#: The most tensors in a message.
_MAX_NAMES = 3


class StoredTensor(NamedTuple):
    """A tensor of a rank: its dtype and shape, the index of its file, and its offset in the file."""

    spec: TensorSpec
    file: int
    offset: int


class RankFiles(NamedTuple):
    """Rank files of another tool.

    Attributes:
        paths: of the files.
        prefixes: for each file its expected first bytes.
        sizes: for each file its size in bytes.
        ranks: for each rank the tensors of its files.
        states: for each file its state when its tensors were listed; empty if prefixes have their positions.
    """

    paths: tuple[AnyPath, ...]
    prefixes: tuple[bytes, ...]
    sizes: tuple[int, ...]
    ranks: tuple[dict[str, StoredTensor], ...]
    states: tuple[FileState, ...] = ()


class FullTensors(NamedTuple):
    """Full tensors that are made of stored tensors.

    Attributes:
        specs: name to dtype and shape of each full tensor.
        stored: name to dtype and shape of each stored tensor.
        shards: name to positions of each stored tensor.
        transforms: name to transform of each full tensor that is not stored under its name.
    """

    specs: dict[str, TensorSpec]
    stored: dict[str, TensorSpec]
    shards: dict[str, Shards]
    transforms: dict[str, Transform]


def detect_layout(folder: AnyPath, names: Collection[str]) -> LayoutFile | None:
    """The layout of other tools' rank files among the files of a folder; None if there is none.

    Args:
        folder: the folder, for messages.
        names: of the files directly in the folder.

    Raises:
        SourceError: if rank files are the only weights, without the file that has to be beside them.
    """
    has_checkpoint = any(one.single in names for one in SOURCE_FORMATS) or any(map(is_hugging_face_index, names))
    for layout in map(layout_file, SOURCE_LAYOUTS):
        if (has_checkpoint and not layout.is_certain) or not (found := rank_files(layout, names)):
            continue
        if layout.beside is None or layout.beside in names:
            return layout
        if not any(is_weights(name) and name not in found and not is_trainer_state(name) for name in names):
            config = (
                f"pass the model's config.json ({option(source_layout=layout.key)} {option(config='FILE')}), "
                if layout.groups
                else ""
            )
            raise SourceError(
                f"{folder}: holds {found[0]}, a rank file of {layout.title}, without {layout.beside}: copy "
                f"{layout.beside} into the folder, {config}or pass the file alone if it is another checkpoint"
            )
    return None


def refuse_rank_file(path: AnyPath) -> None:
    """Refuse one rank file of another tool in place of the folder.

    Raises:
        SourceError: if a file has such a name, and the file that has to be beside it exists.
    """
    for layout in map(layout_file, SOURCE_LAYOUTS):
        if layout.names.fullmatch(path.name) and (layout.beside is None or (path.parent / layout.beside).exists()):
            raise SourceError(f"{path}: is a rank file of {layout.title}: pass its folder {path.parent} instead")


def is_hugging_face_index(name: str) -> bool:
    """Whether a file is the index of a Hugging Face checkpoint, by its name."""
    return is_index(name) and not name.startswith("consolidated")


def rank_files(layout: LayoutFile, names: Collection[str]) -> list[str]:
    """The names of rank files, sorted."""
    return sorted(name for name in names if layout.names.fullmatch(name))


def read_rank_files(folder: AnyPath, layout: LayoutFile, names: Collection[str], *, follow_links: bool) -> RankFiles:
    """Read the positions of all tensors.

    Args:
        folder: the folder.
        layout: of its rank files.
        names: of the files directly in the folder.
        follow_links: whether files may be links out of the folder.

    Raises:
        SourceError: if a file is missing, damaged or a link out of the folder, or ranks have different tensors.
    """
    grouped = _by_rank(folder, layout, rank_files(layout, names))
    paths = tuple(folder / name for files in grouped for name in files)
    for path in paths:
        check_link(path, folder, follow_links=follow_links)
    found = _read_torch(paths) if paths[0].suffix in PYTORCH.suffixes else _read_safetensors(paths)
    number_of = {path.name: number for number, path in enumerate(paths)}
    ranks = tuple(_joined(folder, [found.ranks[number_of[name]] for name in files]) for files in grouped)
    return found._replace(ranks=ranks)


def _by_rank(folder: AnyPath, layout: LayoutFile, names: Sequence[str]) -> list[list[str]]:
    """For each rank the names of its files."""
    suffixes = {Path(name).suffix for name in names}
    found = {name: match.groupdict() for name in names if (match := layout.names.fullmatch(name))}
    counts = {count for group in found.values() if (count := group.get("tp") or group.get("parts"))}
    if len(suffixes) > 1 or len(counts) > 1 or ((NUMBERED_NAME.fullmatch(names[0]) is None) and _is_mixed(found)):
        raise SourceError(
            f"{folder}: holds rank files of several checkpoints ({', '.join(names[:_MAX_NAMES])}, ...): leave those of "
            f"all but one out with {option('ignore')}"
        )
    if not any(group.get("rank") for group in found.values()):
        parts = {int(group.get("part") or 1) for group in found.values()}
        refuse_missing(folder, layout, names, {*range(1, 1 + int(next(iter(counts), 0)))} - parts, kind="part")
        _check_count(folder, names, int(next(iter(counts), 1)))
        return [list(names)]
    by_rank: dict[int, list[str]] = {}
    for name, group in sorted(found.items(), key=lambda item: int(item[1].get("part") or 0)):
        if group["rank"] is not None:
            by_rank.setdefault(int(group["rank"]), []).append(name)
    tp = int(next(iter(counts), 1 + max(by_rank)))
    refuse_missing(folder, layout, [name for held in by_rank.values() for name in held], {*range(tp)} - by_rank.keys())
    for rank, held in by_rank.items():
        if "part" in layout.names.groupindex and layout.engine is not None:
            parts = {int(found[name]["part"] or 0) for name in held}
            refuse_missing(folder, layout, held, {*range(max(parts))} - parts, kind="part")
        elif rank >= tp or len(held) != layout.files_per_rank:
            raise SourceError(
                f"{folder}: rank {rank} of {tp} has {counted(len(held), 'file')} (got {held[-1]}, expected "
                f"{layout.files_per_rank}): {_AGAIN}"
            )
    by_rank[0] += [name for name, group in found.items() if group["rank"] is None]
    return [by_rank[rank] for rank in range(tp)]


def refuse_missing(
    folder: AnyPath, layout: LayoutFile, names: Sequence[str], missing: Collection[int], *, kind: str = "rank"
) -> None:
    """Refuse files without those of some ranks, or without some parts.

    Args:
        folder: the folder.
        layout: of the files.
        names: of all files that exist.
        missing: numbers of the others.
        kind: "rank" or "part", the group of the number in the names; nothing is missing where names do not have it.

    Raises:
        SourceError: if there are missing files.
    """
    found = layout.names.fullmatch(names[0])
    assert found is not None
    if not missing or found[kind] is None:
        return
    start, end = found.span(kind)
    file = f"{names[0][:start]}{min(missing):0{end - start}}{names[0][end:]}"
    more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    held = {match[kind] for match in map(layout.names.fullmatch, names) if match is not None and match[kind]}
    raise SourceError(
        f"{folder}: {file}, the file of {kind} {min(missing)}, is missing{more} (got {', '.join(names[:_MAX_NAMES])}, "
        f"expected {counted(len(held) + len(missing), kind)}): {_AGAIN}"
    )


def _is_mixed(found: Mapping[str, Mapping[str, str | None]]) -> bool:
    """Whether some files are named by parts and others are not."""
    return len({group.get("parts") is None for group in found.values()}) > 1


def _check_count(folder: AnyPath, names: Sequence[str], expected: int) -> None:
    if len(names) != expected:
        raise SourceError(f"{folder}: has {len(names)} rank files (got {names[-1]}, expected {expected}): {_AGAIN}")


def _joined(folder: AnyPath, files: Sequence[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    joined: dict[str, StoredTensor] = {}
    for tensors in files:
        if both := sorted(joined.keys() & tensors.keys()):
            raise SourceError(f"{folder}: tensor {both[0]} is in two files of a rank: {_AGAIN}")
        joined |= tensors
    return joined


def _read_safetensors(paths: tuple[AnyPath, ...]) -> RankFiles:
    headers = [read_header(path) for path in paths]
    ranks = tuple(
        {
            name: StoredTensor(TensorSpec(info.dtype, info.shape), number, header.data_offset + info.start)
            for name, info in header.tensors.items()
        }
        for number, header in enumerate(headers)
    )
    return RankFiles(paths, tuple(header.prefix for header in headers), tuple(h.file_bytes for h in headers), ranks)


def _read_torch(paths: tuple[AnyPath, ...]) -> RankFiles:
    states = file_states(paths)
    ranks = []
    for number, (path, tensors) in enumerate(zip(paths, read_torch_files(paths), strict=True)):
        for tensor in tensors:
            if not is_contiguous(tensor):
                raise SourceError(
                    f"{path}: {tensor.name} is a view that is not contiguous (got strides {list(tensor.strides)} of "
                    f"shape {list(tensor.shape)}): save it again after .contiguous()"
                )
        specs = {one.name: TensorSpec(one.dtype, one.shape) for one in tensors}
        ranks.append({one.name: StoredTensor(specs[one.name], number, one.offset) for one in tensors})
    return RankFiles(paths, (b"",) * len(paths), tuple(state.size for state in states), tuple(ranks), states)


def is_contiguous(tensor: TorchTensor) -> bool:
    """Whether the elements of a tensor are one range of its file, in order."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride != step:
            return 0 in tensor.shape
        step *= size
    return True
