"""What ranks or processes see, in words."""

import pytest

from shardconv.checkpoint.split.views import View, describe_views

CASES = {
    "checksums on one host": (
        [View("a", "", "x", "/p"), View("a", "", "x", "/p"), View("b", "", "x", "/p")],
        "ranks 0, 1 differ from rank 2",
    ),
    "checksums on three hosts": (
        [View("a", "", "x"), View("b", "", "y"), View("c", "", "z")],
        "rank 0 on x differs from rank 1 on y and from rank 2 on z",
    ),
    "texts in two folders": (
        [View("a", "a source", "x", "/p"), View("b", "a split checkpoint", "x", "/q")],
        "rank 0 in /p: a source; rank 1 in /q: a split checkpoint",
    ),
    "texts on two hosts": (
        [*[View("a", "cpu", "x")] * 4, *[View("b", "cuda", "y")] * 4],
        "ranks 0-3 on x: cpu; ranks 4-7 on y: cuda",
    ),
    "many hosts": (
        [View("b", "", "z"), *(View("a", "", f"h{at}") for at in range(5))],
        "rank 0 on z differs from ranks 1-5 on h0, h1, h2 and 2 more",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_views_are_grouped_by_what_is_seen(case):
    views, expected = CASES[case]
    assert describe_views(views, "rank") == expected


def test_processes_are_named():
    assert describe_views([View("a", "", "x"), View("b", "", "x"), View("b", "", "x")], "process") == (
        "process 0 differs from processes 1, 2"
    )
