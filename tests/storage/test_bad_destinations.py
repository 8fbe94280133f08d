"""Bad destinations in object stores: one message for each, and nothing is lost or left half-written.

``CASES`` is the table of docs/remote.md. Another kind of bad destination is one more entry in ``CASES``.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import moto.s3.models
import pytest
from moto.core import DEFAULT_ACCOUNT_ID

import shardconv
from shardconv.files.storage import stores
from tests.storage.written import failing
from tests.support.command import call
from tests.support.s3_server import S3Server

PAGE = Path(__file__).parents[2] / "docs" / "remote.md"
FOLDER = "bad/out"
LOCK = json.dumps({"host": "other", "process": 7, "started": "2026-01-02 03:04:05 UTC", "token": "x"}).encode()
NOTES = (("notes.txt", b"mine"),)
#: Files in the destination afterwards.
NOTHING, UNCHANGED, OTHER, INCOMPLETE = (
    "nothing", "the existing files", "the files of the other process", "no manifest, index or `config.json`",
)  # fmt: skip


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        message: a part of the message.
        left: what is in the destination afterwards.
        there: files in it before the command.
        fault: the faults of the server.
        change: a change in the store during the command.
        when: in the query of the request, after that for the lock, that is answered after the change.
        is_split: whether it has a split checkpoint before the command.
        url: the destination.
        overwrite: whether the command has ``--overwrite``.
        code: the exit code.
        tp: number of rank files; with several, one may fail when it is created, with another message.
    """

    message: str
    left: str = NOTHING
    there: tuple[tuple[str, bytes], ...] = ()
    fault: Callable[[], Callable[..., str | None]] = lambda: lambda *_: None
    change: Callable[[S3Server], object] = lambda _: None
    when: str = "partNumber"
    is_split: bool = False
    url: str = f"s3://bucket/{FOLDER}"
    overwrite: bool = False
    code: int = 1
    tp: int = 2


def put(name: str, data: bytes) -> Callable[[S3Server], object]:
    return lambda s3: s3.client.put_object(Bucket="bucket", Key=f"{FOLDER}/{name}", Body=data)


def remove_lock(s3: S3Server) -> None:
    s3.client.delete_object(Bucket="bucket", Key=f"{FOLDER}/.shardconv.lock")


def remove_bucket(_: S3Server) -> None:
    backends = moto.s3.models.s3_backends
    backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.pop("gone")
    backends.bucket_accounts.pop("gone")


CASES = {
    "a web server or the Hub": Case(
        "write to a local folder", url="http://user:secret@host/model?sig=secret", code=2,
    ),
    "a URL with credentials": Case("has credentials", url="s3://key:secret@bucket/bad/out", code=2),
    "no such bucket": Case(
        "its bucket or container does not exist: create it, or correct its name or the endpoint",
        url="s3://no-bucket/bad/out",
    ),
    "no permission": Case(
        "access is denied (status 403): the server refused the credentials of AWS_ACCESS_KEY_ID",
        fault=lambda: failing("lock", "403"),
    ),
    "no permission for the last file": Case("access is denied (status 403)", fault=lambda: failing("manifest", "403")),
    "a store without conditional writes": Case(
        "the store does not support conditional writes", fault=lambda: failing("lock", "501"),
    ),
    "a store that fails for two minutes": Case(
        "cannot be written: the server answered with status 500", fault=lambda: failing("part", "500"),
    ),
    "a checkpoint, without `--overwrite`": Case(
        "exists: choose another path with -o, or pass --overwrite", UNCHANGED, is_split=True,
    ),
    "other files": Case(
        "does not hold a checkpoint, so it is not overwritten", UNCHANGED, NOTES, overwrite=True,
    ),
    "a checkpoint and other files": Case(
        "holds notes.txt, which is not part of a checkpoint", UNCHANGED, NOTES, is_split=True,
        overwrite=True,
    ),
    "the lock of another command": Case(
        "another run is writing it since", UNCHANGED, ((".shardconv.lock", LOCK),),
    ),
    "the lock is removed during the command": Case(
        "was removed or replaced while this run was writing", change=remove_lock, when="list-type",
    ),
    "the lock is replaced during the command": Case(
        "was removed or replaced while this run was writing", OTHER, change=put(".shardconv.lock", LOCK),
        when="list-type",
    ),
    "a manifest appears during the command": Case(
        "was written by another process: choose another path with -o", OTHER, change=put("shardconv.json", b"theirs"),
        when="list-type",
    ),
    "the bucket is removed during the command": Case(
        "make sure that its bucket exists and no other run writes", change=remove_bucket, url="s3://gone/out", tp=1,
    ),
    "SIGTERM during the command": Case(
        "terminated; nothing was left behind", change=lambda _: os.kill(os.getpid(), signal.SIGTERM), code=143,
    ),
    "an error while a checkpoint is overwritten": Case(
        "the existing files are partly removed: run the command again", INCOMPLETE, is_split=True, overwrite=True,
        fault=lambda: failing("manifest", "403"),
    ),
}  # fmt: skip


