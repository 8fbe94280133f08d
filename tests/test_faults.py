"""Runs that fail: killed, interrupted, out of space, in each other's way, or over a source that changes.

Each ends in one message and leaves nothing under the final name and nothing beside it; what SIGKILL leaves is cleared
by the same command, run again. Source bytes are never touched.
"""

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from build import contents, llama_config, part_names, write_checkpoint
from command import Result, call, finish, run, start

from shardconv.checkpoint import fileio, staging
from shardconv.checkpoint.copy import CopyJob
from shardconv.checkpoint.merge import merge
from shardconv.checkpoint.reshard import reshard
from shardconv.checkpoint.split import split
from shardconv.errors import OutputError, ShardconvError

COMMANDS: dict[str, tuple[str, list[str], Callable[..., Any]]] = {
    "split": ("source", ["--tp", "4"], partial(split, tp=4)),
    "merge": ("split", [], merge),
    "reshard": ("split", ["--tp", "2"], partial(reshard, tp=2)),
}


class Job(NamedTuple):
    """A command that writes, and what it has to write.

    Attributes:
        arguments: the command line, but for the output.
        function: the same as a function of source and destination.
        source: what it reads.
        expected: name to bytes of the files it writes.
    """

    arguments: list[str]
    function: Callable[..., Any]
    source: Path
    expected: dict[str, bytes]

    def call(self, target: Path, *options: str) -> Result:
        """Run it in this process."""
        return call(*self.arguments, "-o", target, *options)

    def on(self, source: Path) -> "Job":
        """The same with another source."""
        return self._replace(arguments=[self.arguments[0], str(source), *self.arguments[2:]], source=source)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a source and its split checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "source", parts=2, config=llama_config(layers=1))
    (folder / "source" / "extra").mkdir()
    (folder / "source" / "extra" / "notes.txt").write_text("a side file in a folder")
    split(folder / "source", folder / "split", tp=4)
    return folder


@pytest.fixture(scope="module", params=COMMANDS)
def job(request, made, tmp_path_factory) -> Job:
    name, options, function = COMMANDS[request.param]
    expected = tmp_path_factory.mktemp("expected") / request.param
    function(made / name, expected)
    return Job([request.param, str(made / name), *options], function, made / name, contents(expected))


@pytest.fixture(autouse=True)
def _sources_stay_as_they_are(made) -> Iterator[None]:
    before = contents(made)
    yield
    assert contents(made) == before


@pytest.fixture
def target(tmp_path) -> Path:
    """A destination in a folder of its own, so that what is left beside it shows."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "result"


def beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


def check_failed(result: Result, target: Path, message: str, code: int = 1) -> None:
    """One message, an exit code, and nothing left."""
    assert result.code == code
    assert message in result.err
    assert result.err.strip().startswith("shardconv: ")
    assert result.err.strip().count("\n") == 0
    assert result.out == ""
    assert beside(target) == []


def check_done(result: Result, job: Job, target: Path) -> None:
    assert result.code == 0, result.err
    assert beside(target) == [target.name]
    assert contents(target) == job.expected


# --- killed ---------------------------------------------------------------------------------------------------------

#: What Python tells of before it does it; beside these, every write is a step.
AUDITED = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.copyfile", "open"}


def kill_before(step: int, folder: Path) -> None:
    """Have this process killed before its n-th step that changes something on disk."""
    steps = itertools.count(1)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        is_ours = event != "open" or str(folder) in str(arguments[0])
        if event in AUDITED and is_ours and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    write = os.pwrite

    def counted(*arguments: Any) -> int:
        count("os.truncate", ())
        return write(*arguments)

    sys.addaudithook(count)
    os.pwrite = counted


def status_of_child(function: Callable[[], int]) -> int:
    """Run a function in a forked process, which costs far less than to start Python; gives its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's idle threads do no harm
        pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "overwrite"])
