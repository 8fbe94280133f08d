"""Verify the files of one rank against its checksums, without the files of other ranks."""

from collections.abc import Sequence

from shardconv.checkpoint.engine.copy import CopyJob, Progress, Scratch, Shards, Span, Stripe, StripeState
from shardconv.checkpoint.engine.layout import Layout
from shardconv.checkpoint.engine.shards import name_tensors
from shardconv.checkpoint.split.manifest import Manifest
from shardconv.checkpoint.split.rank_files import AGAIN
from shardconv.files.fileio import Bytes
from shardconv.files.input_files import InputFiles
from shardconv.support.errors import IntegrityError


def verify_rank(manifest: Manifest, inputs: InputFiles, rank: int, progress: Progress | None = None) -> None:
    """Check the open files of a rank against its checksums without reading others. Does nothing without checksums.

    Args:
        manifest: of the split checkpoint.
        inputs: the files of the rank.
        rank: the rank.
        progress: called with the number of checked bytes of the full tensors and the total.

    Raises:
        IntegrityError: if bytes differ from those that were written.
        SourceError: if a file cannot be read.
    """
    if manifest.checksums is None:
        return
    at = manifest.ranks.index(rank)
    reader = _ChecksumReader(manifest.rank_layout, inputs, at, manifest.checksums[at], list(manifest.tensors))
    CopyJob(manifest.stripes, reader, []).run(progress=progress)


class _ChecksumReader:
    """A reader of one rank's files that only computes and compares checksums; ranks are positions in the layout."""

    def __init__(
        self, layout: Layout, files: InputFiles, rank: int, checksums: Sequence[str], names: Sequence[str]
    ) -> None:
        self.tensors: Sequence[Shards] = layout.shards
        self._first = layout.files_of(rank).start
        self._files, self._rank, self._checksums, self._names = files, rank, checksums, names

    def prefetch(self, stripe: Stripe) -> None:
        """Do nothing: the operating system detects that the file is read sequentially."""

    def cancel(self) -> None:
        """Cancel what threads are waiting for."""
        self._files.cancel()

    def gather(self, state: StripeState, span: Span, _block: Bytes, scratch: Scratch, /) -> None:
        """Read the bytes of a span that are in the rank's shard; the block is not changed."""
        shards = self.tensors[span.tensor]
        for rank, _, low, high in shards.geometry.overlaps(span.start, span.stop):
            if rank == self._rank:
                data = scratch.take("shard", high - low)
                file = shards.files[rank] - self._first
                self._files.read_ranges(file, data, shards.ranges(rank, low, high))
                state.update(0, data)

    def finish(self, state: StripeState, stripe: Stripe, /) -> None:
        """Compare the checksum of a stripe."""
        running = state.hashes.get(0)
        if running is not None and running.hexdigest() != self._checksums[state.number]:
            tensors = name_tensors(stripe, self._names)
            stored = (shards for span in stripe if (shards := self.tensors[span.tensor]).files)
            files = sorted({shards.files[self._rank] - self._first for shards in stored})
            paths = ", ".join(str(self._files.paths[file]) for file in files)
            raise IntegrityError(f"{paths}: the bytes of {tensors} differ from their checksum: {AGAIN}")
