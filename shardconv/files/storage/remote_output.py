"""A destination in an object store: its lock, its existing files, and the new files that replace them.

Large files are uploaded while they are written (:mod:`~shardconv.files.storage.upload`). Small ones are written to a
local folder, and uploaded at the end in an order that the caller chooses. Names are relative to the destination's
folder.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from uuid import uuid4

from shardconv.files.folder import RemotePath, remote_folder, temporary_folder
from shardconv.files.storage.clients import Key, Requests, create, exists, finish, obstore, read, submit
from shardconv.files.storage.errors import explain_write
from shardconv.files.storage.remote_file import RemoteFile
from shardconv.files.storage.stores import list_files, open_store
from shardconv.files.storage.upload import UploadFiles
from shardconv.files.storage.url import Location, lock_name
from shardconv.support.errors import OutputError, ShardconvError, SourceError, option

#: Bytes of the largest file that is sent in one request.
_MAX_REQUEST_BYTES = 32 * 2**20
#: Number of times that files of an aborted run are looked for and deleted: the store may still execute a request that
#: was given up.
_NUM_REMOVALS = 3
#: Seconds in which threads of the store's client finish after the last request: at its exit, Python would abort them.
_END_SECONDS = 0.1
_LOCK_FIELDS = {"host", "process", "started", "token"}
_GONE = f"was written by another process: choose another path with {option('dst')}"


class RemoteLock:
    """The lock of a destination: a file that only one run can create, and that only this run removes.

    Args:
        key: the key of the file in the store.
        shown: URL of the destination.
        requests: the requests of the destination.

    Attributes:
        is_requested: whether this run may have created it.
    """

    def __init__(self, key: Key, shown: str, requests: Requests) -> None:
        self.key, self._shown, self._requests = key, shown, requests
        started = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        values = {"host": socket.gethostname(), "process": os.getpid(), "started": started, "token": uuid4().hex}
        self._data = json.dumps(values).encode()
        self.is_requested = False

    def take(self) -> None:
        """Create the lock.

        Raises:
            OutputError: if there is one.
        """
        self.is_requested = True
        if (other := create(self.key, self._data, self._requests)) is not None:
            raise OutputError(
                f"{self._shown}: another run is writing it{_since(other)}: wait until it finishes, or if it was "
                f"killed, remove {self.key.shown}"
            )

    def check(self) -> None:
        """Check that this run still has the lock.

        Raises:
            OutputError: if it was removed, or replaced by another run's.
        """
        if not self._requests.run(self.is_held, self.key.shown):
            raise OutputError(
                f"{self.key.shown}: was removed or replaced while this run was writing: make sure that its bucket "
                f"exists and no other run writes {self._shown}, and run the command again"
            )

    async def is_held(self) -> bool:
        """Whether the store has the lock of this run."""
        return await read(self.key) == self._data

    def release(self) -> None:
        """Remove the lock.

        Raises:
            OutputError: if another run has it now, or the store refuses to remove it.
        """
        self.check()
        self._requests.run(self.remove, self.key.shown)

    async def remove(self) -> None:
        """Remove the lock, which this run holds."""
        await obstore().delete_async(self.key.store, self.key.name)


class RemoteOutput:
    """A destination while it is checked and written.

    Args:
        location: the folder, or the file.
    """

    _staged: Path

    def __init__(self, location: Location) -> None:
        self.location = location
        self._store = open_store(location)
        self._requests = Requests()
        self._lock_name = lock_name(location.file)
        self._lock = RemoteLock(self._key(self._lock_name), str(location), self._requests)
        self._existing = self._list()
        self._files: list[UploadFiles] = []
        self._put: dict[str, bytes | None] = {}
        self._is_published = False

    @property
    def existing(self) -> RemotePath:
        """The path of the existing file or folder."""
        location = self.location
        name = location.folder.rpartition("/")[2] or location.host
        folder = remote_folder(name, location.to("").rstrip("/"), self._existing)
        return folder / location.file if location.file else folder

    @contextmanager
    def writing(self, order: Callable[[str], int], *, overwrite: bool) -> Iterator[Path]:
        """Provide a local folder for new files, and make them visible at the end; after an error there are none.

        Args:
            order: files with a number above 0 make a folder a checkpoint. They are written in the order of the numbers
                after all other files; of an existing checkpoint, they are removed before the first file is visible.
            overwrite: whether to replace existing files.

        Raises:
            OutputError: if another process writes to the destination, or the store refuses a request.
        """
        try:
            self._lock.take()
            if self._list().keys() != self._existing.keys():
                raise OutputError(f"{self.location}: {_GONE}")
            with temporary_folder() as self._staged:
                yield self._staged
                self._publish(order, overwrite=overwrite)
            self._lock.release()
        except BaseException as error:
            if not self._is_published:
                try:
                    self._abort(error)
                except BaseException as second:
                    second.add_note(f"files in {self.location} and its lock may be left: remove them")
                    raise
                raise
            left = f"{self.location}: is written, but its lock {self._lock.key.shown}"
            if isinstance(error, ShardconvError):
                raise OutputError(f"{left} could not be removed: remove it") from error
            error.add_note(f"{left} may be left: remove it")
            raise
        finally:
            for files in self._files:
                files.release()

    def create(
        self, paths: Sequence[Path], prefixes: Sequence[bytes], sizes: Sequence[int], _mode: int, *, may_exist: bool
    ) -> UploadFiles:
        """Start new files; arguments as for :class:`~shardconv.files.fileio.LocalOutputFiles`."""
        assert not may_exist
        files = UploadFiles([self._key(path.relative_to(self._staged).as_posix()) for path in paths], prefixes, sizes)
        self._files.append(files)
        return files

    def _key(self, name: str) -> Key:
        return Key(self._store, self.location.prefix + name, self.location.to(name))

    def _list(self) -> dict[str, RemoteFile]:
        """Name to file of the existing files, without the lock."""
        location = self.location
        try:
            if location.file:
                file = RemoteFile(self._store, location.prefix + location.file, str(location))
                return {location.file: file} if file.exists() else {}
            files = list_files(location, explain_write)
        except SourceError as error:
            raise OutputError(error.message) from None
        return {name: file for name, file in files.items() if name != self._lock_name}

    def _publish(self, order: Callable[[str], int], *, overwrite: bool) -> None:
        """Make the new files visible, and remove the old ones."""
        for files in self._files:
            files.flush()
        self._lock.check()
        try:
            self._replace(order, overwrite=overwrite)
        except BaseException as error:
            if self._existing:
                error.add_note("the existing files are partly removed: run the command again")
            raise
        self._is_published = True

    def _replace(self, order: Callable[[str], int], *, overwrite: bool) -> None:
        staged = self._staged
        small = [path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()]
        large = {upload.key.name for files in self._files for upload in files.uploads}
        old = [name for name in self._existing if self._key(name).name not in large and name not in small]
        made = sorted((name for name in self._existing if order(name)), key=order, reverse=True)
        self._delete(made)
        for files in self._files:
            files.complete()
        self._lock.check()
        self._delete([name for name in old if name not in made])
        for name in sorted(small, key=lambda name: (order(name), -name.count("/"))):
            self._upload(staged / name, name, is_last=order(name) == max(map(order, small)) and not overwrite)

    def _upload(self, path: Path, name: str, *, is_last: bool) -> None:
        key = self._key(name)
        if is_last and path.stat().st_size <= _MAX_REQUEST_BYTES:
            self._put[name] = data = path.read_bytes()
            if create(key, data, self._requests) is not None:
                raise OutputError(f"{key.shown}: {_GONE}")
            return
        self._put[name] = None
        is_multipart = path.stat().st_size > _MAX_REQUEST_BYTES
        self._requests.run(
            partial(obstore().put_async, key.store, key.name, path, use_multipart=is_multipart), key.shown
        )

    def _delete(self, names: Collection[str]) -> None:
        if names:
            keys = [self._key(name).name for name in names]
            self._requests.run(partial(obstore().delete_async, self._store, keys), str(self.location))

    def _abort(self, error: BaseException) -> None:
        """Remove everything that was written; add a note to the error with the files that may be left."""
        if not self._lock.is_requested:
            return
        left = self._requests.finish()
        for files in self._files:
            left += files.abort()
        removal = submit(self._remove())
        if finish({removal: ""}) or removal.exception() is not None:
            left += [*(key.shown for key, _ in self._written()), self._lock.key.shown]
        else:
            left += removal.result()
        time.sleep(_END_SECONDS)
        if left:
            error.add_note(f"may be left: {_joined(left)}: remove these files unless another run wrote them")

    def _written(self) -> list[tuple[Key, bytes | None]]:
        """The files that may be visible, with their bytes if another process may have written one of that name."""
        uploads = [(upload.key, None) for files in self._files for upload in files.uploads if upload.is_completing]
        return [*uploads, *((self._key(name), data) for name, data in self._put.items())]

    async def _remove(self) -> list[str]:
        """Delete visible files of this run, and then its lock; returns the URLs of the files that remain.

        Without the lock, files may belong to another run, and are not deleted.
        """
        is_held, written = await self._lock.is_held(), self._written()
        for _ in range(_NUM_REMOVALS):
            there = await asyncio.gather(*(_is_there(key, data) for key, data in written))
            found = [key for (key, _), is_there in zip(written, there, strict=True) if is_there]
            if not found or not is_held:
                break
            await obstore().delete_async(self._store, [key.name for key in found])
        if is_held:
            await self._lock.remove()
        return [key.shown for key in found]


async def _is_there(key: Key, data: bytes | None) -> bool:
    """Whether a file exists, with these bytes if there are any."""
    return await exists(key) if data is None else await read(key) == data


def _joined(urls: Collection[str]) -> str:
    return ", ".join(dict.fromkeys(urls))


def _since(lock: bytes) -> str:
    """Start time and host of the run that wrote a lock, for a message; empty if the lock is not valid."""
    try:
        found = json.loads(lock)
    except ValueError:
        return ""
    return (
        f" since {found['started']} on {found['host']}"
        if isinstance(found, dict) and found.keys() >= _LOCK_FIELDS
        else ""
    )
