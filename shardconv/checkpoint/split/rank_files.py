"""The files of a split checkpoint: open rank files with their headers checked, and check auxiliary files."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardconv.checkpoint.engine.shards import ShardReader
from shardconv.checkpoint.split.chosen_ranks import as_option, name_ranks
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.files.checksums import checksum_file
from shardconv.files.folder import AnyPath
from shardconv.files.input_files import InputFiles, ModifiedError
from shardconv.files.paths import leads_out
from shardconv.support.errors import IntegrityError, SourceError, SplitCheckpointError, option

#: The remedy for a damaged rank file.
AGAIN = "copy it again, or split the source again"


class SplitFolder(NamedTuple):
    """A folder with rank files, and its manifest."""

    path: AnyPath
    manifest: Manifest


def open_ranks(
    manifest: Manifest,
    folders: Sequence[SplitFolder],
    checksums: Sequence[Sequence[str]] | None,
    *,
    for_report: bool = False,
) -> tuple[ShardReader, InputFiles]:
    """Open the rank files of a split checkpoint and check their headers.

    Args:
        manifest: has the ranks of all folders, in order.
        folders: the folders.
        checksums: for each of these ranks the checksum of each stripe; None to check none.
        for_report: whether messages are for a report, which names a single folder and the remedy once for all.

    Raises:
        IntegrityError: if a file is missing, or has the wrong size or header.
        SplitCheckpointError: if a file cannot be read.
    """
    paths = [path for folder in folders for path in _existing_files(folder, for_report=for_report)]
    prefixes = [prefix for folder in folders for prefix in folder.manifest.rank_layout.prefixes]
    layout = manifest.rank_layout
    try:
        inputs = InputFiles(paths, prefixes, layout.file_bytes, remedy="" if for_report else f": {AGAIN}")
    except ModifiedError as error:
        raise IntegrityError(error.message) from error
    except SourceError as error:
        raise SplitCheckpointError(error.message) from error
    labels = [path.name if for_report and len(folders) == 1 else str(path) for path in paths]
    reader = ShardReader(
        layout.shards, inputs, labels=labels, names=list(manifest.tensors), checksums=checksums,
        rank_of=layout.rank_of, remedy="" if for_report else f": {AGAIN}",
    )  # fmt: skip
    return reader, inputs


def _existing_files(folder: SplitFolder, *, for_report: bool) -> list[AnyPath]:
    """The rank files of a folder."""
    paths, manifest = folder.manifest.rank_paths(folder.path), folder.manifest
    for path in paths:
        if not path.is_file():
            expected = f"all {manifest.num_ranks} rank files" if manifest.is_complete else name_ranks(manifest.ranks)
            remedy = "" if for_report else ": copy it to this folder, or split the source again"
            raise IntegrityError(f"{path}: is missing (expected {expected}){remedy}")
        if leads_out(path, folder.path):
            raise IntegrityError(f"{path}: is a link out of its folder")
    return paths


def check_ranks(manifest: Manifest, folder: AnyPath, ranks: Sequence[int]) -> None:
    """Check that a folder has ranks.

    Raises:
        SplitCheckpointError: if it does not.
    """
    if missing := [rank for rank in ranks if rank not in manifest.ranks]:
        raise SplitCheckpointError(
            f"{folder}: does not have {name_ranks(missing)} (got {name_ranks(manifest.ranks)} of "
            f"{manifest.num_ranks}): split the source on this host with {manifest.size_options} "
            f"{option(ranks=as_option(missing))}, or start the ranks on the hosts that have them"
        )


def open_rank_files(manifest: Manifest, folder: AnyPath, rank: int) -> tuple[Manifest, ShardReader, InputFiles]:
    """Open the files of a rank and check their headers.

    Args:
        manifest: of the split checkpoint.
        folder: the split checkpoint.
        rank: the rank.

    Returns:
        The manifest of this rank alone, the reader of its shards, and its files.

    Raises:
        IntegrityError: if a file is missing, or has the wrong size or header.
        SplitCheckpointError: if the folder does not have the rank, or a file cannot be read.
    """
    check_ranks(manifest, folder, [rank])
    own, at = manifest.with_ranks((rank,)), manifest.ranks.index(rank)
    checksums = None if manifest.checksums is None else manifest.checksums[at : at + 1]
    return own, *open_ranks(own, [SplitFolder(folder, own)], checksums)


def auxiliary_paths(manifest: Manifest, folder: AnyPath) -> dict[str, AnyPath]:
    """Name to path of the auxiliary files of a split checkpoint.

    Raises:
        SplitCheckpointError: if one is missing, not a regular file, or a link out of the folder.
    """
    paths = {name: folder / name for name in manifest.auxiliary_files}
    for path in paths.values():
        if not is_regular_file(path, folder):
            raise SplitCheckpointError(
                f"{path}: is missing, not a regular file, or a link out of its folder: restore the file"
            )
    return paths


def is_regular_file(path: AnyPath, folder: AnyPath) -> bool:
    """Whether a path is a regular file, and not a link out of its folder."""
    return path.is_file() and not leads_out(path, folder)


def file_differences(checksums: Mapping[str, str], folder: AnyPath) -> list[str]:
    """Messages for files in a folder that are missing, or differ from their checksums."""
    differences = []
    for name, expected in checksums.items():
        path = folder / name
        if not is_regular_file(path, folder):
            differences.append(f"{name}: is missing, not a regular file, or a link out of its folder")
        elif checksum_file(path) != expected:
            differences.append(f"{name}: differs from its checksum")
    return differences
