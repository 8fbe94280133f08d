"""Shared steps of split, merge, reshard and pad: open rank files, write new files, copy auxiliary files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import xxhash

from shardconv.checkpoint.copy import CopyJob, Progress, Stripe
from shardconv.checkpoint.fileio import InputFiles, OutputFiles, create
from shardconv.checkpoint.layout import Layout
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.paths import leads_out
from shardconv.checkpoint.shards import ShardReader, ShardWriter
from shardconv.errors import IntegrityError, SourceError, SplitCheckpointError

#: For each file the checksum of each stripe.
Checksums = tuple[tuple[str, ...], ...]
#: Maps checksums to the prefix of each file: the bytes before its shards.
Identify = Callable[[Checksums], Sequence[bytes]]

#: Bytes of an auxiliary file that are in memory at once.
_CHUNK_BYTES = 2**20


def copy_files(
    reader: ShardReader,
    inputs: InputFiles,
    paths: Sequence[Path],
    layout: Layout,
    stripes: Sequence[Stripe],
    *,
    identify: Identify | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Checksums | None:
    """Write new files from a reader.

    Args:
        reader: reads the full tensors.
        inputs: its files; they must not change during the copy.
        paths: the new files.
        layout: of the new files.
        stripes: the stripes to copy.
        identify: computes the prefix of each file from the checksums, with the length of the prefix in ``layout``; None
            to compute no checksums.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.

    Returns:
        For each file the checksum of each stripe, or None.
    """
    with OutputFiles(paths, layout.prefixes, layout.file_bytes, inputs.mode) as outputs:
        writer = ShardWriter(layout.shards, outputs, num_stripes=len(stripes), with_checksums=identify is not None)
        CopyJob(stripes, reader, [writer]).run(threads=threads, progress=progress)
        inputs.check_unchanged()
        if identify is None:
            return None
        checksums = tuple(map(tuple, writer.checksums))
        for number, (old, new) in enumerate(zip(layout.prefixes, identify(checksums), strict=True)):
            assert len(old) == len(new)
            outputs.write(number, memoryview(new), 0)
    return checksums


def read_ranks(manifest: Manifest, folder: Path) -> tuple[ShardReader, InputFiles]:
    """Open the rank files of a split checkpoint and check their headers.

    Raises:
        IntegrityError: if a file is missing, or has the wrong size or header.
        SplitCheckpointError: if a file cannot be read.
    """
    paths = manifest.rank_paths(folder)
    for path in paths:
        if not path.is_file():
            raise IntegrityError(
                f"{path}: is missing (expected all {manifest.tp} rank files): copy it to this folder, or split the "
                f"source again"
            )
        if leads_out(path, folder):
            raise IntegrityError(f"{path}: is a link out of its folder")
    layout = manifest.rank_layout
    try:
        inputs = InputFiles(paths, layout.prefixes, layout.file_bytes)
    except SourceError as error:
        kind = SplitCheckpointError if isinstance(error.__cause__, OSError) else IntegrityError
        raise kind(str(error)) from error
    labels = [path.name for path in paths]
    reader = ShardReader(
        layout.shards, inputs, labels=labels, names=list(manifest.tensors), checksums=manifest.checksums
    )
    return reader, inputs


def check_readable(manifest: Manifest, folder: Path) -> None:
    """Check the existence, sizes and headers of all files, without reading their data.

    Raises:
        SplitCheckpointError: as :func:`read_ranks` and :func:`auxiliary_paths`.
    """
    auxiliary_paths(manifest, folder)
    _, inputs = read_ranks(manifest, folder)
    inputs.close()


def auxiliary_paths(manifest: Manifest, folder: Path) -> dict[str, Path]:
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


def is_regular_file(path: Path, folder: Path) -> bool:
    """Whether a path is a regular file, and not a link out of its folder."""
    return path.is_file() and not leads_out(path, folder)


def copy_auxiliary(
    files: Mapping[str, Path], folder: Path, expected: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Copy auxiliary files into a folder.

    Args:
        files: name to path.
        folder: the folder to copy to.
        expected: name to expected checksum, or None.

    Returns:
        Name to checksum.

    Raises:
        IntegrityError: if a checksum is not the expected one.
        SourceError: if a file changes during the copy.
    """
    checksums = {}
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        checksums[name] = _copy_file(path, folder / name)
        if expected is not None and checksums[name] != expected[name]:
            raise IntegrityError(f"{path}: differs from its checksum: restore the original file")
    return checksums


def _copy_file(path: Path, target: Path) -> str:
    """Copy a file with its permissions, and return its checksum."""
    size = path.stat().st_size
    running = xxhash.xxh3_128()
    with InputFiles([path], [b""], [size]) as inputs, create(target, inputs.mode) as copy:
        for start in range(0, size, _CHUNK_BYTES):
            chunk = memoryview(bytearray(min(_CHUNK_BYTES, size - start)))
            inputs.read(0, chunk, start)
            running.update(chunk)
            copy.write(chunk)
        inputs.check_unchanged()
    return running.hexdigest()


def checksum_file(path: Path) -> str:
    """Compute the xxh3-128 checksum of a file in bounded memory."""
    running = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            running.update(data)
    return running.hexdigest()


def auxiliary_bytes(files: Mapping[str, Path]) -> int:
    """Total bytes of auxiliary files."""
    return sum(path.stat().st_size for path in files.values())
