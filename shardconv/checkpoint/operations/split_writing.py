"""Write a split checkpoint: the files of its ranks, auxiliary files, adapters, and the manifest at the end."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from shardconv import __version__
from shardconv.checkpoint.engine.copy import STRIPE_BYTES, Progress, Reader
from shardconv.checkpoint.output.destination import check_destination
from shardconv.checkpoint.output.job import journal_of, settings_of
from shardconv.checkpoint.output.journal import Journal
from shardconv.checkpoint.output.remote_output import is_remote
from shardconv.checkpoint.output.staging import staging
from shardconv.checkpoint.output.team import Team
from shardconv.checkpoint.output.write import (
    Checksums,
    auxiliary_bytes,
    check_config,
    copy_files,
    write_auxiliary,
    write_indexes,
)
from shardconv.checkpoint.sources.sample import sample_checksum
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.source_reader import open_tensors
from shardconv.checkpoint.split.chosen_ranks import as_option
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import write_manifest
from shardconv.files.fileio import InputFiles, permissions
from shardconv.files.weight_formats import CONFIG_NAME
from shardconv.layouts.layout import NATIVE, FileLayout
from shardconv.plan.plan import Plan
from shardconv.plan.request import PlanRequest

#: Name to source and manifest of each adapter that is split with its model.
Adapters = Mapping[str, tuple[Source, Manifest]]
_NO_ADAPTERS: Adapters = MappingProxyType({})


def split_by(source: Source, target: Path, plan: Plan, request: PlanRequest, layout: FileLayout = NATIVE) -> None:
    """Split a source with a given plan and layout, and defaults for all other options."""
    manifest = Manifest.of_source(source, plan, request, stripe_bytes=STRIPE_BYTES, layout=layout)
    SplitWriting().write(source, manifest, target)


@dataclass(frozen=True, slots=True)
class SplitWriting:
    """How split checkpoints are written.

    Attributes:
        overwrite: replace an existing checkpoint.
        checksums: store checksums.
        resume: continue an interrupted run.
        read: all files that the result follows from.
        threads: number of threads; None for the default.
        progress: called with the number of copied bytes and the total.
        team: the processes that write the checkpoint together.
    """

    overwrite: bool = False
    checksums: bool = True
    resume: bool = False
    read: tuple[Path, ...] = ()
    threads: int | None = None
    progress: Progress | None = None
    team: Team = field(default_factory=Team)

    def write(self, source: Source, manifest: Manifest, target: Path, adapters: Adapters = _NO_ADAPTERS) -> int:
        """Write a split checkpoint, with adapters in folders in it.

        Returns:
            Bytes of full tensors that an interrupted run had written.
        """
        team = self.team
        team.meet(target, [(source, manifest), *adapters.values()])
        manifest = manifest.with_ranks(team.folder_ranks(manifest.ranks))
        if not manifest.is_complete:
            manifest = replace(manifest, sample=sample_checksum(source))
        own = manifest.with_ranks(team.own_ranks(manifest.ranks))
        adapters = {name: (one, each.with_ranks(manifest.ranks)) for name, (one, each) in adapters.items()}
        reader, inputs = open_tensors(source, manifest.tensors, manifest.plan)
        rows: list[tuple[str, ...]] = []

        def identify(own_rows: Checksums) -> Sequence[bytes]:
            rows.extend(team.gather(own_rows))
            return own.prefixes_with(tuple(rows))

        with inputs:
            journal = None if is_remote(target) else self._journal(own, reader, inputs)
            open_staging = partial(self._staging, target, journal, source, manifest, adapters)
            with team.staging(target, open_staging) as folder:
                copy_files(
                    reader, inputs, own.rank_paths(folder), own.rank_layout, manifest.stripes,
                    identify=identify if self.checksums else None, journal=journal, threads=self.threads,
                    progress=team.watch(self.progress),
                )  # fmt: skip
                if team.is_leader:
                    checksums = tuple(rows) if self.checksums else None
                    self._finish(source, manifest, checksums, folder, adapters, inputs.mode)
                    if team.size > 1:  # before any process renames its folder
                        names = source.auxiliary_names
                        check_destination(target, is_folder=True, overwrite=self.overwrite, auxiliary_files=names)
        return 0 if journal is None else journal.resumed_bytes

    def _journal(self, own: Manifest, reader: Reader, inputs: InputFiles) -> Journal | None:
        """The journal of the files that this process writes, if it writes the checkpoint alone."""
        if not self.checksums or self.team.size > 1:
            return None
        ranks = None if own.is_complete else as_option(own.ranks)
        return journal_of(
            settings_of("split", own) | {"ranks": ranks}, reader, inputs, own.rank_files, own.rank_layout,
            read=self.read, resume=self.resume,
        )  # fmt: skip

    def _staging(
        self, target: Path, journal: Journal | None, source: Source, manifest: Manifest, adapters: Adapters
    ) -> AbstractContextManager[Path]:
        return staging(
            target,
            journal=journal,
            is_folder=True,
            overwrite=self.overwrite,
            num_bytes=sum(_num_bytes(*one) for one in ((source, manifest), *adapters.values())),
            auxiliary_files=source.auxiliary_names,
            mode=permissions([source.path] if source.is_folder else []),
        )

    def _finish(
        self,
        source: Source,
        manifest: Manifest,
        checksums: Checksums | None,
        folder: Path,
        adapters: Adapters,
        mode: int,
    ) -> None:
        """Write what does not belong to one rank; ``mode`` are the permissions of the source's weights."""
        auxiliary_files = write_auxiliary(source, folder)
        check_config(source, folder)
        paths = manifest.adapter_folders(folder)
        for name, adapter in adapters.items():
            SplitWriting(checksums=self.checksums, threads=self.threads).write(*adapter, paths[name])
        write_indexes(manifest, folder, mode)
        written = manifest.written(checksums, auxiliary_files)
        write_manifest(written, folder, f"shardconv {__version__}", mode=_manifest_mode(source, mode))


def _num_bytes(source: Source, manifest: Manifest) -> int:
    return sum(manifest.rank_layout.file_bytes) + auxiliary_bytes(source.auxiliary_files)


def _manifest_mode(source: Source, weights_mode: int) -> int:
    """Permissions of the manifest, and thereby of a merged index: those of the index, or else of the weights.

    The manifest contains the config, so it is readable only for those who can read the config.
    """
    if source.index_path is None:
        return weights_mode
    config = [source.auxiliary_files[CONFIG_NAME]] if CONFIG_NAME in source.auxiliary_files else []
    return permissions([source.index_path, *config])
