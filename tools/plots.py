"""Bar charts of benchmarks/RESULTS.md, as SVG for the documentation site.

The hook of the site inserts a chart above each table of results. Charts take their colors from the theme's variables,
so they follow its light and dark mode. A bar ends at the measured figure, a tick marks the goal, and rows with the same
unit share a scale.
"""

import re
from html import escape
from typing import NamedTuple

#: Sizes in pixels; a chart is scaled down to the width of its page.
_WIDTH, _BARS, _ROW, _BAR, _TOP = 620, 500, 44, 14, 6
_TABLE = re.compile(r"^\| claim \|.*\n\|[-|]+\n((?:\|.*\n?)+)", re.MULTILINE)
_UNIT = re.compile(r"\b(?:s|MB)\b")


class Result(NamedTuple):
    """A row of a table of results."""

    claim: str
    goal: str
    figure: str
    detail: str

    @property
    def value(self) -> float:
        """The figure as a number."""
        return float(self.figure)

    @property
    def limit(self) -> float | None:
        """The number of the goal, if there is one."""
        number = re.match(r"[\d.]+", self.goal)
        return float(number[0]) if number else None

    @property
    def unit(self) -> str:
        """The unit that the claim names; empty for a ratio."""
        found = _UNIT.findall(self.claim.replace(" GB (", " "))
        return found[-1] if found and " / " not in self.claim else ""


def sections(text: str) -> dict[str, str]:
    """Name of each section of RESULTS.md to its text without the heading."""
    return {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in text.split("\n## ")[1:]}


def results(section: str) -> list[Result]:
    """The rows of a section's table."""
    table = _TABLE.search(section)
    rows = [line.strip("| ").split(" | ") for line in table[1].splitlines()] if table else []
    return [Result(*row) for row in rows]


def with_charts(text: str) -> str:
    """Markdown with a chart above each table of results."""
    return _TABLE.sub(lambda table: f"{chart(results(table[0]))}\n\n{table[0]}", text)


def chart(rows: list[Result]) -> str:
    """A horizontal bar for each row, as one line of SVG."""
    scales = {unit: max(_largest(row) for row in rows if row.unit == unit) for unit in {row.unit for row in rows}}
    marks = "".join(_row(row, _TOP + number * _ROW, scales[row.unit]) for number, row in enumerate(rows))
    height = _TOP + len(rows) * _ROW
    summary = escape("; ".join(f"{row.claim}: {row.figure}" for row in rows), quote=True)
    return (
        f'<figure class="chart"><svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="{summary}">{marks}</svg></figure>'
    )


def _largest(row: Result) -> float:
    return max(row.value, row.limit or 0)


def _row(row: Result, top: float, scale: float) -> str:
    bar, middle = top + 18, top + 18 + _BAR - 3
    length = _BARS * row.value / scale
    marks = [
        f'<text x="0" y="{top + 12}">{escape(row.claim)}</text>',
        f'<rect class="track" x="0" y="{bar}" width="{_BARS}" height="{_BAR}"/>',
        f'<rect class="bar" x="0" y="{bar}" width="{length:.1f}" height="{_BAR}"/>',
        f'<text class="figure" x="{_BARS + 10}" y="{middle}">{row.figure} {row.unit}</text>',
    ]
    if row.limit is not None:
        line = f"M{_BARS * row.limit / scale:.1f} {bar - 3}v{_BAR + 6}"
        marks.append(f'<path class="goal" d="{line}"><title>goal: {escape(row.goal)}</title></path>')
    return "".join(marks)
