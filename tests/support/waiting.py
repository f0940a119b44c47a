"""Waits for what another process or task will bring about, and says what, if it never does."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")


@overload
async def until(
    check: Callable[[], Awaitable[T]], what: str, *, timeout: float = ..., every: float = ...
) -> T: ...


@overload
async def until(
    check: Callable[[], T], what: str, *, timeout: float = ..., every: float = ...
) -> T: ...


async def until(
    check: Callable[[], Any], what: str, *, timeout: float = 5, every: float = 0.02
) -> Any:
    """Return the first true value of `check`, which may be a coroutine function.

    An assertion that fails within the check counts as not yet, and is shown when time runs out.
    """
    deadline = time.monotonic() + timeout
    failed: AssertionError | None = None
    while True:
        try:
            value = check()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
        except AssertionError as error:
            failed = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}") from failed
        await asyncio.sleep(every)
