"""What split, merge and reshard have in common: new files, the copy into them, and the side files."""

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

#: Checksums of each new file, and what it then begins with.
Checksums = tuple[tuple[str, ...], ...]
Identify = Callable[[Checksums], Sequence[bytes]]

#: Bytes of a side file that are in memory at once.
_PIECE_BYTES = 2**20


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
    """Write new files from what a reader gives.

    Args:
        reader: where the bytes come from.
        inputs: its files, checked in the end not to have changed.
        paths: the new files.
        layout: what they hold.
        stripes: what passes.
        identify: gives the heads of the files, as long as those in ``layout``, from the checksums; None to take none.
        threads: how many threads; by default as many as there are processors, up to 8.
        progress: called with bytes done and bytes in all.

    Returns:
        For each file the checksum of each stripe, or None.
    """
    with OutputFiles(paths, layout.heads, layout.file_bytes, inputs.mode) as outputs:
        writer = ShardWriter(layout.shards, outputs, num_stripes=len(stripes), with_checksums=identify is not None)
        CopyJob(stripes, reader, [writer]).run(threads=threads, progress=progress)
        inputs.check_unchanged()
        if identify is None:
            return None
        checksums = tuple(map(tuple, writer.checksums))
        for number, (old, head) in enumerate(zip(layout.heads, identify(checksums), strict=True)):
            assert len(old) == len(head)
            outputs.write(number, memoryview(head), 0)
    return checksums


def read_ranks(manifest: Manifest, folder: Path) -> tuple[ShardReader, InputFiles]:
    """The rank files of a split checkpoint, opened and with their headers checked.

    Raises:
        IntegrityError: if a file is missing, of another size, or has not the header that it has to have.
        SplitCheckpointError: if a file cannot be read.
    """
    paths = manifest.rank_paths(folder)
    for path in paths:
        if not path.is_file():
            raise IntegrityError(f"{path}: is missing; all {manifest.tp} rank files are needed")
        if leads_out(path, folder):
            raise IntegrityError(f"{path}: is a link out of its folder")
    layout = manifest.rank_layout
    try:
        inputs = InputFiles(paths, layout.heads, layout.file_bytes)
    except SourceError as error:
        kind = SplitCheckpointError if isinstance(error.__cause__, OSError) else IntegrityError
        raise kind(str(error)) from error
    labels = [path.name for path in paths]
    reader = ShardReader(
        layout.shards, inputs, labels=labels, names=list(manifest.tensors), checksums=manifest.checksums
    )
    return reader, inputs


def check_readable(manifest: Manifest, folder: Path) -> None:
    """Check what a dry run can check without reading data: that files are there, with the right sizes and headers.

    Raises:
        SplitCheckpointError: as :func:`read_ranks` and :func:`side_paths`.
    """
    side_paths(manifest, folder)
    _, inputs = read_ranks(manifest, folder)
    inputs.close()


def side_paths(manifest: Manifest, folder: Path) -> dict[str, Path]:
    """The side files of a split checkpoint, by name.

    Raises:
        SplitCheckpointError: if one is missing, no regular file, or a link out of the folder.
    """
    paths = {name: folder / name for name in manifest.side_files}
    for path in paths.values():
        if not is_side_file(path, folder):
            raise SplitCheckpointError(f"{path}: is missing, no regular file, or a link out of its folder")
    return paths


def is_side_file(path: Path, folder: Path) -> bool:
    """Whether a regular file of a folder is there."""
    return path.is_file() and not leads_out(path, folder)


def copy_side_files(
    files: Mapping[str, Path], folder: Path, expected: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Copy side files into a folder.

    Args:
        files: name to path.
        folder: where each goes under its name.
        expected: name to the checksum that it has to have.

    Returns:
        Name to checksum.

    Raises:
        IntegrityError: if a checksum is not the expected one.
        SourceError: if a file changes meanwhile.
    """
    checksums = {}
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        checksums[name] = _copy_file(path, folder / name)
        if expected is not None and checksums[name] != expected[name]:
            raise IntegrityError(f"{path}: differs from its checksum; put the original back")
    return checksums


def _copy_file(path: Path, target: Path) -> str:
    """Copy a file, with its permissions; returns its checksum."""
    size = path.stat().st_size
    running = xxhash.xxh3_128()
    with InputFiles([path], [b""], [size]) as inputs, create(target, inputs.mode) as copy:
        for start in range(0, size, _PIECE_BYTES):
            piece = memoryview(bytearray(min(_PIECE_BYTES, size - start)))
            inputs.read(0, piece, start)
            running.update(piece)
            copy.write(piece)
        inputs.check_unchanged()
    return running.hexdigest()


def checksum_file(path: Path) -> str:
    """The xxh3-128 of a file, in bounded memory."""
    running = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(_PIECE_BYTES):
            running.update(data)
    return running.hexdigest()


def side_bytes(files: Mapping[str, Path]) -> int:
    """Bytes of side files."""
    return sum(path.stat().st_size for path in files.values())
