"""Atomic output: write into a staging folder, then rename, so that a failed run leaves no incomplete checkpoint.

The staging folder is ``.NAME.partial`` next to the destination. A run holds a lock on it. A marker file in it
identifies it, so the next run can remove the files of a killed run, or continue it by its journal.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from shardconv.checkpoint.output.existing import NewCheckpoint, check_replaceable
from shardconv.checkpoint.output.journal import JOURNAL_NAME, Journal
from shardconv.files.paths import absolute_path, staging_folder
from shardconv.support.errors import OutputError, option
from shardconv.support.exits import Removal, Terminated

#: Names in the staging folder: the marker, the folder that is written, and the folder that it replaces.
_MARKER, _RESULT, _REPLACED = ".shardconv", "result", "replaced"
_BLOCK_BYTES = 512  # of st_blocks
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
_NO_LINKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK, errno.ENOSYS}
_NO_SYNC = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_IS_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}


@contextmanager
def staging(path: Path, new: NewCheckpoint, journal: Journal | None = None) -> Iterator[Path]:
    """Context manager that provides a folder to write into, and moves the result to ``path`` on success.

    The result is the folder itself, or the file with the name of ``path`` in it.

    Args:
        path: the destination.
        new: the checkpoint that is written.
        journal: of the copy of the weights; None to keep none.

    Raises:
        OutputError: if ``path`` exists, another run writes to it, there is too little free space, or it cannot be
            written.
    """
    with as_output_errors(str(absolute_path(path))), nested_staging(path, new, journal) as folder:
        yield folder


@contextmanager
def nested_staging(path: Path, new: NewCheckpoint, journal: Journal | None) -> Iterator[Path]:
    """As :func:`staging`, in a checkpoint that is being written, which reports errors of the operating system."""
    path = absolute_path(path)  # resolve() would follow a link that has to be replaced
    with parent_folders(path):
        partial = staging_folder(path)
        result = partial / (_RESULT if new.is_folder else path.name)
        folder = result if new.is_folder else partial
        kept = [folder / name for name in ([] if journal is None else [*journal.names, *journal.nested])]
        with _locked(partial, path, journal, folder, kept) as descriptor:
            check_replaceable(path, new)
            check_room(path, new.num_bytes - _allocated_bytes(kept))
            if new.is_folder:
                result.mkdir(new.mode | 0o700, exist_ok=True)
            yield folder
            if not _is_same_folder(partial, descriptor):
                raise OutputError(f"{partial}: was removed while it was in use: run the command again")
            if not new.overwrite:
                publish(result, path)
                return
            if os.path.lexists(path):
                flush(result)  # the result has to be on the disk before the existing checkpoint is removed
            check_replaceable(path, new)
            _replace(result, path, partial / _REPLACED)


def staged_folder(path: Path) -> Path:
    """The folder that :func:`staging` provides for a folder in another process."""
    return staging_folder(absolute_path(path)) / _RESULT


@contextmanager
def parent_folders(path: Path) -> Iterator[None]:
    """Create the parent folders of a path; on exit, remove the created ones that are empty."""
    missing = [*takewhile(lambda parent: not os.path.lexists(parent), path.parents)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with Removal(), suppress(OSError):  # the first that is not empty is the last
            for parent in missing:
                parent.rmdir()


@contextmanager
def as_output_errors(target: str) -> Iterator[None]:
    """Raise errors of the operating system as OutputError.

    Args:
        target: the destination, for errors without a path.
    """
    try:
        yield
    except OSError as error:
        notes = getattr(error, "__notes__", [])
        left = "" if notes else " (no files were left behind)"
        if error.errno in _NO_ROOM:
            message = f"{target}: the disk is full: free some space{left}"
        else:
            message = f"{error.filename or target}: cannot be written: {error.strerror or error}{left}"
        output_error = OutputError(message)
        for note in notes:
            output_error.add_note(note)
        raise output_error from error


@contextmanager
def _locked(partial: Path, path: Path, journal: Journal | None, folder: Path, kept: Collection[Path]) -> Iterator[int]:
    """Create and lock the staging folder, and remove it on exit, unless the journal is for another run to continue.

    It is empty except for the marker and, if the journal continues another run, the journal and the files it lists.

    Args:
        partial: the staging folder.
        path: the destination.
        journal: the journal, if there is one.
        folder: the folder in the staging folder that is written.
        kept: the files and folders that the journal is about.
    """
    descriptor = _lock(partial, path, is_resumable=journal is not None and journal.resume)
    try:
        if journal is not None:
            journal.read(partial, path)  # before anything is removed, as it may refuse the run
        is_kept = False
        try:
            _recover(partial, path)
            _clear(partial, {partial / JOURNAL_NAME, *kept} if journal is not None and journal.is_continued else ())
            (partial / _MARKER).touch()
            if journal is not None:
                journal.start(partial)
            yield descriptor
        except BaseException as error:
            if journal is not None and journal.resume:
                is_kept = journal.is_worth_keeping(folder)
                if is_kept and not journal.is_nested:
                    error.add_note(f"finished stripes are kept in {partial}: run the same command again to continue")
                elif not (is_kept or journal.is_nested or journal.finished) and isinstance(
                    error, (KeyboardInterrupt, Terminated)
                ):
                    error.add_note("no stripe was finished, and nothing was left behind")
            raise
        finally:
            with Removal():
                if journal is not None:
                    journal.close()
                if _is_same_folder(partial, descriptor):
                    _recover(partial, path)
                    if not is_kept:
                        _remove(partial)
    finally:
        os.close(descriptor)


def _remove(partial: Path) -> None:
    _clear(partial)
    (partial / _MARKER).unlink(missing_ok=True)  # last, so that files of a killed run are identified
    partial.rmdir()


def _lock(partial: Path, path: Path, *, is_resumable: bool) -> int:
    """Create or take over the staging folder, and lock it."""
    while True:
        is_new = False
        with suppress(FileExistsError):
            partial.mkdir(parents=True)  # another run may have removed a parent folder that it had created
            is_new = True
        try:
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            _take_lock(descriptor, partial, path, is_new=is_new, is_resumable=is_resumable)
            if _is_same_folder(partial, descriptor):
                if not _is_staging_folder(partial):
                    raise OutputError(f"{partial}: holds files that shardconv did not write: rename it")
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take_lock(descriptor: int, partial: Path, path: Path, *, is_new: bool, is_resumable: bool) -> None:
    """Lock the staging folder; without locks in the file system, only a new one is known to be of no other run."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"{path}: another run is writing it: wait until it finishes") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if is_resumable:
            if is_new:
                partial.rmdir()
            raise OutputError(
                f"{path}: cannot be resumed (this file system does not support locks, so that another run may be "
                f"writing it): remove {option(resume=True)}, or write to another file system with {option('dst')}"
            ) from error
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


def _clear(folder: Path, kept: Collection[Path] = ()) -> None:
    """Remove everything except the marker and these files."""
    for child in folder.iterdir():
        if child.name == _MARKER or child in kept:
            continue
        if not child.is_dir() or child.is_symlink():
            child.unlink()
        elif any(path.is_relative_to(child) for path in kept):
            _clear(child, kept)
        else:
            shutil.rmtree(child)


def _allocated_bytes(paths: Collection[Path]) -> int:
    """Bytes that these files and folders, if they exist, have on the disk."""
    files = [one for path in paths for one in (path.rglob("*") if path.is_dir() else [path])]
    found = [path.stat() for path in files if path.is_file()]
    return sum(min(status.st_blocks * _BLOCK_BYTES, status.st_size) for status in found)


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
            f"space, or choose another path with {option('dst')}"
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
        raise OutputError(
            f"{path}: was created by another process: choose another path with {option('dst')}"
        ) from error


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
