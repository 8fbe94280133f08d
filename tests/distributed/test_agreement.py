"""Messages on differences between ranks or processes."""

from pathlib import Path

import pytest

from shardconv.distributed.agreement import View, difference


def view(fact: str, host: str, path: str = "", *, text: str = "") -> View:
    return View({"facts": fact}, {"facts": text} if text else {}, host, path)


CASES = {
    "checksums on one host": (
        [view("a", "x", "/p"), view("a", "x", "/p"), view("b", "x", "/p")],
        "ranks 0, 1 differ from rank 2",
    ),
    "checksums on three hosts": (
        [view("a", "x"), view("b", "y"), view("c", "z")],
        "rank 0 on x differs from rank 1 on y and from rank 2 on z",
    ),
    "texts in two folders": (
        [view("a", "x", "/p", text="a source"), view("b", "x", "/q", text="a split checkpoint")],
        "rank 0 in /p: a source; rank 1 in /q: a split checkpoint",
    ),
    "texts on two hosts": (
        [*[view("a", "x", text="cpu")] * 4, *[view("b", "y", text="cuda")] * 4],
        "ranks 0-3 on x: cpu; ranks 4-7 on y: cuda",
    ),
    "many hosts": (
        [view("b", "z"), *(view("a", f"h{at}") for at in range(5))],
        "rank 0 on z differs from ranks 1-5 on h0, h1, h2 and 2 more",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_views_are_grouped_by_what_is_seen(case):
    views, expected = CASES[case]
    error = difference(Path("x"), views, "rank", "make them the same")
    assert str(error) == f"x: facts differ between ranks ({expected}): make them the same"


def test_processes_are_named():
    error = difference(Path("x"), [view("a", "x"), view("b", "x"), view("b", "x")], "process", "pass the same")
    assert "differ between processes (process 0 differs from processes 1, 2)" in str(error)


def test_equal_views_are_no_error():
    assert difference(Path("x"), [view("a", "x"), view("a", "y")], "rank", "") is None


def test_facts_with_texts_are_the_cause_of_others():
    views = [View({"kinds": kind, "sizes": kind}, {"kinds": kind}, "x", "") for kind in "ab"]
    assert str(difference(Path("x"), views, "rank", "fix")) == (
        "x: kinds differ between ranks (rank 0: a; rank 1: b): fix"
    )
