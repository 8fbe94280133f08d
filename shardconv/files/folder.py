"""Folders and files of checkpoints: local paths, and remote ones with the methods of local paths that read.

Small text files and JSON objects are read with a size limit and errors that name the file. Imports no client of a
store, so that local paths do not wait for it.
"""

import errno
import json
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING

from msgspec import Struct

from shardconv.support import Progress
from shardconv.support.errors import OutputError, SourceError
from shardconv.support.exits import Removal

if TYPE_CHECKING:
    from shardconv.files.storage.remote_file import RemoteFile

#: Names that a file can have on every system, of which none has more bytes.
_NAME, _MAX_NAME_BYTES = re.compile(r"[^/\\:\x00-\x1f\ud800-\udfff]+"), 255
#: The most bytes of the name of a remote folder, which names of outputs extend, as by "-tp8".
_MAX_FOLDER_BYTES = 200
#: Bytes of the largest remote file that is copied for code that reads local files only.
_MAX_COPIED = 2**28
#: Bytes of a file that are copied at once.
_COPIED_BYTES = 2**22
#: Maximum number of simultaneous requests to a store that need little data each.
NUM_REQUESTS = 16
#: The name of :func:`remote_versions` among facts that ranks or processes compare.
REMOTE_VERSIONS = "versions of remote files"
#: See :func:`header_progress`.
progress_of_headers: ContextVar[Progress | None] = ContextVar("progress of headers", default=None)


class RemoteFolder(Struct, frozen=True, eq=False):
    """A remote folder as it was listed.

    Attributes:
        name: its name.
        url: its URL, as it is shown.
        files: file name, relative to the folder, to file.
        children: relative name of each folder in it, "" for itself, to the names of its files and folders.
    """

    name: str
    url: str
    files: "Mapping[str, RemoteFile]"
    children: Mapping[str, tuple[str, ...]]


