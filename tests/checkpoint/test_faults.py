"""Runs that fail: killed, interrupted, out of space, with system errors, or with a source that changes.

Each prints one message and leaves no files; the files of a run killed by SIGKILL are removed by the next run.
"""

import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from shardconv.checkpoint.engine import copy
from shardconv.checkpoint.engine.copy import CopyJob
from shardconv.checkpoint.output import staging
from shardconv.files import fileio
from tests.support.checkpoints import contents, part_names
from tests.support.command import Result, call, finish, start
from tests.support.damage import flip
from tests.support.faults import SLOW, Job, beside, check_done, check_failed, failing, kill_before, status_of_child
from tests.support.matrix import MATRIX

pytestmark = pytest.mark.usefixtures("_sources_stay_as_they_are")

# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "stride"),
    [
        pytest.param(["--overwrite"], 9, id="overwrite-every-ninth"),
        pytest.param([], 1, id="new", marks=MATRIX),
        pytest.param(["--overwrite"], 1, id="overwrite", marks=MATRIX),
        pytest.param(["--overwrite", "--resume"], 1, id="resume", marks=MATRIX),
    ],
)
def test_killed_before_every_step(job, target, options, stride):
    is_there = "--overwrite" in options
    old = {"model.safetensors": b"old", "extra/notes.txt": b"old"}
    for step in itertools.count(1, stride):
        shutil.rmtree(target, ignore_errors=True)
        if is_there:
            for name, data in old.items():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(data)

        def die(step: int = step) -> int:
            kill_before(step, target.parent)
            return job.call(target, *options, "--threads", "1").code

        status = status_of_child(die)
        assert status in {0, -signal.SIGKILL}
        allowed = [old, job.expected] if is_there else [job.expected]
        assert not target.exists() or contents(target) in allowed
        assert set(beside(target)) <= {target.name, ".result.partial"}
        if status == 0:
            break
        if not target.exists() or is_there:
            check_done(job.call(target, *options), job, target)
    assert step > 10  # else nothing was counted
    check_done(Result(status, "", ""), job, target)


def start_slowly(job: Job, target: Path, delay: float) -> subprocess.Popen[str]:
    """Start a command, and return after it has been writing for a while."""
    process = start(*job.arguments, "-o", target, "--threads", "1", patch=SLOW)
    while not list(target.parent.glob(".*.partial/result/*")):
        assert process.poll() is None
        time.sleep(0.001)
    time.sleep(delay)
    return process


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "interrupted; nothing was left"), (signal.SIGTERM, 143, "terminated; nothing was left")],
)
def test_signalled(job, target, number, code, message):
    process = start_slowly(job, target, 0.05)
    process.send_signal(number)
    check_failed(finish(process), target, message, code)


# --- no room, and other errors of the system ------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.999])
def test_full_disk_during_the_copy(job, mount, monkeypatch, share):
    """Other processes may fill the disk while the copy runs."""
    target = mount(int(sum(map(len, job.expected.values())) * share))
    monkeypatch.setattr(staging, "check_room", lambda *_: None)
    check_failed(job.call(target), target, "the disk is full: free some space (no files were left behind)")


@pytest.mark.parametrize("after", [0, 1, 7, 12])
@pytest.mark.parametrize("threads", ["1", "4"])
def test_write_error(job, target, monkeypatch, after, threads):
    monkeypatch.setattr(copy, "BLOCK_BYTES", 2048)  # several blocks
    monkeypatch.setattr(copy, "BLOCK_BYTES_PER_SHARD", 1024)
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, after))
    check_failed(
        job.call(target, "--threads", threads),
        target,
        f"{target}: cannot be written: Input/output error (no files were left behind)",
    )


@pytest.mark.parametrize("after", [0, 3])
def test_read_error(job, target, monkeypatch, after):
    monkeypatch.setattr(fileio, "preadv", failing(fileio.preadv, after))
    check_failed(job.call(target), target, "cannot be read: Input/output error")


# --- sources that change --------------------------------------------------------------------------------------------


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(("change", "message"), [(shrink, "was truncated"), (grow, "changed"), (flip, "changed")])
def test_source_that_changes(job, tmp_path, target, monkeypatch, change, message):
    source = shutil.copytree(job.source, tmp_path / "copy")
    path = min(source.glob("*.safetensors"))
    os.utime(path, (1, 1))  # so that the change shows, however coarse the clock
    copy_stripe = CopyJob.copy_stripe

    def change_then_pass(*arguments: Any) -> None:
        change(path)
        copy_stripe(*arguments)

    monkeypatch.setattr(CopyJob, "copy_stripe", change_then_pass)
    result = job.on(source).call(target)
    assert result.code == 1
    assert f"{path}: {message} while it was read" in result.err or "differ from their checksum" in result.err
    assert beside(target) == []


def test_source_file_removed_between_plan_and_copy(made, tmp_path, target, monkeypatch):
    source = shutil.copytree(made / "source", tmp_path / "copy")
    path = source / part_names(2)[1]
    monkeypatch.setattr("shardconv.checkpoint.output.destination.check_disjoint", lambda *_: path.unlink())
    check_failed(call("split", source, "--tp", "2", "-o", target), target, f"{path}: cannot be opened")


# --- systems that differ --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preadv", [fileio.preadv, fileio.pread_into], ids=["preadv", "pread"])
def test_short_reads_and_writes(job, target, monkeypatch, preadv):
    """Also on systems without optional calls."""
    write = os.pwrite
    monkeypatch.setattr(fileio, "fadvise", None)
    monkeypatch.setattr(fileio, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:97]], at))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:89], at))
    check_done(job.call(target), job, target)


def test_full_sync_on_systems_that_have_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    calls: list[int] = []
    monkeypatch.setattr(staging.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(staging.fcntl, "fcntl", lambda _, command: calls.append(command))
    staging.flush(tmp_path)
    assert calls == [51]
