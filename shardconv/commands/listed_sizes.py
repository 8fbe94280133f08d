"""The tensor parallel sizes that reports of ``plan`` list: ``--tp`` with several sizes, and ``--memory``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click
from msgspec import Struct
from msgspec.structs import replace

from shardconv.commands.command import PLAN, REPORT, Option
from shardconv.commands.options import AS_TP, COUNT
from shardconv.support.errors import UsageError
from shardconv.support.formatting import parse_size, size

if TYPE_CHECKING:
    from shardconv.checkpoint.operations.plan_report import PlanReport
    from shardconv.runtime.estimate import CostReport, TpCost


def _sizes(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Tensor parallel sizes with commas between them, ascending."""
    texts = () if value is None else value.split(",")
    return tuple(sorted({int(COUNT.convert(text, parameter, context)) for text in texts})) or None


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The bytes of a size such as 80GB."""
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


TPS = Option(
    PLAN, "--tp tps", "Show the placement of every tensor for this tensor parallel size; with several sizes, such as "
    "2,4,8, list only these. [default: list all]",
    callback=_sizes, metavar="N[,N...]", meant_by=AS_TP,
)  # fmt: skip
MEMORY = Option(
    REPORT, "--memory", "List only sizes whose weights per rank fit, or with --cost the total. SIZE is such as 80GB.",
    callback=_bytes, metavar="SIZE",
)  # fmt: skip


def per_rank(cost: "TpCost") -> int:
    """The bytes per rank: of the weights where the total is not known."""
    return cost.memory_bytes or cost.weight_bytes


class ListedSizes(Struct, frozen=True):
    """The sizes that a report lists.

    Attributes:
        tps: the sizes of ``--tp``; None for all.
        memory: the most bytes per rank; None for any.
    """

    tps: tuple[int, ...] | None
    memory: int | None

    @property
    def tp(self) -> int | None:
        """The size of the plan, if there is one size."""
        return self.tps[0] if self.tps and len(self.tps) == 1 else None

    @property
    def is_list(self) -> bool:
        """Whether sizes are compared."""
        return self.memory is not None or (self.tps is not None and len(self.tps) > 1)

    @property
    def where(self) -> str:
        """The condition on sizes; empty for none."""
        return "" if self.memory is None else f" that fit into {size(self.memory)} per rank"

    def of_plan(self, report: "PlanReport") -> "PlanReport":
        """A report on a plan with these sizes only.

        Raises:
            UsageError: if the report does not cover a size.
        """
        covered = {*report.supported_tp, *(one.tp for one in report.blocked_tp)}
        listed = {*self.tps} if self.tps and self.tp is None else covered
        if unknown := sorted(listed - covered):
            raise UsageError(f"--tp cannot list {unknown[0]} together with other sizes: pass it alone")
        fitting = {
            tp: num_bytes
            for tp, num_bytes in zip(report.supported_tp, report.supported_bytes, strict=True)
            if tp in listed and (self.memory is None or num_bytes <= self.memory)
        }
        return replace(
            report,
            supported_tp=tuple(fitting),
            supported_bytes=tuple(fitting.values()),
            blocked_tp=tuple(one for one in report.blocked_tp if one.tp in listed),
            padded_tp=tuple(one for one in report.padded_tp if one.tp in listed),
        )

    def least(self, bytes_of: Mapping[int, int]) -> list[str]:
        """The listed size that needs the least memory and the remedy, as a line, if none of them fits.

        Args:
            bytes_of: tensor parallel size to its bytes per rank, also for sizes that are not listed.
        """
        listed = {tp: num_bytes for tp, num_bytes in bytes_of.items() if not self.tps or self.tp or tp in self.tps}
        if self.memory is None or not listed or (smallest := min(listed.values())) <= self.memory:
            return []
        tp = next(tp for tp, num_bytes in listed.items() if num_bytes == smallest)
        shown = f"{smallest:,} bytes" if size(smallest) == size(self.memory) else size(smallest)
        fitting = [str(other) for other, num_bytes in bytes_of.items() if num_bytes <= self.memory]
        remedy = f"--tp {','.join(fitting)}, or a larger --memory" if fitting else "a larger --memory"
        return [f"tp {tp} needs the least memory, {shown} per rank: pass {remedy}"]

    def of_cost(self, report: "CostReport") -> "CostReport":
        """A report on cost with these sizes only."""
        costs = tuple(
            cost
            for cost in report.costs
            if (self.tps is None or cost.tp in self.tps) and (self.memory is None or per_rank(cost) <= self.memory)
        )
        return replace(report, costs=costs)
