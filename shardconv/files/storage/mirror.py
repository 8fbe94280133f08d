"""Local stand-ins of remote folders: an empty file for each remote file, or a copy of a small one.

Code that lists and classifies files works on the stand-ins; code that reads them asks
:func:`~shardconv.files.storage.table.remote_file` first. A stand-in that is read all the same is an empty file, which
is not a valid file of a checkpoint.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from shardconv.files.storage import table
from shardconv.files.storage.remote_file import RemoteFile
from shardconv.support.errors import ShardconvError, SourceError
from shardconv.support.temporary import temporary_folder

#: Files that are copied at a time.
_REQUESTS = 16
#: Names that a folder can have on every system.
_NAME = re.compile(r"[^/\\:\x00-\x1f\ud800-\udfff]{1,200}")


@contextmanager
def mirror(
    name: str, url: str, files: Mapping[str, RemoteFile], copied: Collection[str] = frozenset()
) -> Iterator[Path]:
    """Make a folder of stand-ins, and remove it at the end. Errors name the URL in place of the folder.

    Args:
        name: of the folder.
        url: of the remote folder, as it is shown.
        files: name, relative to the folder, to remote file.
        copied: names of the files that are copied, so that they can be read as local files.

    Raises:
        SourceError: if a name is not valid, or is that of a file and of a folder, or a file cannot be copied.
    """
    for each in files:
        if not all(_is_valid(part) for part in each.split("/")):
            raise SourceError(f"{url}: the name of file {each!r:.100} is not valid on every system: rename it")
    with temporary_folder() as top:
        folder = top / (name if _is_valid(name) else "checkpoint")
        try:
            table.folders[folder] = url
            folder.mkdir()
            for each, file in files.items():
                _make(folder / each, file)
            with ThreadPoolExecutor(_REQUESTS) as pool:
                list(pool.map(_copy, (folder / each for each in copied)))
            yield folder
        except ShardconvError as error:
            error.args = tuple(table.shown(text) if isinstance(text, str) else text for text in error.args)
            raise
        finally:
            for each in files:
                table.files.pop(folder / each, None)
            table.folders.pop(folder, None)


def _make(path: Path, file: RemoteFile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
    except OSError as error:
        raise SourceError(f"{file.shown}: is the name of a file and of a folder: rename one") from error
    table.files[path] = file


def _copy(path: Path) -> None:
    """Replace a stand-in by the file that it stands for."""
    file = table.files[path]
    path.write_bytes(file.read_all(file.size))
    del table.files[path]


def _is_valid(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name not in {".", ".."}
