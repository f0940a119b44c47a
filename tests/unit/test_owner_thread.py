"""The thread that starts the engine's processes outlives the start."""

from __future__ import annotations

import asyncio
import threading

import pytest

from worker.engine.owner import OwnerThread


async def test_the_thread_stays_until_it_is_released() -> None:
    owner = OwnerThread(threading.current_thread, name="owner")
    thread = await owner.result()
    assert thread.name == "owner"
    assert thread.is_alive()
    assert owner.release() is thread
    assert not thread.is_alive()


async def test_a_failure_is_raised_to_who_waits_and_leaves_nothing_to_free() -> None:
    def make() -> None:
        raise LookupError("no model")

    owner = OwnerThread(make, name="owner")
    with pytest.raises(LookupError, match="no model"):
        await owner.result()
    assert owner.release() is None


async def test_a_cancelled_wait_leaves_the_making_under_way() -> None:
    go = threading.Event()
    owner = OwnerThread(lambda: go.wait(), name="owner")
    waiting = asyncio.create_task(owner.result())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not owner.finished(timeout=0)
    go.set()
    assert owner.finished(timeout=5)
    assert owner.release() is True
