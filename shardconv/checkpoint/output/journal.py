"""The journal of a copy: which stripes are on the disk, so that an interrupted run can be continued; and its sink.

It is a file in the staging folder. Line 1 is the format, line 2 the job: everything that determines the bytes of the
new files. Each further line is a finished stripe with the checksum of its bytes on each rank. Nothing waits for the
disk: a run that continues compares the checksums with the files, so a damaged record only costs a copy.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import DecodeError, Struct, json

from shardconv.checkpoint.engine.copy import Scratch, Shards, Span, Stripe, StripeState
from shardconv.checkpoint.engine.shards import ShardWriter
from shardconv.checkpoint.output.job import Job, difference
from shardconv.files.fileio import LocalOutputFiles
from shardconv.files.folder import AnyPath
from shardconv.files.paths import staging_folder
from shardconv.support.errors import OutputError, option

JOURNAL_NAME = "journal"
_FORMAT = "shardconv journal 1"
_START_OVER = f"remove {option(resume=True)} to start over"
#: The decoder's errors for damaged lines.
_DAMAGE = (DecodeError, UnicodeDecodeError, RecursionError)


class _Record(Struct):
    """A finished stripe, with the checksum of its bytes on each rank."""

    stripe: int
    checksums: dict[int, str]


class Journal:
    """The finished stripes of one copy.

    Args:
        job: the copy.
        names: the names of the new weight files.
        resume: whether to continue an interrupted run, and to keep finished stripes if this run fails.
        nested: the names of new checkpoints in the folder, whose finished files are kept, too.
        is_nested: whether it is the journal of such a checkpoint: the outer one reports the files that are kept.

    Attributes:
        names: the names of the new weight files.
        nested: the names under which new checkpoints in the folder are written, and their final names.
        is_nested: see above.
        resume: whether the run continues an interrupted run, or can be continued.
        finished: number of each finished stripe to the checksums of its bytes, by rank.
        resumed_bytes: bytes of full tensors in stripes that were on the disk when the run began.
    """

    def __init__(
        self,
        job: Job,
        names: Sequence[str],
        *,
        resume: bool,
        nested: Sequence[str] = (),
        is_nested: bool = False,
    ) -> None:
        self.names, self.resume, self.is_nested = names, resume, is_nested
        self.nested = [str(path) for name in nested for path in (Path(name), staging_folder(Path(name)))]
        self.finished: dict[int, dict[int, str]] = {}
        self.resumed_bytes = 0
        self._job: Job = json.decode(json.encode(job))
        self._num_bytes = 0
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    @property
    def is_continued(self) -> bool:
        """Whether an interrupted run wrote the journal."""
        return self._num_bytes > 0

    def read(self, folder: Path, target: AnyPath) -> None:
        """Read the journal of an interrupted run, if it is to be continued and there is one.

        Args:
            folder: the staging folder.
            target: the destination, for messages.

        Raises:
            OutputError: if the interrupted run is another job.
        """
        path = folder / JOURNAL_NAME
        if not self.resume or not path.is_file():
            return
        *lines, _ = path.read_bytes().split(b"\n")
        if lines and lines[0] != _FORMAT.encode():
            raise OutputError(
                f"{target}: the journal of the interrupted run has another format (got {lines[0][:40]!r}, expected "
                f"{_FORMAT!r}): continue with the version of shardconv that wrote it, or {_START_OVER}"
            )
        if len(lines) < 2:
            return  # nothing was copied yet
        try:
            job = json.decode(lines[1], type=dict)
        except _DAMAGE as error:
            raise OutputError(f"{target}: the journal of the interrupted run is damaged: {_START_OVER}") from error
        if (text := difference(job, self._job)) is not None:
            raise OutputError(f"{target}: {text}: repeat its command with the same source, or {_START_OVER}")
        self._num_bytes = sum(len(line) + 1 for line in lines[:2])
        with suppress(*_DAMAGE):
            for line in lines[2:]:
                record = json.decode(line, type=_Record)
                self._num_bytes += len(line) + 1
                self.finished[record.stripe] = record.checksums

    def start(self, folder: Path) -> None:
        """Open the journal for new records; begin it, unless an interrupted run wrote it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(folder / JOURNAL_NAME, flags, 0o600)
        os.ftruncate(self._descriptor, self._num_bytes)
        if not self.is_continued:
            self._append(_FORMAT.encode() + b"\n" + json.encode(self._job))

    def is_worth_keeping(self, folder: Path) -> bool:
        """Whether a folder has files of this run that another run can continue with, until they get their final names.

        A checkpoint in the folder that is interrupted leaves something only if it is worth keeping.
        """
        found = [*self.nested, *(self.names if self.finished else ())]
        return any((folder / name).exists() for name in found)

    def record(self, stripe: int, checksums: dict[int, str]) -> None:
        """Record a finished stripe, with the checksum of its bytes on each rank."""
        self._append(json.encode(_Record(stripe, checksums)))
        self.finished[stripe] = checksums

    def count_resumed(self, num_bytes: int) -> None:
        """Count the bytes of a stripe that was on the disk."""
        with self._lock:
            self.resumed_bytes += num_bytes

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, line: bytes) -> None:
        assert self._descriptor is not None
        view = memoryview(line + b"\n")
        with self._lock:
            while view:
                view = view[os.write(self._descriptor, view) :]


class ResumableWriter(ShardWriter):
    """A writer that records finished stripes in a journal.

    Args:
        tensors: the shards of each tensor.
        files: the open files.
        journal: the journal.
        num_stripes: number of stripes.
        rank_of: as for the base class.
    """

    _files: LocalOutputFiles

    def __init__(
        self,
        tensors: Sequence[Shards],
        files: LocalOutputFiles,
        *,
        journal: Journal,
        num_stripes: int,
        rank_of: Sequence[int] = (),
    ) -> None:
        super().__init__(tensors, files, num_stripes=num_stripes, with_checksums=True, rank_of=rank_of)
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
        """Hash the bytes of a span, those of each rank in the order in which they were hashed before."""
        for file, offset, size in self.tensors[span.tensor].stored(span.start, span.stop):
            for at in range(0, size, scratch.block_bytes):
                data = scratch.take("block", min(size - at, scratch.block_bytes))
                self._files.read(file, data, offset + at)
                state.update(self._rank_of[file], data)


def _digests(state: StripeState) -> dict[int, str]:
    return {rank: running.hexdigest() for rank, running in state.hashes.items()}
