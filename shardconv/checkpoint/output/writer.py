"""The one writer of checkpoints: stage, open the new files, copy all tensors in one pass, then auxiliary files.

The caller writes the manifest or index, which makes the folder a checkpoint, at the end of the same context. On exit,
the checkpoint becomes visible as a whole, or not at all.

A :class:`Team` is one process, unless a launcher such as torchrun started several: then
:mod:`shardconv.runtime.split_team` implements it with torch.distributed. Nothing here depends on torch.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, Self, TypedDict

from msgspec import Struct, field

from shardconv.checkpoint.engine.copy import CopyJob, Reader, Shards, Stripe, held_stripes
from shardconv.checkpoint.engine.layout import Layout
from shardconv.checkpoint.engine.shards import ShardWriter
from shardconv.checkpoint.output.auxiliary import AuxiliaryFiles, NewText
from shardconv.checkpoint.output.combined import total
from shardconv.checkpoint.output.destination import Destination, InnerDestination, NewFolder
from shardconv.checkpoint.output.existing import NewCheckpoint
from shardconv.checkpoint.output.job import Job, check_versions, job_of
from shardconv.checkpoint.output.journal import Journal, ResumableWriter
from shardconv.files.fileio import LocalOutputFiles
from shardconv.files.folder import AnyPath, permissions
from shardconv.files.input_files import InputFiles
from shardconv.support import Progress
from shardconv.support.errors import UsageError, option

#: For each rank the checksum of each stripe; each file of an unsharded checkpoint counts as a rank.
Checksums = tuple[tuple[str, ...], ...]


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


#: Maps checksums to the first bytes of each file, before its shards.
Identify = Callable[[Checksums], Iterable[bytes]]


class WriteOptions(Struct, frozen=True):
    """Options of all functions that write a checkpoint, each of which takes them as keyword arguments.

    Attributes:
        overwrite: replace an existing checkpoint.
        dry_run: plan and check everything that does not require reading the data, but write nothing; an existing
            checkpoint is not an error.
        resume: continue an interrupted run of the same arguments, if there is one: stripes that it finished are not
            copied again. If this run fails, finished stripes are kept.
        threads: number of threads; defaults to the number of processors, at most 8.
        progress: called with the number of copied bytes and the total.
        checksums: store checksums, which verify and merge check.

    Raises:
        UsageError: if an interrupted run would be continued by a dry run.
    """

    overwrite: bool = False
    dry_run: bool = False
    resume: bool = False
    threads: int | None = None
    progress: Progress | None = None
    checksums: bool = True

    def __post_init__(self) -> None:
        if self.resume and self.dry_run:
            raise UsageError(
                f"{option(dry_run=True)} writes nothing, so it cannot resume: remove {option(dry_run=True)} or "
                f"{option(resume=True)}"
            )

    def inner(self) -> "WriteOptions":
        """The options for a component of the checkpoint."""
        return WriteOptions(checksums=self.checksums, threads=self.threads)


class WriteReport(Struct, frozen=True, kw_only=True):
    """Result of writing a checkpoint, or with ``dry_run`` the expected result.

    Attributes:
        path: the new checkpoint.
        num_tensors: number of tensors.
        seconds: wall time in seconds.
        dry_run: whether nothing was written.
        destination_exists: whether ``path`` held a checkpoint before, which only ``overwrite`` replaces.
        resumed_bytes: bytes of full tensors that an interrupted run had written and that were not copied again.
        components: name to class of the components of a pipeline that are checkpoints of their own; empty for a model.
        copied: name to class of the other components, with the reason why they are copied.
    """

    path: str
    num_tensors: Annotated[int, total]
    seconds: float
    dry_run: bool
    destination_exists: bool
    resumed_bytes: int = 0
    components: Mapping[str, str] = {}
    copied: Mapping[str, str] = {}


class Outcome(TypedDict):
    """The fields of a :class:`WriteReport` that the writer knows."""

    path: str
    seconds: float
    dry_run: bool
    destination_exists: bool
    resumed_bytes: int


class Weights(NamedTuple):
    """The weight files of a new checkpoint.

    Attributes:
        names: their names.
        prefixes: the bytes of each before its shards.
        sizes: the bytes of each.
        shards: for each tensor the positions of its shards.
        stripes: the stripes of the full tensors.
        identify: computes the prefixes, which have the same lengths, from the checksums; None if there are none.
        rank_of: for each file its rank; empty if each file is a rank.
    """

    names: Sequence[str]
    prefixes: Sequence[bytes]
    sizes: Sequence[int]
    shards: Sequence[Shards]
    stripes: Sequence[Stripe]
    identify: Identify | None = None
    rank_of: Sequence[int] = ()

    @classmethod
    def of_layout(
        cls, names: Sequence[str], layout: Layout, stripes: Sequence[Stripe], identify: Identify | None = None
    ) -> Self:
        """The files of a layout."""
        return cls(names, layout.prefixes, layout.file_bytes, layout.shards, stripes, identify, layout.rank_of)


class Staged(NamedTuple):
    """The new checkpoint before it is visible, with its weights and auxiliary files.

    Attributes:
        folder: the folder that holds it.
        checksums: for each rank the checksum of each stripe; None without checksums.
        auxiliary_files: name to checksum of each auxiliary file.
        mode: the permissions that all files with the tensors have.
        resumed_bytes: bytes of full tensors that an interrupted run had written.
    """

    folder: NewFolder
    checksums: Checksums | None
    auxiliary_files: dict[str, str]
    mode: int
    resumed_bytes: int

    @property
    def path(self) -> Path:
        """The local folder for files that are not weights."""
        return self.folder.path

    def write(self, name: str, text: str, mode: int) -> None:
        """Write a text file with the permissions ``mode``, before the umask, into a folder that exists."""
        NewText(text, mode).write(self.path / name)

    def inner(self, name: str) -> Destination:
        """The destination of a checkpoint in this one."""
        return InnerDestination(self.folder, name)


class CheckpointWriter(Struct, frozen=True):
    """Writes one new checkpoint.

    Attributes:
        destination: its place.
        options: the options for writing.
        auxiliary: its auxiliary files.
        like: the folder whose permissions the new folder gets; None for the usual ones.
        added_files: names of the files that the caller adds.
        added_bytes: their bytes.
        nested: names of the checkpoints in folders of this one that an interrupted run may have finished.
        is_folder: whether it is a folder; a single file does not have auxiliary files.
        ranks: its ranks; None if it is not of some ranks.
        team: the processes that write it together.
    """

    destination: Destination
    options: WriteOptions
    auxiliary: AuxiliaryFiles = field(default_factory=AuxiliaryFiles)
    like: AnyPath | None = None
    added_files: tuple[str, ...] = ()
    added_bytes: int = 0
    nested: tuple[str, ...] = ()
    is_folder: bool = True
    ranks: tuple[int, ...] | None = None
    team: Team = field(default_factory=Team)

    def run(
        self,
        sources: Iterable[AnyPath],
        write: Callable[["CheckpointWriter"], int],
        *,
        began: float,
        check: Callable[[], object] = lambda: None,
    ) -> Outcome:
        """Check the destination, which in a dry run may exist, and write.

        Args:
            sources: the paths that are read.
            write: writes the checkpoint, and returns the bytes of full tensors that an interrupted run had written.
            began: when the command began, by ``time.perf_counter``.
            check: called in a dry run instead of ``write``.

        Raises:
            OutputError: if the destination must not be replaced.
            UsageError: if the destination is in a source, or contains one.
        """
        new, is_dry = self._new(), self.options.dry_run
        exists = self.destination.check(new._replace(overwrite=new.overwrite or is_dry), sources)
        resumed_bytes = 0
        if is_dry:
            check()
        else:
            resumed_bytes = write(self)
        return Outcome(
            path=str(self.destination),
            seconds=time.perf_counter() - began,
            dry_run=is_dry,
            destination_exists=exists,
            resumed_bytes=resumed_bytes,
        )

    @contextmanager
    def writing(
        self, reader: Reader, inputs: InputFiles, weights: Weights, settings: Job, read: Iterable[AnyPath] = ()
    ) -> Iterator[Staged]:
        """Write the weights and auxiliary files; on exit, the checkpoint becomes visible.

        Args:
            reader: reads the full tensors, or the parts of them that the weights need.
            inputs: its files, which are closed at the end; they must not change.
            weights: the weight files.
            settings: the command and its options: see :func:`~shardconv.checkpoint.output.job.settings_of`.
            read: other files on which the result depends.

        Raises:
            IntegrityError: if bytes or files differ from their checksums.
            SourceError: if an input file changes, or cannot be read.
            OutputError: if the destination exists, is in use, or has too little free space, or the interrupted run is
                not of the same arguments.
        """
        with inputs:
            journal = self._journal(reader, inputs, weights, settings, [*read])
            new = self._new(sum(weights.sizes) + self.auxiliary.num_bytes + self.added_bytes)
            open_folder = partial(self.destination.writing, new, journal)
            with self.team.staging(self.destination.path, open_folder) as folder:
                checksums = self._copy(reader, inputs, folder, weights, journal)
                copied = self.auxiliary.write(folder.path, self.options.threads) if self.team.is_leader else {}
                yield Staged(folder, checksums, copied, inputs.mode, 0 if journal is None else journal.resumed_bytes)
                if self.team.size > 1 and self.team.is_leader:  # before any process renames its folder
                    self.destination.check(new, ())

    def _new(self, num_bytes: int = 0) -> NewCheckpoint:
        mode = permissions([] if self.like is None else [self.like])
        names = [*self.auxiliary.names, *self.added_files]
        return NewCheckpoint(self.is_folder, self.options.overwrite, names, self.ranks, num_bytes, mode)

    def _journal(
        self, reader: Reader, inputs: InputFiles, weights: Weights, settings: Job, read: list[AnyPath]
    ) -> Journal | None:
        """The journal of the copy, if it can be continued: this process writes a local checkpoint alone."""
        has_checksums = self.options.checksums or self.options.resume
        if not (has_checksums and self.destination.keeps_journal and self.team.size == 1):
            return None
        if self.options.resume:
            check_versions([*inputs.paths, *read])
        new_files = zip(weights.names, weights.sizes, weights.prefixes, strict=True)
        job = job_of(settings, reader, inputs, new_files, read)
        return Journal(
            job, weights.names, resume=self.options.resume, nested=self.nested, is_nested=self.destination.is_nested
        )

    def _copy(
        self, reader: Reader, inputs: InputFiles, folder: NewFolder, weights: Weights, journal: Journal | None
    ) -> Checksums | None:
        """Copy the tensors to new files; returns the checksums, if the weights need them."""
        paths = [folder.path / name for name in weights.names]
        for parent in {path.parent for path in paths}:
            parent.mkdir(parents=True, exist_ok=True)
        may_exist = journal is not None and journal.is_continued
        with folder.create(paths, weights.prefixes, weights.sizes, inputs.mode, may_exist=may_exist) as outputs:
            num_stripes, rank_of = len(weights.stripes), weights.rank_of
            writer: ShardWriter
            if journal is not None and isinstance(outputs, LocalOutputFiles):
                writer = ResumableWriter(
                    weights.shards, outputs, journal=journal, num_stripes=num_stripes, rank_of=rank_of
                )
                resume = writer.resume if may_exist else None
            else:
                with_checksums = weights.identify is not None
                writer = ShardWriter(
                    weights.shards, outputs, num_stripes=num_stripes, with_checksums=with_checksums, rank_of=rank_of
                )
                resume = None
            held = held_stripes(weights.stripes, weights.shards) if paths else []
            job = CopyJob(held, reader, [writer], resume=resume, in_order=outputs.in_order)
            threads = self.options.threads or outputs.threads
            job.run(threads=threads, progress=self.team.watch(self.options.progress))
            inputs.check_unchanged()
            if weights.identify is None:
                return None
            checksums = tuple(map(tuple, writer.checksums))
            for number, (old, new) in enumerate(zip(weights.prefixes, weights.identify(checksums), strict=True)):
                assert len(old) == len(new)
                if new != old:
                    outputs.write_ranges(number, memoryview(new), [(0, len(new))])
        return checksums
