"""Checkpoints that are written to S3 while something goes wrong: interruptions, lost locks, and a silent store."""

import os
import random
import signal
import tempfile
import time
from itertools import product
from pathlib import Path

import pytest

import shardconv
from shardconv.files.storage import clients, remote_output, upload
from shardconv.files.storage.clients import Key
from shardconv.files.storage.stores import open_store
from shardconv.files.storage.upload import UploadFiles
from shardconv.files.storage.url import parse
from shardconv.support.errors import OutputError
from tests.storage.written import PART, check_nothing_left, failing, without_identity
from tests.support.checkpoints import contents
from tests.support.command import call, finish, start
from tests.support.matrix import cases

MAPS = Path("/proc/self/maps")
SMALL_PARTS = f"""
from shardconv.files.storage import upload
upload.part_bytes = lambda _: {PART}
"""


def start_split(made, url, *options):
    """A split to a URL in a new process, which receives SIGINT also where this process ignores it."""
    restore = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    return start(
        "split", made / "model", "--tp", "2", "-o", url, *options, patch=restore + SMALL_PARTS, env=dict(os.environ)
    )  # fmt: skip


def wait_for(s3, process, is_it):
    """Wait until the server has a request."""
    while not any(is_it(*request) for request in s3.requests):
        time.sleep(0.02)
        assert process.poll() is None


def interrupted(made, s3, number, request_of, target, *options, fault="wait"):
    """The result of a split that gets a signal while the server does not answer a request."""
    step, after, query = request_of
    s3.released.clear()
    s3.fault = failing(step, fault, after)
    process = start_split(made, f"s3://bucket/{target}", *options)
    while sum(query in f"{request[1]}?{request[2]}" and request[0] != "GET" for request in s3.requests) <= after:
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(number)
    time.sleep(0.3)
    s3.released.set()
    return finish(process)


PART_REQUEST, COMPLETE_REQUEST = ("part", 3, "partNumber"), ("complete", 0, "uploadId=")


@pytest.mark.parametrize(
    ("number", "request_of"),
    cases(
        list(product([signal.SIGINT, signal.SIGTERM], [PART_REQUEST, COMPLETE_REQUEST])),
        lambda number, request_of: (number == signal.SIGINT) is (request_of == PART_REQUEST),
    ),
)
def test_an_interruption_leaves_nothing(made, s3, number, request_of):
    name = f"out/interrupted-{request_of[0]}-{number.name}"
    result = interrupted(made, s3, number, request_of, name, fault="hang")
    assert result.code == 128 + number
    assert "nothing was left behind" in result.err
    check_nothing_left(s3, name)


@pytest.mark.parametrize(
    ("step", "query"),
    cases(
        [("manifest", "shardconv.json?"), ("lock", ".lock?"), ("file", "tokenizer.json?")],
        lambda step, query: step != "file",
    ),
)
def test_a_request_that_is_carried_out_after_the_interruption_leaves_nothing(made, s3, step, query):
    target = f"out/carried-out-{step}"
    result = interrupted(made, s3, signal.SIGTERM, (step, 0, query), target)
    assert (result.code, result.err.splitlines()[-1]) == (143, "shardconv: terminated; nothing was left behind")
    check_nothing_left(s3, target)


def test_an_interrupted_overwrite_says_that_the_old_checkpoint_is_incomplete(made, s3):
    shardconv.split(made / "model", "s3://bucket/out/interrupted-overwrite", tp=4)
    s3.requests.clear()
    result = interrupted(
        made, s3, signal.SIGTERM, ("delete", 0, "delete"), "out/interrupted-overwrite", "--overwrite"
    )  # fmt: skip
    assert result.code == 143
    assert "terminated; the existing files are partly removed: run the command again" in result.err
    assert "nothing was left behind" not in result.err
    s3.fault = lambda *_: None
    assert "shardconv.json" not in s3.objects("out/interrupted-overwrite/")


def test_a_second_signal_ends_the_removal_and_names_the_destination(made, s3):
    """The first one arrives with a part, the second one while an upload is aborted."""
    s3.released.clear()
    target, started = "s3://bucket/out/second", []

    def interrupt(method: str, path: str, query: str) -> str | None:
        if "partNumber" in query and started:
            started.pop().send_signal(signal.SIGINT)
        return "wait" if method == "DELETE" else None

    s3.fault = interrupt
    process = start_split(made, target)
    started.append(process)
    wait_for(s3, process, lambda method, path, query: method == "DELETE")
    process.send_signal(signal.SIGINT)
    result = finish(process)
    s3.released.set()
    assert result.code == 130
    assert result.err.endswith(f"shardconv: interrupted; files in {target} and its lock may be left: remove them\n")
    assert s3.objects("out/second/").keys() <= {".shardconv.lock"}


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list the mappings of a process")
def test_few_parts_of_the_temporary_file_are_mapped_at_a_time(s3, tmp_path, monkeypatch):
    """A store that answers late gets the parts in memory, and two of those in the file, at a time."""
    monkeypatch.setattr(upload, "FROM_FILE_BYTES", 2 * PART)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    content = random.Random(0).randbytes(20 * PART)
    s3.released.clear()
    s3.fault = lambda method, path, query: "wait" if "partNumber" in query else None
    files = UploadFiles([Key(open_store(parse("s3://bucket")), "parts", "s3://bucket/parts")], [b""], [len(content)])
    for number in reversed(range(20)):  # the first part, without which none is sent, is the last one
        at = number * PART
        files.write_ranges(0, memoryview(content)[at : at + PART], [(at, PART)])
    time.sleep(1)
    assert MAPS.read_text().count(f" {tmp_path}/") <= 2
    s3.released.set()
    files.flush()
    files.complete()
    files.release()
    assert s3.objects("parts") == {"": content}


