"""Destinations that exist, or that appear during a run: files, folders, links, the source, and other runs.

Only a checkpoint is replaced, and only with --overwrite; everything else is kept, with one message.
"""

import errno
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardconv.checkpoint.engine.copy import CopyJob
from shardconv.checkpoint.operations.split import split
from shardconv.checkpoint.output import auxiliary, staging
from shardconv.support.errors import OutputError, ShardconvError
from tests.support.checkpoints import contents, left
from tests.support.command import Result, call
from tests.support.faults import (
    beside,
    check_done,
    failing,
    put_checkpoint,
    put_dangling_link,
    put_file,
    put_link,
    put_notes,
    refuse_locks,
    refuse_to_list,
    writing,
)
from tests.support.matrix import cases, each_once

pytestmark = pytest.mark.usefixtures("_sources_stay_as_they_are")

# --- what is there already ------------------------------------------------------------------------------------------


def powerset(*options: str) -> Iterator[tuple[str, ...]]:
    for count in range(len(options) + 1):
        yield from itertools.combinations(options, count)


KEPT = {
    put_file: "exists (got a file, expected a folder)",
    put_notes: "does not hold a checkpoint, so it is not overwritten: choose another path with -o\n",
    put_link: "exists (got a link, expected a folder)",
    put_dangling_link: "exists (got a link, expected a folder)",
}


@pytest.mark.parametrize(
    ("put", "options", "message"),
    [
        *(
            (put, [*options], message)
            for put, message in KEPT.items()
            for options in powerset("--overwrite", "--dry-run")
        ),
        (put_checkpoint, [], "exists: choose another path with -o, or pass --overwrite"),
    ],
)
def test_existing_destination_is_kept(job, target, put, options, message):
    """The message asks for another path with any options, unless --overwrite replaces it."""
    put(target)
    before = beside(target), contents(target.parent.parent)
    result = job.call(target, *options)
    assert result.code == 1
    assert f"{target}: {message}" in result.err
    assert (beside(target), contents(target.parent.parent)) == before


def test_empty_folder_as_destination(job, target):
    """It does not require --overwrite."""
    target.mkdir()
    assert json.loads(job.call(target, "--dry-run", "--json").out)["destination_exists"] is False
    assert contents(target) == {}
    check_done(job.call(target), job, target)


def test_destination_in_a_file(job, target):
    (target.parent / "file").write_text("x")
    result = job.call(target.parent / "file" / "result")
    assert result.code == 1
    assert "Traceback" not in result.err
    assert contents(target.parent) == {"file": b"x"}


@pytest.mark.parametrize(
    ("error", "name", "code"),
    [
        (OSError(errno.EIO, "damaged"), None, 1),
        (KeyboardInterrupt(), None, 130),
        (OSError(errno.EIO, "damaged"), "notes.txt", 1),
    ],
    ids=["error", "interrupted", "other files"],
)
def test_created_parent_folders_are_removed_after_a_failure(job, target, monkeypatch, error, name, code):
    """Those that the run created, unless they have other files."""

    def fail(*_: object) -> None:
        if name is not None:
            (target.parent / "there" / "a" / name).write_text("mine")
        raise error

    (target.parent / "there").mkdir()
    monkeypatch.setattr(staging, "publish", fail)
    assert job.call(target.parent / "there" / "a" / "b" / "result").code == code
    assert left(target.parent) == ["there", *([] if name is None else ["there/a", f"there/a/{name}"])]


