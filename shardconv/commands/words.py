"""How commands put numbers into words, for people."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardconv.console import size

if TYPE_CHECKING:
    from shardconv.checkpoint.merge import MergeReport
    from shardconv.checkpoint.pad import PadReport
    from shardconv.checkpoint.reshard import ReshardReport
    from shardconv.checkpoint.split import SplitReport
    from shardconv.checkpoint.unpad import UnpadReport
    from shardconv.plan.sizes import PaddingReport
    from shardconv.proof.model_check import ModelCheck


def duration(seconds: float) -> str:
    """Seconds, in the unit that fits."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def notes(assumed: tuple[str, ...], left_out: Mapping[str, str]) -> list[str]:
    """What was assumed, and what was left out of a source, with a line for each reason."""
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


def dry_run_notes(
    report: "SplitReport | MergeReport | ReshardReport | PadReport | UnpadReport", *, overwrite: bool
) -> list[str]:
    """What a dry run found at its destination."""
    if not (report.dry_run and report.destination_exists):
        return []
    return [f"{report.path} exists: {'it would be replaced' if overwrite else '--overwrite would be needed'}"]


def padding_notes(padding: "PaddingReport") -> list[str]:
    """What is padded as asked, if anything is."""
    return [text] if (text := padding.describe()) else []


def engine_note(layout: str) -> list[str]:
    """What an engine's layout is for, and what settles whether another version reads it."""
    from shardconv.layouts.choice import versions_of

    versions = versions_of(layout)
    if versions is None:
        return []
    return [
        f"for {layout} {versions}; shardconv verify DIR --engine {layout} compares with the version that is installed"
    ]


def layout_note(layout: str) -> str:
    """The layout of rank files, where it is not the native one."""
    return "" if layout == "native" else f", layout {layout}"


def sizes(rank_bytes: tuple[int, ...]) -> str:
    """What the ranks have: one number, or from the least to the most."""
    low, high = size(min(rank_bytes)), size(max(rank_bytes))
    return low if low == high else f"{low} to {high}"


def counted(number: int, thing: str) -> str:
    """So many of a thing."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def rate(num_bytes: int, seconds: float) -> str:
    """How long it took, and how fast that was."""
    return f"{seconds:.1f} s, {size(num_bytes / seconds)}/s"
