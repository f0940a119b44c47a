"""Brings about what is wanted of adapters (LoRA), and tells what has become of it."""

from __future__ import annotations

import asyncio

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

LOAD_S = 300.0
"""Longest load of one adapter."""
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
        try:
            async with asyncio.timeout(LOAD_S):
                await self._engine.load_adapter(wish.name, wish.source)
        except TimeoutError:
            reason = f"not loaded within {LOAD_S:.0f} s"
        except AdapterError as error:
            reason = str(error)
        except Exception as error:  # Whatever the engine makes of it, the worker goes on.
            reason = f"{type(error).__name__}: {error}"
        else:
            self._loaded[wish.name] = wish.source
            log.info("adapter.loaded", adapter=wish.name, source=wish.source)
            return ""
        log.error("adapter.not_loaded", adapter=wish.name, source=wish.source, reason=reason)
        return reason[:_LONGEST_REASON] or "unknown"

    async def _unload(self, name: str) -> None:
        try:
            await self._engine.unload_adapter(name)
        except AdapterError as error:  # It isn't there.
            log.warning("adapter.not_unloaded", adapter=name, reason=str(error))
        del self._loaded[name]
        self._presence.adapters.pop(name, None)
        self._presence.beat_now()
        log.info("adapter.unloaded", adapter=name)
