"""Cases of the long matrix: further cases of behaviors that the default tests show, for ``make test-matrix``."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

MATRIX = pytest.mark.matrix


def cases(values: Iterable[Any], default: Callable[..., bool]) -> list[Any]:
    """The values of a parametrized test, of which only those that ``default`` accepts run by default.

    Args:
        values: one per case; tuples for several parameters.
        default: called with the parameters of a case.
    """
    parameters = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*one, marks=[] if default(*one) else MATRIX) for one in parameters]
