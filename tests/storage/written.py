"""Shared by the tests of writing to S3: comparisons, and faults of the requests of a step."""

import json

from tests.support.s3_server import S3Server

#: Bytes of a part, so that every weight file is a multipart upload.
PART = 16384


def without_identity(files: dict[str, bytes]) -> dict[str, object]:
    """Files with parsed headers, without the identity that only local rank files store, and without the manifest."""
    parsed: dict[str, object] = {name: data for name, data in files.items() if name != "shardconv.json"}
    for name in [name for name in parsed if name.endswith(".safetensors")]:
        data = files[name]
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header["__metadata__"].pop("shardconv", None)
        parsed[name] = (header, data[8 + size :])
    return parsed


def check_nothing_left(s3: S3Server, prefix: str) -> None:
    s3.fault = lambda *_: None
    assert s3.objects(prefix) == {}
    assert s3.unfinished() == []


def failing(step: str, fault: str, after: int = 0):
    """A fault of all requests of a step, after some of them."""
    steps = {
        "lock": lambda method, path, query: method == "PUT" and path.endswith(".lock"),
        "start": lambda method, path, query: method == "POST" and query == "uploads=",
        "part": lambda method, path, query: method == "PUT" and "partNumber" in query,
        "complete": lambda method, path, query: method == "POST" and "uploadId=" in query,
        "delete": lambda method, path, query: method == "POST" and "delete" in query,
        "file": lambda method, path, query: method == "PUT" and path.endswith("tokenizer.json"),
        "manifest": lambda method, path, query: method == "PUT" and path.endswith("shardconv.json"),
    }
    seen = []

    def fault_of(*request: str) -> str | None:
        if not steps[step](*request):
            return None
        seen.append(request)
        return fault if len(seen) > after else None

    return fault_of