def test_killed_before_every_step(job, target, is_there):
    options = ["--overwrite"] if is_there else []
    old = {"model.safetensors": b"old", "extra/notes.txt": b"old"}
    for step in itertools.count(1):
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


#: A slow disk, so that there is time to hit a copy in its midst; and Ctrl-C works even where pytest was started with it
#: ignored.
SLOW = """
import os, signal, time
write = os.pwrite
def slow(*arguments):
    time.sleep(0.05)
    return write(*arguments)
os.pwrite = slow
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def start_slowly(job: Job, target: Path, delay: float) -> subprocess.Popen[str]:
    """Start a command, and come back when it has been writing for a while."""
    process = start(*job.arguments, "-o", target, "--threads", "1", patch=SLOW)
    while not list(target.parent.glob(".*.partial/result/*")):
        assert process.poll() is None
        time.sleep(0.001)
    time.sleep(delay)
    return process


def test_killed_at_random_moments(job, target):
    moments = random.Random(0)
    for _ in range(5):
        process = start_slowly(job, target, moments.uniform(0, 0.5))
        process.kill()
        killed = finish(process).code == -signal.SIGKILL
        assert beside(target) == [".result.partial" if killed else target.name]  # it may have been ready before
        if not killed:
            shutil.rmtree(target)
        check_done(job.call(target), job, target)
        shutil.rmtree(target)


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "interrupted; nothing was left"), (signal.SIGTERM, 143, "terminated; nothing was left")],
)
def test_signalled(job, target, number, code, message):
    process = start_slowly(job, target, 0.05)
    process.send_signal(number)
    check_failed(finish(process), target, message, code)


# --- no room, and other errors of the system ------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes, where that is permitted."""
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


def test_no_room_and_known_before(job, mount):
    target = mount(40_000)
    check_failed(job.call(target), target, "bytes are needed and")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.999])
def test_disk_full_and_not_known_before(job, mount, monkeypatch, share):
    """Others write to the disk, too: the room can go while the copy runs."""
    target = mount(int(sum(map(len, job.expected.values())) * share))
    monkeypatch.setattr(staging, "_check_room", lambda *_: None)
    check_failed(job.call(target), target, "the disk is full; nothing was left behind")


def test_files_of_that_size_are_not_allowed(job, target):
    patch = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    check_failed(run(*job.arguments, "-o", target, patch=patch), target, "File too large")


def failing(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """The function, failing from its n-th call on."""
    calls = itertools.count()

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*arguments, **options)

    return fail


@pytest.mark.parametrize("after", [0, 1, 7, 12])
@pytest.mark.parametrize("threads", ["1", "4"])
def test_write_error(job, target, monkeypatch, after, threads):
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, after))
    check_failed(
        job.call(target, "--threads", threads), target, f"{target}: Input/output error; nothing was left behind"
    )


@pytest.mark.parametrize("after", [0, 3])
def test_read_error(job, target, monkeypatch, after):
    monkeypatch.setattr(fileio, "_preadv", failing(fileio._preadv, after))
    check_failed(job.call(target), target, "cannot be read: Input/output error")


def test_side_file_that_cannot_be_copied(job, target, monkeypatch):
    monkeypatch.setattr(shutil, "copyfile", failing(shutil.copyfile, 1))
    check_failed(job.call(target), target, "Input/output error")


def test_a_bug_is_one_line_too(job, target, monkeypatch):
    def raise_it(*_: Any) -> None:
        raise RuntimeError("boo")

    monkeypatch.setattr(CopyJob, "pass_stripe", raise_it)
    check_failed(job.call(target), target, "internal error: RuntimeError: boo")


def test_destination_in_a_file(job, target):
    (target.parent / "file").write_text("x")
    result = job.call(target.parent / "file" / "result")
    assert result.code == 1
    assert "Traceback" not in result.err
    assert contents(target.parent) == {"file": b"x"}


def test_folders_above_the_destination_are_made(job, target):
    assert job.call(target / "a" / "b").code == 0
    assert contents(target / "a" / "b") == job.expected


