"""Brings about what is wanted of adapters (LoRA), and tells what has become of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from shared.adapters import MOST_ADAPTERS, AdapterStore
from shared.errors import QueueUnavailable
from shared.logs import Log
from shared.outage import Outage
from shared.protocol import AdapterRecord
from worker.engine.interface import AdapterError, Engine
from worker.presence import Presence
from worker.settings import WorkerSettings
from worker.waiting import first

log = Log("adapters")

CHANGE_S = 300.0
"""Longest load or unload of one adapter."""
_LONGEST_REASON = 300
"""Characters that the pool is told."""


class Adapters:
    """The adapters of this worker, as far as they are loaded at run time.

    A wish is dealt with once: what failed is tried again when it is asked for again, or by the
    next worker.
    """

    def __init__(
        self, settings: WorkerSettings, engine: Engine, wishes: AdapterStore, presence: Presence
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._wishes = wishes
        self._presence = presence
        self._loaded: dict[str, str] = {}
        """Name → source."""
        self._outage = Outage(log, "adapters.unknown", "adapters.known")
        self._now = asyncio.Event()

    def look_now(self) -> None:
        """Don't wait for the next look: something has changed."""
        self._now.set()

    async def load(self) -> None:
        """Load what is wanted now; ends once the wishes could be read and were dealt with."""
        while not await self._look():
            await self._pause()

    async def run(self) -> None:
        """Look once per beat, until cancelled."""
        while True:
            await self._pause()
            await self._look()

    async def _pause(self) -> None:
        await first(self._now.wait(), timeout_s=self._settings.beat_s)
        self._now.clear()

    async def _look(self) -> bool:
        """Read the wishes and deal with those that are new; False if they can't be read."""
        try:
            wanted = await self._wishes.wanted(self._presence.pool, renew=True)
        except QueueUnavailable as error:
            self._outage.note(error)
            return False
        self._outage.over()
        for name, source in list(self._loaded.items()):
            if name not in wanted or wanted[name].source != source:
                await self._unload(name)
        told = self._presence.adapters
        for name in told.keys() - wanted.keys():
            del told[name]
        for wish in list(wanted.values())[:MOST_ADAPTERS]:
            if told.get(wish.name, (-1, ""))[0] != wish.asked_ms:
                told[wish.name] = (wish.asked_ms, await self._load(wish))
                self._presence.beat_now()
        return True

    async def _load(self, wish: AdapterRecord) -> str:
        """Load an adapter, unless it is; return why it can't be, empty if it could."""
        if wish.name in self._loaded:
            return ""
        if any(model.name == wish.name for model in self._engine.models):
            return "the worker was started with a model of this name"
        reason = await _failure(self._engine.load_adapter(wish.name, wish.source))
        if reason:
            log.error("adapter.not_loaded", adapter=wish.name, source=wish.source, reason=reason)
        else:
            self._loaded[wish.name] = wish.source
            log.info("adapter.loaded", adapter=wish.name, source=wish.source)
        return reason

    async def _unload(self, name: str) -> None:
        reason = await _failure(self._engine.unload_adapter(name))
        if reason:
            log.warning("adapter.not_unloaded", adapter=name, reason=reason)
            if any(model.name == name for model in self._engine.models):
                return  # The next look tries again.
        else:
            log.info("adapter.unloaded", adapter=name)
        del self._loaded[name]
        self._presence.adapters.pop(name, None)
        self._presence.beat_now()


async def _failure(change: Awaitable[None]) -> str:
    """Wait for an engine's change; return why it failed, empty if it didn't.

    Whatever the engine makes of it, the worker goes on.
    """
    try:
        async with asyncio.timeout(CHANGE_S):
            await change
    except TimeoutError:
        return f"not done within {CHANGE_S:.0f} s"
    except AdapterError as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        return ""
    return reason[:_LONGEST_REASON] or "unknown"
