"""Rank files of other tools in a folder: their names, and the positions of each rank's tensors.

Names and contents are untrusted input.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.sources.folder_files import SourceFolder
from shardconv.files import containers
from shardconv.files.containers.safetensors import TensorFile, read_header
from shardconv.files.folder import AnyPath, read_text
from shardconv.files.weight_formats import DCP_METADATA, PYTORCH, SOURCE_FORMATS, is_index, is_trainer_state, is_weights
from shardconv.layouts import MEGATRON, SOURCE_LAYOUTS
from shardconv.layouts.layout_file import LayoutFile, LayoutHead, layout_file, layout_head
from shardconv.plan.plan import TensorSpec
from shardconv.support.errors import SourceError, UsageError, option
from shardconv.support.formatting import counted

#: The folder of a converted model of Megatron-Core, and the file that names the folder of the last iteration.
FOLDER, LATEST_NAME = "release", "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_\d{7,12}|release")
_AGAIN = "copy the folder again"
#: The most tensors in a message.
_MAX_NAMES = 3


class RankFileTensor(NamedTuple):
    """A tensor of a rank: its dtype and shape, the index of its file, and its offset in the file."""

    spec: TensorSpec
    file: int
    offset: int


class RankFiles(NamedTuple):
    """Rank files of another tool, and for each rank the tensors of its files."""

    files: tuple[TensorFile, ...]
    ranks: tuple[dict[str, RankFileTensor], ...]


def with_iteration(folder: SourceFolder) -> SourceFolder:
    """The folder, with the weights of its last iteration, if it has iterations of Megatron-Core.

    Raises:
        SourceError: if the last iteration, or the file with its name, is not there.
    """
    if LATEST_NAME not in folder.names:
        _refuse_iterations(folder)
        return folder
    latest = read_text(folder.path / LATEST_NAME).strip()
    name = f"iter_{latest:0>7}" if latest.isdecimal() else latest
    inner = f"{name}/"
    if not _ITERATION.fullmatch(name) or not any(one.startswith(inner) for one in folder.kept):
        raise SourceError(
            f"{folder.path / LATEST_NAME}: names {latest!r:.40}, whose folder is not there: copy it, or pass the "
            f"folder of another iteration"
        )
    iterations = (one for one in folder.kept if "/" in one and _ITERATION.fullmatch(one.partition("/")[0]))
    others = {one: "another iteration" for one in iterations if not one.startswith(inner)}
    kept = {one: path for one, path in folder.kept.items() if one not in others and one != LATEST_NAME}
    left_out = folder.left_out | others | {LATEST_NAME: "names the iteration"}
    return replace(folder, kept=kept, left_out=left_out, inner=inner)


def _refuse_iterations(folder: SourceFolder) -> None:
    """Refuse a folder that has iterations as its only weights, and not the name of the last one."""
    names = {one.partition("/")[0] for one in folder.kept if one.endswith(f"/{DCP_METADATA}")}
    if (found := sorted(filter(_ITERATION.fullmatch, names))) and not any(map(is_weights, folder.names)):
        raise SourceError(f"{folder.path / LATEST_NAME}: is missing: copy it, or pass {folder.path / found[-1]}")


def find_layout(folder: SourceFolder, asked: str | None) -> LayoutFile | None:
    """The layout that the user asked for, or the layout of the files; a folder with a manifest is not of another tool.

    Raises:
        SourceError: if rank files are the only weights, without the file that has to be beside them.
        UsageError: if the layout is unknown, or the folder does not hold files of it.
    """
    if asked is None:
        layout = detect_layout(folder.weights_path, folder.names)
        if layout is None and rank_files(layout_head(MEGATRON), folder.inner_names):
            layout = layout_file(MEGATRON)
        return None if MANIFEST_NAME in folder.names else layout
    if asked not in SOURCE_LAYOUTS:
        raise UsageError(f"layout {asked!r} of rank files is unknown (expected one of {', '.join(SOURCE_LAYOUTS)})")
    layout = layout_file(asked)
    if not rank_files(layout, folder.inner_names):
        raise UsageError(
            f"{folder.path}: does not hold files of {option(source_layout=asked)}: correct or remove "
            f"{option('source_layout')}"
        )
    return layout


def detect_layout(folder: AnyPath, names: Collection[str]) -> LayoutFile | None:
    """The layout of other tools' rank files among the files of a folder; None if there is none.

    Args:
        folder: the folder, for messages.
        names: of the files directly in the folder.

    Raises:
        SourceError: if rank files are the only weights, without the file that has to be beside them.
    """
    has_checkpoint = any(one.single in names for one in SOURCE_FORMATS) or any(map(is_hugging_face_index, names))
    layouts = [one for one in map(layout_head, SOURCE_LAYOUTS) if one.is_certain or not has_checkpoint]
    held = [(layout, found) for layout in layouts if (found := rank_files(layout, names))]
    if complete := [layout for layout, _ in held if layout.beside is None or layout.beside in names]:
        return layout_file(complete[0].key)
    for layout, found in reversed(held):  # the last is the most general
        if not any(is_weights(name) and name not in found and not is_trainer_state(name) for name in names):
            config = (
                f"pass the model's config.json ({option(source_layout=layout.key)} {option(config='FILE')}), "
                if layout_file(layout.key).groups
                else ""
            )
            raise SourceError(
                f"{folder}: holds {found[0]}, a rank file of {layout.title}, without {layout.beside}: copy "
                f"{layout.beside} into the folder, {config}or pass the file alone if it is another checkpoint"
            )
    return None


def refuse_rank_file(path: AnyPath) -> None:
    """Refuse a single rank file of another tool: its folder is needed.

    Raises:
        SourceError: if a file has such a name, and the file that has to be beside it exists.
    """
    for layout in map(layout_head, SOURCE_LAYOUTS):
        if layout.names.fullmatch(path.name) and (layout.beside is None or (path.parent / layout.beside).exists()):
            raise SourceError(f"{path}: is a rank file of {layout.title}: pass its folder {path.parent} instead")


def is_hugging_face_index(name: str) -> bool:
    """Whether a file is the index of a Hugging Face checkpoint, by its name."""
    return is_index(name) and not name.startswith("consolidated")


def rank_files(layout: LayoutHead, names: Collection[str]) -> list[str]:
    """The names of rank files, sorted."""
    return sorted(name for name in names if layout.names.fullmatch(name))


def read_rank_files(folder: SourceFolder, layout: LayoutFile, names: Sequence[str]) -> RankFiles:
    """Read the positions of all tensors.

    Args:
        folder: the folder.
        layout: of its rank files.
        names: of the rank files, sorted.

    Raises:
        SourceError: if a file is missing, damaged or a link out of the folder, or ranks have different tensors.
    """
    grouped = _by_rank(folder.path, layout, names)
    ordered = [name for held in grouped for name in held]
    for name in ordered:
        folder.check_link(name)
    paths = [folder.path / name for name in ordered]
    is_torch = paths[0].suffix in PYTORCH.suffixes
    files = (
        containers.torch_files.read_torch_files(paths) if is_torch else [read_header(path).file(path) for path in paths]
    )
    tensors = dict(zip(ordered, map(_tensors, range(len(files)), files), strict=True))
    ranks = (_joined(folder.path, [tensors[name] for name in held]) for held in grouped)
    return RankFiles(tuple(files), tuple(ranks))


def _tensors(number: int, file: TensorFile) -> dict[str, RankFileTensor]:
    """The tensors of a file, all of which are contiguous."""
    if file.left_out:
        raise SourceError(f"{file.path}: entry {file.left_out[0]!r:.100} is not a tensor: save the tensors alone")
    for name, info in file.tensors.items():
        if info.strides is not None:
            raise SourceError(
                f"{file.path}: {name} is a view that is not contiguous (got strides {list(info.strides)} of shape "
                f"{list(info.shape)}): save it again after .contiguous()"
            )
    return {
        name: RankFileTensor(info.spec, number, file.data_offset + info.start) for name, info in file.tensors.items()
    }


def _by_rank(folder: AnyPath, layout: LayoutFile, names: Sequence[str]) -> list[list[str]]:
    """For each rank the names of its files."""
    groups = {name: match.groupdict() for name in names if (match := layout.names.fullmatch(name))}
    counts = {int(count) for group in groups.values() if (count := group.get("tp") or group.get("parts"))}
    if len(counts) > 1 or len({Path(name).suffix for name in names}) > 1:
        raise SourceError(
            f"{folder}: holds rank files of several checkpoints ({', '.join(names[:_MAX_NAMES])}, ...): leave all "
            f"but one out with {option('ignore')}"
        )
    part_of = {name: int(group.get("part") or 0) for name, group in groups.items()}
    by_rank: dict[int, list[str]] = {}
    for name in sorted(names, key=part_of.__getitem__):
        if (rank := groups[name].get("rank")) is not None:
            by_rank.setdefault(int(rank), []).append(name)
    if not by_rank:
        (count,) = counts or {1}
        refuse_missing(folder, layout, names, {*range(1, 1 + count)} - {*part_of.values()}, kind="part")
        if len(names) != count:
            raise SourceError(f"{folder}: has {len(names)} rank files (got {names[-1]}, expected {count}): {_AGAIN}")
        return [list(names)]
    (tp,) = counts or {1 + max(by_rank)}
    refuse_missing(folder, layout, [name for held in by_rank.values() for name in held], {*range(tp)} - by_rank.keys())
    for rank, held in by_rank.items():
        if layout.engine is not None:
            parts = {part_of[name] for name in held}
            refuse_missing(folder, layout, held, {*range(max(parts))} - parts, kind="part")
        elif rank >= tp or len(held) != layout.files_per_rank:
            raise SourceError(
                f"{folder}: rank {rank} of {tp} has {counted(len(held), 'file')} (got {held[-1]}, expected "
                f"{layout.files_per_rank}): {_AGAIN}"
            )
    by_rank[0] += [name for name in names if groups[name]["rank"] is None]
    return [by_rank[rank] for rank in range(tp)]


def refuse_missing(
    folder: AnyPath, layout: LayoutFile, names: Sequence[str], missing: Collection[int], *, kind: str = "rank"
) -> None:
    """Refuse a folder in which files are missing.

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


def _joined(folder: AnyPath, files: Sequence[dict[str, RankFileTensor]]) -> dict[str, RankFileTensor]:
    joined: dict[str, RankFileTensor] = {}
    for tensors in files:
        if both := sorted(joined.keys() & tensors.keys()):
            raise SourceError(f"{folder}: tensor {both[0]} is in two files of a rank: {_AGAIN}")
        joined |= tensors
    return joined
