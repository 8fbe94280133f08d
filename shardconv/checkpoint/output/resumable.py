"""The sink of a copy that can be interrupted and continued: it keeps a journal."""

from collections.abc import Sequence

from shardconv.checkpoint.engine.copy import Scratch, Shards, Span, Stripe, StripeState
from shardconv.checkpoint.engine.shards import ShardWriter
from shardconv.checkpoint.output.journal import Journal
from shardconv.files.output_files import LocalOutputFiles


class ResumableWriter(ShardWriter):
    """A writer that records finished stripes in a journal.

    Args:
        tensors: the shards of each tensor.
        files: the open files.
        num_stripes: number of stripes.
        journal: the journal.
        files_per_rank: number of files of a rank, which share checksums.
    """

    _files: LocalOutputFiles

    def __init__(
        self,
        tensors: Sequence[Shards],
        files: LocalOutputFiles,
        *,
        num_stripes: int,
        journal: Journal,
        files_per_rank: int,
    ) -> None:
        super().__init__(tensors, files, num_stripes=num_stripes, with_checksums=True, files_per_rank=files_per_rank)
        self._journal = journal

    def finish(self, state: StripeState, stripe: Stripe, /) -> None:
        """Store the checksums of a stripe, and record it."""
        super().finish(state, stripe)
        self._journal.record(state.number, _digests(state))

    def resume(self, number: int, stripe: Stripe, scratch: Scratch) -> int:
        """The bytes of a stripe if it is on the disk with the recorded checksums, which are stored; or else 0."""
        expected = self._journal.finished.get(number)
        if expected is None:
            return 0
        state = StripeState(number)
        for span in stripe:
            self._read(state, span, scratch)
        if _digests(state) != expected:
            return 0
        super().finish(state, stripe)
        num_bytes = sum(span.stop - span.start for span in stripe)
        self._journal.count_resumed(num_bytes)
        return num_bytes

    def _read(self, state: StripeState, span: Span, scratch: Scratch) -> None:
        """Compute the checksums of a span, in the order in which its bytes were written."""
        shards = self.tensors[span.tensor]
        for rank, _, low, high in shards.geometry.overlaps(span.start, span.stop):
            file = shards.files[rank]
            for offset, size in shards.ranges(rank, low, high):
                for at in range(0, size, scratch.block_bytes):
                    data = scratch.take("block", min(size - at, scratch.block_bytes))
                    self._files.read(file, data, offset + at)
                    state.update(file // self._files_per_rank, data)


def _digests(state: StripeState) -> dict[int, str]:
    return {rank: running.hexdigest() for rank, running in state.hashes.items()}
