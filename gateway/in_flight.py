"""What each caller has at once, from before a job's submission to its end, and in a minute."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from gateway.errors import RateLimited
from shared.errors import HeadraceError
from shared.in_flight import Admission, InFlightCounts, Window
from shared.protocol import KeyRecord

_MOST_OVER = 200_000
"""Ended jobs that wait to be taken out of their counts; what is beyond is found by pruning."""
_BACKOFF_S = 0.5
_PRUNE_S = 0.05
_PRUNED_PER_S = 10_000
"""Jobs of one key that are looked at in a second, about."""
_MOST_KEYS = 10_000
_RETRY_S = (1, 3)
SETTLE_S = 2.0
"""How often to look for jobs that have ended without anybody's settling them."""

Told = Callable[[Admission], None]
"""Hears how an admission went, before a refusal is raised."""


class InFlight:
    """Holds callers to their limits. `run()` is one of the process's long tasks."""

    def __init__(
        self, counts: InFlightCounts, *, submit_timeout_s: float, settle_s: float = SETTLE_S
    ) -> None:
        self._counts = counts
        self._settle_s = settle_s
        self._unknown_s = 2 * submit_timeout_s
        """A job that isn't there so long after it was counted won't come."""
        self._over: dict[str, list[tuple[str, int | None]]] = {}
        """Key → jobs that have ended, and their tokens where those are known."""
        self._size = 0
        self._wake = asyncio.Event()
        self._next_prune: dict[str, float] = {}
        """Key → when its jobs may be looked at again."""
        self._owing: set[str] = set()
        """Keys with jobs whose tokens may not have been charged."""

    async def admit(self, caller: KeyRecord, job_id: str, told: Told) -> None:
        """Count a request. Raises `RateLimited`, `QueueUnavailable`, `QueueFull`."""
        if caller.tokens_per_minute and len(self._owing) < _MOST_KEYS:
            self._owing.add(caller.id)
        admission = await self._counts.admit(caller, job_id)
        if admission.verdict == "in_flight" and self._may_prune(caller.id, caller.max_in_flight):
            # Some may be a dead gateway's, or go on without their client and have ended.
            if await self._counts.prune(caller.id, unknown_s=self._unknown_s):
                admission = await self._counts.admit(caller, job_id)
        told(admission)
        if admission.verdict != "ok":
            raise _refusal(caller, admission)

    def _may_prune(self, key_id: str, limit: int) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._next_prune.get(key_id, 0):
            return False
        if len(self._next_prune) >= _MOST_KEYS:
            self._next_prune.clear()
        self._next_prune[key_id] = now + max(_PRUNE_S, limit / _PRUNED_PER_S)
        return True

    def release(self, key_id: str, job_id: str, tokens: int | None = None) -> None:
        """See to it that a job that is over doesn't count any more. Returns at once.

        `tokens`: what it is to be charged for, once; None where that isn't known here.
        """
        if self._size < _MOST_OVER:
            self._over.setdefault(key_id, []).append((job_id, tokens))
            self._size += 1
            self._wake.set()

    async def run(self) -> None:
        """Take ended jobs out of their counts and charge them, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_releases())
            group.create_task(self._run_settling())

    async def _run_releases(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            over, self._over, self._size = self._over, {}, 0
            for key_id, jobs in over.items():
                try:
                    await self._counts.settle(key_id, jobs)
                except HeadraceError:
                    for job_id, tokens in jobs:
                        self.release(key_id, job_id, tokens)
                    await asyncio.sleep(_BACKOFF_S)

    async def _run_settling(self) -> None:
        while True:
            await asyncio.sleep(self._settle_s)
            owing, self._owing = self._owing, set()
            for key_id in owing:
                try:
                    left = await self._counts.settle_ended(key_id, unknown_s=self._unknown_s)
                except HeadraceError:
                    left = 1
                if left:
                    self._owing.add(key_id)
                    await asyncio.sleep(left / _PRUNED_PER_S)


def _refusal(caller: KeyRecord, admission: Admission) -> RateLimited:
    if admission.verdict == "in_flight":
        most = caller.max_in_flight
        return RateLimited(
            f"This API key has {most} requests in flight, as many as it may have.",
            retry_after_s=random.uniform(*_RETRY_S),
        )
    kind = admission.verdict
    window = admission.requests if kind == "requests" else admission.tokens
    assert isinstance(window, Window)
    return RateLimited(
        f"This API key has used {window.used} {kind} within a minute, of {window.limit} that it "
        f"may. Try again in {window.wait_s:.1f} s.",
        retry_after_s=window.wait_s,
    )
