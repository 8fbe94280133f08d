"""A checkpoint, its split, and fast retries, for tests of web servers and the Hub."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import moto.s3.models
import pytest

import shardconv
from shardconv.files.storage import remote_file, stores, upload
from tests.storage.written import PART
from tests.support.checkpoints import contents, llama_config, write_checkpoint
from tests.support.s3_server import S3Server, serve_s3
from tests.support.s3_server import upload as copy_to_s3
from tests.support.web_server import WebServer, serve


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """A folder with a source in two files, and its split checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "model", parts=2, config=llama_config(layers=1))
    shardconv.split(folder / "model", folder / "split", tp=2)
    return folder


@pytest.fixture
def _fast_retries(monkeypatch) -> None:
    """Let clients retry as often as ever, but soon."""
    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}
    monkeypatch.setattr(stores, "RETRIES", {**stores.RETRIES, "backoff": backoff})
    monkeypatch.setattr(remote_file, "PAUSES", (0.001,) * len(remote_file.PAUSES))


@pytest.fixture
def web(made) -> Iterator[WebServer]:
    """A web server with the source."""
    with serve(files={f"/model/{name}": data for name, data in contents(made / "model").items()}) as server:
        yield server


@pytest.fixture(scope="module")
def server(made) -> S3Server:
    with serve_s3("bucket") as server:
        copy_to_s3(made / "model", "bucket", "model")
        yield server


@pytest.fixture
def s3(server, monkeypatch, _fast_retries) -> S3Server:
    """The server without faults, and small parts, so that every weight file is a multipart upload."""
    monkeypatch.setattr(upload, "part_bytes", lambda _: PART)
    monkeypatch.setattr(upload, "MEMORY_BYTES", 4 * PART)
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)
    server.fault = lambda *_: None
    server.requests.clear()
    yield server
    server.fault = lambda *_: None
