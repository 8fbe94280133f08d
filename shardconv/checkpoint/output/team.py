"""The processes that write one split checkpoint: one, unless a launcher such as torchrun started several.

Defines the interface of a team. :mod:`shardconv.runtime.split_team` implements
the team of several processes with torch.distributed; nothing here depends on torch.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from msgspec.structs import replace

from shardconv.checkpoint.engine.copy import Progress
from shardconv.checkpoint.output.auxiliary import AuxiliaryFiles
from shardconv.checkpoint.output.destination import NewFolder
from shardconv.checkpoint.sources.source import Source
from shardconv.checkpoint.sources.stored_tensors import sample_checksum
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.manifest_file import comparable
from shardconv.files.folder import REMOTE_VERSIONS, AnyPath, remote_versions

#: For each rank the checksum of each stripe; each file of an unsharded checkpoint counts as a rank.
Checksums = tuple[tuple[str, ...], ...]


def facts(*splits: tuple[Source, Manifest]) -> dict[str, object]:
    """Facts that are equal in all processes that split sources together: plural name to value."""
    return {
        "checkpoints or options": [comparable(replace(manifest, source_name="")) for _, manifest in splits],
        "auxiliary files": [AuxiliaryFiles.of_source(source).checksums() for source, _ in splits],
        "values of tensors": [sample_checksum(source) for source, _ in splits],
        REMOTE_VERSIONS: [remote_versions(source.paths) for source, _ in splits],
    }


class Team:
    """A process that writes a split checkpoint alone; the base class of processes that write one together.

    Processes on one host, or on hosts with a shared disk, write one folder. Each writes the files of some ranks.

    Attributes:
        size: number of processes.
        is_first: whether this process reports the result.
        is_leader: whether this process writes the auxiliary files and the manifest of its folder.
    """

    size = 1
    is_first = True
    is_leader = True

    def meet(self, target: AnyPath, facts: Callable[[], Mapping[str, object]]) -> None:
        """Check that all processes write the same checkpoint, and detect processes that share this one's folder.

        Args:
            target: the folder that this process writes.
            facts: computes the facts that are compared: plural name to a value that JSON can represent.
        """

    def folder_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The subset of ``ranks`` in the folder of this process."""
        return ranks

    def own_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The subset of ``ranks`` whose files this process writes."""
        return ranks

    def staging(
        self, target: Path, open_staging: Callable[[], AbstractContextManager[NewFolder]]
    ) -> AbstractContextManager[NewFolder]:
        """The staging folder, which gets its final name when all processes have left the context.

        Args:
            target: the final name.
            open_staging: opens the staging folder, once for all processes that write it.
        """
        del target
        return open_staging()

    def gather(self, rows: Checksums) -> Checksums:
        """The checksums of all ranks of the folder, gathered from the processes."""
        return rows

    def watch(self, progress: Progress | None) -> Progress | None:
        """A callback for the progress of this process that raises if another process has failed."""
        return progress
