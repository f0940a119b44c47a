"""Which late jobs a worker takes over, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.errors import LanesLost, QueueUnavailable
from shared.keys import tag
from shared.outcomes import Claimed
from shared.transitions import Transitions
from worker.presence import Presence
from worker.settings import WorkerSettings
from worker.takeover import Takeover

BEAT_S = 0.05
BEAT = 8
"""So many looks take longer than a beat."""
TAG = tag("m", 0)


def late(number: int) -> Claimed:
    return Claimed(TAG, "interactive", False, b"%d-0" % number, f"{TAG}{number:024x}")


class Link(Presence):
    def __init__(self) -> None:
        self.pool = "m"
        self.is_sound = True

    def sound(self) -> bool:
        return self.is_sound


class Queue(Transitions):
    """What each look finds; the last of it is found for ever."""

    def __init__(self, *looks: list[Claimed] | Exception) -> None:
        self.looks = list(looks)
        self.seen = 0
        self.idle_s = 0.0
        self.first_at = 0.0
        self._looked = asyncio.Event()

    async def pending(
        self, job_tag: str, *, worker: str | None = None, idle_s: float = 0
    ) -> list[Claimed]:
        assert job_tag == TAG
        self.idle_s = idle_s
        self.first_at = self.first_at or asyncio.get_running_loop().time()
        found = self.looks[min(self.seen, len(self.looks) - 1)]
        self.seen += 1
        self._looked.set()
        if isinstance(found, Exception):
            raise found
        return found

    async def looked(self, times: int) -> None:
        async with asyncio.timeout(10):
            while self.seen < times:
                self._looked.clear()
                await self._looked.wait()


class Taker:
    def __init__(self, refusals: int = 0) -> None:
        self.taken: list[Claimed] = []
        self.at = 0.0
        self.refusals = refusals
        self.done = asyncio.Event()

    async def __call__(self, claimed: Claimed) -> bool:
        if self.refusals > 0:
            self.refusals -= 1
            return False
        self.at = asyncio.get_running_loop().time()
        self.taken.append(claimed)
        self.done.set()
        return True


@asynccontextmanager
async def looking(queue: Queue, taker: Taker, link: Link | None = None) -> AsyncIterator[None]:
    settings = WorkerSettings(beat_s=BEAT_S, lease_s=4 * BEAT_S)
    task = asyncio.create_task(Takeover(settings, queue, link or Link(), taker).run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_what_is_late_at_two_looks_a_beat_apart_is_taken() -> None:
    queue, taker = Queue([late(1)]), Taker()
    async with looking(queue, taker):
        await asyncio.wait_for(taker.done.wait(), 10)
    assert taker.taken[0] == late(1)
    assert taker.at - queue.first_at >= BEAT_S
    # One beat less than a lease: with the second look it is a whole one.
    assert queue.idle_s == 3 * BEAT_S


async def test_what_is_late_at_one_look_is_not() -> None:
    """Its owner beat in between: it was slow, not dead."""
    queue, taker = Queue([late(1)], *[[]] * BEAT, [late(1)], []), Taker()
    async with looking(queue, taker):
        await queue.looked(2 * BEAT)
    assert taker.taken == []


async def test_a_worker_whose_own_link_is_unsound_takes_nothing() -> None:
    queue, taker, link = Queue([late(1)]), Taker(), Link()
    async with looking(queue, taker, link):
        await queue.looked(1)
        link.is_sound = False
        await asyncio.sleep(3 * BEAT_S)
        assert taker.taken == []
        seen, link.is_sound = queue.seen, True
        await asyncio.wait_for(taker.done.wait(), 10)
    assert queue.seen > seen + 1


async def test_looks_that_fail_begin_anew() -> None:
    for failure in (QueueUnavailable(), LanesLost()):
        queue, taker = Queue([late(1)], *[failure] * BEAT, [late(1)], []), Taker()
        async with looking(queue, taker):
            await queue.looked(2 * BEAT)
        assert taker.taken == []


async def test_a_job_waits_for_the_suspect_before_it() -> None:
    queue, taker = Queue([late(1), late(2)]), Taker(refusals=5)
    async with looking(queue, taker):
        await asyncio.wait_for(taker.done.wait(), 10)
        await queue.looked(queue.seen + 1)
    assert taker.taken[:2] == [late(1), late(2)]
