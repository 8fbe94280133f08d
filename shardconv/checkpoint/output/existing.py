"""Checks of existing files that a new checkpoint replaces: only a checkpoint, only on request, never the source."""

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardconv.checkpoint.engine.layout import MANIFEST_NAME, PADDING_NAME, PIPELINE_NAME
from shardconv.checkpoint.sources.layout_files import FOLDER, LATEST_NAME
from shardconv.checkpoint.sources.meta_params import PARAMS_NAME
from shardconv.checkpoint.sources.pipeline import is_pipeline, read_index
from shardconv.checkpoint.split.chosen_ranks import name_ranks
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import is_split, read_manifest
from shardconv.checkpoint.split.split_pipeline import PipelineManifest, is_split_pipeline, read_pipeline_manifest
from shardconv.files.folder import AnyPath, relative_name, walk
from shardconv.files.weight_formats import INDEX_NAME, RANK_FILE
from shardconv.support.errors import OutputError, SourceError, SplitCheckpointError, UsageError, option

_IN_SPLIT = re.compile(rf"{re.escape(MANIFEST_NAME)}|{RANK_FILE}|model-rank-\d+-part-\d+\.safetensors")
_IN_META = re.compile(rf"consolidated\.[0-9]+\.pth|{re.escape(PARAMS_NAME)}")
_IN_MEGATRON = re.compile(rf"{re.escape(LATEST_NAME)}|{FOLDER}/(\.metadata|common\.pt|metadata\.json|__\d+_0\.distcp)")
_IN_MERGED = re.compile(r"[^/]+\.safetensors(\.index\.json)?")


class NewCheckpoint(NamedTuple):
    """The facts about a new checkpoint that decide whether and how it may be written.

    Attributes:
        is_folder: whether it is a folder, or one file.
        overwrite: whether it may replace an existing checkpoint.
        other_files: names of its files beside the weights.
        ranks: the ranks that it has; None if it is not of some ranks.
        num_bytes: bytes of all its files.
        mode: permissions of the folder, before the umask; its owner gets all.
    """

    is_folder: bool
    overwrite: bool
    other_files: Collection[str] = ()
    ranks: Sequence[int] | None = None
    num_bytes: int = 0
    mode: int = 0o777


def is_occupied(path: AnyPath) -> bool:
    """Whether something exists at a path, other than an empty folder."""
    is_folder = path.is_dir() and not path.is_symlink()
    return (path.is_symlink() or path.exists()) and not (is_folder and not any(path.iterdir()))


def check_replaceable(path: AnyPath, new: NewCheckpoint) -> None:
    """Check that a new checkpoint may be written to a path.

    Raises:
        OutputError: if it would replace something that must not be replaced.
    """
    if not is_occupied(path):
        return
    is_folder = path.is_dir() and not path.is_symlink()
    if is_folder != new.is_folder:
        got, expected = ("folder", "file") if is_folder else ("link" if path.is_symlink() else "file", "folder")
        raise OutputError(
            f"{path}: exists (got a {got}, expected a {expected}): choose another path with {option('dst')}"
        )
    if not new.overwrite:
        _refuse_other_ranks(path, new.ranks)
    if is_folder:
        _check_folder(path, new.other_files)
    if not new.overwrite:
        raise OutputError(f"{path}: exists: choose another path with {option('dst')}, or pass {option(overwrite=True)}")


def _refuse_other_ranks(path: AnyPath, ranks: Sequence[int] | None) -> None:
    """Refuse a folder with other ranks of a split: its files belong together with other folders."""
    with suppress(SplitCheckpointError):
        held = _held_ranks(path)
        if held is not None and len(held.ranks) < held.num_ranks and held.ranks != ranks:
            raise OutputError(
                f"{path}: exists (with {name_ranks(held.ranks)} of {held.num_ranks}, which {option(overwrite=True)} "
                f"would remove): choose another folder with {option('dst')}, as merge, reshard and verify take several "
                "folders with some ranks each"
            )


