"""Requests that write to stores. An interrupted command finishes its requests before it removes its files."""

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardconv.files.storage.clients import Result, obstore, submit, wait
from shardconv.files.storage.errors import explain_write, explained

if TYPE_CHECKING:
    from obstore.store import ObjectStore

#: Seconds that an interrupted command waits for each step of the removal of its files.
_ABORT_SECONDS = 20


class Key(NamedTuple):
    """The place of a file in a store, and its URL in messages."""

    store: "ObjectStore"
    name: str
    shown: str


class Requests:
    """Requests of one destination, each with the URL that it may still change after an interruption."""

    def __init__(self) -> None:
        self._running: dict[Future[Any], str] = {}

    def run(self, start: Callable[[], Awaitable[Result]], shown: str) -> Result:
        """Start a request, and wait for it.

        Raises:
            OutputError: if it fails.
        """

        async def run() -> Result:
            with explained(shown, explain_write):
                return await start()

        future = submit(run())
        self._running[future] = shown
        result = wait(future)
        del self._running[future]
        return result

    def finish(self) -> list[str]:
        """Finish the requests that were interrupted; returns the URLs of requests that do not finish."""
        return finish(self._running)


def finish(requests: Mapping[Future[Any], str]) -> list[str]:
    """Wait for requests for a limited time. Cancel the unfinished ones, and return their URLs."""
    late = wait_for(requests, timeout=_ABORT_SECONDS).not_done
    for request in late:
        request.cancel()
    return [requests[request] for request in late]


async def read(key: Key) -> bytes | None:
    """The bytes of a small file; None if it does not exist."""
    try:
        return bytes(await (await obstore().get_async(key.store, key.name)).bytes_async())
    except FileNotFoundError:
        return None


async def exists(key: Key) -> bool:
    """Whether a file exists."""
    try:
        await obstore().head_async(key.store, key.name)
    except FileNotFoundError:
        return False
    return True


def create(key: Key, data: bytes, requests: Requests) -> bytes | None:
    """Write a file unless it exists; returns the bytes that another process wrote, or None.

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
