"""A destination in an object store: a lock, the files that are there, and new files in place of them.

Large files are uploaded while they are written (:mod:`~shardconv.storage.upload`). Small ones are written to a local
folder, and uploaded at the end in an order that the caller chooses. Names are relative to the destination's folder.
"""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from uuid import uuid4

from shardconv.errors import OutputError, ShardconvError, SourceError
from shardconv.storage import table
from shardconv.storage.mirror import mirror
from shardconv.storage.problems import explain_write
from shardconv.storage.remote_file import RemoteFile
from shardconv.storage.requirements import obstore
from shardconv.storage.stores import list_files, open_store
from shardconv.storage.transfer import submit
from shardconv.storage.upload import Key, UploadFiles, finish, request
from shardconv.storage.url import Location

#: Bytes of the largest file that is sent in one request.
_MAX_REQUEST_BYTES = 32 * 2**20
_MAX_LOCK_BYTES = 2**16
_GONE = "was written by another process: choose another path with -o"


class RemoteOutput:
    """A destination while it is checked and written.

    Args:
        location: the folder, or the file.

    Attributes:
        target: the stand-in of the destination; the files that are there are stand-ins in it.
    """

    target: Path
    _staged: Path

    def __init__(self, location: Location) -> None:
        self.location = location
        self._store = open_store(location)
        self._lock_name = f".{location.file}.lock" if location.file else ".shardconv.lock"
        self._existing = self._list()
        self._files: list[UploadFiles] = []
        self._put: list[str] = []

    @contextmanager
    def mirrored(self) -> Iterator[Path]:
        """Make the stand-ins of what is there; yields :attr:`target`."""
        location = self.location
        name = location.folder.rpartition("/")[2] or location.host
        with mirror(name, location.to("").rstrip("/"), self._existing) as folder:
            self.target = folder / location.file if location.file else folder
            table.outputs[self.target] = self
            try:
                yield self.target
            finally:
                del table.outputs[self.target]

    @contextmanager
    def writing(self, order: Callable[[str], int], *, overwrite: bool) -> Iterator[Path]:
        """Provide a local folder for new files, and make them visible at the end; after an error there are none.

        Args:
            order: files with a number above 0 make a folder a checkpoint. They are written in the order of the numbers
                after all other files; of an existing checkpoint, they are removed before the first file is visible.
            overwrite: whether to replace what is there.

        Raises:
            OutputError: if another process writes to the destination, or the store refuses a request.
        """
        self._lock()
        self._staged = staged = Path(tempfile.mkdtemp(prefix="shardconv-")).resolve()
        try:
            table.outputs[staged], table.folders[staged] = self, self.location.to("").rstrip("/")
            if self._list().keys() != self._existing.keys():
                raise OutputError(f"{self.location}: {_GONE}")
            yield staged
            self._publish(order, overwrite=overwrite)
            self._delete([self._lock_name])
        except BaseException:
            self._abort()
            raise
        finally:
            del table.outputs[staged], table.folders[staged]
            shutil.rmtree(staged, ignore_errors=True)

    def open(self, paths: Sequence[Path], prefixes: Sequence[bytes], sizes: Sequence[int]) -> UploadFiles:
        """Start new files; arguments as those of :class:`~shardconv.checkpoint.output_files.OutputFiles`."""
        files = UploadFiles([self._key(path.relative_to(self._staged).as_posix()) for path in paths], prefixes, sizes)
        self._files.append(files)
        return files

    def _key(self, name: str) -> Key:
        return Key(self._store, self.location.prefix + name, self.location.to(name))

    def _list(self) -> dict[str, RemoteFile]:
        """Name to file of what is there, without the lock."""
        location = self.location
        try:
            if location.file:
                file = RemoteFile(self._store, location.prefix + location.file, str(location))
                return {location.file: file} if file.exists() else {}
            files = list_files(location, explain_write)
        except SourceError as error:
            raise OutputError(str(error)) from None
        return {name: file for name, file in files.items() if name != self._lock_name}

    def _lock(self) -> None:
        """Create the lock.

        Raises:
            OutputError: if there is one.
        """
        started = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        owner = {"host": socket.gethostname(), "process": os.getpid(), "started": started, "token": uuid4().hex}
        if (other := self._create(self._lock_name, json.dumps(owner).encode())) is None:
            return
        found = {}
        with suppress(ValueError):
            found = json.loads(other)
        since = f" since {found['started']} on {found['host']}" if found.keys() >= owner.keys() else ""
        raise OutputError(
            f"{self.location}: another run is writing it{since}: wait until it finishes, or if it was killed, remove "
            f"{self.location.to(self._lock_name)}"
        )

    def _create(self, name: str, data: bytes) -> bytes | None:
        """Write a file unless it exists; returns what another process wrote."""
        key = self._key(name)

        async def create() -> None:
            with suppress(obstore().exceptions.AlreadyExistsError):
                await obstore().put_async(key.store, key.name, data, mode="create")

        request(create, key.shown)
        try:  # a request that is repeated after a lost answer finds what it wrote itself
            found = RemoteFile(*key).read_all(max(_MAX_LOCK_BYTES, len(data)))
        except SourceError as error:
            raise OutputError(str(error)) from None
        return None if found == data else found

    def _publish(self, order: Callable[[str], int], *, overwrite: bool) -> None:
        """Make the new files visible, and remove the old ones."""
        for files in self._files:
            files.flush()
        staged = self._staged
        small = [path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()]
        large = {upload.key.name for files in self._files for upload in files.uploads}
        old = [name for name in self._existing if self._key(name).name not in large and name not in small]
        made = sorted((name for name in self._existing if order(name)), key=order, reverse=True)
        self._delete(made)
        try:
            for files in self._files:
                files.complete()
            self._delete([name for name in old if name not in made])
            for name in sorted(small, key=lambda name: (order(name), -name.count("/"))):
                self._upload(staged / name, name, is_last=order(name) == max(map(order, small)) and not overwrite)
        except ShardconvError as error:
            if self._existing:
                error.args = (f"{error}; what was there is partly removed: run the command again",)
            raise

    def _upload(self, path: Path, name: str, *, is_last: bool) -> None:
        key = self._key(name)
        self._put.append(name)
        if is_last and path.stat().st_size <= _MAX_REQUEST_BYTES:
            if self._create(name, path.read_bytes()) is not None:
                self._put.remove(name)
                raise OutputError(f"{key.shown}: {_GONE}")
            return
        is_multipart = path.stat().st_size > _MAX_REQUEST_BYTES
        put = partial(obstore().put_async, key.store, key.name, path, use_multipart=is_multipart)
        request(put, key.shown)

    def _delete(self, names: Collection[str]) -> None:
        if names:
            keys = [self._key(name).name for name in names]
            request(partial(obstore().delete_async, self._store, keys), str(self.location))

    def _abort(self) -> None:
        """Remove everything that was written; an error does not replace the one that led here."""
        for files in self._files:
            files.abort()

        async def delete() -> None:
            with suppress(Exception):
                await obstore().delete_async(
                    self._store, [self._key(name).name for name in (*self._put, self._lock_name)]
                )

        finish([submit(delete())])
