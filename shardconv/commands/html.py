"""``--html FILE`` of ``plan`` and ``verify``: a report as one page."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from msgspec import Struct

from shardconv.commands.options import SourcePath
from shardconv.support.console import Console
from shardconv.support.errors import OutputError, ShardconvError, UsageError
from shardconv.support.formatting import size

if TYPE_CHECKING:
    from shardconv.checkpoint.operations.plan_report import PlanReport
    from shardconv.checkpoint.sources.planning import PlanOptions


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
    from shardconv.html.page import MARK

    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OutputError(f"{path}: is a folder, a link or a device (expected a file): choose another file for --html")
    if not path.exists():
        return
    if not overwrite:
        raise OutputError(f"{path}: exists: choose another file for --html, or pass --overwrite")
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
