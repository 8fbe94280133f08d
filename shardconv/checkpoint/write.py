"""What split, merge and reshard have in common: new files, the copy into them, and the side files."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from shardconv.checkpoint.copy import CopyJob, Progress, Stripe
from shardconv.checkpoint.fileio import InputFiles, OutputFiles
from shardconv.checkpoint.layout import Layout
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.shards import ShardReader, ShardWriter
from shardconv.errors import SourceError, SplitCheckpointError


def copy_files(
    reader: ShardReader,
    inputs: InputFiles,
    paths: Sequence[Path],
    layout: Layout,
    stripes: Sequence[Stripe],
    *,
    checksums: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[tuple[str, ...], ...] | None:
    """Write new files from what a reader gives.

    Args:
        reader: where the bytes come from.
        inputs: its files, checked in the end not to have changed.
        paths: the new files.
        layout: what they hold.
        stripes: what passes.
        checksums: whether to take checksums.
        threads: how many threads; by default as many as there are processors, up to 8.
        progress: called with bytes done and bytes in all.

    Returns:
        For each file the checksum of each stripe, or None.
    """
    with OutputFiles(paths, layout.heads, layout.file_bytes, inputs.mode) as outputs:
        writer = ShardWriter(layout.shards, outputs, num_stripes=len(stripes), with_checksums=checksums)
        CopyJob(stripes, reader, [writer]).run(threads=threads, progress=progress)
        inputs.check_unchanged()
    return tuple(map(tuple, writer.checksums)) if checksums else None


def read_ranks(manifest: Manifest, folder: Path) -> tuple[ShardReader, InputFiles]:
    """The rank files of a split checkpoint, opened and with their headers checked.

    Raises:
        SplitCheckpointError: if a file is missing, of another size, or has not the header that it has to have.
    """
    paths = manifest.rank_paths(folder)
    for path in paths:
        if not path.is_file():
            raise SplitCheckpointError(f"{path}: is missing; all {manifest.tp} rank files are needed")
    layout = manifest.rank_layout
    try:
        inputs = InputFiles(paths, layout.heads, layout.file_bytes)
    except SourceError as error:
        raise SplitCheckpointError(str(error)) from error
    labels = [path.name for path in paths]
    reader = ShardReader(
        layout.shards, inputs, labels=labels, names=list(manifest.tensors), checksums=manifest.checksums
    )
    return reader, inputs


def side_paths(manifest: Manifest, folder: Path) -> dict[str, Path]:
    """The side files of a split checkpoint, by name.

    Raises:
        SplitCheckpointError: if one is missing, or no regular file.
    """
    paths = {name: folder / name for name in manifest.side_files}
    for path in paths.values():
        if path.is_symlink() or not path.is_file():
            raise SplitCheckpointError(f"{path}: is missing, or no regular file")
    return paths


def copy_side_files(files: Mapping[str, Path], folder: Path) -> dict[str, str]:
    """Copy side files into a folder, each under its name; returns name to checksum."""
    for name, path in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return {name: checksum_file(folder / name) for name in files}


def checksum_file(path: Path) -> str:
    """The xxh3-128 of a file, in bounded memory."""
    running = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(2**20):
            running.update(data)
    return running.hexdigest()


def side_bytes(files: Mapping[str, Path]) -> int:
    """Bytes of side files."""
    return sum(path.stat().st_size for path in files.values())
