"""Steps and lines of reports that several commands share, and ``--html FILE``: a report as one page."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from msgspec import Struct

from shardconv.checkpoint.split.chosen_ranks import name_ranks
from shardconv.commands.command import chosen
from shardconv.commands.options import SOURCE_OPTIONS, SourcePath
from shardconv.plan.engines import CHECKED
from shardconv.support import Progress
from shardconv.support.console import Console
from shardconv.support.errors import OutputError, ShardconvError, UsageError
from shardconv.support.exits import ImportPhase
from shardconv.support.formatting import counted, rate, size, sizes

if TYPE_CHECKING:
    from shardconv.checkpoint.operations.plan_report import PlanReport
    from shardconv.checkpoint.operations.reshard import ReshardReport
    from shardconv.checkpoint.operations.split import SplitReport
    from shardconv.checkpoint.operations.verify import VerifyReport
    from shardconv.checkpoint.output.writer import WriteReport
    from shardconv.checkpoint.sources.planning import PlanOptions
    from shardconv.hf.names import ModelCheck
    from shardconv.plan.planner import PaddingReport
    from shardconv.runtime.run import RunReport


@contextmanager
def source_progress(console: Console, what: str) -> Iterator[Progress | None]:
    """A callback for the progress of a command; the headers of remote files that it reads first have their own.

    Args:
        console: console of the command.
        what: name of the activity.
    """
    from shardconv.files.folder import header_progress

    with (
        console.progress("read headers", counts=True) as headers,
        header_progress(headers),
        console.progress(what) as progress,
    ):
        yield progress


def check_source(src: SourcePath, options: dict[str, Any]) -> "ModelCheck":
    """Compare a source with the model that its config names; ``options`` are the command's."""
    with ImportPhase():
        from shardconv.proof.model_check import check_source as run
    return run(src, **chosen(options, SOURCE_OPTIONS))


def show_written(
    console: Console,
    report: "WriteReport",
    what: str,
    options: Mapping[str, Any],
    *,
    num_bytes: int,
    copied_bytes: int | None = None,
    is_warning: bool = False,
    lines: Sequence[str] = (),
    quiet_warnings: Sequence[str] = (),
) -> None:
    """Print the report of a checkpoint that was written.

    Args:
        console: console of the command.
        report: report of the run.
        what: phrase for the kind of output, which follows the path, the number and the size of the tensors.
        options: options of the command.
        num_bytes: bytes of the tensors.
        copied_bytes: bytes that this run copied and an interrupted run had written; all bytes by default.
        is_warning: whether the first line is a warning.
        lines: further lines.
        quiet_warnings: the warnings among them.
    """
    copied = max((num_bytes if copied_bytes is None else copied_bytes) - report.resumed_bytes, 0)
    effect = "would be written" if report.dry_run else rate(copied, report.seconds)
    first = f"{report.path}: {report.num_tensors} tensors, {size(num_bytes)}, {what}; {effect}"
    warnings = [*([first] if is_warning else []), *quiet_warnings]
    lines = [first, *component_notes(report), *lines, *_closing_lines(report, options)]
    console.report(report, lines, quiet_warnings=warnings)


def _closing_lines(report: "WriteReport", options: Mapping[str, Any]) -> Iterator[str]:
    """Lines about ``--resume``, and about a destination that exists at a dry run."""
    if options["resume"]:
        kept = f"resumed: {size(report.resumed_bytes)} were already written"
        yield kept if report.resumed_bytes else "nothing to resume: all tensors were copied"
    if report.dry_run and report.destination_exists:
        effect = "it would be replaced" if options["overwrite"] else "--overwrite would be needed"
        yield f"{report.path} exists: {effect}"


def notes(assumed: tuple[str, ...], left_out: Mapping[str, str]) -> list[str]:
    """The assumptions, and the files of the source that were left out, one line per reason."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    lines = [f"left out ({reason}): {', '.join(names[reason])}" for reason in names]
    return [*(f"assumed: {sentence}" for sentence in assumed), *lines]


def model_notes(check: "ModelCheck | None") -> list[str]:
    """The result of a comparison with the model, if there was one."""
    if check is None:
        return []
    ignored = f"; not used by it: {len(check.ignored)}, as {check.ignored[0]}" if check.ignored else ""
    return [f"names and shapes match {check.model}{ignored}"]


def component_notes(report: "WriteReport | VerifyReport | PlanReport") -> list[str]:
    """The components of a pipeline, if it is one."""
    if not report.components:
        return []
    copied: dict[str, list[str]] = {}
    for name, kind_and_reason in report.copied.items():
        copied.setdefault(kind_and_reason.rpartition(", ")[2], []).append(name)
    sharded = ", ".join(f"{name} ({kind})" for name, kind in report.components.items())
    return [f"components: {sharded}", *(f"copied ({reason}): {', '.join(copied[reason])}" for reason in copied)]


def adapter_notes(names: Collection[str]) -> list[str]:
    """The adapters that are written with the model, if there are any."""
    return [f"with {counted(len(names), 'adapter')}: {', '.join(names)}"] if names else []


def padding_notes(padding: "PaddingReport") -> list[str]:
    """The padding that was asked for, if there is any."""
    return [text] if (text := padding.describe()) else []


def engine_note(layout: str) -> list[str]:
    """The engine versions that read an engine's layout, and how to check another."""
    from shardconv.layouts.choice import versions_of

    if (versions := versions_of(layout)) is None:
        return []
    check = f"; shardconv verify DIR --engine {layout} compares with the installed version"
    return [f"for {layout} {versions}{check if layout == CHECKED else ''}"]


