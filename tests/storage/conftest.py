"""A checkpoint, its split, and fast retries, for tests of web servers and the Hub."""

from datetime import timedelta
from pathlib import Path

import pytest

import shardconv
from shardconv.storage import remote_file, stores
from tests.support.checkpoints import llama_config, write_checkpoint


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """A folder with a source in two files, and its split checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "model", parts=2, config=llama_config(layers=1))
    shardconv.split(folder / "model", folder / "split", tp=2)
    return folder


@pytest.fixture
def _fast_retries(monkeypatch) -> None:
    """Let clients retry as often as ever, but soon."""
    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}
    monkeypatch.setattr(stores, "RETRIES", {**stores.RETRIES, "backoff": backoff})
    monkeypatch.setattr(remote_file, "PAUSES", (0.001,) * len(remote_file.PAUSES))