class RemotePath(Struct, frozen=True, eq=False):
    """A file or folder in a remote folder, with the methods of :class:`pathlib.Path` that read.

    Its text is its URL, without passwords and signatures. It is not a path of the operating system: code that reads
    local files only calls :func:`local_copy`.
    """

    _folder: RemoteFolder
    _key: str = ""

    def __str__(self) -> str:
        return f"{self._folder.url}/{self._key}" if self._key else self._folder.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str | PurePath) -> "RemotePath":
        joined = PurePosixPath(self._key) / name
        return RemotePath(self._folder, "" if joined == PurePosixPath() else str(joined))

    @property
    def _path(self) -> PurePosixPath:
        return PurePosixPath(self._key or self._folder.name)

    @property
    def name(self) -> str:
        """The name of the file or folder."""
        return self._path.name

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot on."""
        return self._path.suffix

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return self._path.stem

    @property
    def parent(self) -> "RemotePath":
        """The folder of the file or folder; of the listed folder itself."""
        return RemotePath(self._folder, self._key.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether there is such a file or folder."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._key in self._folder.files

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return self._key in self._folder.children

    def is_symlink(self) -> bool:
        """Whether it is a link, which stores do not have."""
        return False

    def iterdir(self) -> "Iterator[RemotePath]":
        """The files and folders directly in a folder.

        Raises:
            NotADirectoryError: if it is not a folder.
        """
        if not self.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self))
        return (self / name for name in self._folder.children[self._key])

    def glob(self, pattern: str) -> "Iterator[RemotePath]":
        """The files and folders directly in a folder whose names match a pattern."""
        return (child for child in (self.iterdir() if self.is_dir() else ()) if fnmatchcase(child.name, pattern))

    def relative_to(self, folder: "RemotePath") -> PurePosixPath:
        """The path relative to a folder that contains it."""
        return PurePosixPath(self._key).relative_to(folder._key)  # noqa: SLF001 - of its own class

    def resolve(self) -> "RemotePath":
        """The path itself: it is absolute, and stores do not have links."""
        return self

    @property
    def file(self) -> "RemoteFile":
        """The file.

        Raises:
            FileNotFoundError: if there is none.
        """
        if not self.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return self._folder.files[self._key]

    def read_bytes(self) -> bytes:
        """The contents of a file.

        Raises:
            FileNotFoundError: if there is none.
            SourceError: if it changed or cannot be read.
        """
        return self.file.read_all()


#: A path of a checkpoint that is read.
AnyPath = Path | RemotePath


def remote_folder(name: str, url: str, files: "Mapping[str, RemoteFile]") -> RemotePath:
    """The path of a remote folder.

    Args:
        name: the name of the folder.
        url: the URL of the folder, as messages show it.
        files: file name, relative to the folder, to file.

    Raises:
        SourceError: if a name is not valid, or is both a file and a folder.
    """
    children: dict[str, dict[str, None]] = {"": {}}
    check_portable(url, files)
    for each in files:
        child = each
        while child:
            parent, _, last = child.rpartition("/")
            children.setdefault(parent, {})[last] = None
            child = parent
    if both := next((each for each in files if each in children), None):
        raise SourceError(f"{url}/{both}: is the name of a file and of a folder: rename one")
    listed = {folder: tuple(names) for folder, names in children.items()}
    name = name if is_portable_name(name, _MAX_FOLDER_BYTES) else "checkpoint"
    return RemotePath(RemoteFolder(name, url, files, listed))


def is_portable_name(name: str, max_bytes: int = _MAX_NAME_BYTES) -> bool:
    """Whether an untrusted name is a plain file name, without folders, on every system."""
    return name not in {".", ".."} and _NAME.fullmatch(name) is not None and len(name.encode()) <= max_bytes


def check_portable(folder: object, names: Iterable[str]) -> None:
    """Check the names of files in a folder, with / as separator, as they are checked when a manifest has them.

    Raises:
        SourceError: if one is not valid on every system.
    """
    if name := next((name for name in names if not all(map(is_portable_name, name.split("/")))), None):
        raise SourceError(f"{folder}: the name of file {name!r:.100} is not valid on every system: rename it")


def walk(folder: AnyPath, *, hidden: bool = False) -> Iterator[AnyPath]:
    """Every file under a folder; links to folders are yielded, but not entered, and so are hidden folders.

    Args:
        folder: the folder.
        hidden: whether hidden folders are entered, too.

    Raises:
        OSError: if a folder cannot be read.
    """
    children: list[AnyPath] = sorted(folder.iterdir(), key=lambda child: child.name)
    folders = {
        child: child.is_symlink() or (child.name.startswith(".") and not hidden) for child in children if child.is_dir()
    }
    yield from (child for child, is_closed in folders.items() if is_closed)
    yield from (child for child in children if child not in folders)
    for child, is_closed in folders.items():
        if not is_closed:
            yield from walk(child, hidden=hidden)


def relative_name(path: AnyPath, folder: AnyPath) -> str:
    """The name of a file relative to a folder of its kind, with / as separator."""
    assert isinstance(path, RemotePath) == isinstance(folder, RemotePath)
    return path.relative_to(folder).as_posix()  # type: ignore[arg-type] # both are local, or both remote


def permissions(paths: Iterable[AnyPath]) -> int:
    """The intersection of the permissions of files."""
    mode = 0o777
    for path in paths:
        if isinstance(path, Path):
            mode &= path.stat().st_mode
        elif path.is_file():
            mode &= path.file.mode
    return mode


def file_bytes(path: AnyPath) -> int:
    """The size of a file.

    Raises:
        OSError: if a local file cannot be read, or there is none.
        SourceError: if a remote file cannot be read.
    """
    return path.file.size if isinstance(path, RemotePath) else path.stat().st_size


def file_state(path: AnyPath) -> str:
    """The size, version and permissions of a file; errors as in :func:`file_bytes`."""
    if isinstance(path, RemotePath):
        return path.file.state
    status = path.stat()
    return f"{status.st_size} bytes, time {status.st_mtime_ns}, mode {status.st_mode & 0o777:o}"


def remote_versions(paths: Iterable[AnyPath]) -> dict[str, str]:
    """URL to size and version of the remote files among paths, which processes that read them compare.

    Raises:
        SourceError: if a file cannot be read.
    """
    return {str(path): path.file.state for path in paths if isinstance(path, RemotePath)}


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a temporary folder, removed at the end; a signal that interrupts this says that files may be left."""
    import shutil  # noqa: PLC0415 - slow, and few commands need them
    import tempfile  # noqa: PLC0415

    folder = Path(tempfile.mkdtemp(prefix="shardconv-")).resolve()
    try:
        yield folder
    finally:
        with Removal():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def local_copy(
    folder: AnyPath, is_needed: Callable[[str], bool], max_bytes: int | None = _MAX_COPIED
) -> Iterator[Path]:
    """A local folder with some files of a folder, for code that reads local files only; a local folder is itself.

    Args:
        folder: the folder.
        is_needed: whether a file is needed, by its name relative to the folder.
        max_bytes: larger files are not copied; None for no limit.

    Raises:
        SourceError: if a remote file cannot be read.
    """
    if isinstance(folder, Path):
        yield folder
        return
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - slow, and local folders do not need it

    with temporary_folder() as top:
        copied = top / folder.name
        names = (relative_name(path, folder) for path in walk(folder) if path.is_file())
        is_stopping = threading.Event()
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            try:
                copy = partial(_copy, folder, copied, max_bytes, is_stopping)
                list(pool.map(copy, filter(is_needed, names)))
            except BaseException:
                is_stopping.set()
                raise
        copied.mkdir(exist_ok=True)
        yield copied


