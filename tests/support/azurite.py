"""Azurite, Microsoft's emulation of Azure Blob Storage, on loopback: it is a program of its own, which npm installs."""

import base64
import hashlib
import hmac
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from urllib.request import Request, urlopen

import pytest

ACCOUNT = "devstoreaccount1"
#: The key of this account, which is the same in every Azurite, from its documentation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2021-08-06"
_OPTIONS = ("--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent")


@contextmanager
def serve_azure(container: str) -> Iterator[str]:
    """Run a server with an empty container; yields the URL of the account. Skips the test without Azurite."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("Azurite is not installed (make test-azure)")
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", "0", *_OPTIONS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = (re.search(r"listens on (http://127\.0\.0\.1:\d+)", line) for line in process.stdout)
            url = f"{next(filter(None, found))[1]}/{ACCOUNT}"
            send(url, "PUT", container, {"restype": "container"})
            yield url
        finally:
            process.terminate()


def send(url: str, method: str, container: str, query: dict[str, str]) -> bytes:
    """The answer to a signed request about a container."""
    date = formatdate(usegmt=True)
    parameters = "".join(f"\n{name}:{query[name]}" for name in sorted(query))
    resource = f"/{ACCOUNT}/{ACCOUNT}/{container}{parameters}"
    signed = method + 12 * "\n" + f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n{resource}"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    headers = {
        "authorization": f"SharedKey {ACCOUNT}:{signature}", "x-ms-date": date, "x-ms-version": _VERSION,
        "content-length": "0", "content-type": "",
    }  # fmt: skip
    text = "&".join(f"{name}={value}" for name, value in query.items())
    with urlopen(Request(f"{url}/{container}?{text}", method=method, headers=headers)) as answer:
        return answer.read()
