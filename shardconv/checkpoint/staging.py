"""Atomic output: write into a staging folder, then rename, so that a failed run leaves no incomplete checkpoint.

The staging folder is ``.NAME.partial`` next to the destination. A run holds a lock on it. A marker file in it
identifies it, so the next run can remove the files of a killed run.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardconv.checkpoint.destination import check_destination
from shardconv.checkpoint.paths import absolute_path
from shardconv.errors import OutputError

#: Names in the staging folder: the marker, the folder that is written, and the folder that it replaces.
_MARKER, _RESULT, _REPLACED = ".shardconv", "result", "replaced"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
_NO_LINKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK, errno.ENOSYS}
_NO_SYNC = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_IS_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}


@contextmanager
def staging(
    path: Path,
    *,
    is_folder: bool,
    overwrite: bool,
    num_bytes: int,
    auxiliary_files: Collection[str] = (),
    mode: int = 0o777,
) -> Iterator[Path]:
    """Context manager that provides a folder to write into, and moves the result to ``path`` on success.

    Args:
        path: the destination.
        is_folder: whether the result is the folder itself, or the file with the name of ``path`` in it.
        overwrite: replace an existing checkpoint.
        num_bytes: number of bytes that will be written.
        auxiliary_files: names of the auxiliary files that will be written.
        mode: permissions of the folder, before the umask; its owner gets all.

    Raises:
        OutputError: if ``path`` exists, another run writes to it, there is too little free space, or it cannot be
            written.
    """
    path = absolute_path(path)  # resolve() would follow a link that has to be replaced
    with _as_output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.parent / f".{path.name}.partial"
        with _locked(partial, path) as descriptor:
            check_destination(path, is_folder=is_folder, overwrite=overwrite, auxiliary_files=auxiliary_files)
            check_room(path, num_bytes)
            result = partial / (_RESULT if is_folder else path.name)
            if is_folder:
                result.mkdir(mode | 0o700)
            yield result if is_folder else partial
            if not _is_same_folder(partial, descriptor):
                raise OutputError(f"{partial}: was removed while it was in use: run the command again")
            if overwrite:
                if os.path.lexists(path):
                    flush(result)  # the result has to be on the disk before the existing checkpoint is removed
                check_destination(path, is_folder=is_folder, overwrite=True, auxiliary_files=auxiliary_files)
                _replace(result, path, partial / _REPLACED)
            else:
                publish(result, path)


@contextmanager
def joined_staging(path: Path) -> Iterator[Path]:
    """Context manager that provides the folder that :func:`staging` provides to another process.

    Raises:
        OutputError: if it cannot be written.
    """
    path = absolute_path(path)
    with _as_output_errors(path):
        yield path.parent / f".{path.name}.partial" / _RESULT


@contextmanager
def _as_output_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise OutputError(f"{path}: the disk is full: free some space (no files were left behind)") from error
        raise OutputError(
            f"{error.filename or path}: cannot be written: {error.strerror or error} (no files were left behind)"
        ) from error


@contextmanager
def _locked(partial: Path, path: Path) -> Iterator[int]:
    """Create and lock the staging folder, with only the marker in it, and remove it on exit."""
    descriptor = _lock(partial, path)
    try:
        try:
            _recover(partial, path)
            _clear(partial)
            (partial / _MARKER).touch()
            yield descriptor
        finally:
            if _is_same_folder(partial, descriptor):
                _recover(partial, path)
                _clear(partial)
                (partial / _MARKER).unlink(missing_ok=True)  # last, so that files of a killed run are identified
                partial.rmdir()
    finally:
        os.close(descriptor)


def _lock(partial: Path, path: Path) -> int:
    """Create or take over the staging folder, and lock it."""
    while True:
        is_new = False
        with suppress(FileExistsError):
            partial.mkdir()
            is_new = True
        try:
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            _take_lock(descriptor, partial, path, is_new=is_new)
            if _is_same_folder(partial, descriptor):
                if not _is_staging_folder(partial):
                    raise OutputError(f"{partial}: holds files that shardconv did not write: rename it")
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take_lock(descriptor: int, partial: Path, path: Path, *, is_new: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"{path}: another run is writing it: wait until it finishes") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if not is_new:
            raise OutputError(
                f"{path}: another run may be writing it (this file system does not support locks): if none is, remove "
                f"{partial}"
            ) from error


def _is_same_folder(partial: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), partial.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _is_staging_folder(partial: Path) -> bool:
    """Whether the folder has the marker, or is empty: a run can be killed before it writes the marker."""
    names = [child.name for child in partial.iterdir()]
    return not names or _MARKER in names


def _clear(partial: Path) -> None:
    """Remove everything except the marker."""
    for child in partial.iterdir():
        if child.name == _MARKER:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def _recover(partial: Path, path: Path) -> None:
    """Undo a replacement that was interrupted between its two renames."""
    replaced = partial / _REPLACED
    if not os.path.lexists(replaced):
        return
    if not os.path.lexists(path):
        replaced.rename(path)
    elif os.path.lexists(partial / _RESULT):  # so another process created path
        raise OutputError(f"{path}: was created by another process; the previous checkpoint is kept as {replaced}")


def check_room(path: Path, num_bytes: int) -> None:
    """Refuse to write if the file system has fewer free bytes."""
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise OutputError(
            f"{path}: the disk has too little free space (got {free:,} bytes, expected {num_bytes:,}): free some "
            f"space, or choose another path with -o"
        )


def publish(result: Path, path: Path) -> None:
    """Rename the result to ``path`` if that does not exist; the kernel checks it, to avoid a race."""
    try:
        if result.is_dir():
            result.rename(path)  # fails, unless path does not exist or is an empty folder
        else:
            with suppress(FileNotFoundError, NotADirectoryError):
                path.rmdir()
            _move_file(result, path)
    except OSError as error:
        if error.errno not in _IS_TAKEN:
            raise
        raise OutputError(f"{path}: was created by another process: choose another path with -o") from error


def _move_file(result: Path, path: Path) -> None:
    """Rename a file without replacing another."""
    try:
        os.link(result, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        result.rename(path)
    else:
        result.unlink()


def _replace(result: Path, path: Path, replaced: Path) -> None:
    """Rename the result to ``path``; an existing folder is moved to ``replaced``, which the lock holder removes."""
    exists = os.path.lexists(path)
    if path.is_dir() and not path.is_symlink():
        if any(path.iterdir()):
            path.rename(replaced)
        elif not result.is_dir():
            path.rmdir()
    result.rename(path)
    if exists:
        sync_folder(path.parent)


def flush(result: Path) -> None:
    """Write a file or a folder to the disk."""
    for path in [*result.rglob("*"), result] if result.is_dir() else [result]:
        sync_folder(path)


def sync_folder(path: Path) -> None:
    """Wait until a file or folder is on the disk; on macOS os.fsync does not."""
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if full_sync is None or path.is_dir():
            os.fsync(descriptor)
        else:
            fcntl.fcntl(descriptor, full_sync)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # not every file system supports it
            raise
    finally:
        os.close(descriptor)
