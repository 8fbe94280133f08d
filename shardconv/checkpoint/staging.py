"""Write beside, check, then rename: nothing that looks complete is ever left behind by a run that failed.

Owns the way of a file or folder to its final name. A run works in ``.NAME.partial`` beside the destination and holds a
lock on it. A marker in there says whose it is; what a killed run left there is cleared by the next.
"""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from shardconv.checkpoint.layout import MANIFEST_NAME
from shardconv.checkpoint.manifest import read_manifest
from shardconv.errors import OutputError, SplitCheckpointError

#: What lies in the folder that is worked in: the sign that it is ours, a folder that is written, and the one that it
#: replaces.
_MARKER, _RESULT, _REPLACED = ".shardconv", "result", "replaced"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
_NO_LINKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK, errno.ENOSYS}
_NO_SYNC = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_IS_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
_IN_SPLIT = re.compile(re.escape(MANIFEST_NAME) + r"|(rank-\d+-of-\d+|model-rank-\d+-part-\d+)\.safetensors")
_IN_MERGED = re.compile(r"[^/]+\.safetensors(\.index\.json)?")


@contextmanager
def staging(
    path: Path, *, is_folder: bool, overwrite: bool, num_bytes: int, side_files: Collection[str] = (), mode: int = 0o777
) -> Iterator[Path]:
    """Give a folder to write into; on leaving without an exception, the result appears under ``path``.

    Args:
        path: the final name.
        is_folder: whether the folder itself is the result, or the file of the same name in it.
        overwrite: replace what is there.
        num_bytes: what will be written.
        side_files: names of the side files that will be written.
        mode: permissions of the folder, before the umask; its owner gets all.

    Raises:
        OutputError: if ``path`` exists, another run writes to it, there is no room, or it cannot be written.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link that is to be replaced
    with _messages(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.parent / f".{path.name}.partial"
        with _locked(partial, path) as descriptor:
            check_free(path, is_folder=is_folder, overwrite=overwrite, side_files=side_files)
            _check_room(path, num_bytes)
            result = partial / (_RESULT if is_folder else path.name)
            if is_folder:
                result.mkdir(mode | 0o700)
            yield result if is_folder else partial
            if not _is_still(partial, descriptor):
                raise OutputError(f"{partial}: was removed while it was written to; run the command again")
            if overwrite:
                if os.path.lexists(path):
                    _flush(result)  # what is there goes only when its successor is on the disk
                check_free(path, is_folder=is_folder, overwrite=True, side_files=side_files)
                _replace(result, path, partial / _REPLACED)
            else:
                _publish(result, path)


@contextmanager
def _messages(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise OutputError(f"{path}: the disk is full; nothing was left behind") from error
        raise OutputError(f"{error.filename or path}: {error.strerror or error}; nothing was left behind") from error


def check_free(path: Path, *, is_folder: bool, overwrite: bool, side_files: Collection[str] = ()) -> None:
    """Check that a destination may be written.

    Args:
        path: the destination.
        is_folder: whether it becomes a folder.
        overwrite: whether a checkpoint there is replaced.
        side_files: names of the side files that will be written.

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
    if found_folder:
        _check_ours(path, side_files)


def check_target(
    path: Path, *, is_folder: bool, overwrite: bool, dry_run: bool, side_files: Collection[str] = ()
) -> bool:
    """Check a destination as :func:`check_free`; a dry run is not refused where ``overwrite`` is all that is missing.

    Returns:
        Whether a checkpoint is there, which only ``overwrite`` replaces.
    """
    check_free(path, is_folder=is_folder, overwrite=overwrite or dry_run, side_files=side_files)
    is_folder_there = path.is_dir() and not path.is_symlink()
    return os.path.lexists(path) and not (is_folder_there and not any(path.iterdir()))


def _check_ours(folder: Path, side_files: Collection[str]) -> None:
    """Check that a folder that is to be replaced holds a checkpoint and nothing else."""
    is_split = (folder / MANIFEST_NAME).is_file()
    if not is_split and not any(name.endswith(".safetensors") for name in os.listdir(folder)):  # noqa: PTH208
        raise OutputError(
            f"{folder}: holds no checkpoint, so it is not overwritten; remove it yourself if that is meant"
        )
    if is_split:
        with suppress(SplitCheckpointError):
            side_files = read_manifest(folder).side_files
    weights = _IN_SPLIT if is_split else _IN_MERGED
    for name in _files(folder):
        if name not in side_files and not weights.fullmatch(name):
            raise OutputError(
                f"{folder}: holds {name}, which is no part of a checkpoint; remove it yourself if that is meant"
            )


