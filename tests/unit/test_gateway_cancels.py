"""Cancels are repeated until the queue has taken them, and forced where nobody obeys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from gateway.cancels import Canceller
from shared.errors import QueueUnavailable
from shared.outcomes import CancelOutcome
from shared.transitions import Transitions
from tests.support.waiting import until


class FakeTransitions:
    """Notes cancels; fails as often as it is told to."""

    def __init__(self, word: str = "queued", failures: int = 0) -> None:
        self.word = word
        self.failures = failures
        self.calls: list[tuple[str, str, bool, bool]] = []

    async def cancel(
        self, job_id: str, lane: str, reason: str, *, force: bool, early: bool
    ) -> CancelOutcome:
        self.calls.append((job_id, reason, force, early))
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise QueueUnavailable
        return CancelOutcome("forced" if force else self.word)


@asynccontextmanager
async def running(fake: FakeTransitions, **options: Any) -> AsyncIterator[Canceller]:
    options = {"force_after_s": 0.05, **options}
    canceller = Canceller(cast(Transitions, fake), **options)
    task = asyncio.ensure_future(canceller.run())
    try:
        yield canceller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_failed_cancels_are_repeated_until_they_get_through() -> None:
    fake = FakeTransitions(failures=3)
    async with running(fake) as canceller:
        canceller.request("job", "interactive", "expired", early=True)
        assert canceller.pending == 1
        await until(lambda: canceller.pending == 0, "the cancel gets through")
    assert fake.calls == [("job", "expired", False, True)] * 4


async def test_worker_that_does_not_obey_is_overruled() -> None:
    fake = FakeTransitions("running")
    async with running(fake) as canceller:
        canceller.request("job", "interactive")
        await until(lambda: len(fake.calls) == 2, "the cancel is forced")
    assert [force for _, _, force, _ in fake.calls] == [False, True]


async def test_queued_job_needs_no_force() -> None:
    fake = FakeTransitions("queued")
    async with running(fake) as canceller:
        canceller.request("job", "interactive")
        await asyncio.sleep(0.15)
    assert len(fake.calls) == 1


async def test_pending_cancels_are_bounded() -> None:
    fake = FakeTransitions(failures=1_000)
    async with running(fake, limit=10) as canceller:
        for number in range(50):
            canceller.request(f"job{number}", "interactive")
        assert canceller.pending == 10


async def test_drain_waits_for_what_is_pending() -> None:
    fake = FakeTransitions(failures=2)
    async with running(fake) as canceller:
        canceller.request("job", "interactive")
        await canceller.drain(5)
        assert len(fake.calls) == 3


async def test_drain_is_bounded() -> None:
    fake = FakeTransitions(failures=1_000)
    async with running(fake) as canceller:
        canceller.request("job", "interactive")
        async with asyncio.timeout(1):
            await canceller.drain(0.1)
