"""Change the manifest of a split checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash


def change_manifest(
    folder: Path, change: Callable[[dict[str, Any]], object], *, sign: bool = True, name: str = "shardconv.json"
) -> None:
    """Change the manifest and, as an attacker would, update its checksum."""
    path = folder / name
    data = json.loads(path.read_text())
    change(data)
    if sign:
        del data["manifest_checksum"]
        data["manifest_checksum"] = xxhash.xxh3_128_hexdigest(_text(data))
    path.write_bytes(_text(data))


def change_text(folder: Path, old: bytes, new: bytes) -> None:
    """Replace text in the manifest, and update its checksum."""
    path = folder / "shardconv.json"
    body = path.read_bytes().rpartition(b',"manifest_checksum"')[0] + b"}"
    assert body.count(old) == 1
    body = body.replace(old, new)
    path.write_bytes(body[:-1] + b',"manifest_checksum":"%s"}' % xxhash.xxh3_128_hexdigest(body).encode())


def _text(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
