"""A web server on loopback with ranges, a log, and faults on request."""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

#: Requests of a weight file before its data: its size and the length of its header, and its header.
HEADER_REQUESTS = 2
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Request(NamedTuple):
    """A request that was answered.

    Attributes:
        method: GET or HEAD.
        path: without the query.
        query: what follows the question mark.
        headers: by name in lower case.
        sent: bytes of the body that were sent.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    sent: int


class Answer(NamedTuple):
    """A full answer in place of a file."""

    status: int
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes = b""


@dataclass
class WebServer:
    """A server of files in memory.

    Attributes:
        files: path to contents.
        has_ranges: whether it answers requests of ranges with them.
        tag: prefix of the tags of files; empty for none.
        changed: the time of the last change of files; empty for none.
        fault: name of a fault for each request, see :meth:`_Handler._send_file`; None for none.
        released: ends the fault ``hang``.
        route: answers a request in place of the files; None to serve the files.
        log: the requests.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    has_ranges: bool = True
    tag: str = "v1"
    changed: str = ""
    fault: Callable[[str], str | None] = lambda _path: None
    route: Callable[[str, dict[str, str]], Answer | None] = lambda _path, _headers: None
    released: threading.Event = field(default_factory=threading.Event)
    log: list[Request] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_sent(self) -> int:
        """Bytes of all bodies that were sent."""
        return sum(request.sent for request in self.log)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: WebServer

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path, headers = unquote(parts.path), {name.lower(): value for name, value in self.headers.items()}
        answer, sent = self.state.route(path, headers), 0
        fault = self.state.fault(path)
        try:
            if answer is not None:
                sent = self._send(*answer)
            elif fault is not None and fault.isdecimal():
                sent = self._send(int(fault), {}, b"no")
            elif path not in self.state.files:
                sent = self._send(404, {}, b"none")
            else:
                sent = self._send_file(self.state.files[path], headers, fault)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        self.state.log.append(Request(self.command, path, parts.query, headers, sent))

    def _send(self, status: int, headers: Mapping[str, str], body: bytes, size: int | None = None) -> int:
        """Send an answer; ``size`` is the announced size, if it is not that of the body."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body) if size is None else size))
        self.end_headers()
        if self.command == "HEAD":
            return 0
        self.wfile.write(body)
        return len(body)

    def _send_file(self, data: bytes, headers: dict[str, str], fault: str | None) -> int:
        """Send a file or a range.

        Faults: ``hang`` waits, ``cut`` closes the connection in the middle, ``slow`` pauses there, ``short`` sends and
        announces half of the range, ``shifted`` sends another range, ``larger`` announces a larger file.
        """
        tag = f'"{self.state.tag}-{hashlib.md5(data).hexdigest()}"' if self.state.tag else ""
        tags = {name: text for name, text in {"etag": tag, "last-modified": self.state.changed}.items() if text}
        if tag and headers.get("if-match", tag) != tag:
            return self._send(412, tags, b"")
        match = _RANGE.fullmatch(headers.get("range", "")) if self.state.has_ranges else None
        if match is None:
            return self._send(200, tags, data)
        start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
        if start >= stop:
            return self._send(416, {}, b"")
        body = data[start:stop]
        if fault == "hang":
            self.state.released.wait(60)
        total = len(data) + (1 if fault == "larger" else 0)
        if fault == "shifted":
            start, stop = start + 1, stop + 1
        described = {**tags, "content-range": f"bytes {start}-{stop - 1}/{total}"}
        if fault == "short":
            body = body[: len(body) // 2]
        if fault in {"cut", "slow"}:
            half = len(body) // 2
            sent = self._send(206, described, body[:half], len(body))
            if fault == "cut":
                self.close_connection = True
                return sent
            time.sleep(0.05)
            self.wfile.write(body[half:])
            return len(body)
        return self._send(206, described, body)


@contextmanager
def serve(**options: Any) -> Iterator[WebServer]:
    """Run a server; ``options`` are the attributes of :class:`WebServer`."""
    state = WebServer(**options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    server.daemon_threads = True
    state.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def num_requests(server: WebServer, path: str) -> int:
    """The number of requests for a file."""
    return sum(request.path == path for request in server.log)
