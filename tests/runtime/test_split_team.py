"""Splits by several processes, as torchrun starts them, compared with a split by one.

Most tests start the processes themselves, with the variables that torchrun sets. Processes with outputs in different
folders stand for hosts with a disk each.
"""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardconv
from shardconv.runtime import split_team
from shardconv.support.errors import UsageError
from tests.support.checkpoints import contents, left, llama_config, write_checkpoint
from tests.support.command import ENVIRONMENT, Result, call, finish, start, wait_until
from tests.support.faults import SLOW
from tests.support.forked import Popen
from tests.support.hub import serve_hub
from tests.support.matrix import MATRIX, each_once
from tests.support.pipelines import write_pipeline
from tests.support.torchrun import free_port, on_one_node

pytestmark = pytest.mark.timeout(240)
PATIENCE = 60


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("team") / "source", parts=2)


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("team") / "split"
    shardconv.split(source, folder, tp=4)
    return contents(folder)


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment of a process that torchrun starts, on the loopback interface."""
    return {
        **ENVIRONMENT, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def begin(*commands: list[object], scripts: dict[int, Path] | None = None) -> list[subprocess.Popen[str]]:
    """Start ``shardconv split`` with each of some arguments, as the processes of one team."""
    port, streams = free_port(), {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    programs = {rank: [str(path)] for rank, path in (scripts or {}).items()}
    return [
        Popen(
            [sys.executable, *programs.get(rank, ["-m", "shardconv"]), "split", *map(str, arguments)],
            text=True, env=variables(rank, len(commands), port), **streams,
        )
        for rank, arguments in enumerate(commands)
    ]  # fmt: skip


def team(*commands: list[object], scripts: dict[int, Path] | None = None) -> list[Result]:
    return [finish(process) for process in begin(*commands, scripts=scripts)]


def check_failed(results: list[Result], message: str) -> None:
    """Check that all processes failed, and that one of them says why."""
    assert all(result.code not in {0, None} for result in results), results
    errors = re.findall(r"^shardconv: .*$", "\n".join(result.err for result in results), re.MULTILINE)
    assert len(errors) == 1, results
    assert re.search(message, errors[0]), errors
    assert all(result.out == "" for result in results)


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [pytest.param(2, marks=MATRIX), 3, pytest.param(5, marks=MATRIX)])
def test_shared_disk(source, expected, tmp_path, size):
    """Also with processes without a rank; the first process prints the result."""
    results = team(*[[source, "--tp", 4, "-o", tmp_path / "out", "--json"]] * size)
    assert [result.code for result in results] == [0] * size, results
    assert [bool(result.out) for result in results] == [True] + [False] * (size - 1)
    report = json.loads(results[0].out)
    assert (report["ranks"], len(report["rank_bytes"])) == ([0, 1, 2, 3], 4)
    assert contents(tmp_path / "out") == expected
    assert left(tmp_path) == sorted(["out", *(f"out/{name}" for name in expected)])


def check_hosts(source: Path, home: Path, names: str) -> Result:
    """Split by processes whose letters name their hosts, of which there are two; returns the result of the first."""
    results = team(*([source, "--tp", 4, "-o", home / name / "out"] for name in names))
    assert [result.code for result in results] == [0] * len(names), results
    folders = [home / name / "out" for name in sorted({*names})]
    for folder, ranks in zip(folders, ("0-1", "2-3"), strict=True):
        shardconv.split(source, folder.with_name("alone"), tp=4, ranks=ranks)
        assert contents(folder) == contents(folder.with_name("alone"))
    shardconv.merge(folders, home / "back")
    assert contents(home / "back") == contents(source)
    return results[0]


def test_pipeline(tmp_path):
    """On a shared disk, and on two hosts with a disk each."""
    source = write_pipeline(tmp_path / "source")
    shardconv.split(source, tmp_path / "expected", tp=4)
    results = team(*[[source, "--tp", 4, "-o", tmp_path / "out", "--json"]] * 2)
    assert [result.code for result in results] == [0, 0], results
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    check_hosts(source, tmp_path, "ab")


def test_pipelines_that_differ(tmp_path):
    sources = [write_pipeline(tmp_path / name) for name in "ab"]
    (sources[1] / "scheduler" / "scheduler_config.json").write_text("{}")
    check_failed(team(*([one, "--tp", 2, "-o", tmp_path / "out"] for one in sources)), "files of pipelines")
    assert not (tmp_path / "out").exists()


def test_disk_of_each_host(source, tmp_path):
    """Two hosts with two processes each: each host has its ranks, whose files only differ in the identity."""
    assert "2 rank files (ranks 0, 1 of 4)" in check_hosts(source, tmp_path, "aabb").out


@pytest.mark.parametrize(
    ("options", "arguments"),
    [(["--ranks", "1-3"], {"ranks": "1-3"}), (["--no-checksums"], {"checksums": False})],
    ids=["some ranks", "no checksums"],
)
def test_options_have_the_effect_that_they_have_on_one_process(source, tmp_path, options, arguments):
    results = team(*[[source, "--tp", 4, *options, "-o", tmp_path / "out"]] * 2)
    assert [result.code for result in results] == [0, 0], results
    shardconv.split(source, tmp_path / "alone", tp=4, **arguments)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_dry_run(source, tmp_path):
    results = team(*[[source, "--tp", 4, "-o", tmp_path / "out", "--dry-run"]] * 2)
    assert [result.code for result in results] == [0, 0], results
    assert [bool(result.out) for result in results] == [True, False]
    assert left(tmp_path) == []


def test_under_torchrun(source, expected, tmp_path):
    result = finish(on_one_node(2, "-m", "shardconv", "split", source, "--tp", "4", "-o", tmp_path / "out"))
    assert result.code == 0, result.err
    assert result.out.count("4 rank files") == 1
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("command", ["merge", "verify", "reshard", "pad", "unpad"])
def test_commands_of_one_process_are_refused_in_the_first_of_several(command):
    options = {"reshard": ["--tp", "2"], "pad": ["--multiple-of", "tp=2"]}.get(command, [])
    message = f"shardconv: {command} is not shared between processes (got 2, expected 1): start it without torchrun\n"
    environment = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert finish(start(command, "out", *options, env=environment)) == (1, "", message)


def test_refused_command_has_one_message_under_torchrun():
    result = finish(on_one_node(3, "-m", "shardconv", "merge", "out"))
    assert (result.code, result.out, result.err.count("shardconv: ")) == (1, "", 1), result


def test_variables_of_other_launchers_do_not_make_a_group(source, tmp_path):
    """A job array may set them for processes of their own."""
    shardconv.split(source, tmp_path / "out", tp=2)
    result = finish(start("verify", tmp_path / "out", env={"RANK": "1", "WORLD_SIZE": "2"}))
    assert (result.code, result.out.splitlines()[-1]) == (0, "correct")


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(tmp_path_factory) -> Path:
    """A program that is the command, and whose writes wait for a file beside it."""
    path = tmp_path_factory.mktemp("held") / "held.py"
    path.write_text(
        "import os, time\nfrom pathlib import Path\nfrom shardconv.cli import main\nwrite = os.pwrite\n"
        "def wait(*arguments):\n    while not Path(__file__).with_name('go').exists():\n        time.sleep(0.02)\n"
        "    return write(*arguments)\nos.pwrite = wait\nmain()\n"
    )
    return path


@pytest.fixture
def slow(tmp_path_factory) -> Path:
    """A program that is the command on a slow disk."""
    path = tmp_path_factory.mktemp("slow") / "slow.py"
    path.write_text(f"{SLOW}\nfrom shardconv.cli import main\nmain()\n")
    return path


@pytest.fixture
def full(tmp_path_factory) -> Path:
    """A program that is the command on a full disk."""
    path = tmp_path_factory.mktemp("full") / "full.py"
    write = "import errno, os\ndef write(*_):\n    raise OSError(errno.ENOSPC, 'full')\nos.pwrite = write\n"
    path.write_text(f"{write}\nfrom shardconv.cli import main\nmain()\n")
    return path


@pytest.mark.parametrize(("process", "names"), each_once([0, 1], ["aa", "ab"]))
def test_full_disk(source, tmp_path, slow, full, process, names):
    """The other process stops copying, long before it would be done."""
    folders = [tmp_path / name / "out" for name in names]
    programs = {0: slow, 1: slow, process: full}
    results = team(*([source, "--tp", 4, "-o", folder] for folder in folders), scripts=programs)
    check_failed(results, "the disk is full: free some space")
    assert left(tmp_path) == []


CHANGES = {
    "values": (lambda folder: write_checkpoint(folder, parts=2, seed=7), "out: values of tensors"),
    "config": (
        lambda folder: (folder / "config.json").write_text(json.dumps({**llama_config(), "rope_theta": 5.0})),
        "out: checkpoints or options and auxiliary files",
    ),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "out: auxiliary files"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_processes_with_different_sources(source, tmp_path, what):
    change, message = CHANGES[what]
    other = write_checkpoint(tmp_path / "other" / "source", parts=2)
    change(other)
    folders = [tmp_path / name / "out" for name in "ab"]
    results = team(*([src, "--tp", 4, "-o", to] for src, to in zip((source, other), folders, strict=True)))
    check_failed(
        results,
        rf"{message} differ between processes \(process 0 in \S+ differs from process 1 in \S+\): pass the same source",
    )
    assert not any(folder.parent.exists() for folder in folders)


def test_a_commit_that_is_pushed_while_processes_split_is_an_error(source, tmp_path, monkeypatch):
    """It changes the last rows of tensors only, which no sample has."""
    with serve_hub(contents(source)) as hub:
        hub.push_after_the_first(contents(source))
        monkeypatch.setitem(ENVIRONMENT, "HF_ENDPOINT", hub.server.url)
        results = team(*[["hf://org/model", "--tp", 4, "-o", tmp_path / "out"]] * 2)
    check_failed(
        results,
        r"versions of remote files differ between processes \(process 0 differs from process 1\): .*start again",
    )
    assert left(tmp_path) == []


ERRORS = {
    "another option": ([], ["--replicate", "lm_head.weight"], "checkpoints or options differ between processes"),
    "unsupported size": (["--pad"], ["--tp", 5], "is not a multiple of 5"),
    "wrong ranks": (["--ranks", "9"], ["--ranks", "9"], "--ranks has rank 9"),
    "more hosts than ranks": (["--ranks", "1"], ["--ranks", "1"], "there are more hosts than ranks"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_one_error_for_all(source, tmp_path, what):
    *options, message = ERRORS[what]
    results = team(*([source, "--tp", 4, "-o", tmp_path / str(at) / "out", *one] for at, one in enumerate(options)))
    check_failed(results, message)
    assert not any(path.is_file() or path.name == "out" for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("process", [0, 1])
def test_folder_that_cannot_be_written(source, tmp_path, process):
    """The parent of one process's destination is a file; the file that finds shared disks is removed."""
    (tmp_path / "file").write_text("")
    folders = [tmp_path / "good"] * 2
    folders[process] = tmp_path / "file"
    results = team(*([source, "--tp", 2, "-o", folder / "out"] for folder in folders))
    check_failed(results, "file.*: cannot be written|exists and is not a folder")
    assert left(tmp_path) == ["file"]


