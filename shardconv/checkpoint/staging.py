"""Write beside, check, then rename: nothing that looks complete is ever left behind by a run that failed.

Owns the way of a file or folder to its final name. A run writes to ``.NAME.partial`` beside the destination and holds a
lock on it; what a killed run left there is cleared by the next.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardconv.checkpoint.layout import MANIFEST_NAME
from shardconv.errors import OutputError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def staging(path: Path, *, is_folder: bool, overwrite: bool, num_bytes: int) -> Iterator[Path]:
    """Give a folder to write into; on leaving without an exception, the result appears under ``path``.

    Args:
        path: the final name.
        is_folder: whether the folder itself is the result, or the file of the same name in it.
        overwrite: replace what is there.
        num_bytes: what will be written.

    Raises:
        OutputError: if ``path`` exists, another run writes to it, there is no room, or it cannot be written.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link that is to be replaced
    with _messages(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.parent / f".{path.name}.partial"
        descriptor = _lock(partial, path)
        try:
            _recover(path)
            check_free(path, is_folder=is_folder, overwrite=overwrite)
            _check_room(path, num_bytes)
            yield partial
            _publish(partial if is_folder else partial / path.name, path)
        finally:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), partial.stat()):
                    shutil.rmtree(partial)
            os.close(descriptor)


@contextmanager
def _messages(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise OutputError(f"{path}: the disk is full; nothing was left behind") from error
        raise OutputError(f"{error.filename or path}: {error.strerror or error}; nothing was left behind") from error


def check_free(path: Path, *, is_folder: bool, overwrite: bool) -> None:
    """Check that a destination may be written.

    Raises:
        OutputError: if something is there that is not to be replaced.
    """
    if not os.path.lexists(path):
        return
    found_folder = path.is_dir() and not path.is_symlink()
    if found_folder and not any(path.iterdir()):
        return
    if found_folder != is_folder:
        found, wanted = ("folder", "file") if found_folder else ("link" if path.is_symlink() else "file", "folder")
        raise OutputError(f"{path}: is a {found}, and a {wanted} is to be written; choose another name with -o")
    if not overwrite:
        raise OutputError(f"{path}: exists; choose another name with -o, or --overwrite")
    if found_folder and not (path / MANIFEST_NAME).is_file() and not _holds_checkpoint(path):
        raise OutputError(f"{path}: holds no checkpoint, so it is not overwritten; remove it yourself if that is meant")


def check_apart(target: Path, sources: Iterable[Path]) -> None:
    """Check that a destination is neither in a source nor holds one, so that replacing it destroys none.

    Raises:
        OutputError: if it does.
    """
    home = target.resolve()
    for source in dict.fromkeys(path.resolve() for path in sources):
        if home.is_relative_to(source):
            raise OutputError(f"{target}: lies in the source; choose another place with -o")
        if source.is_relative_to(home):
            raise OutputError(f"{target}: holds {source}, which is read; choose another place with -o")


def _holds_checkpoint(folder: Path) -> bool:
    return any(name.endswith(".safetensors") for name in os.listdir(folder))  # noqa: PTH208 - names only


def _lock(partial: Path, path: Path) -> int:
    """Make or take over the folder that is written to, and lock it against other runs."""
    while True:
        with suppress(FileExistsError):
            partial.mkdir()
        try:
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(f"{path}: another run is writing it") from None
        except OSError as error:
            if error.errno not in {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}:
                os.close(descriptor)
                raise
        if _is_still(partial, descriptor):
            _clear(partial)
            return descriptor
        os.close(descriptor)


def _is_still(partial: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), partial.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _clear(folder: Path) -> None:
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def _check_room(path: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise OutputError(
            f"{path}: {num_bytes:,} bytes are needed and {free:,} are free on its disk; nothing was written"
        )


def _replaced(path: Path) -> Path:
    return path.parent / f".{path.name}.replaced"


def _recover(path: Path) -> None:
    """Undo a replacement that was interrupted between its two renames, or finish one after them."""
    replaced = _replaced(path)
    if not os.path.lexists(replaced):
        return
    if os.path.lexists(path):
        _remove(replaced)
    else:
        replaced.rename(path)


def _publish(result: Path, path: Path) -> None:
    if os.path.lexists(path):
        _flush(result)  # what is there goes only when its successor is on the disk
    if path.is_dir() and not path.is_symlink() and any(path.iterdir()):
        path.rename(_replaced(path))
    try:
        if path.is_dir() and not path.is_symlink() and not result.is_dir():
            path.rmdir()
        result.rename(path)
    except BaseException:
        _recover(path)
        raise
    _recover(path)


def _flush(result: Path) -> None:
    for path in [*result.rglob("*"), result] if result.is_dir() else [result]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
