"""Requests to stores: one thread with an event loop runs those of all threads, so that they can be cancelled."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from functools import lru_cache
from typing import TypeVar

Result = TypeVar("Result")

#: Maximum number of requests at a time.
MAX_REQUESTS = 32


class _Loop:
    """An event loop in a thread of its own, which does not keep the process alive."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(MAX_REQUESTS)
        threading.Thread(target=self._loop.run_forever, name="shardconv-transfer", daemon=True).start()

    def submit(self, request: Coroutine[None, None, Result]) -> Future[Result]:
        """Start a request."""
        return asyncio.run_coroutine_threadsafe(self._limited(request), self._loop)

    async def _limited(self, request: Coroutine[None, None, Result]) -> Result:
        async with self._room:
            return await request


@lru_cache(maxsize=1)
def _loop_of(_process: int) -> _Loop:
    """The loop of this process; a forked process does not have the threads of its parent."""
    return _Loop()


def submit(request: Coroutine[None, None, Result]) -> Future[Result]:
    """Start a request, from any thread; cancelling the future cancels the request."""
    return _loop_of(os.getpid()).submit(request)


def wait(request: Future[Result]) -> Result:
    """The result of a request.

    Raises:
        InterruptedError: if it was cancelled.
    """
    try:
        return request.result()
    except CancelledError:
        raise InterruptedError("another thread failed, or the user interrupted the transfer") from None
