"""The text of progress: amounts, rate and time left, by a clock that the tests set."""

import pytest

from shardconv.support import console
from shardconv.support.console import Display
from shardconv.support.formatting import time_left


@pytest.fixture
def clock(monkeypatch):
    """A list whose first element is the time."""
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_lines_have_amount_rate_and_time_left(clock):
    lines = []
    display = Display(lines.append)
    report = display.activity("split", counts=False)
    for second in range(1, 31):
        clock[0] = 1000.0 + second
        report(second * 10**8, 10**10)
    assert lines == [
        "split: 1 GB of 10 GB, 100 MB/s, 90 s left",
        "split: 2 GB of 10 GB, 100 MB/s, 80 s left",
        "split: 3 GB of 10 GB, 100 MB/s, 70 s left",
    ]


def test_counts_have_no_rate(clock):
    lines = []
    display = Display(lines.append)
    report = display.activity("prove", counts=True)
    clock[0] += 10
    report(0, 3)
    clock[0] += 20
    report(2, 3)
    assert lines == ["prove: 0 of 3", "prove: 2 of 3, 15 s left"]


def test_time_of_an_activity_begins_after_the_one_before(clock):
    """The rate of copying does not count the time of reading headers."""
    lines = []
    display = Display(lines.append)
    headers, copy = display.activity("read headers", counts=True), display.activity("split", counts=False)
    clock[0] += 50
    headers(8, 8)
    clock[0] += 10
    copy(10**9, 2 * 10**9)
    assert lines == ["read headers: 8 of 8, 0 s left", "split: 1 GB of 2 GB, 100 MB/s, 10 s left"]


def test_nothing_is_shown_of_short_activities(clock):
    lines = []
    display = Display(lines.append)
    clock[0] += 9
    display.activity("split", counts=False)(1, 1)
    assert lines == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (150, "2 min"), (3600, "60 min"), (9000, "2.5 h")]
)
def test_time_left(seconds, text):
    assert time_left(seconds) == text
