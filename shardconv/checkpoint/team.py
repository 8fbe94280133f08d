"""The processes that write one split checkpoint: one, unless a launcher such as torchrun started several.

Owns what they would have to agree on. :mod:`shardconv.runtime.split_team` has several processes; this module does not
know how they communicate.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from shardconv.checkpoint.copy import Progress
from shardconv.checkpoint.manifest import Manifest
from shardconv.checkpoint.manifest_json import to_json
from shardconv.checkpoint.sample import sample_checksum
from shardconv.checkpoint.source import Source
from shardconv.checkpoint.write import auxiliary_checksums

#: For each rank the checksum of each stripe.
Rows = tuple[tuple[str, ...], ...]


def facts(*splits: tuple[Source, Manifest]) -> dict[str, object]:
    """What has to be the same for processes that split sources together: plural name to value."""
    return {
        "checkpoints or options": [to_json(replace(manifest, source_name=""), "") for _, manifest in splits],
        "auxiliary files": [auxiliary_checksums(source) for source, _ in splits],
        "values of tensors": [sample_checksum(source) for source, _ in splits],
    }


class Team:
    """A process that writes a split checkpoint alone; the base class of processes that write one together.

    Processes on one host, or on hosts with a shared disk, write one folder. Each writes the files of some ranks.

    Attributes:
        size: number of processes.
        is_first: whether this process reports the result.
        is_leader: whether this process writes what does not belong to one rank: auxiliary files and the manifest.
    """

    size = 1
    is_first = True
    is_leader = True

    def meet(self, target: Path, facts: Callable[[], Mapping[str, object]]) -> None:
        """Check that all processes would write the same checkpoint, and find those that write the same folder.

        Args:
            target: the folder that this process would write.
            facts: computes what has to be the same in all processes: plural name to value, which JSON can represent.
        """

    def folder_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of ``ranks`` that the folder of this process will have."""
        return ranks

    def own_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of ``ranks`` whose files this process writes."""
        return ranks

    def staging(
        self, target: Path, open_staging: Callable[[], AbstractContextManager[Path]]
    ) -> AbstractContextManager[Path]:
        """The staging folder, which gets its final name when all processes have left the context.

        Args:
            target: the final name.
            open_staging: opens the staging folder, once for all processes that write it.
        """
        del target
        return open_staging()

    def gather(self, rows: Rows) -> Rows:
        """The checksums of all ranks of the folder, from those of the ranks of each process."""
        return rows

    def watch(self, progress: Progress | None) -> Progress | None:
        """A callback for the progress of this process that raises if another process has failed."""
        return progress
