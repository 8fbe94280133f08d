"""Checks of user paths: refusal of URLs, hints for names on the Hugging Face Hub, and links out of a folder.

Imports only errors and URLs, so that the command line can check its arguments before it imports anything else.
"""

import os
import re
from pathlib import Path

from shardconv.errors import UsageError
from shardconv.storage.url import SCHEMES, is_url, without_secrets

#: A URL without its colon, which would be a path.
_NO_COLON = re.compile(rf"(?P<scheme>{'|'.join(SCHEMES)})//(?P<rest>[^/].*)", re.DOTALL)
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)")
_HUB_HOST = re.compile(r"(?:huggingface\.co|hf\.co)/")
#: Commands that copy a folder from or to remote storage, by scheme.
_COPY_COMMANDS = {
    "s3": "aws s3 cp --recursive FROM TO",
    "gs": "gcloud storage cp --recursive FROM TO",
}


def local_path(path: str | Path) -> Path:
    """Convert a user path to a Path.

    Raises:
        UsageError: if it is a URL, or one without its colon.
    """
    if match := _NO_COLON.fullmatch(os.fspath(path)):
        url = without_secrets(f"{match['scheme']}://{match['rest']}")
        raise UsageError(
            f"{match['scheme']}//...: is not a URL (did you mean {url}?): add the colon, or begin a local path with ./"
        )
    if not is_url(path):
        return Path(path)
    url = without_secrets(path)
    scheme, _, rest = url.partition("://")
    name = _HUB_NAME.match(_HUB_HOST.sub("", rest, count=1).partition("@")[0])
    command = _COPY_COMMANDS.get(scheme.lower(), "")
    if name and (scheme.lower() == "hf" or _HUB_HOST.match(rest)):
        command = _hub_download(name["name"])
    raise UsageError(
        f"{url}: is a URL (expected a local path): only checkpoints that are read or written may be remote, not "
        f"adapters, configs and plan files. Download it to a local folder first"
        f"{f', for example with {command}' if command else ''}"
    )


def hub_hint(path: Path) -> str:
    """The remedies for the message that a path does not exist, if it looks like a name on the Hub."""
    if not _HUB_NAME.fullmatch(str(path)) or path.suffix in {".safetensors", ".json"}:
        return ""
    return (
        f": if it is the name of a model on the Hugging Face Hub, pass hf://{path}, or download it first: "
        f"{_hub_download(str(path))}"
    )


def _hub_download(name: str) -> str:
    return f"hf download {name} --local-dir {name.rpartition('/')[2]}"


def absolute_path(path: Path) -> Path:
    """The absolute path without ``.`` and ``..``; links are not followed."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute() keeps .., Path.resolve() follows links


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path is a link out of its folder; links to the blobs of a Hugging Face cache are not."""
    root, target = folder.resolve(), path.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    return not any(target.is_relative_to(parent) for parent in allowed)
