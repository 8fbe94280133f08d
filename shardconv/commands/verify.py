"""``shardconv verify``: compare a split checkpoint with its checksums, its source or an engine."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from shardconv.checkpoint.split.chosen_ranks import name_ranks
from shardconv.commands.command import CHECKS, OneProcessCommand, Option
from shardconv.commands.options import (
    DIRS,
    HTML_OPTIONS,
    SOURCE_OPTIONS,
    SOURCE_PATH,
    SourcePath,
    display_options,
    threads_option,
)
from shardconv.commands.shared import HtmlFile, component_notes, layout_note, notes, plan_for_page, source_progress
from shardconv.files.paths import local_path
from shardconv.plan.engines import CHECKED
from shardconv.support.console import Console
from shardconv.support.errors import UsageError
from shardconv.support.formatting import counted, size

if TYPE_CHECKING:
    from shardconv.checkpoint.operations.verify import VerifyReport
    from shardconv.engines.check import EngineReport

#: The most differences that are printed.
_MAX_LINES = 20

_AGAINST = "Also compare every byte with this source."
_ENGINE = "Also compare with the model that this engine, which has to be installed, constructs on each rank."


@click.command(
    cls=OneProcessCommand,
    params=[
        DIRS,
        *SOURCE_OPTIONS,
        Option(CHECKS, "--against", _AGAINST, type=SOURCE_PATH, metavar="SRC"),
        Option(CHECKS, "--engine", _ENGINE, type=click.Choice([CHECKED])),
        threads_option(CHECKS, "reading"),
        *HTML_OPTIONS,
        *display_options(),
    ],
    epilog="shardconv verify llama-tp8\nshardconv verify host0/llama-tp8 host1/llama-tp8\n"
    "shardconv verify llama-tp8 --against llama",
)
def verify(
    console: Console,
    src: tuple[SourcePath, ...],
    *,
    engine: str | None,
    html: Path | None,
    overwrite: bool,
    **options: Any,
) -> None:
    """Compare the split checkpoint DIR with its checksums.

    Pass all folders if each has only some ranks. Exits 3 on a difference.
    """
    from shardconv.checkpoint.operations.verify import verify as run

    page = HtmlFile.of(html, overwrite=overwrite, sources=(*src, options["against"]))
    checked = _check_engine(src) if engine is not None else None
    with source_progress(console, "verify") as progress:
        report = run(src, progress=progress, **options)
    remedies = [_remedy(report)] if report.differences else []  # differences from an engine have remedies of their own
    if checked is not None:
        engines = (*report.checked, f"{checked.engine} {checked.version}")
        report = replace(report, checked=engines, differences=(*report.differences, *checked.differences))
    if page is not None:
        page.write(console, _page(src, report, remedies))
    warnings = _warnings(report, remedies)
    verdict = ["correct"] if _is_sure(report) and not report.differences else []
    console.report(report, [*_head(report), *warnings, *verdict], quiet_warnings=warnings)
    if report.differences:
        sys.exit(3)


def _page(src: tuple[SourcePath, ...], report: "VerifyReport", remedies: list[str]) -> bytes:
    """The page of a verification, with the stored plan, which is the same in all folders."""
    from shardconv.html import write_page

    plan, no_plan = plan_for_page(src[0], None)
    if plan is not None and plan.tp is None:
        plan, no_plan = None, f"{src[0]}: is not a split checkpoint of shardconv, which stores its plan"
    return write_page(plan, no_plan=no_plan, verify=report, remedy="; ".join(remedies))


def _check_engine(src: tuple[SourcePath, ...]) -> "EngineReport":
    if len(src) > 1:
        raise UsageError(f"--engine checks one folder with all ranks (got {len(src)} folders): remove it, or pass one")
    from shardconv.engines.check import check_engine

    return check_engine(local_path(src[0]))


def _remedy(report: "VerifyReport") -> str:
    """The remedy for differences, in the files themselves or from the source alone."""
    again = "use the source" if report.external_layout else "split the source again"
    if report.is_damaged:
        return again if report.external_layout else f"copy the damaged files again, or {again}"
    return f"pass the source that was split to --against; if you did, {again}"


def _is_sure(report: "VerifyReport") -> bool:
    return report.has_checksums or report.is_compared


def _head(report: "VerifyReport") -> list[str]:
    count = max(report.tp, report.ep) * report.pp
    ranks = counted(count, "rank") if len(report.ranks) == count else f"{name_ranks(report.ranks)} of {count}"
    held = f"{ranks}, {report.num_tensors} tensors, {size(report.num_bytes)}"
    return [
        f"{', '.join(report.paths)}: {held}{layout_note(report.layout)}",
        *component_notes(report),
        f"checked: {', '.join(report.checked)}",
        *notes((), report.left_out),
    ]


def _warnings(report: "VerifyReport", remedies: list[str]) -> list[str]:
    origin = f"has files of {report.external_layout}" if report.external_layout else "was split with --no-checksums"
    more = len(report.differences) - _MAX_LINES
    warnings = [
        *(f"{name}: is in the folder, but not part of this split checkpoint" for name in report.other_weights),
        *([] if report.has_checksums else [f"no checksums: the checkpoint {origin}"]),
        *(f"differs: {line}" for line in report.differences[:_MAX_LINES]),
        *([f"... and {more} more (--json has all)"] if more > 0 else []),
    ]
    if remedies:
        failed = counted(len(report.differences), "difference")
        warnings.append(f"verification failed: {failed}: {remedies[0]}")
    elif not report.differences and not _is_sure(report):
        warnings.append("no difference found, but without checksums most would not show: --against SRC compares all")
    return warnings
