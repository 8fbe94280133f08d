"""``shardconv plan --cost`` and ``--measure-link``: options in, tables out."""

import gc
import math
import os
from collections.abc import MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from shardconv.commands.options import together
from shardconv.commands.words import counted, duration
from shardconv.console import Console, ranges, size
from shardconv.errors import UsageError
from shardconv.signals import ImportPhase

if TYPE_CHECKING:
    from shardconv.runtime.estimate import CostReport, TpCost, Traffic
    from shardconv.tensor.cost import Link
    from shardconv.tensor.link import LinkReport


def _number(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """No range of click's leaves it out."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("is no number", param=parameter)
    return value


cost_options = together(
    click.option("--cost", is_flag=True, help="Show what each rank would hold and send, for each number of ranks."),
    click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Of --cost: prompts at once. [default: 1]"),
    click.option(
        "--seq",
        type=click.IntRange(min=1),
        metavar="N",
        help="Of --cost: tokens of a prompt. [default: 2048, or the model's most]",
    ),
    click.option(
        "--alpha",
        type=click.FloatRange(min=0, max=1e9),
        callback=_number,
        metavar="SECONDS",
        help="Of --cost: what a message between ranks takes, however short. [default: 5e-6]",
    ),
    click.option(
        "--beta",
        type=click.FloatRange(min=0, max=1e9),
        callback=_number,
        metavar="SECONDS",
        help="Of --cost: what a byte takes, one by the bandwidth. [default: 2e-11, of 50 GB/s]",
    ),
    click.option("--measure-link", is_flag=True, help="Measure both, in processes that torchrun starts."),
)


@dataclass(frozen=True)
class CostFlags:
    """What was given of :data:`cost_options`, under the same names."""

    cost: bool
    batch: int | None
    seq: int | None
    alpha: float | None
    beta: float | None
    measure_link: bool

    @classmethod
    def taken(cls, options: MutableMapping[str, Any]) -> Self:
        """Those of all options, which are then without them."""
        return cls(**{field.name: options.pop(field.name) for field in fields(cls)})

    def check(self, src: Path | None, **others: bool) -> None:
        """Refuse what does not go together.

        Args:
            src: the source, if one was given.
            others: further things to show, by their options, and whether they are asked for.

        Raises:
            UsageError: if it does not.
        """
        if src is None and (self.cost or not self.measure_link):
            raise click.MissingParameter(param_hint="'SRC'", param_type="argument")
        given = [name for name in ("batch", "seq", "alpha", "beta") if getattr(self, name) is not None]
        if given and not self.cost:
            raise UsageError(f"--{given[0]} is for --cost")
        if self.measure_link and (self.alpha is not None or self.beta is not None):
            raise UsageError("--measure-link measures what --alpha and --beta say: give one or the other")
        if self.measure_link and src is not None and not self.cost:
            raise UsageError("--measure-link needs no SRC but for --cost")
        if more := next((name for name, is_asked in others.items() if is_asked and (self.cost or src is None)), None):
            raise UsageError(
                f"--{more.replace('_', '-')} is not for --cost, nor for --measure-link: ask for one after the other"
            )

    @property
    def link(self) -> "Link":
        """What the options say of the link, by default what a link is by default."""
        from shardconv.tensor.cost import Link

        given = {"alpha": self.alpha, "beta": self.beta}
        return Link(**{name: value for name, value in given.items() if value is not None})


def measured_link(console: Console, *, is_reported: bool) -> "Link | None":
    """Be a process of those that measure their link; the first one gets it, and says it.

    Args:
        console: of the command.
        is_reported: whether it is the result; else it is said beside that.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys() or os.environ["WORLD_SIZE"] == "1":
        raise UsageError(
            "--measure-link times what passes between processes, two at least, which torchrun starts: torchrun "
            "--nproc-per-node N -m shardconv plan --measure-link"
        )
    gc.enable()
    from shardconv.distributed import init_parallel
    from shardconv.runtime.launch import leave
    from shardconv.tensor.link import measure_link

    report = measure_link(init_parallel(tensor=int(os.environ["WORLD_SIZE"])).tensor)
    leave()
    if os.environ["RANK"] != "0":
        return None
    if is_reported:
        console.report(report, _link_lines(report))
    else:
        console.note(_link_lines(report))
    return report.link


#: By how much a fit may be off before it is worth nothing.
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
    bandwidth = f"{size(round(link.bandwidth, 1))}/s" if link.beta else "bytes without time"
    return f"{duration(link.alpha)} a message, {bandwidth}"


def show_cost(
    src: Path,
    console: Console,
    flags: CostFlags,
    link: "Link | None",
    *,
    tp: int | None,
    **options: Any,  # noqa: ANN401
) -> None:
    """Count, and print it.

    Args:
        src: the source.
        console: of the command.
        flags: what is counted.
        link: that was measured, or None for that of the flags.
        tp: the only number of ranks, or None for all.
        options: of the plan.
    """
    gc.enable()
    with ImportPhase():
        from shardconv.runtime.estimate import MAX_TP, estimate_cost
    with console.progress("count", counts=True) as progress:
        report = estimate_cost(
            src,
            tps=None if tp is None else (tp,),
            batch=flags.batch or 1,
            seq=flags.seq,
            link=link or flags.link,
            progress=progress,
            **options,
        )
    bound = [] if tp else [f"tp: the supported sizes up to {MAX_TP}; --tp N counts another"]
    gaps = _gaps(report)
    console.report(report, [*_head(report), *bound, *gaps, ""], quiet_warnings=[*report.notes, *gaps])
    console.table(_COLUMNS, [_row(cost) for cost in report.costs])


_COLUMNS = (
    "tp", "weights", "cache", "activations", "in all", "step: sent", "of it a layer", "time", "prompts: sent", "time"
)  # fmt: skip


def _head(report: "CostReport") -> list[str]:
    """What was counted, so that it can be counted again."""
    layers = f", {counted(report.num_layers, 'layer')}" if report.num_layers else ""
    prompts, tokens = counted(report.batch, "prompt"), counted(report.seq, "token")
    return [
        f"{report.source}: {report.model or 'no model'}, family {report.family}{layers}",
        f"a rank, with {prompts} of {tokens}, and a step for the next token of each, in {report.dtype}",
        f"link: {_link(report.link)}; times are its alone, by rings, which is the most for short messages",
        *report.notes,
    ]


def _gaps(report: "CostReport") -> list[str]:
    """What was not counted, and why."""
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
