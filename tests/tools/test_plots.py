"""Charts of benchmarks/RESULTS.md on the documentation site."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.plots import chart, results, sections, with_charts

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text("utf-8")
TABLE = """Some text.

| claim | goal | measured | detail |
|---|---|---|---|
| split / cp, tmpfs | 0.5 or less | 0.25 | 1.85 s, cp 4.27 s |
| merge / cp | (none) | 1.00 | 3.20 s |
| peak RSS in MB, source of 2.0 GB | 64 or less | 32 | split 30 |
"""


def bars(svg: str) -> list[tuple[float, float]]:
    """For each row, where its bar ends and where its goal is, as parts of the track; nan for no goal."""
    found = []
    for element in ElementTree.fromstring(svg).iter():
        kind = element.get("class")
        if kind == "track":
            found.append((float(element.get("width")), float("nan"), float("nan")))
        elif kind == "bar":
            found[-1] = (found[-1][0], float(element.get("width")), found[-1][2])
        elif kind == "goal":
            found[-1] = (*found[-1][:2], float(re.match(r"M([\d.]+)", element.get("d"))[1]))
    return [(bar / track, goal / track) for track, bar, goal in found]


def test_bars_end_at_figures_and_ticks_at_goals():
    """Ratios share a scale of 1.00, and the row in MB has its own, which ends at the goal of 64."""
    expected = [(0.25, 0.5), (1.0, float("nan")), (0.5, 1.0)]
    for found, wanted in zip(bars(chart(results(TABLE))), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-3, nan_ok=True)


def test_every_result_has_a_bar():
    for name, section in sections(RESULTS).items():
        rows = re.findall(r"^\| (?!claim \|)", section, re.MULTILINE)
        assert len(bars(chart(results(section)))) == len(rows) > 0, name


def test_the_chart_stands_above_its_table():
    text = with_charts(TABLE)
    assert text.startswith("Some text.\n\n<figure")
    assert text.endswith(TABLE.partition("\n\n")[2])


def test_the_performance_page_links_every_section():
    linked = re.findall(r"RESULTS\.md#(\w+)", PERFORMANCE)
    assert sorted(linked) == sorted(sections(RESULTS))
