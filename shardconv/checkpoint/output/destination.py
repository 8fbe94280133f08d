"""Checks of destinations: only a checkpoint is replaced, only on request, and never the source."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from shardconv.checkpoint.engine.layout import MANIFEST_NAME
from shardconv.checkpoint.sources.meta_params import PARAMS_NAME
from shardconv.checkpoint.split.chosen_ranks import name_ranks
from shardconv.checkpoint.split.manifest_file import is_split, read_manifest
from shardconv.files.storage.table import shown
from shardconv.files.weight_formats import RANK_FILE
from shardconv.support.errors import OutputError, SplitCheckpointError, UsageError, option

_IN_SPLIT = re.compile(rf"{re.escape(MANIFEST_NAME)}|{RANK_FILE}|model-rank-\d+-part-\d+\.safetensors")
_IN_META = re.compile(rf"consolidated\.[0-9]+\.pth|{re.escape(PARAMS_NAME)}")
_IN_MERGED = re.compile(r"[^/]+\.safetensors(\.index\.json)?")


def check_destination(
    path: Path,
    *,
    is_folder: bool,
    overwrite: bool,
    auxiliary_files: Collection[str] = (),
    ranks: Sequence[int] | None = None,
) -> None:
    """Check that a destination may be written.

    Args:
        path: the destination.
        is_folder: whether a folder will be written.
        overwrite: whether an existing checkpoint may be replaced.
        auxiliary_files: names of the auxiliary files that will be written.
        ranks: the ranks that will be written; None for a checkpoint that is not of some ranks.

    Raises:
        OutputError: if the destination must not be replaced.
    """
    if not os.path.lexists(path):
        return
    got_folder = path.is_dir() and not path.is_symlink()
    if got_folder and not any(path.iterdir()):
        return
    if got_folder != is_folder:
        got, expected = ("folder", "file") if got_folder else ("link" if path.is_symlink() else "file", "folder")
        raise OutputError(
            f"{path}: exists (got a {got}, expected a {expected}): choose another path with {option('dst')}"
        )
    if not overwrite:
        _refuse_other_ranks(path, ranks)
    if got_folder:
        _check_replaceable(path, auxiliary_files)
    if not overwrite:
        raise OutputError(f"{path}: exists: choose another path with {option('dst')}, or pass {option(overwrite=True)}")


def _refuse_other_ranks(path: Path, ranks: Sequence[int] | None) -> None:
    """Refuse a folder with some of the ranks, but not these: they belong together with those of other folders."""
    with suppress(SplitCheckpointError):
        if is_split(path) and not (manifest := read_manifest(path)).is_complete and manifest.ranks != ranks:
            raise OutputError(
                f"{path}: exists (with {name_ranks(manifest.ranks)} of {manifest.tp}, which {option(overwrite=True)} "
                f"would remove): choose another folder with {option('dst')}, as merge, reshard and verify take several "
                "folders with some ranks each"
            )


def check_target(
    path: Path,
    *,
    is_folder: bool,
    overwrite: bool,
    dry_run: bool,
    auxiliary_files: Collection[str] = (),
    ranks: Sequence[int] | None = None,
) -> bool:
    """Check a destination like :func:`check_destination`; a dry run does not require ``overwrite``.

    Returns:
        Whether the destination exists and requires ``overwrite``.
    """
    allow = overwrite or dry_run
    check_destination(path, is_folder=is_folder, overwrite=allow, auxiliary_files=auxiliary_files, ranks=ranks)
    got_folder = path.is_dir() and not path.is_symlink()
    return os.path.lexists(path) and not (got_folder and not any(path.iterdir()))


def _check_replaceable(folder: Path, auxiliary_files: Collection[str]) -> None:
    """Check that a folder holds a checkpoint and nothing else."""
    is_split = (folder / MANIFEST_NAME).is_file()
    is_merged = any(child.suffix == ".safetensors" for child in folder.iterdir())
    is_meta = (folder / PARAMS_NAME).is_file() and any(folder.glob("consolidated.*.pth"))
    if not (is_split or is_merged or is_meta):
        raise OutputError(
            f"{folder}: does not hold a checkpoint, so it is not overwritten: choose another path with {option('dst')}"
        )
    if is_split:
        with suppress(SplitCheckpointError):
            auxiliary_files = _split_files(folder)
    weights = _IN_SPLIT if is_split else _IN_MERGED if is_merged else _IN_META
    for name in _files(folder):
        if name not in auxiliary_files and not weights.fullmatch(name):
            raise OutputError(
                f"{folder}: holds {name}, which is not part of a checkpoint: remove it, or choose another path "
                f"with {option('dst')}"
            )


def _split_files(folder: Path) -> list[str]:
    """The auxiliary files of a split checkpoint, and all files of its adapters."""
    manifest = read_manifest(folder)
    found = [*manifest.auxiliary_files]
    for path in manifest.adapter_folders(folder).values():
        adapter = read_manifest(path)
        names = (MANIFEST_NAME, *adapter.rank_files, *adapter.auxiliary_files)
        found += [(path / name).relative_to(folder).as_posix() for name in names]
    return found


def _files(folder: Path) -> Iterator[str]:
    """The relative names of all files and links under a folder."""

    def refuse(error: OSError) -> NoReturn:
        raise OutputError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for root, folders, files in os.walk(folder, onerror=refuse):
        links = [name for name in folders if Path(root, name).is_symlink()]
        yield from (Path(root, name).relative_to(folder).as_posix() for name in sorted(links + files))


def check_disjoint(target: Path, sources: Iterable[Path]) -> None:
    """Check that a destination is not in a source and does not contain one, so that replacing it destroys no source.

    Raises:
        UsageError: if they overlap.
    """
    destination = Path(shown(target.resolve()))
    for text in dict.fromkeys(shown(path.resolve()) for path in sources):
        source = Path(text)
        if destination == source:
            raise UsageError(f"{target}: is the source: choose another path with {option('dst')}")
        if destination.is_relative_to(source):
            raise UsageError(f"{target}: is in the source {text}: choose another path with {option('dst')}")
        if source.is_relative_to(destination):
            raise UsageError(f"{target}: contains the source {text}: choose another path with {option('dst')}")
