"""A file in a store, read by ranges of bytes. Every range is of the same version of the file, or an error.

A version is an ETag, or else the time of the last change. Where a server sends neither, only sizes are compared.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from shardconv.files.storage.clients import obstore, submit, wait
from shardconv.files.storage.errors import OTHER_RANGE, MissingError, TransferError, changed, explained, is_empty
from shardconv.support.errors import SourceError

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ObjectStore

Result = TypeVar("Result")

#: Seconds before each further attempt at a transfer that was interrupted, beside the retries of the store's client.
PAUSES = (0.2, 1.0, 5.0)
#: The range whose answer has the size of a file.
_FIRST = 8
#: The time of the last change that clients report where a server does not send one.
_NO_TIME = datetime.fromtimestamp(0, UTC)


class RemoteFile:
    """A file in a store.

    Args:
        store: the store.
        key: the name of the file in it.
        shown: its URL in messages.
        size: in bytes; None to request it when it is needed.
        is_pinned: whether the URL contains the version of the file, so that tags of caches do not matter.
    """

    #: Permissions of a local copy, before the umask.
    mode = 0o666

    def __init__(
        self, store: "ObjectStore", key: str, shown: str, size: int | None = None, *, is_pinned: bool = False
    ) -> None:
        self.shown = shown
        self._store, self._key, self._size, self._is_pinned = store, key, size, is_pinned
        self._head = b""
        self._version: str | datetime | None = None
        self._is_version_read = is_pinned
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of the file.

        Raises:
            SourceError: if it does not exist or cannot be read.
        """
        if not self.exists():
            raise SourceError(f"{self.shown}: does not exist: correct the URL")
        assert self._size is not None
        return self._size

    @property
    def state(self) -> str:
        """The size and version, which a file with other contents does not have if :attr:`has_version`.

        Raises:
            SourceError: if it does not exist or cannot be read.
        """
        version = self._version if self.has_version else "unknown"
        return f"{self.size} bytes, version {self._key if self._is_pinned else version}"

    @property
    def has_version(self) -> bool:
        """Whether the server sends a version, which a file with other contents does not have; errors as in `state`."""
        if not self._is_version_read:
            self._size = wait(submit(self._request_size()))
        return self._is_pinned or self._version is not None

    def exists(self) -> bool:
        """Whether the file exists.

        Raises:
            SourceError: if that cannot be found out.
        """
        if self._size is None:
            self._size = wait(submit(self._request_size()))
        return self._size is not None

    def fetch(self, start: int, stop: int) -> Future[memoryview]:
        """Start to read a range, which must be in the file and not empty."""
        return submit(self._fetch(start, stop))

    def keep(self, size: int) -> None:
        """Fetch the first bytes, and keep them in memory for later reads; errors as in :meth:`read`."""
        head = bytearray(min(size, self.size))
        self.read(memoryview(head), 0)
        self._head = bytes(head)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from a position.

        Raises:
            SourceError: if the file changed, is shorter, or cannot be read.
        """
        kept = self._head[offset : offset + len(buffer)]
        buffer[: len(kept)] = kept
        if len(kept) < len(buffer):
            buffer[len(kept) :] = wait(self.fetch(offset + len(kept), offset + len(buffer)))

    def read_all(self, max_bytes: int | None = None) -> bytes:
        """The contents of the file, of at most ``max_bytes`` bytes.

        Raises:
            SourceError: if it changed, is too large, or cannot be read.
        """
        if max_bytes is not None and self.size > max_bytes:
            raise SourceError(f"{self.shown}: is too large (got {self.size} bytes, expected at most {max_bytes})")
        return bytes(wait(self.fetch(0, self.size))) if self.size else b""

    def check_unchanged(self) -> None:
        """Do nothing: every range is of the version that was read first."""

    def close(self) -> None:
        """Do nothing: connections belong to the store."""

    async def _request_size(self) -> int | None:
        try:
            meta, head = await self._repeated(self._request_head)
        except MissingError:
            return None
        self._check_version(meta)
        if len(head) == min(_FIRST, meta["size"]):
            self._head = head
        return meta["size"]

    async def _request_head(self) -> "tuple[ObjectMeta, bytes]":
        """The size and version of the file in the store, and its first bytes."""
        try:
            result = await self._get(0, _FIRST)
            return result.meta, bytes(await result.bytes_async())
        except Exception as error:
            if not is_empty(error):
                raise
        return await obstore().head_async(self._store, self._key), b""  # an empty file does not have the range

    async def _fetch(self, start: int, stop: int) -> memoryview:
        return await self._repeated(partial(self._fetch_once, start, stop))

    async def _repeated(self, request: Callable[[], Coroutine[None, None, Result]]) -> Result:
        """The result of a request, which is repeated if the connection is lost.

        Raises:
            MissingError: if the file does not exist.
            SourceError: if it cannot be read.
        """
        for pause in PAUSES:
            with suppress(TransferError), explained(self.shown):
                return await request()
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - so that threads do not retry together
        with explained(self.shown):
            return await request()

    async def _fetch_once(self, start: int, stop: int) -> memoryview:
        result = await self._get(start, stop)
        self._check_version(result.meta)
        size = result.meta["size"]
        if self._size is not None and size != self._size:
            raise SourceError(f"{self.shown}: changed while it was read (got {size} bytes, expected {self._size})")
        data = memoryview(await result.bytes_async())
        if tuple(result.range) != (start, stop) or len(data) != stop - start:
            raise SourceError(f"{self.shown}: {OTHER_RANGE}")
        return data

    async def _get(self, start: int, stop: int) -> "GetResult":
        options: GetOptions = {"range": (start, stop)}
        if isinstance(self._version, str) and not self._version.startswith("W/"):  # weak tags never match a condition
            options["if_match"] = self._version
        result: GetResult = await obstore().get_async(self._store, self._key, options=options)
        return result

    def _check_version(self, meta: "ObjectMeta") -> None:
        """Raise an error if the object was replaced since its first read."""
        if self._is_pinned:
            return
        time = meta["last_modified"]
        version = meta["e_tag"] or (time if time != _NO_TIME else None)
        with self._lock:
            if not self._is_version_read:
                self._version, self._is_version_read = version, True
        if version != self._version:
            raise changed(self.shown)
