"""Takes over the jobs of workers that were lost: their leases have lapsed.

Three rules keep a slow network from looking like death, and a poisonous job from condemning its
neighbours: an entry must have been found late, by one beat less than a lease, and again a beat
later; this worker's own link must have been sound for a whole lease; and a worker begins only a few
suspects at a time, jobs whose worker was lost and that haven't got further since, and one that has
cost two workers in a row alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from shared.errors import LanesLost, QueueUnavailable
from shared.keys import tags
from shared.logs import Log
from shared.outcomes import Claimed
from shared.transitions import Transitions
from worker.presence import Presence
from worker.settings import WorkerSettings

log = Log("takeover")

LOOKS_PER_BEAT = 4
NEXT_S = 0.005
"""How soon to look whether a suspect has got further, so that the next may come."""


class Takeover:
    """The loop that looks for late entries. `run()` is one of the worker's tasks."""

    def __init__(
        self,
        settings: WorkerSettings,
        transitions: Transitions,
        presence: Presence,
        take: Callable[[Claimed], Awaitable[bool]],
    ) -> None:
        self._settings = settings
        self._transitions = transitions
        self._presence = presence
        self._take = take
        """Takes a job over; False where there is no room for it now."""
        self._late: dict[Claimed, float] = {}
        """Since when, by the loop's clock."""

    async def run(self) -> None:
        """Look a few times a beat until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s())
            try:
                await self._look()
            except LanesLost:
                self._late.clear()
            except QueueUnavailable:
                self._late.clear()

    def _pause_s(self) -> float:
        """Return how long to wait: until the next look, or until an entry is late for a beat."""
        beat_s = self._settings.beat_s
        # Workers that look at the same moment would all go for the same entries.
        pause_s = beat_s / LOOKS_PER_BEAT * random.uniform(0.75, 1.25)
        if self._late:
            due_s = min(self._late.values()) + beat_s - asyncio.get_running_loop().time()
            pause_s = min(pause_s, max(due_s, 0) + beat_s * random.uniform(0.01, 0.05))
        return pause_s

    async def _look(self) -> None:
        if not self._presence.sound():
            self._late.clear()
            return
        lease_s, beat_s = self._settings.lease_s, self._settings.beat_s
        # The second sighting, a beat later, is a lease after the owner's last beat.
        idle_s = max(lease_s - beat_s, beat_s)
        looks = [
            self._transitions.pending(one, idle_s=idle_s)
            for one in tags(self._presence.pool, self._settings.shards)
        ]
        found: list[Claimed] = []
        for seen in await asyncio.gather(*looks, return_exceptions=True):
            if isinstance(seen, list):
                found += seen
            elif not isinstance(seen, QueueUnavailable):
                raise seen
        now = asyncio.get_running_loop().time()
        self._late = {claimed: self._late.get(claimed, now) for claimed in found}
        for claimed, since in list(self._late.items()):
            if now - since < beat_s:
                continue
            while not await self._take(claimed):
                if asyncio.get_running_loop().time() > now + lease_s:
                    return
                await asyncio.sleep(NEXT_S)
