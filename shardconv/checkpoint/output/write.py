"""Shared steps of split, merge, reshard and pad: open rank files, write new files, copy auxiliary files."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import xxhash

from shardconv.checkpoint.engine.copy import CopyJob, Progress, Reader, Shards, Stripe
from shardconv.checkpoint.engine.held import held_stripes
from shardconv.checkpoint.engine.shards import ShardWriter
from shardconv.checkpoint.output.journal import Journal
from shardconv.checkpoint.output.resumable import ResumableWriter
from shardconv.checkpoint.output.staging import staging
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.files.checksums import checksum, checksum_file, chunks
from shardconv.files.fileio import create
from shardconv.files.folder import AnyPath, file_bytes, permissions
from shardconv.files.input_files import InputFiles
from shardconv.files.output_files import LocalOutputFiles, OutputFiles, open_outputs
from shardconv.files.text_files import read_json
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.support.errors import IntegrityError, SourceError

#: For each rank the checksum of each stripe; each file of an unsharded checkpoint counts as a rank.
Checksums = tuple[tuple[str, ...], ...]
#: Maps checksums to the prefix of each file: the bytes before its shards.
Identify = Callable[[Checksums], Sequence[bytes]]

#: Bytes of an auxiliary file that are in memory at once.
_CHUNK_BYTES = 2**20


class NewFiles(Protocol):
    """The positions of shards in new files, as a :class:`~shardconv.checkpoint.engine.layout.Layout` has them."""

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


def write_indexes(manifest: Manifest, folder: Path, mode: int) -> None:
    """Write the index of each rank that has several files, with the permissions ``mode`` before the umask."""
    for name, text in manifest.rank_indexes.items():
        with create(folder / name, mode) as file:
            file.write(text.encode())


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
    files: Mapping[str, AnyPath],
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


def _copy_file(path: AnyPath, target: Path) -> str:
    """Copy a file with its permissions, and return its checksum."""
    size = file_bytes(path)
    running = xxhash.xxh3_128()
    with InputFiles([path], [b""], [size]) as inputs, create(target, inputs.mode) as copy:
        inputs.prefetch([(0, 0, size)])
        for chunk in chunks(inputs, size):
            running.update(chunk)
            copy.write(chunk)
        inputs.check_unchanged()
    return running.hexdigest()


def stage_copy(
    source: Source, target: AnyPath, *, num_bytes: int, added: str, overwrite: bool, journal: Journal | None
) -> AbstractContextManager[Path]:
    """Stage a folder with new weight files of ``num_bytes`` bytes, the auxiliary files of a source, and one more.

    See :func:`~shardconv.checkpoint.output.staging.staging`.
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


def auxiliary_bytes(files: Mapping[str, AnyPath]) -> int:
    """Total bytes of auxiliary files."""
    return sum(map(file_bytes, files.values()))