def rank_files(report: "SplitReport | ReshardReport") -> str:
    """The number and size of the rank files, and their layout."""
    count, ranks, num_ranks = len(report.rank_bytes), getattr(report, "ranks", ()), num_ranks_of(report)
    which = f" ({name_ranks(ranks)} of {num_ranks})" if count < num_ranks else ""
    if report.files_per_rank == 1:
        files = f"{counted(count, 'rank file')}{which} of {sizes(report.rank_bytes)}"
    else:
        most = f"{'up to ' if report.stages else ''}{report.files_per_rank}"
        files = f"{counted(count, 'rank')}{which} of {sizes(report.rank_bytes)} in {most} files each"
    return f"{files}{layout_note(report.layout)}{stages_note(report.stages)}"


def num_ranks_of(report: "SplitReport | ReshardReport | RunReport") -> int:
    """The number of ranks of all pipeline stages."""
    return max(report.tp, report.ep) * max(len(report.stages), 1)


def stages_note(num_layers: Sequence[int]) -> str:
    """The number of layers of each pipeline stage, where there are several."""
    return f", {len(num_layers)} stages of {', '.join(map(str, num_layers))} layers" if num_layers else ""


def layout_note(layout: str) -> str:
    """The layout of rank files, where it is not the native one."""
    return "" if layout == "native" else f", layout {layout}"


# --- reports as one page ----------------------------------------------------------------------------------------------


class HtmlFile(Struct, frozen=True):
    """The file of ``--html``, which may be written."""

    path: Path
    overwrite: bool

    @classmethod
    def of(cls, path: Path | None, *, overwrite: bool, sources: Iterable[SourcePath | None]) -> "HtmlFile | None":
        """Check the values of the options, before anything else takes time; None without ``--html``.

        Args:
            path: the file.
            overwrite: whether a page may be replaced.
            sources: the paths that the command reads.

        Raises:
            UsageError: if an option contradicts ``--html``.
            OutputError: if the file must not be written.
        """
        if path is None:
            if overwrite:
                raise UsageError("--overwrite applies to --html only: add --html FILE, or remove it")
            return None
        if str(path) == "-":
            raise UsageError("--html - is stdout, which has the result (expected a file): pass the name of a file")
        for source in (Path(source) for source in sources if isinstance(source, Path)):
            if path.resolve().is_relative_to(source.resolve()):
                raise UsageError(f"{path}: is in the source {source}: choose another file for --html")
        _check_file(path, overwrite=overwrite)
        return cls(path, overwrite)

    def write(self, console: Console, page: bytes) -> None:
        """Write the page, all of it or nothing.

        Raises:
            OutputError: if it cannot be written.
        """
        from shardconv.checkpoint.output.existing import NewCheckpoint
        from shardconv.checkpoint.output.staging import staging

        _check_file(self.path, overwrite=self.overwrite)  # again: a command can take hours
        new = NewCheckpoint(is_folder=False, overwrite=self.overwrite, num_bytes=len(page))
        with staging(self.path, new) as folder:
            (folder / self.path.name).write_bytes(page)
        console.note([f"{self.path}: page of {size(len(page))}"])


def _check_file(path: Path, *, overwrite: bool) -> None:
    """Check that nothing but a page is replaced, and only on request."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OutputError(f"{path}: is a folder, a link or a device (expected a file): choose another file for --html")
    if not path.exists():
        return
    if not overwrite:
        raise OutputError(f"{path}: exists: choose another file for --html, or pass --overwrite")
    from shardconv.html import MARK

    with path.open("rb") as file:
        if (begin := file.read(len(MARK))) and begin != MARK:
            raise OutputError(f"{path}: is not a page of shardconv, so it is not overwritten: choose another file")


def plan_for_page(
    src: SourcePath, tp: int | None, stages: Mapping[str, Any] | None = None, **options: "Unpack[PlanOptions]"
) -> "tuple[PlanReport | None, str | None]":
    """The plan to show beside another report, or the reason why there is none."""
    from shardconv.checkpoint.operations.plan_report import report_plan

    try:
        return report_plan(src, tp=tp, **(stages if tp and stages else {}), **options), None
    except ShardconvError as error:
        return None, error.with_options()
