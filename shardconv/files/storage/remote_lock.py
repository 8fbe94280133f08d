"""The lock of a remote destination: a file that only one run can create, and that only this run removes."""

import json
import os
import socket
from datetime import UTC, datetime
from functools import partial
from uuid import uuid4

from shardconv.files.storage.clients import obstore
from shardconv.files.storage.write_requests import Key, Requests, read
from shardconv.support.errors import OutputError

_FIELDS = {"host", "process", "started", "token"}


class RemoteLock:
    """A lock.

    Args:
        key: its place.
        shown: URL of the destination.
        requests: those of the destination.

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
            OutputError: if it was removed, or replaced by that of another run.
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


def create(key: Key, data: bytes, requests: Requests) -> bytes | None:
    """Write a file unless it exists; returns what another process wrote.

    Raises:
        OutputError: if the store refuses it.
    """

    async def put() -> None:
        try:
            await obstore().put_async(key.store, key.name, data, mode="create")
        except obstore().exceptions.AlreadyExistsError:  # perhaps by the same request, repeated after a lost answer
            return

    requests.run(put, key.shown)
    found = requests.run(partial(read, key), key.shown)
    return None if found == data else found or b""


def _since(lock: bytes) -> str:
    """When and where the run started that wrote a lock, if it is valid."""
    try:
        found = json.loads(lock)
    except ValueError:
        return ""
    return (
        f" since {found['started']} on {found['host']}" if isinstance(found, dict) and found.keys() >= _FIELDS else ""
    )
