"""Paths as users give them: local ones only.

Owns the refusal of URLs, the hint for names of the Hugging Face Hub, and which links lead out of a folder. Imports only
errors, so that the command line can check its arguments before anything else is imported.
"""

import os
import re
from pathlib import Path

from shardconv.errors import UsageError

#: A scheme of two letters or more, so that no drive letter is one. A Path has only one of the slashes left.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?P<rest>.*)", re.DOTALL)
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)")
_HUB_HOST = re.compile(r"(?:huggingface\.co|hf\.co)/")
#: What copies a folder from or to a remote storage, by scheme.
_COPIES = {
    "s3": "aws s3 cp --recursive FROM TO",
    "gs": "gcloud storage cp --recursive FROM TO",
}


def local_path(path: str | Path) -> Path:
    """A path that a user gave, as a Path.

    Raises:
        UsageError: if it is a URL.
    """
    match = _URL.fullmatch(os.fspath(path))
    if match is None:
        return Path(path)
    scheme, rest = match["scheme"].lower(), match["rest"]
    name = _HUB_NAME.match(_HUB_HOST.sub("", rest, count=1))
    copies = _COPIES.get(scheme, "")
    if name and (scheme == "hf" or _HUB_HOST.match(rest)):
        copies = _hub_download(name["name"])
    raise UsageError(
        f"{match['scheme']}://{rest}: is a URL (expected a local path): download the checkpoint to a local folder "
        f"first, and upload results afterwards{f', for example with {copies}' if copies else ''}"
    )


def hub_hint(path: Path) -> str:
    """What to add to the message that a path does not exist: how to download it, if it looks like a name of the Hub."""
    if not _HUB_NAME.fullmatch(str(path)) or path.suffix in {".safetensors", ".json"}:
        return ""
    return f"; if it is the name of a model on the Hugging Face Hub, download it first: {_hub_download(str(path))}"


def _hub_download(name: str) -> str:
    return f"hf download {name} --local-dir {name.rpartition('/')[2]}"


def leads_out(path: Path, folder: Path) -> bool:
    """Whether links take a path out of its folder; in a Hugging Face cache the blobs belong to it."""
    root, target = folder.resolve(), path.resolve()
    homes = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    return not any(target.is_relative_to(home) for home in homes)