WRONG_VARIABLES = {
    "no address": ({"MASTER_ADDR": None}, "MASTER_ADDR is not set (expected the variables that torchrun sets)"),
    "no port": ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
    "text": ({"WORLD_SIZE": "two"}, "WORLD_SIZE is malformed (got 'two', expected a number)"),
    "negative": ({"RANK": "-1"}, "RANK is malformed (got '-1', expected a number)"),
    "too large": ({"RANK": "2"}, "RANK is too large (got 2, expected less than the WORLD_SIZE of 2)"),
}


@pytest.mark.parametrize("what", WRONG_VARIABLES)
def test_variables_that_torchrun_did_not_set(monkeypatch, what):
    changes, message = WRONG_VARIABLES[what]
    for name, value in {**variables(0, 2, free_port()), **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=re.escape(message)), split_team.join():
        pass


def test_destination_exists(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    check_failed(team(*[[source, "--tp", 4, "-o", tmp_path / "out"]] * 2), "does not hold a checkpoint")
    assert left(tmp_path) == ["out", "out/notes.txt"]


def test_destination_that_appears_on_one_host_leaves_no_folder_on_the_others(source, tmp_path, held):
    processes = begin(
        *([source, "--tp", 4, "-o", tmp_path / name / "out"] for name in "ab"), scripts=dict.fromkeys((0, 1), held)
    )
    wait_until(lambda: copying(tmp_path / "a") and copying(tmp_path / "b"))
    (tmp_path / "b" / "out").mkdir()
    (tmp_path / "b" / "out" / "notes.txt").write_text("mine")
    held.with_name("go").touch()
    results = [finish(each) for each in processes]
    assert left(tmp_path) == ["b", "b/out", "b/out/notes.txt"]
    check_failed(results, "b/out: does not hold a checkpoint")


def copying(folder: Path) -> bool:
    return any(folder.glob(".*.partial/result/*.safetensors"))


@pytest.mark.parametrize("process", [0, 1], ids=["leader", "other"])
def test_killed_process(source, tmp_path, held, process):
    """The other ends with an error; what a killed leader leaves is removed by the next split."""
    processes = begin(*[[source, "--tp", 4, "-o", tmp_path / "out"]] * 2, scripts=dict.fromkeys((0, 1), held))
    wait_until(lambda: copying(tmp_path))
    processes[process].kill()
    held.with_name("go").touch()
    began = time.monotonic()
    results = [finish(each) for each in processes]
    assert time.monotonic() - began < PATIENCE
    assert results[process].code == -signal.SIGKILL
    other = results[1 - process]
    assert other.code == 1
    assert "another process was killed, or its host failed" in other.err
    assert process == 0 or left(tmp_path) == []
    assert not (tmp_path / "out").exists()
    assert call("split", source, "--tp", 4, "-o", tmp_path / "out").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_error_of_a_slow_process_is_printed_under_torchrun(source, tmp_path):
    """The process that stops for the error of another one does not exit before that one has printed it."""
    program = tmp_path / "late.py"
    program.write_text(
        "import time\nfrom shardconv.runtime.split_team import SplitTeam\nfail = SplitTeam._fail\n"
        "def late(team):\n    is_later = fail(team)\n    time.sleep(0 if is_later else 2)\n    return is_later\n"
        "SplitTeam._fail = late\nfrom shardconv.cli import main\nmain()\n"
    )
    result = finish(on_one_node(2, program, "split", source, "--tp", "5", "-o", tmp_path / "out"))
    assert (result.code, len(re.findall(r"^shardconv: .*5", result.err, re.MULTILINE))) == (1, 1), result.err
