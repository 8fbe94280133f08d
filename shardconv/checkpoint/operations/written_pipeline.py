"""Operations that write a pipeline: the same operation on each component, and a copy of all other files.

The result is a folder of the same shape, which becomes visible as a whole.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import fields, replace

from shardconv.checkpoint.engine.layout import MANIFEST_NAME, PIPELINE_NAME
from shardconv.checkpoint.engine.shards import ShardReader
from shardconv.checkpoint.operations.pipeline import Options, call_on, part_of
from shardconv.checkpoint.output.auxiliary import AuxiliaryFiles
from shardconv.checkpoint.output.combined import combine
from shardconv.checkpoint.output.destination import Destination, InnerDestination, NewFolder, find_destination
from shardconv.checkpoint.output.job import Job, options_of
from shardconv.checkpoint.output.writer import CheckpointWriter, Staged, Team, Weights, WriteOptions, WriteReport
from shardconv.checkpoint.sources.pipeline import Pipeline
from shardconv.checkpoint.split.manifest_file import write_sealed
from shardconv.checkpoint.split.split_pipeline import PipelineManifest, SplitComponent
from shardconv.files.checksums import checksum_file
from shardconv.files.folder import AnyPath, permissions, walk
from shardconv.files.input_files import InputFiles
from shardconv.files.paths import staging_folder
from shardconv.files.weight_formats import INDEX_NAME
from shardconv.support.errors import UsageError, option

R = TypeVar("R")


class Written(Struct, frozen=True):
    """The way in which an operation writes a pipeline: ``on_pipelines(Written(...))``.

    Attributes:
        command: its name.
        open: opens the pipeline that is read.
        name: the default name of the destination, with ``{name}`` for the name of the pipeline, and options.
        is_split: whether the result is a split pipeline.
        is_finished: whether a component that an interrupted run has written is correct, given the folders that it was
            made from; by default none is, and all are written again.
    """

    command: str
    open: Callable[[Sequence[AnyPath], Options], Pipeline]
    name: str
    is_split: bool = False
    is_finished: Callable[[Sequence[AnyPath], AnyPath], bool] = lambda _made_of, _folder: False

    def __call__(self, operation: Callable[..., R], paths: list[AnyPath], options: Options) -> R:
        """Apply an operation to all components of a pipeline."""
        began = time.perf_counter()
        settings = options_of(self.command, options)
        how = WriteOptions(**{one.name: options[one.name] for one in fields(WriteOptions) if one.name in options})
        given = find_destination(options.pop("dst", None), resume=how.resume)
        pipeline = self.open(paths, options)
        destination = given or Destination(Path(self.name.format(name=pipeline.name, **options)))
        if destination.path.suffix == ".safetensors":
            raise UsageError(f"{destination}: is one file (expected a folder, for a pipeline): change {option('dst')}")
        report: R = _Run(self, operation, pipeline, options, how, destination, settings).run(began)
        return report


class _Run(Struct, frozen=True):
    """One run of an operation that writes a pipeline."""

    written: Written
    operation: Callable[..., Any]
    pipeline: Pipeline
    options: Options
    how: WriteOptions
    destination: Destination
    settings: Job

    @property
    def team(self) -> Team:
        return self.options.get("team") or Team()

    def run(self, began: float) -> Any:  # noqa: ANN401 - the report of any operation
        """Plan all components, then write them."""
        pipeline = self.pipeline
        planned = {name: self._plan(name) for name in pipeline.components}
        first: Any = next(iter(planned.values()))
        writer = CheckpointWriter(
            self.destination, self.how, AuxiliaryFiles(pipeline.files, expected=pipeline.expected), like=pipeline.first,
            added_files=pipeline.inner_files, added_bytes=sum(map(_new_bytes, planned.values())),
            nested=tuple(pipeline.components), ranks=getattr(first, "ranks", None), team=self.team,
        )  # fmt: skip
        reports = dict(planned)

        def write(writer: CheckpointWriter) -> int:
            return self._write(writer, reports)

        outcome = writer.run(pipeline.paths, write, began=began)
        return combine(reports, pipeline, **outcome)

    def _plan(self, name: str) -> WriteReport:
        """The report of a dry run of a component, which checks everything except the data."""
        inner = InnerDestination(NewFolder(self.destination.path), name)
        inner.is_remote = self.destination.is_remote
        report: WriteReport = self._call(name, inner, dry_run=True, resume=False, overwrite=False, progress=None)
        return report

    def _call(self, name: str, inner: Destination, **changed: object) -> Any:  # noqa: ANN401 - see run
        return call_on(self.operation, self.pipeline, name, {**self.options, "dst": inner, **changed})

    def _write(self, writer: CheckpointWriter, reports: dict[str, Any]) -> int:
        """Write all components, and replace their reports; returns the bytes that an interrupted run had written."""
        team, pipeline, planned = self.team, self.pipeline, dict(reports)
        team.meet(self.destination.path, lambda: {"files of pipelines": writer.auxiliary.checksums()})
        inputs = InputFiles([], [], [])
        reader, nothing = ShardReader([], inputs, labels=[], names=[]), Weights([], [], [], [], [])
        read = [one for path in pipeline.paths for one in walk(path) if one.is_file()]
        read += [path for adapter in self.options.get("adapters", ()) for path in adapter.source.paths]
        with writer.writing(reader, inputs, nothing, self.settings, read) as staged:
            total, done = sum(map(_full_bytes, planned.values())), 0
            for name, report in planned.items():
                size = _full_bytes(report)
                reports[name] = self._finished(name, report, staged) or self._call(
                    name, staged.inner(name), overwrite=False, progress=part_of(self.how.progress, done, size, total)
                )
                done += size
            if self.written.is_split and team.is_leader:
                manifest = self._manifest(staged, reports)
                write_sealed(manifest, staged.path / PIPELINE_NAME, mode=permissions([pipeline.first / INDEX_NAME]))
        return sum(report.resumed_bytes for report in reports.values())

    def _finished(self, name: str, planned: WriteReport, staged: Staged) -> WriteReport | None:
        """The report on a component that an interrupted run has finished; None if it has to be written."""
        folder = staged.path / name
        if not folder.exists():
            return None
        shutil.rmtree(staging_folder(folder), ignore_errors=True)  # if the run was killed when it had the final name
        if self.written.is_finished([path / name for path in self.pipeline.paths], folder):
            return replace(planned, dry_run=False, resumed_bytes=_full_bytes(planned))
        shutil.rmtree(folder)
        return None

    def _manifest(self, staged: Staged, reports: Mapping[str, Any]) -> PipelineManifest:
        components = {
            name: SplitComponent(kind, checksum_file(staged.path / name / MANIFEST_NAME))
            for name, kind in self.pipeline.components.items()
        }
        first = next(iter(reports.values()))
        return PipelineManifest(
            tp=first.tp, ranks=getattr(first, "ranks", None) or tuple(range(first.tp)), components=components,
            copied=self.pipeline.copied, files=staged.auxiliary_files, ignore=self.pipeline.ignore,
        )  # fmt: skip


def _full_bytes(report: Any) -> int:  # noqa: ANN401 - a report of any operation
    """Bytes of the full tensors that an operation copies."""
    size: int = getattr(report, "source_bytes", None) or report.num_bytes
    return size


def _new_bytes(report: Any) -> int:  # noqa: ANN401 - a report of any operation
    """Bytes of the tensors that an operation writes."""
    size: int = sum(getattr(report, "rank_bytes", ())) or report.num_bytes
    return size