# --- what is at the destination already -----------------------------------------------------------------------------


def put_file(target: Path) -> None:
    target.write_text("mine")


def put_notes(target: Path) -> None:
    target.mkdir()
    (target / "notes.txt").write_text("mine")


def put_checkpoint(target: Path) -> None:
    target.mkdir()
    (target / "model.safetensors").write_text("old")
    (target / "tokenizer.json").write_text("old")


def put_link(target: Path) -> None:
    elsewhere = target.parent.parent / "elsewhere"
    put_checkpoint(elsewhere)
    target.symlink_to(elsewhere)


def put_dangling_link(target: Path) -> None:
    target.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("put", "options", "message"),
    [
        (put_file, [], "is a file, and a folder is to be written"),
        (put_file, ["--overwrite"], "is a file, and a folder is to be written"),
        (put_notes, [], "exists; choose another name with -o, or --overwrite"),
        (put_notes, ["--overwrite"], "holds no checkpoint, so it is not overwritten"),
        (put_checkpoint, [], "exists; choose another name with -o, or --overwrite"),
        (put_link, [], "is a link, and a folder is to be written"),
        (put_link, ["--overwrite"], "is a link, and a folder is to be written"),
        (put_dangling_link, [], "is a link, and a folder is to be written"),
    ],
)
@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["", "dry"])
def test_destination_that_is_kept(job, target, put, options, message, dry_run):
    put(target)
    before = beside(target), contents(target.parent.parent)
    result = job.call(target, *options, *dry_run)
    assert result.code == 1
    assert f"{target}: {message}" in result.err
    assert (beside(target), contents(target.parent.parent)) == before


def test_overwrite(job, target):
    put_checkpoint(target)
    check_done(job.call(target, "--overwrite"), job, target)


def test_overwrite_what_is_not_there(job, target):
    check_done(job.call(target, "--overwrite"), job, target)


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_empty_folder_as_destination(job, target, options):
    target.mkdir()
    check_done(job.call(target, *options), job, target)


@pytest.mark.parametrize(
    ("owner", "name", "after"), [(os, "pwrite", 0), (os, "pwrite", 9), (Path, "rename", 0), (Path, "write_bytes", 0)]
)
def test_overwrite_keeps_the_old_one_when_the_new_fails(job, target, monkeypatch, owner, name, after):
    put_checkpoint(target)
    before = contents(target.parent)
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), after))
    assert job.call(target, "--overwrite").code == 1
    assert contents(target.parent) == before


def test_overwrite_brings_the_old_one_back_when_the_new_cannot_take_its_place(job, target, monkeypatch):
    put_checkpoint(target)
    before = contents(target.parent)
    rename = Path.rename

    def fail_once(path: Path, to: Path) -> Path:
        if path.parent.name == ".result.partial" and path.name == "result":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail_once)
    assert job.call(target, "--overwrite").code == 1
    assert contents(target.parent) == before


class TestMergeIntoOneFile:
    """Of merge alone: the destination is a file."""

    @pytest.fixture
    def file(self, target) -> Path:
        return target.with_suffix(".safetensors")

    def test_file_is_kept(self, made, file):
        put_file(file)
        result = call("merge", made / "split", "-o", file)
        assert (result.code, file.read_text()) == (1, "mine")
        assert "exists; choose another name" in result.err

    @pytest.mark.parametrize("put", [put_file, put_link, put_dangling_link, Path.mkdir])
    def test_file_link_or_empty_folder_is_replaced(self, made, file, put):
        put(file)
        assert call("merge", made / "split", "-o", file, "--overwrite").code == 0
        assert beside(file) == [file.name]
        assert file.is_file()
        assert not file.is_symlink()

    def test_folder_is_kept(self, made, file):
        put_checkpoint(file)
        result = call("merge", made / "split", "-o", file, "--overwrite")
        assert "is a folder, and a file is to be written" in result.err
        assert sorted(contents(file)) == ["model.safetensors", "tokenizer.json"]


