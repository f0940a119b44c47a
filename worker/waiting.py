"""Waiting for whatever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first(*waits: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Wait for the first of several to be done, or for the time-out; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