def test_refused_destination_leaves_no_parent_folders(job, target, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    result = job.call(target.parent / "a" / "b" / "result")
    assert (result.code, "too little free space" in result.err) == (1, True)
    assert left(target.parent) == []


def test_parent_folders_are_created(job, target):
    assert job.call(target / "a" / "b").code == 0
    assert contents(target / "a" / "b") == job.expected


# --- what is overwritten --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("put", [put_checkpoint, Path.mkdir, lambda _: None], ids=["checkpoint", "empty", "nothing"])
def test_overwrite(job, target, put):
    put(target)
    check_done(job.call(target, "--overwrite"), job, target)


OTHER_FILES = [
    "NOTES.md", "extra/mine.txt", "other/deep/x", ".hidden", ".ssh/key", "extra/model.safetensors", "pipe", "link",
]  # fmt: skip


@pytest.mark.parametrize(("name", "is_its_own"), each_once(OTHER_FILES, [False, True]))
def test_overwrite_keeps_a_folder_with_other_files(job, target, name, is_its_own):
    if is_its_own:
        job.function(job.source, target)
    else:
        put_checkpoint(target)
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "pipe":
        os.mkfifo(path)
    elif name == "link":
        path.symlink_to(target.parent, target_is_directory=True)
    else:
        path.write_text("mine")
    before = contents(target)
    message = f"{target}: holds {name}, which is not part of a checkpoint: remove it, or choose another path with -o"
    for options in (["--dry-run"], []):
        result = job.call(target, "--overwrite", *options)
        assert result.code == 1
        assert message in result.err
        assert os.path.lexists(path)
        assert beside(target) == [target.name]
        assert contents(target) == before
    path.unlink()
    check_done(job.call(target, "--overwrite"), job, target)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_overwrite_a_split_checkpoint(job, made, target, is_damaged):
    """Auxiliary files in its manifest are replaced, if it can be read; a folder with other files is kept."""
    source = shutil.copytree(made / "source", target.parent.parent / "other")
    (source / "special.txt").write_text("x")
    split(source, target, tp=2)
    mine = target / "model.safetensors"
    if is_damaged:
        (target / "shardconv.json").write_text("{")
        mine = target / "special.txt"
    mine.write_text("mine")
    assert f"holds {mine.name}, which is not part" in job.call(target, "--overwrite").err
    mine.unlink()
    check_done(job.call(target, "--overwrite"), job, target)


def test_overwrite_a_folder_that_cannot_be_read(job, target, monkeypatch):
    put_checkpoint(target)
    (target / "extra").mkdir()
    refuse_to_list(monkeypatch, target / "extra")
    assert f"{target / 'extra'}: cannot be read: Permission denied" in job.call(target, "--overwrite").err
    monkeypatch.undo()
    assert sorted(contents(target)) == ["model.safetensors", "tokenizer.json"]


def fail_once(name: str) -> Callable[[Path, Path], Path]:
    """A rename that fails for a name in the staging folder."""
    rename = Path.rename

    def renamed(path: Path, to: Path) -> Path:
        if path.parent.name == ".result.partial" and path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, to)

    return renamed


@pytest.mark.parametrize(
    ("owner", "name", "failed"),
    [
        (os, "pwrite", lambda: failing(os.pwrite, 0)),
        (os, "pwrite", lambda: failing(os.pwrite, 2)),
        (Path, "rename", lambda: failing(Path.rename, 0)),
        (Path, "rename", lambda: fail_once("result")),
        (auxiliary, "create", lambda: failing(auxiliary.create, 0)),
    ],
)
def test_overwrite_keeps_the_checkpoint_if_the_run_fails(job, target, monkeypatch, owner, name, failed):
    put_checkpoint(target)
    before = contents(target.parent)
    monkeypatch.setattr(owner, name, failed())
    assert job.call(target, "--overwrite").code == 1
    assert contents(target.parent) == before


def test_overwrite_flushes_the_result_before_it_removes_the_checkpoint(job, target, monkeypatch):
    put_checkpoint(target)
    replaced = target.parent / ".result.partial" / "replaced"
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(staging, "sync_folder", lambda path: synced.append((path, replaced.exists())))
    check_done(job.call(target, "--overwrite"), job, target)
    assert (target.parent / ".result.partial" / "result", False) in synced
    assert synced[-1] == (target.parent, True)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=type)
def test_nothing_is_kept_after_the_result_has_its_final_name(job, target, monkeypatch, error):
    """Not the replaced checkpoint either: there is nothing to resume."""

    def fail_at_the_end(path: Path) -> None:
        if path == target.parent:
            raise error

    put_checkpoint(target)
    monkeypatch.setattr(staging, "sync_folder", fail_at_the_end)
    result = job.call(target, "--overwrite", "--resume")
    assert result.code != 0
    assert "finished stripes are kept" not in result.err
    assert beside(target) == [target.name]
    assert contents(target) == job.expected


# --- what comes to the destination meanwhile, or lies beside it -----------------------------------------------------


def when_all_is_written(monkeypatch, action: Callable[[], object]) -> None:
    """Call a function after all files are written and before they are published."""
    publish = staging.publish
    monkeypatch.setattr(staging, "publish", lambda *arguments: (action(), publish(*arguments)))


