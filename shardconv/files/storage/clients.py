"""Clients of stores: packages of the extra ``remote``, and the thread that runs their requests.

It has an event loop for the requests of all threads, so that they can be cancelled.
"""

import asyncio
import importlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from functools import lru_cache
from types import ModuleType
from typing import TypeVar

from shardconv.support.errors import SourceError, install

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
