"""How many jobs each caller has at once, from before their submission until they have ended."""

from __future__ import annotations

import asyncio
import random

from gateway.errors import RateLimited
from shared.errors import HeadraceError
from shared.in_flight import InFlightCounts

_MOST_OVER = 200_000
"""Ended jobs that wait to be taken out of their counts; what is beyond is found by pruning."""
_BACKOFF_S = 0.5
_PRUNE_S = 0.05
_PRUNED_PER_S = 10_000
"""Jobs of one key that are looked at in a second, about."""
_MOST_PRUNED = 10_000
_RETRY_S = (1, 3)


class InFlight:
    """Holds callers to their limits. `run()` is one of the process's long tasks."""

    def __init__(self, counts: InFlightCounts, *, submit_timeout_s: float) -> None:
        self._counts = counts
        self._unknown_s = 2 * submit_timeout_s
        """A job that isn't there so long after it was counted won't come."""
        self._over: dict[str, list[str]] = {}
        """Key → jobs that have ended."""
        self._size = 0
        self._wake = asyncio.Event()
        self._next_prune: dict[str, float] = {}
        """Key → when its jobs may be looked at again."""

    async def admit(self, key_id: str, limit: int, job_id: str) -> None:
        """Count a job. Raises `RateLimited`, `QueueUnavailable`, `QueueFull`."""
        if await self._counts.admit(key_id, limit, job_id):
            return
        # Some may be a dead gateway's, or go on without their client and have ended.
        if self._may_prune(key_id, limit) and await self._counts.prune(
            key_id, unknown_s=self._unknown_s
        ):
            if await self._counts.admit(key_id, limit, job_id):
                return
        raise RateLimited(
            f"This API key has {limit} requests in flight, as many as it may have.",
            retry_after_s=random.uniform(*_RETRY_S),
        )

    def _may_prune(self, key_id: str, limit: int) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._next_prune.get(key_id, 0):
            return False
        if len(self._next_prune) >= _MOST_PRUNED:
            self._next_prune.clear()
        self._next_prune[key_id] = now + max(_PRUNE_S, limit / _PRUNED_PER_S)
        return True

    def release(self, key_id: str, job_id: str) -> None:
        """See to it that a job that has ended doesn't count any more. Returns at once."""
        if self._size < _MOST_OVER:
            self._over.setdefault(key_id, []).append(job_id)
            self._size += 1
            self._wake.set()

    async def run(self) -> None:
        """Take ended jobs out of their counts until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            over, self._over, self._size = self._over, {}, 0
            for key_id, job_ids in over.items():
                try:
                    await self._counts.release(key_id, job_ids)
                except HeadraceError:
                    for job_id in job_ids:
                        self.release(key_id, job_id)
                    await asyncio.sleep(_BACKOFF_S)
