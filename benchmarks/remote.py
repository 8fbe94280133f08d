"""Clients of the server in :mod:`benchmarks.s3_server`: transfers of the stores' own clients, to compare with."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Command, Pairs, run, run_pairs

#: Variables of the environment with credentials that the server does not check.
_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
}  # fmt: skip
#: Scripts that upload the files of a folder, and download the files of a model.
UPLOAD = {
    "obstore": """
import os, sys, obstore
from pathlib import Path
store = obstore.store.S3Store("b", endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})
for path in Path(sys.argv[1]).iterdir():
    obstore.put(store, f"theirs/{path.name}", path, chunk_size=8 * 2**20)
""",
    "boto3": """
import sys, boto3
from pathlib import Path
client = boto3.client("s3")
for path in Path(sys.argv[1]).iterdir():
    client.upload_file(str(path), "b", f"theirs/{path.name}")
""",
}
DOWNLOAD = {
    "obstore": """
import os, sys, obstore
from concurrent.futures import ThreadPoolExecutor
store = obstore.store.S3Store("b", endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})
target = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY)
size = obstore.head(store, sys.argv[1])["size"]
CHUNK = 8 * 2**20
def copy(start):
    os.pwrite(target, obstore.get_range(store, sys.argv[1], start=start, end=min(start + CHUNK, size)), start)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(copy, range(0, size, CHUNK)))
""",
    "obstore with hashes": """
import os, sys, obstore, xxhash
from concurrent.futures import ThreadPoolExecutor
store = obstore.store.S3Store("b", endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})
target = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY)
size = obstore.head(store, sys.argv[1])["size"]
CHUNK, BLOCK = 8 * 2**20, 2**18
def copy(start):
    data = memoryview(obstore.get_range(store, sys.argv[1], start=start, end=min(start + CHUNK, size)))
    for at in range(0, len(data), BLOCK):
        xxhash.xxh3_128(data[at : at + BLOCK])
        os.pwrite(target, data[at : at + BLOCK], start + at)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(copy, range(0, size, CHUNK)))
""",
    "boto3": """
import sys, boto3
boto3.client("s3").download_file("b", sys.argv[1], sys.argv[2])
""",
}


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder as bucket ``b``; the environment's clients of S3 use the server. Yields its address."""
    command = (sys.executable, "-m", "benchmarks.s3_server", str(folder))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        os.environ.update(_ENVIRONMENT, AWS_ENDPOINT_URL=url)
        yield url
        process.communicate()


def counts(url: str) -> dict[str, int]:
    """The bytes of bodies that the server sent and received so far."""
    with urllib.request.urlopen(f"{url}/requests") as answer:
        found: dict[str, int] = json.load(answer)
    return found


class Transfer(NamedTuple):
    """Pairs of a command and a client of the store that transfers the same bytes.

    Attributes:
        name: of the command.
        client: the client.
        pairs: their usage.
        num_bytes: bytes of bodies that the server sent or received for one run of the command.
    """

    name: str
    client: str
    pairs: Pairs
    num_bytes: int


def transfers(folder: Path, shardconv: Command, rounds: int) -> Iterator[Transfer]:
    """Measure commands with URLs and the clients in turns.

    Args:
        folder: with ``source``, a folder with ``model.safetensors``, and ``split``, its split checkpoint.
        shardconv: the command line.
        rounds: of each pair.
    """
    source, split, out, copied = folder / "source", folder / "split", folder / "out", folder / "copied"
    uploads: dict[str, Command] = {
        "split to s3://": (*shardconv, "split", source, "--tp", "8", "-o", "s3://b/split-there", "--overwrite"),
        "merge to s3://": (*shardconv, "merge", split, "-o", "s3://b/merged.safetensors", "--overwrite"),
    }
    downloads: dict[str, Command] = {
        "split of s3://": (*shardconv, "split", "s3://b/source", "--tp", "8", "-o", out),
        "merge of s3://": (*shardconv, "merge", "s3://b/split", "-o", out),
    }
    with serve(folder) as url:
        for name, command in {**uploads, **downloads}.items():
            before = counts(url)
            run(command)
            after = counts(url)
            for client, script in (UPLOAD if name in uploads else DOWNLOAD).items():
                places = (split,) if name in uploads else ("source/model.safetensors", copied)
                theirs = (sys.executable, "-c", script, *places)
                pairs = run_pairs(command, theirs, outputs=(out, copied), rounds=rounds)
                yield Transfer(name, client, pairs, sum(after.values()) - sum(before.values()))
