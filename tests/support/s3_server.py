"""An S3 server on loopback: moto's, which keeps objects in memory, with a log of requests, and faults.

Faults: a status code, "cut" (the connection is closed in place of an answer), "late" (it is closed after the request
was carried out), "hang" (it is closed when :attr:`S3Server.released` is set) and "wait" (it is carried out and answered
then).

It also accepts requests to Google Cloud Storage: Google's XML protocol is that of S3, except for the header of one
condition.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

#: Variables of the environment that choose other servers or credentials.
_OTHERS = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION")


@dataclass
class S3Server:
    """A running server.

    Attributes:
        url: its address.
        num_sent: bytes of the bodies of all answers.
        authorizations: the header of each request.
        requests: method, path and query of each request.
        fault: returns the fault of a request from its method, path and query; None for none.
        released: ends faults that hang.
    """

    url: str = ""
    num_sent: int = 0
    authorizations: list[str] = field(default_factory=list)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    fault: Callable[[str, str, str], str | None] = lambda *_: None
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def client(self) -> Any:
        """AWS's own client of the server."""
        return boto3.client("s3", endpoint_url=self.url)

    def objects(self, prefix: str = "", bucket: str = "bucket") -> dict[str, bytes]:
        """Name, without the prefix, to content of the objects in a bucket, by the server's own client.

        A request that waited in the server may remove one of them meanwhile.
        """
        client, found = self.client, {}
        for one in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", []):
            with suppress(client.exceptions.NoSuchKey):
                body = client.get_object(Bucket=bucket, Key=one["Key"])["Body"]
                found[one["Key"].removeprefix(prefix)] = body.read()
        return found

    def unfinished(self, bucket: str = "bucket") -> list[str]:
        """The names of multipart uploads that were neither completed nor aborted."""
        return [one["Key"] for one in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]


def answer(environ: dict[str, Any], start: Any, fault: str, state: S3Server) -> list[bytes]:
    """Answer with a fault."""
    if fault == "hang":
        state.released.wait(60)
    if fault in {"cut", "late", "hang"}:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    else:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start(f"{fault if fault.isdigit() else 500} Fault", [("content-length", "0")])
    return [b""]


def environment(patch: pytest.MonkeyPatch, url: str) -> None:
    """Let the tools of AWS use a server on loopback, with credentials that are not used elsewhere."""
    for name in _OTHERS:
        patch.delenv(name, raising=False)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url, "AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    }.items():  # fmt: skip
        patch.setenv(name, value)


@contextmanager
def serve_s3(bucket: str) -> Iterator[S3Server]:
    """Run a server with an empty bucket; the environment's tools of AWS use it."""
    state = S3Server()
    app = DomainDispatcherApplication(create_backend_app)

    def counted(environ: dict[str, Any], start: Any) -> Any:
        if environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH") == "0":  # it does not exist
            environ["HTTP_IF_NONE_MATCH"] = "*"
        state.authorizations.append(environ.get("HTTP_AUTHORIZATION", ""))
        request = (environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"])
        state.requests.append(request)
        fault = state.fault(*request)
        if fault == "wait":
            state.released.wait(60)
        elif fault is not None:
            if fault == "late":
                list(app(environ, lambda *_: None))
            return answer(environ, start, fault, state)

        def start_counted(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if environ["REQUEST_METHOD"] == "GET":
                state.num_sent += int({name.lower(): value for name, value in headers}.get("content-length", 0))
            return start(status, headers, *rest)

        return app(environ, start_counted)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, counted, threaded=True)
    state.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        environment(patch, state.url)
        boto3.client("s3", endpoint_url=state.url).create_bucket(Bucket=bucket)
        yield state
    state.released.set()
    server.shutdown()
    server.server_close()


def upload(folder: Path, bucket: str, prefix: str) -> None:
    """Copy the files of a folder into a bucket, with AWS's own client."""
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    for path in folder.rglob("*"):
        if path.is_file():
            client.put_object(
                Bucket=bucket, Key=f"{prefix}/{path.relative_to(folder).as_posix()}", Body=path.read_bytes()
            )
