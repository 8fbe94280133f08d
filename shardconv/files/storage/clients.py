"""Clients of stores: packages of the extra ``remote``, the thread that runs their requests, and requests that write.

The thread has an event loop for the requests of all threads, so that they can be cancelled. An interrupted command
finishes its requests that write before it removes its files.
"""

import asyncio
import importlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from functools import lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shardconv.files.storage.errors import explain_write, explained
from shardconv.support.errors import SourceError, install

if TYPE_CHECKING:
    from obstore.store import ObjectStore


Result = TypeVar("Result")

#: Maximum number of requests at a time.
MAX_REQUESTS = 32


@lru_cache(maxsize=1)
def _loop_of(_process: int) -> tuple[asyncio.AbstractEventLoop, asyncio.Semaphore]:
    """The loop of this process, and room for its requests; a forked process does not have the threads of its parent.

    The thread of the loop does not keep the process alive.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="shardconv-transfer", daemon=True).start()
    return loop, asyncio.Semaphore(MAX_REQUESTS)


def submit(request: Coroutine[None, None, Result]) -> Future[Result]:
    """Start a request, from any thread; cancelling the future cancels the request."""
    loop, room = _loop_of(os.getpid())

    async def limited() -> Result:
        async with room:
            return await request

    return asyncio.run_coroutine_threadsafe(limited(), loop)


def wait(request: Future[Result]) -> Result:
    """The result of a request.

    Raises:
        InterruptedError: if it was cancelled.
    """
    try:
        return request.result()
    except CancelledError:
        raise InterruptedError("another thread failed, or the user interrupted the transfer") from None


def obstore() -> ModuleType:
    """The clients of stores.

    Raises:
        SourceError: if the package is not installed.
    """
    return _require("obstore")


def obstore_stores() -> ModuleType:
    """The classes of stores; errors as in :func:`obstore`."""
    return _require("obstore.store")


def huggingface_hub() -> ModuleType:
    """The client of the Hub, with its constants; errors as in :func:`obstore`."""
    _require("huggingface_hub.constants")  # an attribute of the package only when it was imported
    return _require("huggingface_hub")


def _require(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise SourceError(f"URLs require {package} ({error}): {install('remote')}") from error


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
