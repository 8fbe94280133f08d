"""Lines of a report that several commands print."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardconv.checkpoint.split.chosen_ranks import name_ranks
from shardconv.support.formatting import counted, rate, size, sizes

if TYPE_CHECKING:
    from shardconv.checkpoint.operations.merge import MergeReport
    from shardconv.checkpoint.operations.pad import PadReport
    from shardconv.checkpoint.operations.reshard import ReshardReport
    from shardconv.checkpoint.operations.split import SplitReport
    from shardconv.checkpoint.operations.unpad import UnpadReport
    from shardconv.plan.tp_sizes import PaddingReport
    from shardconv.proof.model_check import ModelCheck

    WriteReport = SplitReport | MergeReport | ReshardReport | PadReport | UnpadReport


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
    return [f"names and shapes are those of {check.model}{ignored}"]


def dry_run_notes(report: "WriteReport", *, overwrite: bool) -> list[str]:
    """Whether the destination of a dry run exists."""
    if not (report.dry_run and report.destination_exists):
        return []
    return [f"{report.path} exists: {'it would be replaced' if overwrite else '--overwrite would be needed'}"]


def written(report: "WriteReport", num_bytes: int) -> str:
    """The duration and the rate of what a run wrote; without them for a dry run.

    Args:
        report: of the run.
        num_bytes: bytes of the tensors, with those that an interrupted run had written.
    """
    return "would be written" if report.dry_run else rate(max(num_bytes - report.resumed_bytes, 0), report.seconds)


def resume_notes(report: "WriteReport", *, resume: bool) -> list[str]:
    """How much an interrupted run had written, with ``--resume``."""
    kept = f"resumed: {size(report.resumed_bytes)} were already written"
    return [kept if report.resumed_bytes else "nothing to resume: all tensors were copied"] * resume


def padding_notes(padding: "PaddingReport") -> list[str]:
    """The padding that was asked for, if there is any."""
    return [text] if (text := padding.describe()) else []


def engine_note(layout: str) -> list[str]:
    """The engine versions that read an engine's layout, and how to check another."""
    from shardconv.layouts.choice import versions_of

    versions = versions_of(layout)
    if versions is None:
        return []
    return [f"for {layout} {versions}; shardconv verify DIR --engine {layout} compares with the installed version"]


def rank_files(report: "SplitReport | ReshardReport") -> str:
    """The number and size of the rank files."""
    count, ranks = len(report.rank_bytes), getattr(report, "ranks", ())
    which = f" ({name_ranks(ranks)} of {report.tp})" if count < report.tp else ""
    if report.files_per_rank == 1:
        return f"{counted(count, 'rank file')}{which} of {sizes(report.rank_bytes)}"
    return f"{counted(count, 'rank')}{which} of {sizes(report.rank_bytes)} in {report.files_per_rank} files each"


def layout_note(layout: str) -> str:
    """The layout of rank files, where it is not the native one."""
    return "" if layout == "native" else f", layout {layout}"