# --- destinations too near to the source ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
@pytest.mark.parametrize("name", ["", "sub", "sub/sub", "../{name}"])
def test_destination_in_the_source(job, tmp_path, name, options):
    source = shutil.copytree(job.source, tmp_path / "copy")
    before = contents(tmp_path)
    result = job.on(source).call(source / name.format(name=source.name), *options)
    assert result.code == 1
    assert "lies in the source" in result.err or "exists" in result.err
    assert contents(tmp_path) == before


def test_destination_that_holds_the_source(job, target):
    """As it also holds a checkpoint, --overwrite would remove the source with it."""
    put_checkpoint(target)
    source = shutil.copytree(job.source, target / "source")
    before = contents(target.parent)
    result = job.on(source).call(target, "--overwrite")
    assert result.code == 1
    assert "which is read; choose another place" in result.err
    assert contents(target.parent) == before


def test_destination_that_holds_what_the_source_links_to(made, target):
    source = target.parent / "source"
    shutil.copytree(made / "source", target)
    source.mkdir()
    for path in filter(Path.is_file, target.iterdir()):
        (source / path.name).symlink_to(path)
    before = contents(target.parent)
    result = call("split", source, "--tp", "2", "-o", target, "--follow-links", "--overwrite")
    assert result.code == 1
    assert "which is read; choose another place" in result.err
    assert contents(target.parent) == before


# --- what is not ours to replace --------------------------------------------------------------------------------------


def test_destination_that_appears_meanwhile(made, target):
    """Nobody asked for it to be overwritten, and when the run began it was not there."""

    def appear(done: int, total: int) -> None:
        target.mkdir(exist_ok=True)
        (target / "precious.txt").write_text("mine")

    with pytest.raises(OutputError, match="result"):
        split(made / "source", target, tp=2, progress=appear)
    assert contents(target.parent) == {"result/precious.txt": b"mine"}


def test_file_that_appears_meanwhile(made, tmp_path):
    file = tmp_path / "out" / "result.safetensors"
    file.parent.mkdir()
    with pytest.raises(OutputError, match="result"):
        merge(made / "split", file, progress=lambda done, total: file.write_text("mine") and None)
    assert contents(file.parent) == {"result.safetensors": b"mine"}


@pytest.mark.parametrize("name", ["NOTES.md", "extra/mine.txt", "other/deep/x", ".hidden"])
def test_overwrite_spares_what_is_no_checkpoints(job, target, name):
    job.function(job.source, target)
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    (target / name).write_text("mine")
    before = contents(target)
    result = job.call(target, "--overwrite")
    assert result.code == 1
    assert f"holds {name}, which is no part of a checkpoint" in result.err
    assert contents(target) == before


def test_overwrite_spares_the_plan_file_that_is_read(made, target):
    shutil.copytree(made / "split", target)
    (target / "plan.toml").write_text('[rules]\n"lm_head" = { style = "replicate" }')
    result = call("split", made / "source", "--tp", "2", "-o", target, "--plan", target / "plan.toml", "--overwrite")
    assert result.code == 1
    assert "plan.toml, which is read" in result.err
    assert (target / "plan.toml").is_file()


def test_a_folder_of_the_name_that_is_worked_in(job, target):
    mine = target.parent / ".result.partial" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    result = job.call(target)
    assert result.code == 1
    assert "holds what is not of shardconv; rename it first" in result.err
    assert mine.read_text() == "mine"