@pytest.mark.parametrize("put", [put_file, put_notes, put_checkpoint, put_link, put_dangling_link])
def test_destination_that_appears_during_the_run_is_kept(job, target, monkeypatch, put):
    """It did not exist when the run began, and --overwrite was not passed."""
    same = target.parent.parent / "same" / "out" / "result"
    same.parent.mkdir(parents=True)
    put(same)
    when_all_is_written(monkeypatch, lambda: put(target))
    result = job.call(target)
    assert result.code == 1
    assert f"{target}: was created by another process: choose another path with -o" in result.err
    assert beside(target) == [target.name]
    assert contents(target.parent) == contents(same.parent)
    assert target.is_symlink() == same.is_symlink()


def test_empty_folder_that_appears_during_the_run_is_replaced(job, target, monkeypatch):
    when_all_is_written(monkeypatch, target.mkdir)
    check_done(job.call(target), job, target)


def test_overwrite_checks_the_destination_again_before_it_replaces_it(job, target, monkeypatch):
    put_checkpoint(target)
    flush = staging.flush
    monkeypatch.setattr(staging, "flush", lambda path: (flush(path), (target / "notes.txt").write_text("mine")))
    assert "holds notes.txt, which is not part of a checkpoint" in job.call(target, "--overwrite").err
    assert beside(target) == [target.name]
    assert contents(target)["notes.txt"] == b"mine"


def test_overwrite_keeps_both_if_another_process_writes_the_destination(job, target, monkeypatch):
    """A file appears between its two renames: both are kept, also by later runs."""
    put_checkpoint(target)
    old = contents(target)
    rename = Path.rename

    def rename_then_put(path: Path, to: Path) -> Path:
        result = rename(path, to)
        if path == target:
            put_notes(target)
        return result

    monkeypatch.setattr(Path, "rename", rename_then_put)
    kept = target.parent / ".result.partial" / "replaced"
    for message in (f"the previous checkpoint is kept as {kept}", "does not hold a checkpoint"):
        assert message in job.call(target, "--overwrite").err
        assert contents(target) == {"notes.txt": b"mine"}
        assert contents(kept) == old


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (put_notes, "holds files that shardconv did not write: rename it"),
        (put_checkpoint, "holds files that shardconv did not write: rename it"),
        (put_file, "Not a directory"),
    ],
)
def test_user_files_with_the_name_of_the_staging_folder_are_kept(job, target, put, message):
    put(target.parent / ".result.partial")
    before = contents(target.parent)
    result = job.call(target)
    assert result.code == 1
    assert message in result.err
    assert contents(target.parent) == before


def test_empty_folder_with_the_name_of_the_staging_folder_is_used(job, target):
    """A run that is killed before it writes the marker leaves such a folder."""
    (target.parent / ".result.partial").mkdir()
    check_done(job.call(target), job, target)


# --- too near to what is read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
@pytest.mark.parametrize("name", ["", "sub", "sub/sub", "../{name}"])
def test_destination_in_the_source(job, tmp_path, name, options):
    source = shutil.copytree(job.source, tmp_path / "copy")
    before = contents(tmp_path)
    result = job.on(source).call(source / name.format(name=source.name), *options)
    assert result.code == (1 if "exists" in result.err else 2)
    assert any(words in result.err for words in ("is in the source", "is the source:", "exists"))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("way", ["folder", "link", "plan file"])
def test_destination_that_contains_the_source(made, target, way):
    """It also holds a checkpoint, so --overwrite would remove what is read."""
    shutil.copytree(made / "source", target)
    source, options = made / "source", []
    if way == "folder":
        source = shutil.copytree(made / "source", target / "source")
    elif way == "link":
        source, options = target.parent / "source", ["--follow-links"]
        source.mkdir()
        for path in filter(Path.is_file, target.iterdir()):
            (source / path.name).symlink_to(path)
    else:
        (target / "plan.toml").write_text('[rules]\n"lm_head" = { style = "replicate" }')
        options = ["--rules", target / "plan.toml"]
    before = contents(target.parent)
    result = call("split", source, "--tp", "2", "-o", target, *options, "--overwrite")
    assert (result.code, "contains the source" in result.err) == (2, True)
    assert "choose another path" in result.err
    assert contents(target.parent) == before


