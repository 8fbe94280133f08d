"""Rewrite a split or padded checkpoint, or a source, as another checkpoint: the steps of merge, reshard and unpad."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shardconv.checkpoint.engine.copy import Progress, Reader
from shardconv.checkpoint.engine.layout import MANIFEST_NAME, Layout
from shardconv.checkpoint.output.destination import check_disjoint, check_target
from shardconv.checkpoint.output.job import journal_of
from shardconv.checkpoint.output.journal import Job
from shardconv.checkpoint.output.staging import staging
from shardconv.checkpoint.output.write import (
    Checksums,
    Identify,
    auxiliary_bytes,
    copy_auxiliary,
    copy_files,
    write_auxiliary,
)
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.source_reader import open_tensors
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.padding_manifest import PADDING_NAME
from shardconv.checkpoint.split.rank_files import SplitFolder, auxiliary_paths, check_readable, read_ranks
from shardconv.files.folder import AnyPath, permissions
from shardconv.files.input_files import InputFiles

_MANIFESTS = (MANIFEST_NAME, PADDING_NAME)


class Staged(NamedTuple):
    """The new checkpoint before it has its final name.

    Attributes:
        folder: the staging folder, which holds the new weight files and auxiliary files.
        checksums: for each weight file the checksum of each stripe, or None.
        auxiliary_files: name to checksum of each auxiliary file.
        mode: the permissions that all existing weight files have.
        resumed_bytes: bytes of full tensors that an interrupted run had written.
    """

    folder: Path
    checksums: Checksums | None
    auxiliary_files: dict[str, str]
    mode: int
    resumed_bytes: int


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite of a checkpoint that has a manifest, or of a source.

    Attributes:
        manifest: of the existing checkpoint, or of the source.
        folder: of the existing checkpoint.
        target: the new checkpoint.
        is_folder: whether the new checkpoint is a folder; a file does not have auxiliary files.
        source: to read in place of the files of the manifest; None for a checkpoint that has a manifest.
        added_files: names of auxiliary files that only the new checkpoint has.
        overwrite: replace an existing checkpoint at ``target``.
        resume: continue an interrupted run.
        threads: number of threads, or None for the default.
        progress: called with the number of copied bytes and the total.
        folders: the folders with the ranks of the manifest, in order; ``folder`` alone if there are none.
    """

    manifest: Manifest
    folder: AnyPath
    target: AnyPath
    is_folder: bool = True
    source: Source | None = None
    added_files: tuple[str, ...] = ()
    overwrite: bool = False
    resume: bool = False
    threads: int | None = None
    progress: Progress | None = None
    folders: tuple[SplitFolder, ...] = ()

    def check(self, *, dry_run: bool) -> bool:
        """Check the destination, and for a dry run all files that would be read.

        Returns:
            Whether the destination exists and requires ``overwrite``.

        Raises:
            SplitCheckpointError: if a file is missing, or has the wrong size or header.
            OutputError: if the destination must not be written.
        """
        check_disjoint(self.target, [self.folder, *(one.path for one in self.folders)])
        exists = check_target(
            self.target,
            is_folder=self.is_folder,
            overwrite=self.overwrite,
            dry_run=dry_run,
            auxiliary_files=[*self.manifest.auxiliary_files, *self.added_files],
        )
        if dry_run and self.source is None:
            check_readable(self.manifest, self._split_folders)
        return exists

    @contextmanager
    def run(
        self,
        settings: Job,
        names: Sequence[str],
        layout: Layout,
        *,
        identify: Identify | None = None,
        added_bytes: int = 0,
    ) -> Iterator[Staged]:
        """Copy all tensors and auxiliary files into a staging folder, which gets its final name on exit.

        Args:
            settings: the command and its options: see :func:`~shardconv.checkpoint.output.job.settings_of`.
            names: names of the new weight files.
            layout: of the new weight files.
            identify: see :func:`~shardconv.checkpoint.output.write.copy_files`.
            added_bytes: bytes of the files that the caller adds to the staging folder.

        Raises:
            SplitCheckpointError: if a file is missing, or bytes differ from those that were written.
            OutputError: if the destination exists, is in use, or has too little free space.
        """
        auxiliary_files = self._auxiliary_paths() if self.is_folder else {}
        reader, inputs = self._open()
        journal_for = partial(journal_of, settings, read=self._manifest_paths(), resume=self.resume)
        with (
            inputs,
            staging(
                self.target,
                journal=(journal := journal_for(reader, inputs, names, layout)),
                is_folder=self.is_folder,
                overwrite=self.overwrite,
                num_bytes=sum(layout.file_bytes) + auxiliary_bytes(auxiliary_files) + added_bytes,
                auxiliary_files=[*self.manifest.auxiliary_files, *self.added_files],
                mode=permissions([self.folder]),
            ) as folder,
        ):
            checksums = copy_files(
                reader, inputs, [folder / name for name in names], layout, self.manifest.stripes,
                identify=identify, journal=journal, threads=self.threads, progress=self.progress,
            )  # fmt: skip
            copied = self._copy_auxiliary(auxiliary_files, folder)
            yield Staged(folder, checksums, copied, inputs.mode, journal.resumed_bytes)

    def _open(self) -> tuple[Reader, InputFiles]:
        if self.source is not None:
            return open_tensors(self.source, self.manifest.tensors, None)
        return read_ranks(self.manifest, self._split_folders)

    @property
    def _split_folders(self) -> tuple[SplitFolder, ...]:
        return self.folders or (SplitFolder(self.folder, self.manifest),)

    def _manifest_paths(self) -> list[AnyPath]:
        """The manifests of the existing checkpoint, if it has any."""
        folders = [one.path for one in self._split_folders]
        return [path for folder in folders for name in _MANIFESTS if (path := folder / name).is_file()]

    def _auxiliary_paths(self) -> Mapping[str, AnyPath]:
        return auxiliary_paths(self.manifest, self.folder) if self.source is None else self.source.auxiliary_files

    def _copy_auxiliary(self, files: Mapping[str, AnyPath], folder: Path) -> dict[str, str]:
        if self.source is None or not self.is_folder:
            return copy_auxiliary(files, folder, self.manifest.auxiliary_files)
        return write_auxiliary(self.source, folder)