# --- sources that change --------------------------------------------------------------------------------------------


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def modify(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")


@pytest.mark.parametrize(("change", "message"), [(shrink, "shrank"), (grow, "changed"), (modify, "changed")])
def test_source_that_changes(job, tmp_path, target, monkeypatch, change, message):
    source = shutil.copytree(job.source, tmp_path / "copy")
    path = min(source.glob("*.safetensors"))
    os.utime(path, (1, 1))  # so that the change shows, however coarse the clock
    pass_stripe = CopyJob.pass_stripe

    def change_then_pass(*arguments: Any) -> None:
        change(path)
        pass_stripe(*arguments)

    monkeypatch.setattr(CopyJob, "pass_stripe", change_then_pass)
    result = job.on(source).call(target)
    assert result.code == 1
    assert f"{path}: {message} while it was read" in result.err or "differ from their checksum" in result.err
    assert beside(target) == []


def test_part_that_goes_between_the_plan_and_the_copy(made, tmp_path, target, monkeypatch):
    source = shutil.copytree(made / "source", tmp_path / "copy")
    path = source / part_names(2)[1]
    monkeypatch.setattr("shardconv.checkpoint.split.check_apart", lambda *_: path.unlink())
    check_failed(call("split", source, "--tp", "2", "-o", target), target, f"{path}: cannot be opened")


# --- two runs for one destination -----------------------------------------------------------------------------------


def test_second_run_while_the_first_writes(job, target, monkeypatch):
    is_writing, may_go_on = threading.Event(), threading.Event()
    pass_stripe = CopyJob.pass_stripe

    def wait_then_pass(*arguments: Any) -> None:
        is_writing.set()
        assert may_go_on.wait(60)
        pass_stripe(*arguments)

    monkeypatch.setattr(CopyJob, "pass_stripe", wait_then_pass)
    first = threading.Thread(target=job.function, args=(job.source, target))
    first.start()
    assert is_writing.wait(60)
    try:
        for overwrite in (False, True):
            with pytest.raises(OutputError, match="result: another run is writing it"):
                job.function(job.source, target, overwrite=overwrite)
    finally:
        may_go_on.set()
        first.join()
    check_done(Result(0, "", ""), job, target)


@pytest.mark.parametrize("overwrite", [False, True])
def test_many_races(job, target, overwrite):
    for _ in range(20):
        barrier = threading.Barrier(3)
        outcomes: list[str] = []

        def race(barrier: threading.Barrier = barrier, outcomes: list[str] = outcomes) -> None:
            barrier.wait()
            try:
                job.function(job.source, target, overwrite=overwrite)
                outcomes.append("")
            except ShardconvError as error:
                outcomes.append(str(error))

        runners = [threading.Thread(target=race) for _ in range(3)]
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join()
        assert len(outcomes) == 3
        assert outcomes.count("") == 1 or (overwrite and "" in outcomes)
        assert all("another run is writing it" in text or "exists" in text for text in outcomes if text)
        check_done(Result(0, "", ""), job, target)
        shutil.rmtree(target)


def test_race_of_processes(job, target):
    processes = [start(*job.arguments, "-o", target, patch=SLOW) for _ in range(3)]
    results = [finish(process) for process in processes]
    assert sorted(result.code for result in results) == [0, 1, 1]
    assert all("another run is writing it" in result.err or "exists" in result.err for result in results if result.code)
    check_done(Result(0, "", ""), job, target)


# --- systems that do less -------------------------------------------------------------------------------------------


def test_without_the_calls_that_not_every_system_has(job, target, monkeypatch):
    monkeypatch.setattr(fileio, "_preadv", fileio._pread_into)
    monkeypatch.setattr(fileio, "_fadvise", None)
    check_done(job.call(target), job, target)


@pytest.mark.parametrize("preadv", [fileio._preadv, fileio._pread_into], ids=["preadv", "pread"])
def test_reads_and_writes_that_move_a_few_bytes(job, target, monkeypatch, preadv):
    write = os.pwrite
    monkeypatch.setattr(fileio, "_preadv", lambda file, buffers, at: preadv(file, [buffers[0][:97]], at))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:89], at))
    check_done(job.call(target), job, target)


def test_file_systems_without_locks(job, target, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(staging.fcntl, "flock", refuse)
    check_done(job.call(target), job, target)
