"""Shared steps of split, merge, reshard and pad: open rank files, write new files, copy auxiliary files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import xxhash

from shardconv.checkpoint.chosen_ranks import as_option, name_ranks
from shardconv.checkpoint.copy import CopyJob, Progress, Reader, Shards, Stripe
from shardconv.checkpoint.fileio import InputFiles, create, file_bytes, permissions
from shardconv.checkpoint.formats import CONFIG_NAME
from shardconv.checkpoint.held import held_stripes
from shardconv.checkpoint.journal import Journal
from shardconv.checkpoint.json_files import read_json
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.output_files import LocalOutputFiles, OutputFiles, open_outputs
from shardconv.checkpoint.paths import leads_out
from shardconv.checkpoint.resumable import ResumableWriter
from shardconv.checkpoint.shards import ShardReader, ShardWriter
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.staging import staging
from shardconv.errors import IntegrityError, SourceError, SplitCheckpointError

#: For each rank the checksum of each stripe; each file of an unsharded checkpoint counts as a rank.
Checksums = tuple[tuple[str, ...], ...]
#: Maps checksums to the prefix of each file: the bytes before its shards.
Identify = Callable[[Checksums], Sequence[bytes]]

#: Bytes of an auxiliary file that are in memory at once.
_CHUNK_BYTES = 2**20


#: The remedy for a damaged rank file.
AGAIN = "copy it again, or split the source again"


class NewFiles(Protocol):
    """The positions of shards in new files, as a :class:`~shardconv.checkpoint.layout.Layout` has them."""

    @property
    def prefixes(self) -> list[bytes]:
        """The bytes of each file before its shards."""

    @property
    def file_bytes(self) -> list[int]:
        """Bytes of each file."""

    @property
    def shards(self) -> tuple[Shards, ...]:
        """For each tensor the positions of its shards."""

    @property
    def files_per_rank(self) -> int:
        """Number of files of each rank."""


def copy_files(
    reader: Reader,
    inputs: InputFiles,
    paths: Sequence[Path],
    layout: NewFiles,
    stripes: Sequence[Stripe],
    *,
    identify: Identify | None = None,
    journal: Journal | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Checksums | None:
    """Write new files from a reader, which only reads what they need.

    Args:
        reader: reads the full tensors.
        inputs: its files; they must not change during the copy.
        paths: the new files.
        layout: of the new files.
        stripes: the stripes to copy.
        identify: computes the prefix of each file from the checksums, with the length of the prefix in ``layout``; None
            to return no checksums.
        journal: of this copy, which says what is already written; None to keep none.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.

    Returns:
        For each rank the checksum of each stripe, or None.
    """
    may_exist = journal is not None and journal.is_continued
    with open_outputs(paths, layout.prefixes, layout.file_bytes, inputs.mode, may_exist=may_exist) as outputs:
        writer = _writer(layout, outputs, len(stripes), journal, with_checksums=identify is not None)
        resume = writer.resume if isinstance(writer, ResumableWriter) and may_exist else None
        held = held_stripes(stripes, layout.shards) if paths else []
        job = CopyJob(held, reader, [writer], resume=resume, in_order=outputs.in_order)
        job.run(threads=threads or outputs.threads or inputs.threads, progress=progress)
        inputs.check_unchanged()
        if identify is None:
            return None
        checksums = tuple(map(tuple, writer.checksums))
        for number, (old, new) in enumerate(zip(layout.prefixes, identify(checksums), strict=True)):
            assert len(old) == len(new)
            if new != old:
                outputs.write_ranges(number, memoryview(new), [(0, len(new))])
    return checksums


def _writer(
    layout: NewFiles, outputs: OutputFiles, num_stripes: int, journal: Journal | None, *, with_checksums: bool
) -> ShardWriter:
    """The sink for new files."""
    count = layout.files_per_rank
    if journal is None or not isinstance(outputs, LocalOutputFiles):  # an upload cannot be continued
        sizes = {"num_stripes": num_stripes, "files_per_rank": count}
        return ShardWriter(layout.shards, outputs, with_checksums=with_checksums, **sizes)
    return ResumableWriter(layout.shards, outputs, num_stripes=num_stripes, journal=journal, files_per_rank=count)


class SplitFolder(NamedTuple):
    """A folder with rank files, and its manifest."""

    path: Path
    manifest: Manifest


def read_ranks(
    manifest: Manifest, folders: Sequence[SplitFolder], *, for_report: bool = False
) -> tuple[ShardReader, InputFiles]:
    """Open the rank files of a split checkpoint and check their headers.

    Args:
        manifest: has the ranks of all folders, in order.
        folders: the folders.
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
    except SourceError as error:
        kind = SplitCheckpointError if isinstance(error.__cause__, OSError) else IntegrityError
        raise kind(str(error)) from error
    labels = [path.name if for_report and len(folders) == 1 else str(path) for path in paths]
    reader = ShardReader(
        layout.shards, inputs, labels=labels, names=list(manifest.tensors), checksums=manifest.checksums,
        files_per_rank=layout.files_per_rank, remedy="" if for_report else f": {AGAIN}",
    )  # fmt: skip
    return reader, inputs


def _existing_files(folder: SplitFolder, *, for_report: bool) -> list[Path]:
    """The rank files of a folder."""
    paths, manifest = folder.manifest.rank_paths(folder.path), folder.manifest
    for path in paths:
        if not path.is_file():
            expected = f"all {manifest.tp} rank files" if manifest.is_complete else name_ranks(manifest.ranks)
            remedy = "" if for_report else ": copy it to this folder, or split the source again"
            raise IntegrityError(f"{path}: is missing (expected {expected}){remedy}")
        if leads_out(path, folder.path):
            raise IntegrityError(f"{path}: is a link out of its folder")
    return paths