def _files(folder: Path) -> Iterator[str]:
    """The names, with / between folders, of all under a folder that is no folder itself."""

    def refuse(error: OSError) -> NoReturn:
        raise OutputError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for root, folders, files in os.walk(folder, onerror=refuse):
        links = [name for name in folders if Path(root, name).is_symlink()]
        yield from (Path(root, name).relative_to(folder).as_posix() for name in sorted(links + files))


def check_apart(target: Path, sources: Iterable[Path]) -> None:
    """Check that a destination is neither in a source nor holds one, so that replacing it destroys none.

    Raises:
        OutputError: if it does.
    """
    home = target.resolve()
    for source in dict.fromkeys(path.resolve() for path in sources):
        if home == source:
            raise OutputError(f"{target}: is what is read; choose another place with -o")
        if home.is_relative_to(source):
            raise OutputError(f"{target}: lies in the source, {source}; choose another place with -o")
        if source.is_relative_to(home):
            raise OutputError(f"{target}: holds {source}, which is read; choose another place with -o")


@contextmanager
def _locked(partial: Path, path: Path) -> Iterator[int]:
    """Hold the folder that is worked in, at first with nothing in it but the marker, and remove it in the end."""
    descriptor = _lock(partial, path)
    try:
        try:
            _recover(partial, path)
            _clear(partial)
            (partial / _MARKER).touch()
            yield descriptor
        finally:
            if _is_still(partial, descriptor):
                _recover(partial, path)
                _clear(partial)
                (partial / _MARKER).unlink(missing_ok=True)  # last, else what is left by a kill would not be known
                partial.rmdir()
    finally:
        os.close(descriptor)


def _lock(partial: Path, path: Path) -> int:
    """Make or take over the folder that is worked in, and lock it against other runs."""
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
            if _is_still(partial, descriptor):
                if not _is_ours(partial):
                    raise OutputError(f"{partial}: is needed, and holds what is not of shardconv; rename it first")
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take_lock(descriptor: int, partial: Path, path: Path, *, is_new: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"{path}: another run is writing it") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if not is_new:
            raise OutputError(
                f"{path}: another run may be writing it, and this file system has no locks to tell; if none is, remove "
                f"{partial}"
            ) from error


def _is_still(partial: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), partial.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _is_ours(partial: Path) -> bool:
    """Whether the folder has the marker, or nothing: a run can be killed before it sets the marker."""
    names = os.listdir(partial)  # noqa: PTH208 - names only
    return not names or _MARKER in names


def _clear(partial: Path) -> None:
    """Remove all but the marker."""
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
    elif os.path.lexists(partial / _RESULT):  # so what is there is not the result
        raise OutputError(f"{path}: appeared meanwhile; what was there before is kept as {replaced}")


def _check_room(path: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise OutputError(
            f"{path}: {num_bytes:,} bytes are needed and {free:,} are free on its disk; nothing was written"
        )


def _publish(result: Path, path: Path) -> None:
    """Give the result its name where nothing has it; that is for the kernel to say, as a check could be outrun."""
    try:
        if result.is_dir():
            result.rename(path)  # refused, unless nothing is there or an empty folder
        else:
            with suppress(FileNotFoundError, NotADirectoryError):
                path.rmdir()
            _move_file(result, path)
    except OSError as error:
        if error.errno not in _IS_TAKEN:
            raise
        raise OutputError(f"{path}: appeared meanwhile and is kept; choose another name with -o") from error


def _move_file(result: Path, path: Path) -> None:
    """Rename a file, but never over another."""
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
    """Give the result its name, and move aside a folder that has it; whoever holds the lock removes that then."""
    is_there = os.path.lexists(path)
    if path.is_dir() and not path.is_symlink():
        if any(path.iterdir()):
            path.rename(replaced)
        elif not result.is_dir():
            path.rmdir()
    result.rename(path)
    if is_there:
        _sync(path.parent)


def _flush(result: Path) -> None:
    for path in [*result.rglob("*"), result] if result.is_dir() else [result]:
        _sync(path)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk, which on macOS os.fsync does not."""
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if full_sync is None or path.is_dir():
            os.fsync(descriptor)
        else:
            fcntl.fcntl(descriptor, full_sync)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # not every file system can
            raise
    finally:
        os.close(descriptor)
