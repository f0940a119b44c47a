"""Says that this gateway is there: workers end what a gateway that died has left behind."""

from __future__ import annotations

import asyncio
import contextlib

from shared.errors import HeadraceError
from shared.registry import Registry

BEATS_PER_LEASE = 5


class Presence:
    """Renews the gateway's lease in the registry. `run()` is one of the process's long tasks."""

    def __init__(self, registry: Registry, name: str, *, lease_s: float) -> None:
        self._registry = registry
        self._name = name
        self._lease_s = lease_s

    async def run(self) -> None:
        """Announce until cancelled. That the queue is away others say."""
        while True:
            with contextlib.suppress(HeadraceError):
                await self._registry.announce_gateway(self._name, self._lease_s)
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)

    async def leave(self) -> None:
        """Say that it is gone, if the queue can be told."""
        with contextlib.suppress(HeadraceError):
            await self._registry.leave_gateway(self._name)