def _copy(folder: RemotePath, to: Path, max_bytes: int | None, is_stopping: threading.Event, name: str) -> None:
    source, target = (folder / name).file, to / name
    if max_bytes is not None and source.size > max_bytes:
        return
    buffer = memoryview(bytearray(min(_COPIED_BYTES, source.size)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for start in range(0, source.size, _COPIED_BYTES):
                if is_stopping.is_set():
                    return
                block = buffer[: source.size - start]
                source.read(block, start)
                file.write(block)
    except OSError as error:
        raise OutputError(
            f"{source.shown}: cannot be copied to {to}: {error.strerror or error}: free some space, or set TMPDIR to a "
            "folder on another disk"
        ) from error


@contextmanager
def header_progress(progress: Progress | None) -> Iterator[None]:
    """Call a function with the number of remote headers that were read and the total, in calls from this context."""
    token = progress_of_headers.set(progress)
    try:
        yield
    finally:
        progress_of_headers.reset(token)


# --- texts: files that are read with a size limit, and large texts in memory ------------------------------------------

#: The remedy for a file that is not the expected JSON.
_AGAIN = "correct it, or download or copy it again"
_MAX_BYTES = 512 * 2**20
#: Pattern of the first bytes of a text that was stored instead of the file, to the problem and the remedy.
_STARTS = {
    rb"version https://git-lfs\.": ("is a pointer of git LFS, not the file itself", "run git lfs pull"),
    rb"(\xef\xbb\xbf)?\s*<[!?A-Za-z]": ("is an HTML or XML page, not the file itself", "download it again"),
}
#: Number of bytes to read from the start of a file.
START_BYTES = 64


class Compressed:
    """A text that is compressed in memory, such as one with the names of all tensors."""

    __slots__ = ("_data", "_size")

    def __init__(self, *parts: bytes | bytearray) -> None:
        stream = zlib.compressobj(zlib.Z_BEST_SPEED)
        self._data, self._size = b"".join((*map(stream.compress, parts), stream.flush())), sum(map(len, parts))

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compressed) and self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def raw(self) -> bytes:
        """The text."""
        return zlib.decompress(self._data)


def read_json(path: AnyPath) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        SourceError: if the file cannot be read, or is not a JSON object.
    """
    return parse_object(path, read_text(path))


def read_text(path: AnyPath) -> str:
    """Read a UTF-8 text file.

    Raises:
        SourceError: if it cannot be read, is too large, or is not UTF-8.
    """
    try:
        if isinstance(path, RemotePath):
            return path.file.read_all(_MAX_BYTES).decode()
        status = path.stat()
        if stat.S_ISFIFO(status.st_mode):
            raise SourceError(f"{path}: is not a regular file")  # reading a pipe could block forever
        if status.st_size > _MAX_BYTES:
            raise SourceError(f"{path}: is too large (got {status.st_size} bytes, expected at most {_MAX_BYTES})")
        return path.read_bytes().decode()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: is not UTF-8") from error


def parse_object(path: AnyPath, text: str) -> dict[str, object]:
    """Parse a JSON object; the path is for messages.

    Raises:
        SourceError: if the text is not a JSON object.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem, remedy = text_problem(text[:START_BYTES].encode()) or (f"is not JSON ({error})", _AGAIN)
        raise SourceError(f"{path}: {problem}: {remedy}") from error
    if not isinstance(data, dict):
        raise SourceError(f"{path}: is not a JSON object (got {type(data).__name__}): {_AGAIN}")
    return data


def text_problem(start: bytes) -> tuple[str, str] | None:
    """The problem and the remedy of a text file, by its first :data:`START_BYTES` bytes; None for all other files."""
    return next((problem for pattern, problem in _STARTS.items() if re.match(pattern, start)), None)