def faults(case: Case, s3: S3Server) -> Callable[[str, str, str], str | None]:
    """The faults of a case, with its change."""
    fault, steps = case.fault(), [case.change, lambda _: None]

    def fault_of(method: str, path: str, query: str) -> str | None:
        if (len(steps) == 2 and path.endswith(".lock")) or (len(steps) == 1 and case.when in query):
            steps.pop()(s3)
        return fault(method, path, query)

    return fault_of


@pytest.mark.parametrize("name", CASES)
def test_bad_destination(name, made, s3, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(stores, "RETRIES", {**stores.RETRIES, "max_retries": 2})
    s3.client.create_bucket(Bucket="gone")
    for old in s3.objects(FOLDER):
        s3.client.delete_object(Bucket="bucket", Key=f"{FOLDER}{old}")
    if case.is_split:
        shardconv.split(made / "model", case.url, tp=4)
    for file, data in case.there:
        put(file, data)(s3)
    before = files_at(case.url, s3)
    s3.requests.clear()
    s3.fault = faults(case, s3)
    result = call("split", made / "model", "--tp", case.tp, "-o", case.url, *["--overwrite"] * case.overwrite)
    s3.fault = lambda *_: None
    assert bool(s3.requests) == (case.code != 2), "a URL that is not valid is refused before a request"
    assert result.code == case.code
    assert case.message in result.err
    assert result.err.count("shardconv: ") == 1
    assert "secret" not in result.err
    assert [name for bucket in buckets(s3) for name in s3.unfinished(bucket)] == []
    check_left(case, before, files_at(case.url, s3))


def buckets(s3: S3Server) -> set[str]:
    return {bucket["Name"] for bucket in s3.client.list_buckets()["Buckets"]}


def files_at(url: str, s3: S3Server) -> dict[str, bytes]:
    """The files of a destination; none if the server does not have its bucket."""
    location = urlsplit(url)
    bucket, folder = location.hostname or "", location.path.strip("/")
    return s3.objects(f"{folder}/", bucket) if bucket in buckets(s3) else {}


def check_left(case: Case, before: dict[str, bytes], found: dict[str, bytes]) -> None:
    if case.left == INCOMPLETE:
        assert [name for name in found if name.endswith(("shardconv.json", ".index.json", "config.json"))] == []
    elif case.left == OTHER:
        assert found in ({".shardconv.lock": LOCK}, {"shardconv.json": b"theirs"})
    else:
        assert found == {NOTHING: {}, UNCHANGED: before}[case.left]


def test_the_page_has_the_table():
    rows = [f"| {name} | {case.message} | {case.left} |" for name, case in CASES.items()]
    text = PAGE.read_text()
    assert [row for row in rows if row not in text] == []
