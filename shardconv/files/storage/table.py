"""The table of stand-ins: which local paths stand for remote files. Imports nothing, as every local read asks it."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardconv.files.storage.remote_file import RemoteFile
    from shardconv.files.storage.remote_output import RemoteOutput

#: Stand-in to remote file.
files: "dict[Path, RemoteFile]" = {}
#: Folder of stand-ins to the URL that is shown.
folders: dict[Path, str] = {}
#: Stand-in of a destination, and the folder with its new files, to the destination.
outputs: "dict[Path, RemoteOutput]" = {}


def remote_file(path: Path) -> "RemoteFile | None":
    """The remote file that a path stands for; None for a local file."""
    return files.get(path)


#: The name of the versions among facts that ranks or processes compare: each opens remote files by itself.
REMOTE_VERSIONS = "versions of remote files"


def versions(paths: Iterable[Path]) -> dict[str, str]:
    """Name to size and version of the remote files among paths, which processes that read them compare.

    Raises:
        SourceError: if a file cannot be read.
    """
    return {path.name: file.state for path in paths if (file := files.get(path)) is not None}


def remote_output(path: Path) -> "RemoteOutput | None":
    """The remote destination that a path, or a folder that contains it, stands for; None for a local path."""
    if not outputs:
        return None
    return next((outputs[one] for one in (path, *path.parents) if one in outputs), None)


def shown(text: str | Path) -> str:
    """A path or a message, with URLs in place of the paths of stand-ins."""
    result = str(text)
    for folder, url in list(folders.items()):
        result = result.replace(str(folder), url)
    return result
