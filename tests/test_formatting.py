"""Numbers for people are rounded before their unit is chosen."""

import pytest

from shardconv.support.formatting import duration, exact_size, parse_size, size


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1000, "1 kB"), (1024, "1.02 kB"), (999_499, "999 kB"),
        (999_500, "1 MB"), (999_999, "1 MB"), (999_700_000, "1 GB"), (99_950, "100 kB"), (1125, "1.13 kB"),
        (10**12, "1 TB"), (12_345 * 10**12, "12300 TB"),
    ],
)  # fmt: skip
def test_sizes(number, expected):
    assert size(number) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 µs"), (1.25e-4, "125 µs"), (9.999e-4, "1 ms"), (0.25, "250 ms"), (0.9994, "999 ms"), (0.9999, "1 s"),
        (1.5, "1.5 s"), (12_345, "12300 s"),
    ],
)  # fmt: skip
def test_durations(seconds, expected):
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [(20_000, "20kB"), (5 * 10**9, "5GB"), (5 * 2**30, "5368709120B"), (1, "1B"), (10**12, "1000GB")],
)
def test_exact_sizes(number, expected):
    assert exact_size(number) == expected
    assert parse_size(expected) == number
