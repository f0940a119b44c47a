"""A thread that makes something slowly and then stays, for as long as what it made is in use.

It must stay because the kernel's parent-death signal follows the thread that started a child, not
its process: an engine core started by a pool's thread would be killed as the pool shrinks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class OwnerThread(Generic[T]):
    """Runs `make` at once, and ends after `release()`."""

    def __init__(self, make: Callable[[], T], *, name: str) -> None:
        self._make: Callable[[], T] | None = make
        self._made: Future[T] = Future()
        self._released = threading.Event()
        # Not allowed to be cancelled: the thread can't be.
        self._made.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def result(self) -> T:
        """Wait for what is made. A cancelled wait leaves the making under way."""
        return await asyncio.wrap_future(self._made)

    def finished(self, timeout: float) -> bool:
        """Block until it was made or failed, at most that long; say whether it has."""
        return bool(wait([self._made], timeout).done)

    def release(self) -> T | None:
        """Let the thread go; return what it made, for the last time, unless it failed."""
        self._released.set()
        self._thread.join()
        made, self._made = self._made, Future()
        return None if made.exception() else made.result()

    def _run(self) -> None:
        make, self._make = self._make, None
        assert make is not None
        try:
            self._made.set_result(make())
        except BaseException as error:
            self._made.set_exception(error)
        del make
        self._released.wait()
