"""Messages of signals: what was left behind."""

import subprocess
import sys
from itertools import pairwise

import pytest

from shardconv.checkpoint.output import staging
from shardconv.checkpoint.output.existing import NewCheckpoint
from shardconv.cli import describe
from shardconv.files.folder import temporary_folder
from shardconv.support.exits import Terminated


def noted(error: BaseException, note: str) -> BaseException:
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ([KeyboardInterrupt()], "interrupted; nothing was left behind"),
        ([noted(KeyError("cache"), "of the error"), Terminated()], "terminated; nothing was left behind"),
        ([noted(KeyboardInterrupt(), "files may be left")], "interrupted; files may be left"),
        ([KeyboardInterrupt(), KeyboardInterrupt()], "interrupted; nothing was left behind"),
        (
            [KeyboardInterrupt(), noted(Terminated(), "files may be left"), Terminated()],
            "terminated; files may be left",
        ),
    ],
)
def test_message_of_a_signal(raised, message):
    """Each exception is raised while the one before it is handled."""
    for first, second in pairwise(raised):
        second.__context__ = first
    assert describe(raised[-1])[0] == message


def in_staging(tmp_path):
    return staging.staging(tmp_path / "out", NewCheckpoint(is_folder=True, overwrite=False))


@pytest.mark.parametrize(
    "place",
    [in_staging, lambda _: temporary_folder()],
    ids=["staging folder", "temporary folder"],
)
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_during_a_removal_says_that_files_may_be_left(place, signals, tmp_path, monkeypatch):
    """Of two signals, the first one starts the removal."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def remove():
        with place(tmp_path):
            if signals == 2:
                raise Terminated

    monkeypatch.setattr(staging, "_remove", interrupt)
    monkeypatch.setattr("shutil.rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        remove()
    left = "a signal ended the removal of files, so some may be left behind"
    assert describe(caught.value) == (f"interrupted; {left}", 130)


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["split"], 2)])
def test_a_command_exits_without_destructors(arguments, code):
    """Threads of a store's client may still run: Python's end would abort the process now and then."""
    script = "import atexit; from shardconv.__main__ import main; atexit.register(print, 'at the end'); main()"
    ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert "at the end" not in ended.stdout
