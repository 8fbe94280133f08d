"""Fixtures that several modules share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a tiny model, by its name in models.py; each is written once."""
    from models import MODELS  # noqa: PLC0415 - transformers takes seconds to import, and few tests need it

    return cache(lambda name: MODELS[name].write(tmp_path_factory.mktemp(name)))
