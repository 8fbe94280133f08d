"""Servers that are slow, cut connections, answer 500 and 503 at random, and lie about lengths.

Every run gives the right bytes or one error, and never a short file.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import shardconv
from shardconv.files.storage import stores
from shardconv.support.errors import SourceError
from tests.support.checkpoints import contents
from tests.support.command import call
from tests.support.matrix import MATRIX, each_once
from tests.support.web_server import HEADER_REQUESTS, WebServer, num_requests, serve

pytestmark = pytest.mark.usefixtures("_fast_retries")


def at_random(*faults: str, seed: int = 0, share: float = 0.3) -> Callable[[str], str | None]:
    """Faults of some requests."""
    chooser = random.Random(seed)
    return lambda _path: chooser.choice(faults) if chooser.random() < share else None


def split(web: WebServer, target: Path) -> None:
    shardconv.split(f"{web.url}/model/model.safetensors.index.json", target, tp=2)


@pytest.mark.parametrize(("faults", "tag"), each_once([["500", "503", "429"], ["cut"], ["slow"]], ["v1", ""]))
def test_passing_faults_do_not_change_the_result(made, web, tmp_path, faults, tag):
    web.tag, web.fault = tag, at_random(*faults)
    split(web, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(made / "split")


@pytest.mark.parametrize("fault", ["short", "shifted", "larger"])
def test_wrong_lengths_are_errors(web, tmp_path, fault):
    wrong = "/model/model-00002-of-00002.safetensors"
    web.fault = lambda path: fault if path == wrong and num_requests(web, path) >= HEADER_REQUESTS else None
    result = call("split", f"{web.url}/model/model.safetensors.index.json", "--tp", "2", "-o", tmp_path / "out")
    assert result.code == 1
    assert "another range" in result.err or "changed while it was read" in result.err
    assert result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["500", "cut"])
def test_lasting_faults_are_one_error(web, tmp_path, fault):
    web.fault = lambda path: fault if path.endswith("-00002-of-00002.safetensors") else None
    result = call("split", f"{web.url}/model/model.safetensors.index.json", "--tp", "2", "-o", tmp_path / "out")
    assert result.code == 1
    assert result.err.startswith(f"shardconv: {web.url}/model/model-00002-of-00002.safetensors: cannot be read: ")
    assert result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_does_not_wait_for_the_server(web, tmp_path):
    weights = "/model/model-00002-of-00002.safetensors"
    web.fault = lambda path: "hang" if path == weights and num_requests(web, path) >= HEADER_REQUESTS else None

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardconv.split(f"{web.url}/model/model.safetensors.index.json", tmp_path / "out", tp=2, progress=interrupt)
    assert not web.released.is_set()
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_gone_is_one_error(monkeypatch, tmp_path):
    monkeypatch.setattr(stores, "RETRIES", {**stores.RETRIES, "max_retries": 1})
    with serve() as server:
        url = server.url
    result = call("plan", f"{url}/model.safetensors")
    assert result.code == 1
    server = url.removeprefix("http://")
    assert f"cannot be read: the server {server} cannot be reached" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=MATRIX) for seed in range(30)])
def test_any_mixture_of_faults_gives_the_right_bytes_or_an_error(made, web, tmp_path, seed):
    faults = ("500", "503", "cut", "slow", "short", "shifted", "larger")
    web.fault = at_random(*faults, seed=seed, share=random.Random(seed).choice([0.02, 0.1, 0.4]))
    with suppress(SourceError):
        split(web, tmp_path / "out")
        assert contents(tmp_path / "out") == contents(made / "split")
        return
    assert list(tmp_path.iterdir()) == []
