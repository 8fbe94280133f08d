"""Checkpoints that ranks load: a split checkpoint, or a source with the manifest that a split of it would have.

Owns the differences between the two. Whatever loads a checkpoint reads the manifest, and shards from a reader.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardconv.checkpoint.engine.copy import STRIPE_BYTES, Progress
from shardconv.checkpoint.sources.adapter_advice import adapter_folders, refuse_adapter_alone
from shardconv.checkpoint.sources.planning import PlanOptions, plan_source, refuse_changes
from shardconv.checkpoint.sources.sample import sample_checksum
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import is_split, read_manifest
from shardconv.checkpoint.split.manifest_json import to_json
from shardconv.checkpoint.split.rank_files import check_ranks
from shardconv.checkpoint.split.rank_reader import RankFileReader, RankReader, SourceReader, copied_bytes
from shardconv.files.checksums import checksum_file
from shardconv.files.paths import absolute_path
from shardconv.files.storage.table import REMOTE_VERSIONS, remote_file, shown, versions
from shardconv.support.errors import SplitCheckpointError, UsageError, option


@dataclass(frozen=True, slots=True)
class Loadable:
    """A checkpoint that ranks load.

    Attributes:
        path: the split checkpoint, or the source as the user passed it.
        manifest: of the split checkpoint; of a source, that of a split, with the checksums of auxiliary files only.
        source: the source; None for a split checkpoint.
    """

    path: Path
    manifest: Manifest
    source: Source | None = None

    @property
    def folder(self) -> Path:
        """The folder with config.json and the other auxiliary files."""
        return self.path if self.source is None else self.source.folder

    @property
    def adapter_note(self) -> str:
        """Which adapters it holds, and how to apply one; "" without any."""
        if self.source is None:
            names = ", ".join(self.manifest.adapters)
            return f"adapters that are not applied: {names} (pass --adapter NAME to apply one)" if names else ""
        found = [*adapter_folders(self.path if self.path.is_dir() else self.path.parent, self.source.left_out)]
        if not found:
            return ""
        names = ", ".join(absolute_path(folder).name for folder in found)
        source, adapter = (shlex.quote(shown(path)) for path in (self.path, found[0]))
        return (
            f"adapters that are not applied: {names} (to apply one, shardconv split {source} --adapter {adapter} --tp "
            f"{self.manifest.tp}, and pass --adapter NAME)"
        )

    @property
    def kind(self) -> str:
        """The kind of checkpoint, for messages; the same on all ranks, because each kind has other facts."""
        if self.source is not None:
            return "a source"
        return f"a split checkpoint with {'all' if self.manifest.is_complete else 'some of the'} ranks"

    def open_rank(self, rank: int, *, verify: bool = False, progress: Progress | None = None) -> RankReader:
        """Open the shards of a rank.

        Args:
            rank: the rank.
            verify: check the rank file of a split checkpoint against its checksums first.
            progress: called with the number of checked bytes and the total.

        Raises:
            SplitCheckpointError: if the rank file cannot be used, or differs from its checksums.
            SourceError: if a file of the source does not match its header.
        """
        if self.source is None:
            return RankFileReader(self.manifest, self.path, rank, verify=verify, progress=progress)
        return SourceReader(self.source, self.manifest.plan, rank)

    def copied_bytes(self, rank: int) -> int:
        """Bytes of the shards of a rank that are copied into memory, because they are not ranges of a mapped file."""
        return 0 if self.source is None else copied_bytes(self.source, self.manifest.plan, rank)

    def fetched_bytes(self, rank: int) -> int:
        """Bytes of the files of a rank that are fetched into memory, because they are remote."""
        if self.source is not None:
            return 0
        layout, paths = self.manifest.rank_layout, self.manifest.rank_paths(self.path)
        files = layout.files_of(self.manifest.ranks.index(rank))
        found = zip(paths[files], layout.file_bytes[files], strict=True)
        return sum(size for path, size in found if remote_file(path) is not None)

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Check that this host has the files of ranks, where the checkpoint is split.

        Raises:
            SplitCheckpointError: if it does not.
        """
        if self.source is not None:
            return
        check_ranks(self.manifest, self.path, ranks)
        layout, paths = self.manifest.rank_layout, self.manifest.rank_paths(self.path)
        files = [file for rank in ranks for file in paths[layout.files_of(self.manifest.ranks.index(rank))]]
        if missing := next((file for file in files if not file.exists()), None):
            raise SplitCheckpointError(f"{missing}: is missing: copy it to this host, or split the source again")

    def facts(self) -> dict[str, object]:
        """Facts that have to be the same on all ranks: plural name to value, which JSON can represent.

        A manifest has checksums of a split checkpoint, but not of a source, whose folder may have any name on a host.
        Where hosts have some of the ranks, checksums are not compared. Each rank opens remote files by itself, so their
        versions are.

        Raises:
            SourceError: if the source, or a remote file, cannot be read.
        """
        source, manifest = self.source, self.manifest
        paths = manifest.rank_paths(self.path) if source is None else source.paths
        return {
            "checkpoints": to_json(manifest.shared if source is None else replace(manifest, source_name=""), ""),
            "values of tensors": None if source is None else sample_checksum(source),
            REMOTE_VERSIONS: versions(paths),
        }


def open_loadable(path: Path, *, tp: int | None, options: PlanOptions) -> Loadable:
    """Open a split checkpoint, or plan a source for ``tp`` ranks.

    Args:
        path: the folder of a split checkpoint, or a source.
        tp: tensor parallel size of a source; None for that of a split checkpoint.
        options: how the source is read and planned; a split checkpoint has its plan.

    Raises:
        UsageError: if options are given for a split checkpoint, or it is for another tensor parallel size.
        SplitCheckpointError: if the manifest is not valid, or there is none and ``tp`` is None.
        SourceError: if the source cannot be read.
        PlanError: if no plan is known to be correct.
        RunError: if the path is an adapter without its base model.
    """
    if not is_split(path):
        refuse_adapter_alone(path, tp)
    if tp is None or is_split(path):
        manifest = read_manifest(path, remedy=f"or load it without splitting it: {option(tp='N')}")
        _refuse_options(path, manifest, tp, options)
        return Loadable(path, manifest)
    source, _, request, (resolver, assumed), _ = plan_source(path, **options)
    plan = resolver.plan(tp, assumed=assumed)
    manifest = Manifest.of_source(source, plan, request, stripe_bytes=STRIPE_BYTES, checksums=False)
    checksums = {name: checksum_file(file) for name, file in source.auxiliary_files.items()}
    return Loadable(path, manifest.written(None, checksums), source)


def _refuse_options(path: Path, manifest: Manifest, tp: int | None, options: PlanOptions) -> None:
    """Refuse options that a split checkpoint does not use."""
    if tp not in (None, manifest.tp):
        raise UsageError(
            f"{path}: is split for {manifest.tp} ranks (got {option(tp=tp)}): remove {option('tp')}, or make a "
            f"checkpoint for {tp} ranks with shardconv reshard {path} --tp {tp}"
        )
    refuse_changes(path, options)
