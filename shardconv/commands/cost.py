"""Memory and communication cost of each tensor parallel size: ``plan --cost`` and ``--measure-link``."""

import gc
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardconv.commands.command import COST, Flag, Option
from shardconv.commands.listed_sizes import ListedSizes, per_rank
from shardconv.commands.options import COUNT, Number, SourcePath
from shardconv.commands.shared import HtmlFile, plan_for_page, stages_note
from shardconv.support.console import Console
from shardconv.support.errors import UsageError
from shardconv.support.exits import ImportPhase
from shardconv.support.formatting import counted, duration, ranges, size

if TYPE_CHECKING:
    from shardconv.runtime.estimate import CostReport, PipelineCost, TpCost, Traffic
    from shardconv.tensor.cost import Link, LinkReport


_LINK_NUMBER = Number(float, 0, 1e9)
_ALPHA = "Latency of a message between ranks, for --cost. [default: 5e-6]"
_BETA = "Inverse bandwidth (seconds per byte), for --cost. [default: 2e-11, 50 GB/s]"
_SEQ = "Tokens per prompt of --cost. [default: 2048, or the model's limit; of a pipeline, its own number]"
_SIZE = "{} of the picture of --cost, for transformers of diffusers. [default: the pipeline's]"
_FRAMES = "Frames of the video of --cost. [default: the pipeline's]"
COST_OPTIONS = (
    Flag(COST, "--cost", "Show memory per rank and communication cost, for each tp size."),
    Option(COST, "--batch", "Prompts per batch of --cost. [default: 1]", type=COUNT, default=1, metavar="N"),
    Option(COST, "--seq", _SEQ, type=COUNT, metavar="N"),
    Option(COST, "--height", _SIZE.format("Height"), type=COUNT, metavar="PIXELS"),
    Option(COST, "--width", _SIZE.format("Width"), type=COUNT, metavar="PIXELS"),
    Option(COST, "--frames", _FRAMES, type=COUNT, metavar="N"),
    Option(COST, "--alpha", _ALPHA, type=_LINK_NUMBER, default=5e-6, metavar="SECONDS"),
    Option(COST, "--beta", _BETA, type=_LINK_NUMBER, default=2e-11, metavar="SECONDS"),
    Flag(COST, "--measure-link", "Measure alpha and beta, in processes that torchrun starts."),
)