# --- two runs for one destination -----------------------------------------------------------------------------------


def test_second_run_while_the_first_writes(job, target):
    with writing(lambda: job.function(job.source, target)):
        for overwrite in (False, True):
            with pytest.raises(OutputError, match="result: another run is writing it"):
                job.function(job.source, target, overwrite=overwrite)
    check_done(Result(0, "", ""), job, target)


@pytest.mark.parametrize("races", cases([6, 20], lambda races: races == 6))
@pytest.mark.parametrize("overwrite", [False, True])
def test_many_races(job, target, overwrite, races):
    for _ in range(races):
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


# --- file systems that do less --------------------------------------------------------------------------------------


def test_file_systems_without_locks(job, target, monkeypatch):
    """Another run may be in the staging folder that exists: it is kept, and no run can be resumed."""
    refuse_locks(monkeypatch)
    check_done(job.call(target), job, target)
    remains = target.parent / ".result.partial"
    refused = "cannot be resumed (this file system does not support locks"
    result = job.call(target, "--overwrite", "--resume")
    assert (result.code, refused in result.err, remains.exists()) == (1, True, False)
    remains.mkdir()
    (remains / ".shardconv").touch()
    result = job.call(target, "--overwrite")
    assert (result.code, "another run may be writing it" in result.err) == (1, True)
    assert f"remove {remains}" in result.err
    result = job.call(target, "--overwrite", "--resume")
    assert (result.code, refused in result.err, str(remains) in result.err) == (1, True, False)
    assert [path.name for path in remains.iterdir()] == [".shardconv"]
    shutil.rmtree(remains)
    check_done(job.call(target, "--overwrite"), job, target)


def test_staging_folder_that_is_replaced_during_the_run(job, target, monkeypatch):
    """A user removes it during the run, and starts another run."""
    partial = target.parent / ".result.partial"
    copy = CopyJob.run

    def replace_then_copy(*arguments: Any, **options: Any) -> None:
        copy(*arguments, **options)
        partial.rename(tmp := target.parent / "moved")
        shutil.copytree(tmp, partial)

    monkeypatch.setattr(CopyJob, "run", replace_then_copy)
    result = job.call(target)
    assert (result.code, "was removed while it was in use" in result.err) == (1, True)
    assert not target.exists()


# --- a file as the destination --------------------------------------------------------------------------------------


def refuse_links(*_: Any) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


class TestMergeIntoOneFile:
    """Only merge can write one."""

    @pytest.fixture
    def file(self, target) -> Path:
        return target.with_suffix(".safetensors")

    @pytest.fixture(autouse=True, params=[True, False], ids=["links", "no links"])
    def _links(self, request, monkeypatch) -> None:
        if not request.param:
            monkeypatch.setattr(os, "link", refuse_links)

    @pytest.mark.parametrize(
        ("put", "options", "message"),
        [
            (put_file, [], "exists: choose another path"),
            (put_checkpoint, ["--overwrite"], "exists (got a folder, expected a file)"),
        ],
    )
    def test_what_exists_is_kept(self, made, file, put, options, message):
        put(file)
        before = contents(file.parent)
        result = call("merge", made / "split", "-o", file, *options)
        assert (result.code, message in result.err) == (1, True)
        assert contents(file.parent) == before

    @pytest.mark.parametrize("put", [None, put_file, put_link, put_dangling_link, Path.mkdir])
    def test_file_link_or_empty_folder_is_replaced(self, made, file, put):
        options = [] if put is None else ["--overwrite"]
        if put is not None:
            put(file)
        assert call("merge", made / "split", "-o", file, *options).code == 0
        assert beside(file) == [file.name]
        assert (file.is_file(), file.is_symlink(), file.stat().st_nlink) == (True, False, 1)

    @pytest.mark.parametrize("put", [put_file, put_notes, put_link, put_dangling_link])
    def test_what_appears_meanwhile_is_kept(self, made, file, monkeypatch, put):
        when_all_is_written(monkeypatch, lambda: put(file))
        result = call("merge", made / "split", "-o", file)
        assert f"{file}: was created by another process" in result.err
        assert beside(file) == [file.name]
        assert not file.is_file() or file.read_text() == "mine"