def _held_ranks(path: AnyPath) -> Manifest | PipelineManifest | None:
    """The manifest of a split checkpoint or pipeline; None for other folders."""
    if is_split_pipeline(path):
        return read_pipeline_manifest(path)
    return read_manifest(path) if is_split(path) else None


def _check_folder(folder: AnyPath, other_files: Collection[str]) -> None:
    """Check that a folder holds a checkpoint and nothing else."""
    is_split = (folder / MANIFEST_NAME).is_file()
    is_merged = any(child.suffix == ".safetensors" for child in folder.iterdir())
    is_meta = (folder / PARAMS_NAME).is_file() and any(folder.glob("consolidated.*.pth"))
    is_megatron = (folder / LATEST_NAME).is_file()
    kinds = {
        _in_pipeline(folder): is_pipeline(folder),
        _IN_SPLIT: is_split,
        _IN_MERGED: is_merged,
        _IN_META: is_meta,
        _IN_MEGATRON: is_megatron,
    }
    weights = next((pattern for pattern, is_kind in kinds.items() if is_kind), None)
    if weights is None:
        raise OutputError(
            f"{folder}: does not hold a checkpoint, so it is not overwritten: choose another path with {option('dst')}"
        )
    with suppress(SplitCheckpointError):
        if is_split_pipeline(folder):
            other_files = _pipeline_files(folder)
        elif is_split:
            other_files = _all_files(folder)
    for name in _files(folder):
        if name not in other_files and not weights.fullmatch(name):
            raise OutputError(
                f"{folder}: holds {name}, which is not part of a checkpoint: remove it, or choose another path "
                f"with {option('dst')}"
            )


def _in_pipeline(folder: AnyPath) -> re.Pattern[str]:
    """The names of files of a pipeline that follow from its components: weights, and manifests."""
    with suppress(SourceError):
        components = "|".join(map(re.escape, read_index(folder))) if is_pipeline(folder) else ""
        weights = rf"({components})/({re.escape(PADDING_NAME)}|[^/]+\.safetensors(\.index.*\.json)?)"
        return re.compile(rf"{re.escape(PIPELINE_NAME)}|{re.escape(INDEX_NAME)}|{weights}")
    return re.compile(re.escape(INDEX_NAME))


def _pipeline_files(folder: AnyPath) -> list[str]:
    """All files of a split pipeline, except for its manifest."""
    manifest = read_pipeline_manifest(folder)
    return [*manifest.files, *(f"{one}/{name}" for one in manifest.components for name in _all_files(folder / one))]


def _all_files(folder: AnyPath) -> list[str]:
    """All files of a split checkpoint."""
    manifest = read_manifest(folder)
    return [MANIFEST_NAME, *manifest.rank_files, *manifest.rank_indexes, *_split_files(folder)]


def _split_files(folder: AnyPath) -> list[str]:
    """The auxiliary files of a split checkpoint, and all files of its adapters."""
    manifest = read_manifest(folder)
    adapters = manifest.adapter_folders(folder).values()
    of_adapters = (relative_name(path / name, folder) for path in adapters for name in _all_files(path))
    return [*manifest.auxiliary_files, *of_adapters]


def _files(folder: AnyPath) -> list[str]:
    """The relative names of all files and links under a folder."""
    try:
        return [relative_name(path, folder) for path in walk(folder, hidden=True)]
    except OSError as error:
        raise OutputError(f"{error.filename}: cannot be read: {error.strerror}") from error


def check_disjoint(target: str, location: Path, sources: Iterable[AnyPath]) -> None:
    """Check that a destination is not in a source and does not contain one, so that replacing it destroys no source.

    Args:
        target: the destination in messages.
        location: its absolute path without links, or its URL as one.
        sources: the paths of the sources.

    Raises:
        UsageError: if they overlap.
    """
    for text in dict.fromkeys(str(path.resolve()) for path in sources):
        source = Path(text)
        if location == source:
            raise UsageError(f"{target}: is the source: choose another path with {option('dst')}")
        if location.is_relative_to(source):
            raise UsageError(f"{target}: is in the source {text}: choose another path with {option('dst')}")
        if source.is_relative_to(location):
            raise UsageError(f"{target}: contains the source {text}: choose another path with {option('dst')}")
