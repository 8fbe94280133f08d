"""Change the manifest of a split checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object], *, sign: bool = True) -> None:
    """Change the manifest and, as an attacker would, update its checksum."""
    path = folder / "shardconv.json"
    data = json.loads(path.read_text())
    change(data)
    if sign:
        del data["manifest_checksum"]
        data["manifest_checksum"] = xxhash.xxh3_128_hexdigest(_text(data))
    path.write_bytes(_text(data))


def _text(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