def check_ranks(manifest: Manifest, folder: Path, ranks: Sequence[int]) -> None:
    """Check that a folder has ranks.

    Raises:
        SplitCheckpointError: if it does not.
    """
    if missing := [rank for rank in ranks if rank not in manifest.ranks]:
        raise SplitCheckpointError(
            f"{folder}: does not have {name_ranks(missing)} (got {name_ranks(manifest.ranks)} of {manifest.tp}): split "
            f"the source on this host with --tp {manifest.tp} --ranks {as_option(missing)}, or start the ranks on the "
            f"hosts that have them"
        )


def open_rank(manifest: Manifest, folder: Path, rank: int) -> InputFiles:
    """Open the files of one rank of a split checkpoint and check their headers.

    Raises:
        SplitCheckpointError: if the folder does not have the rank, or a file is missing or a link out of its folder,
            cannot be read, or has the wrong size or header.
    """
    check_ranks(manifest, folder, [rank])
    layout, files = manifest.rank_layout, manifest.rank_layout.files_of(manifest.ranks.index(rank))
    paths = manifest.rank_paths(folder)[files]
    for path in paths:
        if leads_out(path, folder):
            raise SplitCheckpointError(f"{path}: is a link out of its folder")
        if not path.is_file():
            raise SplitCheckpointError(f"{path}: is missing: copy it to this host, or split the source again")
    try:
        return InputFiles(paths, layout.prefixes[files], layout.file_bytes[files])
    except SourceError as error:
        raise SplitCheckpointError(str(error)) from error


def write_indexes(manifest: Manifest, folder: Path, mode: int) -> None:
    """Write the index of each rank that has several files, with the permissions ``mode`` before the umask."""
    for name, text in manifest.rank_indexes.items():
        with create(folder / name, mode) as file:
            file.write(text.encode())


def check_readable(manifest: Manifest, folders: Sequence[SplitFolder]) -> None:
    """Check the existence, sizes and headers of all files, without reading their data.

    Raises:
        SplitCheckpointError: as :func:`read_ranks` and :func:`auxiliary_paths`.
    """
    auxiliary_paths(manifest, folders[0].path)
    _, inputs = read_ranks(manifest, folders)
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


def write_auxiliary(source: Source, folder: Path) -> dict[str, str]:
    """Copy the auxiliary files of a source into a folder, and write those with other contents.

    Returns:
        Name to checksum.
    """
    unchanged = {name: path for name, path in source.auxiliary_files.items() if name not in source.made_files}
    checksums = copy_auxiliary(unchanged, folder)
    for name, text in source.made_files.items():
        original = source.auxiliary_files.get(name)
        with create(folder / name, 0o666 if original is None else permissions([original])) as file:
            file.write(text.encode())
        checksums[name] = checksum(text.encode())
    return checksums


def check_config(source: Source, folder: Path) -> None:
    """Check that the config in a folder is that of the source's plan.

    Raises:
        SourceError: if it is not.
    """
    if source.config is not None and read_json(folder / CONFIG_NAME) != source.config:
        raise SourceError(
            f"{source.auxiliary_files.get(CONFIG_NAME, source.path)}: changed after the plan was made: run the command "
            f"again"
        )


def auxiliary_checksums(source: Source) -> dict[str, str]:
    """Name to checksum of the auxiliary files of a source."""
    made = {name: checksum(text.encode()) for name, text in source.made_files.items()}
    return {name: checksum_file(path) for name, path in source.auxiliary_files.items() if name not in made} | made


def copy_auxiliary(
    files: Mapping[str, Path],
    folder: Path,
    expected: Mapping[str, str] | None = None,
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
    size = file_bytes(path)
    running = xxhash.xxh3_128()
    with InputFiles([path], [b""], [size]) as inputs, create(target, inputs.mode) as copy:
        inputs.prefetch([(0, 0, size)])
        for chunk in _chunks(inputs, size):
            running.update(chunk)
            copy.write(chunk)
        inputs.check_unchanged()
    return running.hexdigest()


def checksum(data: bytes) -> str:
    """The xxh3-128 checksum of data."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_file(path: Path) -> str:
    """Compute the xxh3-128 checksum of a file in bounded memory."""
    size = file_bytes(path)
    running = xxhash.xxh3_128()
    with InputFiles([path], [b""], [size]) as inputs:
        inputs.prefetch([(0, 0, size)])
        for chunk in _chunks(inputs, size):
            running.update(chunk)
    return running.hexdigest()


def _chunks(inputs: InputFiles, size: int) -> Iterator[memoryview]:
    """The contents of the only input file."""
    for start in range(0, size, _CHUNK_BYTES):
        chunk = memoryview(bytearray(min(_CHUNK_BYTES, size - start)))
        inputs.read(0, chunk, start)
        yield chunk


def stage_copy(
    source: Source, target: Path, *, num_bytes: int, added: str, overwrite: bool, journal: Journal | None
) -> AbstractContextManager[Path]:
    """Stage a folder with new weight files of ``num_bytes`` bytes, the auxiliary files of a source, and one more.

    See :func:`~shardconv.checkpoint.staging.staging`.
    """
    return staging(
        target,
        journal=journal,
        is_folder=True,
        overwrite=overwrite,
        num_bytes=num_bytes + auxiliary_bytes(source.auxiliary_files),
        auxiliary_files=[*source.auxiliary_names, added],
        mode=permissions([source.path] if source.is_folder else []),
    )


def auxiliary_bytes(files: Mapping[str, Path]) -> int:
    """Total bytes of auxiliary files."""
    return sum(map(file_bytes, files.values()))
