"""HTML pages of reports: plans of made-up tensors, and what is in a page without a browser.

python -m tests.support.pages    # prints the size of a page of 100,000 tensors
"""

import json
from collections.abc import Iterable
from html.parser import HTMLParser
from typing import Any

from msgspec import structs

from shardconv.checkpoint.operations.plan_report import PlanReport, TensorReport
from shardconv.html import write_page
from shardconv.plan.placement import Interval
from shardconv.plan.planner import NO_PADDING

#: Names that would do harm as markup, as script or as text that looks like other text.
HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>.0.weight',
    "{{script}}${alert(3)}<!--<script>",
    "model.\u202ethgiew.\x07\ud800",
    "__proto__",
)


class Parsed(HTMLParser):
    """The elements of a page: tags with attributes, and the text of scripts and styles."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))

    @property
    def data(self) -> dict[str, Any]:
        """The block of data."""
        place = [tag for tag, _ in self.tags if tag == "script"]
        assert place == ["script", "script"]
        return json.loads(next(text for tag, text in self.texts if tag == "script"))


def tensor_report(name: str, rows: int = 8, tp: int = 2, *, is_sharded: bool = True) -> TensorReport:
    """A matrix of ``rows`` rows and 4 columns in BF16, sharded by rows or replicated."""
    local = rows // tp if is_sharded else rows
    ranks = tuple((Interval(rank * local, (rank + 1) * local),) for rank in range(tp)) if is_sharded else ()
    return TensorReport(
        name, "BF16", (rows, 4), "dim 0" if is_sharded else "replicated", "a test: colwise **", ((local, 4),) * tp,
        (8 * local,) * tp, "colwise" if is_sharded else "replicate", (), 0 if is_sharded else None, ranks,
    )  # fmt: skip


def plan_report(tensors: Iterable[TensorReport], *, source: str = "made-up", tp: int = 2) -> PlanReport:
    """The report of a plan with these tensors."""
    found = tuple(tensors)
    return PlanReport(
        source=source, family="test", tp=tp, num_tensors=len(found), num_bytes=sum(8 * one.shape[0] for one in found),
        assumed=(), left_out={}, supported_tp=(1, 2), supported_bytes=(2, 1), blocked_tp=(), padded_tp=(),
        padding=NO_PADDING, rank_bytes=tuple(sum(one.shard_bytes[rank] for one in found) for rank in range(tp)),
        tensors=found,
    )  # fmt: skip


def many_tensors() -> list[TensorReport]:
    """100,000 tensors, with the names of a model of 60 layers, most of which have 555 experts."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
             for layer in range(3, 63) for expert in range(555) for name in ("gate", "up", "down")]  # fmt: skip
    names += [f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in range(3) for name in ("gate", "up", "down")]
    names += [f"model.layers.{layer}.input_layernorm.weight" for layer in range(63)]
    names += [f"model.extra_{number}.weight" for number in range(28)]
    report_of = {is_sharded: tensor_report("", is_sharded=is_sharded) for is_sharded in (True, False)}
    return [structs.replace(report_of["norm" not in name], name=name) for name in names]


if __name__ == "__main__":
    print(f"{len(write_page(plan_report(many_tensors()))):,} bytes")
