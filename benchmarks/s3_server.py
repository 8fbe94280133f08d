"""A fast S3 server on loopback, for one bucket: it sends the files of a folder, and discards large uploads.

It checks neither signatures nor checksums, so that the clients bound the rate. Each GET of ``/requests`` returns the
bytes of the bodies that were sent and received so far.
"""

import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

#: Objects that are larger are not kept.
_MAX_KEPT = 2**20
_BUFFER_BYTES = 2**20


class _Server(ThreadingHTTPServer):
    """The server, with the folder that it sends and the small objects that it was sent."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.kept: dict[str, bytes] = {}
        self.counts = {"sent": 0, "received": 0}
        self.lock = threading.Lock()

    def count(self, kind: str, size: int) -> None:
        """Count bytes of bodies."""
        with self.lock:
            self.counts[kind] += size


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection; TCP_NODELAY is set, so that small answers are not delayed by 40 ms."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: object) -> None:
        """Write no log."""

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    def reply(self, status: int, body: bytes = b"", **headers: object) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        """Receive the body of a request; empty if it is not kept."""
        size, kept = int(self.headers.get("Content-Length") or 0), b""
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
        if size <= _MAX_KEPT:
            kept = self.rfile.read(size)
        else:
            buffer = memoryview(bytearray(_BUFFER_BYTES))
            left = size
            while left:
                left -= self.rfile.readinto(buffer[: min(left, _BUFFER_BYTES)])
        self.server.count("received", size)
        return kept

    def do_PUT(self) -> None:
        """Receive an object or a part."""
        body = self.body()
        if self.headers.get("If-None-Match") and self.key in self.server.kept:
            self.reply(412)
            return
        if "uploadId" not in self.query:
            self.server.kept[self.key] = body
        self.reply(200, ETag='"x"')

    def do_POST(self) -> None:
        """Start or complete an upload, or delete objects."""
        body = self.body()
        if "delete" in self.query:
            keys = [key.decode() for key in re.findall(rb"<Key>([^<]*)</Key>", body)]
            for key in keys:
                self.server.kept.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self.reply(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
            return
        name = "InitiateMultipartUploadResult" if "uploads" in self.query else "CompleteMultipartUploadResult"
        fields = f"<Bucket>b</Bucket><Key>{escape(self.key)}</Key><UploadId>1</UploadId><ETag>x</ETag>"
        self.reply(200, f"<{name}>{fields}</{name}>".encode())

    def do_DELETE(self) -> None:
        """Abort an upload, or delete an object."""
        self.server.kept.pop(self.key, None)
        self.reply(204)

    def do_HEAD(self) -> None:
        """Answer as to a GET, without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Send an object, a range of one, or a list."""
        if self.path == "/requests":
            self.reply(200, json.dumps(self.server.counts).encode())
        elif "list-type" in self.query:
            self.reply(200, self.listing().encode(), Content_Type="application/xml")
        elif self.key in self.server.kept:
            self.send_range(self.server.kept[self.key])
        elif (path := self.server.folder / self.key).is_file():
            self.send_file(path)
        else:
            self.reply(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def listing(self) -> str:
        """The list of the objects with a prefix."""
        prefix = self.query.get("prefix", [""])[0]
        folder = self.server.folder
        files = [path for path in folder.rglob("*") if path.is_file()]
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
        sizes |= {key: len(data) for key, data in self.server.kept.items()}
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>x</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, size in sorted(sizes.items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"

    def bounds(self, size: int) -> tuple[int, int]:
        """The range of a request, of a file of some bytes."""
        start, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        return int(start), min(int(last) + 1, size) if last else size

    def head_of(self, size: int) -> tuple[int, int]:
        """Send the head of an answer with a range; returns the range."""
        start, stop = self.bounds(size)
        self.send_response(206 if "Range" in self.headers else 200)
        for name, value in {
            "Content-Length": stop - start, "Content-Range": f"bytes {start}-{stop - 1}/{size}", "ETag": '"x"',
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Accept-Ranges": "bytes",
        }.items():  # fmt: skip
            self.send_header(name, str(value))
        self.end_headers()
        return start, stop

    def send_range(self, data: bytes) -> None:
        """Send a range of bytes in memory."""
        start, stop = self.head_of(len(data))
        if self.command != "HEAD":
            self.wfile.write(data[start:stop])

    def send_file(self, path: Path) -> None:
        """Send a range of a file, which does not go through this process."""
        start, stop = self.head_of(path.stat().st_size)
        if self.command == "HEAD":
            return
        self.wfile.flush()
        with path.open("rb") as file:
            self.connection.sendfile(file, start, stop - start)
        self.server.count("sent", stop - start)


def main(folder: str) -> None:
    """Serve a folder until stdin is closed; prints the address."""
    server = _Server(Path(folder))
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
