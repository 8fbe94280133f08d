"""Commands that write, with something to write: for test_faults.py and test_destination.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardconv.checkpoint.split import split
from tests.support.checkpoints import contents, llama_config, write_checkpoint
from tests.support.faults import COMMANDS, Job


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a source and its split checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "source", parts=2, config=llama_config(layers=1))
    (folder / "source" / "extra").mkdir()
    (folder / "source" / "extra" / "notes.txt").write_text("an auxiliary file in a folder")
    split(folder / "source", folder / "split", tp=4)
    return folder


@pytest.fixture(scope="module", params=COMMANDS)
def job(request, made, tmp_path_factory) -> Job:
    """Each command that writes, with something to write."""
    name, options, function = COMMANDS[request.param]
    expected = tmp_path_factory.mktemp("expected") / request.param
    function(made / name, expected)
    return Job([request.param, str(made / name), *options], function, made / name, contents(expected))


@pytest.fixture
def _sources_stay_as_they_are(made) -> Iterator[None]:
    """Whatever a run does, and however it ends, no byte of its source changes."""
    before = contents(made)
    yield
    assert contents(made) == before


@pytest.fixture
def target(tmp_path) -> Path:
    """A destination in a folder of its own, so that what is left beside it shows."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "result"


@pytest.fixture
def listed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """List PyTorch files in this process."""
    from tests.support.torch_files import list_in_process  # noqa: PLC0415 - imports torch

    list_in_process(monkeypatch)
