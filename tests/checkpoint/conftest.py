"""Fixtures of several files: commands that write, with something to write, and small stripes."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardconv.checkpoint.engine import geometry as byte_ranges
from shardconv.checkpoint.operations.split import split
from tests.support.checkpoints import contents, llama_config, write_checkpoint
from tests.support.faults import COMMANDS, Job
from tests.support.matrix import cases


@pytest.fixture
def stripes_without_gaps(monkeypatch):
    """Many stripes, and no gap that is read."""
    monkeypatch.setattr("shardconv.checkpoint.split.manifest.STRIPE_BYTES", 5000)
    monkeypatch.setattr(byte_ranges, "GAP_BYTES", 1)
    byte_ranges.geometry.cache_clear()
    yield
    byte_ranges.geometry.cache_clear()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a source and its split checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "source", parts=2, config=llama_config(layers=1))
    (folder / "source" / "extra").mkdir()
    (folder / "source" / "extra" / "notes.txt").write_text("an auxiliary file in a folder")
    split(folder / "source", folder / "split", tp=4)
    return folder


@pytest.fixture(scope="module", params=cases(COMMANDS, lambda name: name != "reshard"))  # it writes like merge
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
def mount(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of a given size, if that is permitted."""
    place = tmp_path / "mounted"
    place.mkdir()
    program = shutil.which("mount")

    def mount_one(num_bytes: int) -> Path:
        command = [program, "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", place]
        if program is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here")
        return place / "result"

    yield mount_one
    if place.is_mount():
        subprocess.run(["umount", place], check=True)
