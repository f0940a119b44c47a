"""One timer for all open requests: silence, keep-alive, deadlines and stalled readers."""

from __future__ import annotations

import asyncio
from typing import Protocol

SWEEP_EVERY_S = 0.25


class Swept(Protocol):
    """Something that wants to know the time."""

    def tick(self, now: float) -> None:
        """Look at the clock; must not block."""


class Sweeper:
    """Ticks whatever is in its set. `run()` is one of the process's long tasks."""

    def __init__(self) -> None:
        self.swept: set[Swept] = set()

    async def run(self) -> None:
        """Tick until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            now = loop.time()
            for one in tuple(self.swept):
                one.tick(now)
