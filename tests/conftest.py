"""Fixtures that several modules share."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

#: Before torch is imported: several threads of several processes on few cores wait for each other while they spin, and
#: take four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from importlib.util import find_spec

import pytest

pytest.register_assert_rewrite("tests.support")  # before its import, so that its checks say what they found

from shardconv.checkpoint.split import split  # noqa: E402
from tests.support.checkpoints import contents, llama_config, write_checkpoint  # noqa: E402
from tests.support.faults import COMMANDS, Job  # noqa: E402

#: Tests in vLLM run in an environment of its own: make test-vllm.
collect_ignore = [] if find_spec("vllm") else ["engines/vllm"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as what a shell has put into the background: tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a tiny model, by its name in models.py; each is written once."""
    from tests.support.models import MODELS  # noqa: PLC0415 - transformers takes seconds to import

    return cache(lambda name: MODELS[name].write(tmp_path_factory.mktemp(name)))


# --- for test_faults.py and test_destination.py ---------------------------------------------------------------------


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
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks that this process launches, which saves their imports: see support/forked.py."""
    from tests.support import forked  # noqa: PLC0415 - likewise

    handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    monkeypatch.setattr(f"{handler}.Popen", forked.Popen)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Run a check on four processes, see ranks.py; each module on its own: idle groups of others take time."""
    from tests.support.ranks import ranks_in  # noqa: PLC0415 - for tests of layers only

    with ranks_in(tmp_path_factory.mktemp("ranks")) as run:
        yield run
