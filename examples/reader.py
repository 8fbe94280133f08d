"""Restore the source files of a split checkpoint of shardconv, and check all checksums: ``python reader.py FOLDER``.

Implements docs/checkpoint-format.md for the native layout, without shardconv. Writes to the current folder.
"""

import json
import struct
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

FOLDER = Path(sys.argv[1])
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "BOOL": 1}


def digest(data: bytes | str) -> str:
    """The checksum of bytes, or of a text."""
    return xxhash.xxh3_128_hexdigest(data.encode() if isinstance(data, str) else data)


def read_rank(path: Path) -> dict[str, bytes]:
    """The tensors of a rank file: name to bytes."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    assert header.pop("__metadata__").get("shardconv") == identity
    return {name: data[end:][slice(*entry["data_offsets"])] for name, entry in header.items()}


def full_tensor(name: str, dtype: str, shape: list[int]) -> bytes:
    """The bytes of a tensor of the source."""
    placement, element = placements[name], np.dtype(f"V{BYTES[dtype]}")
    held = [rank for rank in ranks if name in rank][:tp]  # the ranks of its first stage
    if placement["dim"] is None:
        return held[0][name]
    full, before = np.empty(shape, element), (slice(None),) * placement["dim"]
    for rank, entries in zip(held, placement["ranks"], strict=True):
        sizes = [entry["padding"] if isinstance(entry, dict) else entry[1] - entry[0] for entry in entries]
        shard = np.frombuffer(rank[name], element).reshape(*shape[: len(before)], sum(sizes), *shape[len(before) + 1 :])
        for number, entry in enumerate(entries):
            local = sum(sizes[:number])
            if isinstance(entry, list):
                full[*before, slice(*entry)] = shard[*before, local : local + sizes[number]]
    return full.tobytes()


def stripes(sizes: dict[str, int], stripe_bytes: int) -> list[list[tuple[str, int, int]]]:
    """Lists of (tensor, start, stop)."""
    found: list[list[tuple[str, int, int]]] = []
    stripe: list[tuple[str, int, int]] = []
    room = stripe_bytes
    for tensor, size in sizes.items():
        if size > room and stripe:
            found, stripe, room = [*found, stripe], [], stripe_bytes
        start = 0
        while size - start > room:
            found.append([(tensor, start, start + room)])
            start += room
        if start < size:
            stripe.append((tensor, start, size))
            room -= size - start
    return [*found, stripe] if stripe else found


def position(byte: int, rank: int, placement: dict[str, Any], dtype: str, shape: list[int]) -> int:
    """The position in a rank's shard of a byte of the full tensor."""
    if placement["dim"] is None:
        return byte
    item = prod(shape[placement["dim"] + 1 :]) * BYTES[dtype]
    row, column = divmod(byte, placement["size"] * item)
    starts, width = [], 0
    for entry in placement["ranks"][rank]:
        if isinstance(entry, list):
            starts.append((entry[0] * item, entry[1] * item, width))
        width += (entry[1] - entry[0] if isinstance(entry, list) else entry["padding"]) * item
    inside = [local + column - start for start, stop, local in starts if start < column < stop]
    later = [local for start, _, local in starts if start >= column]
    local: int = 0 if column == 0 else [*inside, *later, width][0]
    return int(row * width + local)


text = (FOLDER / "shardconv.json").read_bytes()
manifest = json.loads(text)
assert digest(text.rpartition(b',"manifest_checksum":')[0] + b"}") == manifest["manifest_checksum"]
assert manifest["format_version"] == 1
assert "layout" not in manifest
for name, checksum in manifest["auxiliary_files"].items():
    assert digest((FOLDER / name).read_bytes()) == checksum

plan, checksums, tp = manifest["plan"], manifest["checksums"], manifest["plan"]["tp"]
identity = digest("\n".join(map(" ".join, checksums)))
placements = {name: plan["placements"][index]["placement"] for name, index in plan["tensors"].items()}
count = tp * len(plan["stages"]["layers"]["ranks"] if "stages" in plan else [0])
names = [f"rank-{rank:0{len(str(count - 1))}}-of-{count}.safetensors" for rank in range(count)]
ranks = [read_rank(FOLDER / name) for name in names]

tensors: dict[str, tuple[str, list[int]]] = {}  # name to dtype and shape, in the order of the source
for name_of_file, text in manifest["source_files"]:
    header = json.loads(text)
    header.pop("__metadata__", None)
    by_offset = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    tensors |= {name: (entry["dtype"], entry["shape"]) for name, entry in by_offset}
    data = b"".join(full_tensor(name, entry["dtype"], entry["shape"]) for name, entry in by_offset)
    Path(name_of_file).write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + data)

tensors = dict(sorted(tensors.items(), key=lambda item: -BYTES[item[1][0]]))  # file order
sizes = {name: prod(shape) * BYTES[dtype] for name, (dtype, shape) in tensors.items()}
for number, stripe in enumerate(stripes(sizes, manifest["stripe_bytes"])):
    for rank in range(count):
        data = b""
        for name, start, stop in [span for span in stripe if span[0] in ranks[rank]]:
            low, high = (position(byte, rank % tp, placements[name], *tensors[name]) for byte in (start, stop))
            data += ranks[rank][name][low:high]
        assert digest(data) == checksums[rank][number]
