"""Paths and URLs that a user passes: parsing, and hints for missing paths and unfinished runs.

Imports no client of a store, so that the command line can check its arguments before it imports anything else.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from shardconv.files import storage
from shardconv.files.folder import AnyPath, RemotePath
from shardconv.files.storage.url import LOCK_NAME, SCHEMES, is_url, parse, without_secrets
from shardconv.support.errors import ShardconvError, SourceError, UsageError, option

#: A checkpoint that is read: its path, or the path or URL that a user passes.
SourcePath = str | AnyPath
#: A URL without its colon, which would be a path.
_NO_COLON = re.compile(rf"(?P<scheme>{'|'.join(SCHEMES)})//(?P<rest>[^/].*)", re.DOTALL)
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)")
_STAGING_NAME = re.compile(r"\.(?P<name>.+)\.partial")
_HUB_HOST = re.compile(r"(?:huggingface\.co|hf\.co)/")
_KILLED = "wait until it finishes, or if it was killed,"
#: Commands that copy a folder from or to remote storage, by scheme.
_COPY_COMMANDS = {
    "s3": "aws s3 cp --recursive FROM TO",
    "gs": "gcloud storage cp --recursive FROM TO",
}


def open_path(path: SourcePath) -> AnyPath:
    """The path of a checkpoint that is read; the folder of a URL is listed.

    Raises:
        SourceError: if a URL does not exist or cannot be listed, or a package is not installed.
        UsageError: if a URL is not valid.
    """
    if isinstance(path, RemotePath):
        return path
    return storage.folders.open_remote(parse(path)) if is_url(path) else local_path(path)


def open_paths(src: SourcePath | Iterable[SourcePath]) -> list[AnyPath]:
    """The paths of several folders that are read together, or of a single checkpoint; raises as :func:`open_path`."""
    if isinstance(src, SourcePath) or not isinstance(src, Iterable):
        return [open_path(src)]
    return [open_path(path) for path in src]


def local_path(path: str | Path) -> Path:
    """Convert a user path to a Path.

    Raises:
        UsageError: if it is a URL, or one without its colon.
    """
    is_remote = is_url(path)
    if match := _NO_COLON.fullmatch(os.fspath(path)):
        url = without_secrets(f"{match['scheme']}://{match['rest']}")
        raise UsageError(
            f"{match['scheme']}//...: is not a URL (did you mean {url}?): add the colon, or begin a local path with ./"
        )
    if not is_remote:
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


def staging_folder(path: Path) -> Path:
    """The folder in which a run writes before its result gets its final name, ``path``."""
    return path.parent / f".{path.name}.partial"


def unfinished(path: AnyPath) -> str:
    """The problem and the remedy for a path in the staging folder of a run; "" for other paths."""
    if isinstance(path, RemotePath):
        return ""
    absolute = absolute_path(path)
    for folder in (absolute, *absolute.parents[:2]):
        if (match := _STAGING_NAME.fullmatch(folder.name)) and folder.is_dir():
            return (
                f"holds the files of an unfinished run for {folder.parent / match['name']}: {_KILLED} run its command "
                f"again with {option(resume=True)}, or remove {folder}"
            )
    return ""


def locked(folder: AnyPath) -> str:
    """The problem and the remedy for a folder in an object store that a run has not finished writing; "" for others."""
    lock = folder / LOCK_NAME
    return (
        f"a run has not finished writing it: {_KILLED} remove {lock} and run its command again" if lock.exists() else ""
    )


def missing_hint(path: AnyPath, *, takes_url: bool = True) -> str:
    """The end of the message that a path does not exist, with the remedy.

    Names a similar path beside it, or the command that downloads a model of the Hub.

    Args:
        path: the path.
        takes_url: whether a URL may be passed instead.
    """
    if isinstance(path, RemotePath):
        return ": correct the URL"
    if (partial := staging_folder(path)).exists():
        return (
            f" (a run has not finished writing it): {_KILLED} run its command again with {option(resume=True)}, or "
            f"remove {partial}"
        )
    if hint := _similar_hint(path) or _several_hint(path):
        return hint
    if not _HUB_NAME.fullmatch(str(path)) or path.suffix in {".safetensors", ".json", ".toml"}:
        return ": correct the path"
    url = f"pass hf://{path}, or " if takes_url else ""
    return f": if it is the name of a model on the Hugging Face Hub, {url}download it first: {_hub_download(str(path))}"


def check_exists(path: Path, error: type[ShardconvError]) -> None:
    """Check that a file exists; raises ``error`` with a similar path if it does not."""
    if not os.path.lexists(path):
        raise error(f"{path}: does not exist{_similar_hint(path) or ': correct the path'}")


def _similar_hint(path: Path) -> str:
    """A similar path beside one that does not exist, and the remedy; "" if there is none."""
    names: list[str] = []
    with suppress(OSError):
        names = [child.name for child in path.parent.iterdir() if not child.name.startswith(".")]
    similar = get_close_matches(path.name, sorted(names), n=1)
    return f" (similar: {path.parent / similar[0]}): correct the path" if similar else ""


def _several_hint(path: Path) -> str:
    """The remedy for several paths in one argument: joined by commas, or as a pattern; "" for others."""
    if "," in path.as_posix() and all(Path(each).exists() for each in path.as_posix().split(",")):
        return ": several folders are separated by spaces: pass each as its own argument"
    if set("*?[") & set(path.as_posix()):
        return ": the shell expands patterns without quotes: remove the quotes, or correct the pattern"
    return ""


def _hub_download(name: str) -> str:
    return f"hf download {name} --local-dir {name.rpartition('/')[2]}"


def absolute_path(path: Path) -> Path:
    """The absolute path without ``.`` and ``..``; links are not followed."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute() keeps .., Path.resolve() follows links


def folder_name(folder: AnyPath) -> str:
    """The name of a folder, also of ``.`` and ``..``; a link has its own name."""
    return folder.name if isinstance(folder, RemotePath) else absolute_path(folder).name


def leads_out(path: AnyPath, folder: AnyPath) -> bool:
    """Whether a path is a link out of its folder; links to the blobs of a Hugging Face cache are not.

    The folder may be in the cache, or belong to a component of a pipeline there.
    """
    if isinstance(path, RemotePath) or isinstance(folder, RemotePath):
        return False
    root, target = folder.resolve(), path.resolve()
    allowed = [root, *(one.parent / "blobs" for one in root.parents[:2] if one.name == "snapshots")]
    return not any(target.is_relative_to(parent) for parent in allowed)


def check_link(path: AnyPath, folder: AnyPath, *, follow_links: bool) -> None:
    """Refuse a link out of the folder.

    Raises:
        SourceError: if it is one and ``follow_links`` is False.
    """
    if not follow_links and leads_out(path, folder):
        raise SourceError(f"{path}: is a link out of its folder: pass {option(follow_links=True)} to read it")
