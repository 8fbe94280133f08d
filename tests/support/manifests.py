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
        text = json.dumps(data, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
        data["manifest_checksum"] = xxhash.xxh3_128_hexdigest(text.encode())
    path.write_text(json.dumps(data))