def measured_link(console: Console, *, is_reported: bool) -> "Link | None":
    """Measure the link between the processes that torchrun started; rank 0 reports it, and returns it.

    Args:
        console: console of the command.
        is_reported: whether it is the result of the command, or only a note.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys() or os.environ["WORLD_SIZE"] == "1":
        raise UsageError(
            "--measure-link times messages between at least two processes: torchrun --nproc-per-node N -m shardconv "
            "plan --measure-link"
        )
    gc.enable()
    from shardconv.distributed import init_parallel
    from shardconv.runtime.launch import leave
    from shardconv.tensor.cost import measure_link

    report = measure_link(init_parallel(tensor=int(os.environ["WORLD_SIZE"])).tensor)
    leave()
    if os.environ["RANK"] != "0":
        return None
    if is_reported:
        console.report(report, _link_lines(report))
    else:
        console.note(_link_lines(report))
    return report.link


#: The largest relative error of a useful fit.
_MISFIT = 0.5


def _link_lines(report: "LinkReport") -> list[str]:
    worst = max(report.timings, key=lambda timing: timing.error)
    return [
        f"{report.num_ranks} ranks, {report.backend} on {report.device}: {_link(report.link)}",
        *(
            f"all-reduce of {size(timing.num_bytes)}: {duration(timing.seconds)}, by the fit "
            f"{duration(timing.fitted_seconds)}"
            for timing in report.timings
        ),
        f"the fit is off by at most {worst.error:.0%}, at {size(worst.num_bytes)}"
        f"{': measure again while nothing else runs' * (worst.error > _MISFIT)}",
        f"shardconv plan SRC --cost --alpha {report.link.alpha:.4g} --beta {report.link.beta:.4g}",
    ]


def _link(link: "Link") -> str:
    bandwidth = f"{size(round(link.bandwidth, 1))}/s" if link.beta else "infinite bandwidth"
    return f"{duration(link.alpha)} per message, {bandwidth}"


def show_cost(
    src: SourcePath,
    console: Console,
    flags: dict[str, Any],
    options: dict[str, Any],
    *,
    link: "Link | None",
    page: HtmlFile | None,
    listed: ListedSizes,
    stages: Mapping[str, Any],
) -> None:
    """Print memory and communication cost.

    Args:
        src: the source.
        console: console of the command.
        flags: the values of :data:`COST_OPTIONS`.
        options: options of the plan.
        link: the measured link; None for the link of ``flags``.
        page: the file of ``--html``, if there is one; it has the cost of all supported sizes.
        listed: the tensor parallel sizes.
        stages: the values of the options for pipeline stages.
    """
    with ImportPhase():
        from shardconv.checkpoint.sources.pipeline import is_pipeline
        from shardconv.files.paths import open_path
        from shardconv.html import write_page
        from shardconv.plan.planner import MAX_PADDED_TP
        from shardconv.runtime.estimate import MAX_TP, NUM_PADDED, PipelineCost, estimate_cost
        from shardconv.tensor.cost import Link
    if page is not None and is_pipeline(open_path(src)):
        raise UsageError(f"--html shows the cost of one model (got the pipeline {src}): pass a component")
    planned, no_plan = (None, None) if page is None else plan_for_page(src, listed.tp, stages, **options)
    curve = () if planned is None else tuple(size for size in planned.supported_tp if size <= MAX_TP)
    with console.progress("count", counts=True) as progress:
        report = estimate_cost(
            src,
            tps=None if listed.tps is None else sorted({*listed.tps, *curve}),
            **stages,
            **{name: flags[name] for name in ("batch", "seq", "height", "width", "frames")},
            link=link or Link(flags["alpha"], flags["beta"]),
            progress=progress,
            **options,
        )
    if isinstance(report, PipelineCost):
        _show_pipeline(report, console)
        return
    if page is not None:
        page.write(console, write_page(planned, no_plan=no_plan, cost=report))
    least = listed.least({cost.tp: per_rank(cost) for cost in report.costs})
    report = listed.of_cost(report)
    padded = f", and the {NUM_PADDED} up to {MAX_PADDED_TP} with the least padding" if options["pad"] else ""
    every = f"the supported sizes up to {MAX_TP}{padded}{listed.where}; --tp N counts another"
    bound = [] if listed.tps else [f"tp: {every}"]
    gaps = _gaps(report)
    console.report(report, [*_head(report), *bound, *gaps, *least, ""], quiet_warnings=[*report.notes, *gaps])
    if report.costs:
        console.table(_COLUMNS, [_row(cost) for cost in report.costs])


def _show_pipeline(report: "PipelineCost", console: Console) -> None:
    """Print the cost of each component, and the weights of all."""
    gaps = [f"{name}: {gap}" for name, one in report.components.items() for gap in _gaps(one)]
    heads = [line for one in report.components.values() for line in _head(one)]
    lines = [*dict.fromkeys(heads), f"copied components: {size(report.copied_bytes)} on every rank", *gaps, ""]
    console.report(report, lines, quiet_warnings=gaps)
    rows = [(name, *_row(cost)) for name, one in report.components.items() for cost in one.costs]
    unknown = ("-",) * (len(_COLUMNS) - 2)
    totals = [("all", str(tp), size(weights), *unknown) for tp, weights in report.weight_bytes.items()]
    console.table(("component", *_COLUMNS), [*rows, *totals])


_COLUMNS = (
    "tp", "weights", "cache", "activations", "total", "step: sent", "per layer", "time", "prompts: sent", "time"
)  # fmt: skip


def _head(report: "CostReport") -> list[str]:
    """The settings of the counted run."""
    layers = f", {counted(report.num_layers, 'layer')}" if report.num_layers else ""
    prompts = counted(report.batch, "prompt") + (f" of {counted(report.seq, 'token')}" if report.seq else "")
    frames = f" and {counted(report.frames, 'frame')}" if report.frames and report.frames > 1 else ""
    pixels = f" of {report.width} x {report.height} pixels{frames}" if report.height else ""
    is_denoising = any(cost.decode and not cost.prefill for cost in report.costs)
    step = f"a denoising step{pixels}" if is_denoising else "a step for the next token of each"
    is_counted = any(cost.not_counted is None for cost in report.costs)
    return [
        f"{report.source}: {report.model or 'no model'}, family {report.family}{layers}{stages_note(report.stages)}",
        f"per rank{f', with {prompts}, and {step}' if is_counted else ''}, in {report.dtype}",
        f"link: {_link(report.link)}; times: communication only; ring collectives; upper bound",
        *report.notes,
    ]


def _gaps(report: "CostReport") -> list[str]:
    """The sizes for which only weights were counted, by reason."""
    reasons: dict[str, list[int]] = {}
    for cost in report.costs:
        if cost.not_counted is not None:
            reasons.setdefault(cost.not_counted, []).append(cost.tp)
    return [f"only weights are counted for tp {ranges(sizes)}: {reason}" for reason, sizes in reasons.items()]


def _row(cost: "TpCost") -> tuple[str, ...]:
    held = (cost.weight_bytes, cost.cache_bytes, cost.activation_bytes, cost.memory_bytes)
    prompt = _sent(cost.prefill)
    return str(cost.tp), *map(_size, held), *_sent(cost.decode), prompt[0], prompt[2]


def _sent(traffic: "Traffic | None") -> tuple[str, str, str]:
    if traffic is None:
        return "-", "-", "-"
    return size(traffic.sent_bytes), _size(traffic.layer_bytes), duration(traffic.seconds)


def _size(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else size(num_bytes)
