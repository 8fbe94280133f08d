"""Quantized checkpoints, each made once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def unquantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The unquantized checkpoint of a model, by its name in support/quantized.py."""
    from tests.support.quantized import MODELS  # noqa: PLC0415 - transformers takes seconds to import

    return cache(lambda name: MODELS[name].write(tmp_path_factory.mktemp(name)))
