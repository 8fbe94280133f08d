"""Cases of the long matrix: further cases of behaviors that the default tests show, for ``make test-matrix``."""

import itertools
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest

MATRIX = pytest.mark.matrix
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="runs a command that needs torch")


def cases(values: Iterable[Any], default: Callable[..., bool]) -> list[Any]:
    """The values of a parametrized test, of which only those that ``default`` accepts run by default.

    Args:
        values: one per case; tuples for several parameters.
        default: called with the parameters of a case.
    """
    parameters = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*one, marks=[] if default(*one) else MATRIX) for one in parameters]


def each_once(*values: Iterable[Any]) -> list[Any]:
    """The product of the values of several parameters. Each value runs by default, in one of its combinations.

    Args:
        values: of each parameter; tuples for several parameters.
    """
    columns = [[value if isinstance(value, tuple) else (value,) for value in column] for column in values]
    default = {  # the next cycle through a column starts one later, so that it meets other values
        tuple((at + at // len(column)) % len(column) for column in columns) for at in range(max(map(len, columns)))
    }
    positions = itertools.product(*(range(len(column)) for column in columns))
    parameters = {
        index: [value for column, at in zip(columns, index, strict=True) for value in column[at]] for index in positions
    }
    return [pytest.param(*one, marks=[] if index in default else MATRIX) for index, one in parameters.items()]
