"""``--tp`` with several sizes, and ``--memory``, of ``plan``."""

import json

import pytest

from tests.support.checkpoints import DEMO
from tests.support.command import call
from tests.support.matrix import needs_torch


def planned(*options: str) -> dict:
    return json.loads(call("plan", DEMO, *options, "--json").out)


def test_several_sizes_are_listed():
    every, some = planned(), planned("--tp", "8,2,3")
    bytes_of = dict(zip(every["supported_tp"], every["supported_bytes"], strict=True))
    assert some["supported_tp"] == [2, 8]
    assert some["supported_bytes"] == [bytes_of[2], bytes_of[8]]
    assert [one["tp"] for one in some["blocked_tp"]] == [one["tp"] for one in some["padded_tp"]] == [3]
    assert some["tp"] is None
    assert call("plan", DEMO, "--tp", "8,2,3").out.endswith("\n\ntp  weights per rank\n2   3.39 MB\n8   916 kB\n")


def test_sizes_that_fit():
    bytes_of = dict(zip(planned()["supported_tp"], planned()["supported_bytes"], strict=True))
    assert planned("--memory", f"{bytes_of[4]}B")["supported_tp"] == [4, 8]
    assert planned("--memory", f"{bytes_of[4] - 1}B")["supported_tp"] == [8]
    assert planned("--memory", "1.7GB", "--tp", "1,8")["supported_tp"] == [1, 8]


@pytest.mark.parametrize("options", [(), pytest.param(("--cost", "--seq", "16"), marks=needs_torch)])
def test_no_size_fits(options):
    """A line names the size with the least memory, instead of a table."""
    lines = call("plan", DEMO, "--memory", "1kB", *options).out.splitlines()
    (least,) = (line for line in lines if line.startswith("tp 8 needs the least memory, "))
    assert least.endswith(" per rank: pass a larger --memory")
    assert not [line for line in lines if line.startswith("tp  weights")]


def test_other_sizes_fit():
    """The line is about the listed sizes, and its remedy has others that fit."""
    least = min(planned()["supported_bytes"])
    lines = call("plan", DEMO, "--memory", f"{least}B", "--tp", "2,4").out.splitlines()
    (line,) = (line for line in lines if "needs the least memory" in line)
    assert line.startswith("tp 4 needs ")
    assert line.endswith(" per rank: pass --tp 8, or a larger --memory")


def test_least_memory_is_told_from_a_limit_with_the_same_digits():
    """Exact bytes, where both sizes round to the same text."""
    least = min(planned()["supported_bytes"])
    assert f"needs the least memory, {least:,} bytes per rank" in call("plan", DEMO, "--memory", f"{least - 1}B").out


@needs_torch
def test_costs_that_fit():
    options = ["--cost", "--seq", "16"]
    total = {cost["tp"]: cost["memory_bytes"] for cost in planned(*options)["costs"]}
    assert sorted(total) == [1, 2, 4, 8]
    fitting = planned(*options, "--memory", f"{total[2]}B")["costs"]
    assert [cost["tp"] for cost in fitting] == [tp for tp, memory in total.items() if memory <= total[2]]
    assert [cost["tp"] for cost in planned(*options, "--tp", "2,4")["costs"]] == [2, 4]


@needs_torch
def test_several_sizes_are_proven():
    assert [proof["tp"] for proof in planned("--prove", "--tp", "2,4")["proofs"]] == [2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "2,99"], "--tp cannot list 99 together with other sizes: pass it alone"),
        (["--tp", "2,x"], "Invalid value for '--tp': got 'x', expected an integer from 1"),
        (["--memory", "80"], "is not a size (got '80', expected a unit: 80GB, 80GiB or 80B)"),
        (["--memory", "0"], "is not a size (got '0', expected one such as 500MB, 5GB or 5GiB)"),
        (["--memory", "2x"], "Invalid value for '--memory': is not a size (got '2x'"),
        (["--memory", "2GB", "--propose"], "--memory does not apply to --propose: remove one of the two"),
        (["--tp", "2,4", "--all"], "--all lists the tensors of a plan, which is for one tensor parallel size"),
    ],
)
def test_wrong_values_are_refused(options, message):
    result = call("plan", DEMO, *options)
    assert result.code == 2
    assert message in result.err
