"""Links: the fit, measurements between ranks, and the command under torchrun."""

import json

import pytest

from shardconv.tensor.cost import Link, LinkReport, collective_time, fit_link, measure_link
from tests.support.checkpoints import llama_config, write_checkpoint
from tests.support.command import finish
from tests.support.torchrun import on_one_node

pytestmark = pytest.mark.timeout(240)  # loaded machines are slow


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("link", [Link(), Link(1e-3, 1e-9), Link(0.0, 1e-6), Link(1e-4, 0.0)])
def test_fit_recovers_a_link(num_ranks, link):
    """From times that follow the formula."""
    times = [(size, collective_time("all_reduce", size, num_ranks, link)) for size in (8, 4096, 10**6, 10**8)]
    found = fit_link(times, num_ranks)
    assert found.alpha == pytest.approx(link.alpha, rel=1e-6, abs=1e-15)
    assert found.beta == pytest.approx(link.beta, rel=1e-6, abs=1e-21)


def test_fit_is_not_negative():
    """Times that decrease with size, or grow faster than it, do not have an exact fit."""
    falling = fit_link([(8, 1.0), (10**6, 1.1), (10**9, 0.1)], 2)
    assert (falling.alpha > 0, falling.beta) == (True, 0.0)
    rising = fit_link([(8, 1e-12), (10**6, 1.0), (10**9, 1e6)], 2)
    assert (rising.alpha, rising.beta > 0) == (0.0, True)


def test_fit_minimizes_the_relative_error():
    """No neighbor of the fit is better."""
    times = [(8, 3e-5), (4096, 2e-5), (10**6, 9e-4), (10**8, 0.2)]
    best = fit_link(times, 4)

    def error(link):
        return sum((collective_time("all_reduce", size, 4, link) / seconds - 1) ** 2 for size, seconds in times)

    for alpha, beta in ((0.99, 1), (1.01, 1), (1, 0.99), (1, 1.01)):
        assert error(Link(best.alpha * alpha, best.beta * beta)) > error(best)


def check_measured(axis):
    report = measure_link(axis, sizes=(8, 512, 1 << 16))
    assert (report.num_ranks, report.backend, report.device) == (axis.size, "gloo", "cpu")
    assert [timing.num_bytes for timing in report.timings] == [8, 512, 1 << 16]
    for timing in report.timings:
        assert timing.seconds > 0
        assert timing.fitted_seconds == collective_time("all_reduce", timing.num_bytes, axis.size, report.link)
        off = abs(timing.fitted_seconds - timing.seconds) / timing.seconds
        assert timing.error == pytest.approx(off, abs=1e-12)
    with pytest.raises(ValueError, match="1 sizes, expected at least 2 of each"):
        measure_link(axis, sizes=(8,))
    return report


@pytest.mark.parametrize(("layout", "apart"), [("pairs", (0, 2)), ("four", (0,))])
def test_all_ranks_measure_the_same(ranks, layout, apart):
    reports = ranks(layout, check_measured)
    for rank, report in enumerate(reports):
        assert report == reports[max(first for first in apart if first <= rank)]


def test_one_rank_does_not_have_a_link():
    with pytest.raises(ValueError, match="got 1 ranks"):
        measure_link()


def measure(*arguments):
    return finish(on_one_node(2, "-m", "shardconv", "plan", "--measure-link", *arguments))


def test_measurement_under_torchrun():
    """One process prints the result, and all exit."""
    result = measure("--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert list(report) == list(LinkReport.__struct_fields__)
    assert (report["num_ranks"], report["backend"], report["device"]) == (2, "gloo", "cpu")
    times = [(timing["num_bytes"], timing["seconds"]) for timing in report["timings"]]
    assert [num_bytes for num_bytes, _ in times[:3]] == [8, 64, 512]
    assert Link(**report["link"]) == fit_link(times, 2)


def test_measured_link_is_used_for_costs(tmp_path):
    """One process prints the link and the result."""
    source = write_checkpoint(tmp_path / "tiny", config=llama_config(layers=1))
    result = measure(source, "--cost", "--tp", "2", "--seq", "4")
    assert result.code == 0, result.err
    assert (result.out.count("LlamaForCausalLM"), "2 ranks, gloo on cpu: " in result.err) == (1, True)
    flags = next(line for line in result.err.splitlines() if line.startswith("shardconv plan SRC --cost --alpha "))
    alpha, beta = float(flags.split()[5]), float(flags.split()[7])
    assert 0 <= alpha < 1e3
    assert beta >= 0


def test_missing_source_under_torchrun():
    """All processes fail, and one prints the error."""
    result = measure("nowhere", "--cost")
    assert (result.code != 0, result.out) == (True, "")
    assert result.err.count("shardconv: nowhere: does not exist") == 1
