"""The checkpoint that tests of loading share."""

import pytest


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of checkpoints and their splits, see support/loading.py."""
    return tmp_path_factory.mktemp("load")


@pytest.fixture
def source(home):
    from tests.support.loading import source_and_split  # noqa: PLC0415 - imports transformers

    return source_and_split(home, "llama", 2)[0]


@pytest.fixture
def split(home):
    """The source, split for two ranks."""
    from tests.support.loading import source_and_split  # noqa: PLC0415 - likewise

    return source_and_split(home, "llama", 2)[1]