def test_a_signal_while_the_lock_is_removed_keeps_the_checkpoint(made, s3):
    s3.released.clear()
    s3.fault = failing("delete", "wait")
    target = "s3://bucket/out/released"
    process = start_split(made, target)
    wait_for(s3, process, lambda method, path, query: method == "POST" and "delete" in query)
    process.send_signal(signal.SIGTERM)
    result = finish(process)
    lock = f"{target}/.shardconv.lock"
    message = f"shardconv: terminated; {target}: is written, but its lock {lock} may be left: remove it\n"
    assert (result.code, result.err) == (143, message)
    assert without_identity(s3.objects("out/released/")).keys() >= without_identity(contents(made / "split")).keys()
    assert shardconv.verify(target).differences == ()
    s3.fault = lambda *_: None
    s3.released.set()


def test_a_lock_that_cannot_be_removed_does_not_remove_the_checkpoint(made, s3):
    s3.fault = failing("delete", "403")
    result = call("split", made / "model", "--tp", "2", "-o", "s3://bucket/out/unlock")
    assert result.code == 1
    lock = "s3://bucket/out/unlock/.shardconv.lock"
    assert f"s3://bucket/out/unlock: is written, but its lock {lock} could not be removed: remove it\n" in result.err
    s3.fault = lambda *_: None
    assert without_identity(s3.objects("out/unlock/")).keys() >= without_identity(contents(made / "split")).keys()
    assert shardconv.verify("s3://bucket/out/unlock").differences == ()


def test_urls_of_requests_that_the_store_does_not_answer_are_named(made, s3, monkeypatch):
    monkeypatch.setattr(clients, "_ABORT_SECONDS", 0.2)
    monkeypatch.setattr(remote_output.RemoteOutput, "_upload", raise_interrupt)
    s3.released.clear()
    s3.fault = lambda method, path, _: "wait" if method == "HEAD" and "/out/silent/" in path else None
    with pytest.raises(KeyboardInterrupt) as caught:
        shardconv.split(made / "model", "s3://bucket/out/silent", tp=2)
    s3.released.set()
    assert caught.value.__notes__[0].startswith("may be left: s3://")
    for name in ("rank-0-of-2.safetensors", "rank-1-of-2.safetensors", ".shardconv.lock"):
        assert f"s3://bucket/out/silent/{name}" in caught.value.__notes__[0]


def raise_interrupt(*_, **__) -> None:
    raise KeyboardInterrupt


def test_a_lock_lost_during_publication_keeps_the_files_of_the_other_run(made, s3):
    name = "out/taken"

    def take(method: str, path: str, query: str) -> None:
        if method == "PUT" and path.endswith("tokenizer.json"):
            s3.fault = lambda method, path, _: "403" if method == "PUT" and path.endswith("config.json") else None
            s3.client.put_object(Bucket="bucket", Key=f"{name}/.shardconv.lock", Body=b"[]")

    s3.fault = take
    with pytest.raises(OutputError, match="access is denied") as caught:
        shardconv.split(made / "model", f"s3://bucket/{name}", tp=2)
    s3.fault = lambda *_: None
    assert {".shardconv.lock", "rank-0-of-2.safetensors"} <= s3.objects(f"{name}/").keys()
    assert f"s3://bucket/{name}/rank-0-of-2.safetensors" in caught.value.__notes__[-1]


OF_A_RUN = b'{"host": "other", "process": 7, "started": "2026-01-02 03:04:05 UTC", "token": "x"}'
LOCKS = {
    OF_A_RUN: " since 2026-01-02 03:04:05 UTC on other",
    **dict.fromkeys([b"[]", b"7", b"no", b"", b'{"host": 1}'], ""),
}


@pytest.mark.parametrize("data", cases(LOCKS, lambda data: data in {OF_A_RUN, b"[]"}))
def test_a_lock_of_another_run_or_tool_is_one_error(made, s3, data):
    s3.client.put_object(Bucket="bucket", Key="out/foreign/.shardconv.lock", Body=data)
    result = call("split", made / "model", "--tp", "2", "-o", "s3://bucket/out/foreign")
    assert result.code == 1
    assert result.err == (
        f"shardconv: s3://bucket/out/foreign: another run is writing it{LOCKS[data]}: wait until it finishes, or if it "
        "was killed, remove s3://bucket/out/foreign/.shardconv.lock\n"
    )
