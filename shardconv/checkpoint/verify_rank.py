"""Verify one rank file against its checksums, without the files of other ranks."""

from collections.abc import Sequence
from pathlib import Path

from shardconv.checkpoint.copy import CopyJob, Progress, Scratch, Shards, Span, Stripe, StripeState
from shardconv.checkpoint.fileio import Bytes, InputFiles
from shardconv.checkpoint.manifest import Manifest
from shardconv.errors import IntegrityError


def verify_rank(manifest: Manifest, folder: Path, rank: int, progress: Progress | None = None) -> None:
    """Check one rank file against its checksums without reading the others. Does nothing without checksums.

    Args:
        manifest: of the split checkpoint.
        folder: of the split checkpoint.
        rank: the rank of the file.
        progress: called with the number of checked bytes of the full tensors and the total.

    Raises:
        IntegrityError: if bytes differ from those that were written.
        SourceError: if the file cannot be read, or has the wrong size.
    """
    layout, path = manifest.rank_layout, manifest.rank_paths(folder)[rank]
    with InputFiles([path], [layout.prefixes[rank]], [layout.file_bytes[rank]]) as inputs:
        verify_open_rank(manifest, inputs, rank, progress)


def verify_open_rank(manifest: Manifest, inputs: InputFiles, rank: int, progress: Progress | None = None) -> None:
    """Check an open rank file like :func:`verify_rank`."""
    if manifest.checksums is None:
        return
    shards, names = manifest.rank_layout.shards, list(manifest.tensors)
    reader = _ChecksumReader(shards, inputs, rank, manifest.checksums[rank], names)
    CopyJob(manifest.stripes, reader, []).run(progress=progress)


class _ChecksumReader:
    """A reader of one rank file that only computes and compares checksums."""

    def __init__(
        self, tensors: Sequence[Shards], files: InputFiles, rank: int, checksums: Sequence[str], names: Sequence[str]
    ) -> None:
        self.tensors = tensors
        self._files, self._rank, self._checksums, self._names = files, rank, checksums, names

    def prefetch(self, stripe: Stripe) -> None:
        """Do nothing: the operating system detects that the file is read sequentially."""

    def gather(self, state: StripeState, span: Span, _block: Bytes, scratch: Scratch, /) -> None:
        """Read the bytes of a span that are in the rank's shard; the block is not changed."""
        shards = self.tensors[span.tensor]
        for rank, _, low, high in shards.geometry.overlaps(span.start, span.stop):
            if rank == self._rank:
                data = scratch.take("shard", high - low)
                self._files.read(0, data, shards.offsets[rank] + low)
                state.update(0, data)

    def finish(self, state: StripeState, stripe: Stripe, /) -> None:
        """Compare the checksum of a stripe."""
        running = state.hashes.get(0)
        if running is not None and running.hexdigest() != self._checksums[state.number]:
            first, last = self._names[stripe[0].tensor], self._names[stripe[-1].tensor]
            tensors = first if first == last else f"{first} ... {last}"
            raise IntegrityError(f"{self._files.paths[0]}: the bytes of {tensors} differ from their checksum")
