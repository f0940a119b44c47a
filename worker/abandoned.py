"""Ends jobs whose answers nobody will fetch: their gateways have died, or their time is over.

A gateway that lives sees to its clients' jobs itself. One that died can't: its lease in the
registry has lapsed. Three rules keep a slow gateway or queue from looking like death: the lease
must have been found lapsed twice, a beat apart; this worker's own link must have been sound for a
whole lease; and nobody may listen on the job's channel, for a gateway that is only frozen still
does. A host that lost its power seems to listen too, so after `DEAF_S` that no longer counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from shared.errors import Unavailable
from shared.keys import tag_of
from shared.logs import Log, about
from shared.outcomes import Adopted, Left, Readers
from shared.registry import Registry
from shared.transitions import Transitions
from worker.presence import Presence
from worker.running import Running
from worker.settings import WorkerSettings

log = Log("abandoned")

DEAF_S = 60.0


class Abandoned:
    """The loop that looks for them. `run()` is one of the worker's tasks."""

    def __init__(
        self,
        settings: WorkerSettings,
        registry: Registry,
        transitions: Transitions,
        presence: Presence,
        running: Running,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._transitions = transitions
        self._presence = presence
        self._running = running
        self._absent: dict[str, float] = {}
        """Gateway → since when it hasn't been seen, by the loop's clock."""
        self._live: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Look once a beat until cancelled."""
        while True:
            await asyncio.sleep(self._settings.beat_s)
            try:
                await self._look()
            except Unavailable:
                self._absent.clear()

    async def _look(self) -> None:
        if not self._presence.sound():
            self._absent.clear()
            return
        self._live = await self._registry.gateways()
        watched = [
            run.adopted
            for run in self._running.jobs.values()
            if run.stopped is None and run.adopted.job.patience_s is not None
        ]
        watched.sort(key=lambda adopted: adopted.job.id)
        found: list[Readers] = []
        for _, jobs in groupby((adopted.job.id for adopted in watched), tag_of):
            found += await self._transitions.readers(list(jobs))
        now = asyncio.get_running_loop().time()
        names = {_gateway(one) for readers in found for one in readers.names}
        self._absent = {name: self._absent.get(name, now) for name in names - self._live}
        for adopted, readers in zip(watched, found, strict=True):
            gone = [one for one in readers.names if self._absent_s(one, now) > 0]
            if gone or readers.abandoned:
                deaf = all(self._absent_s(one, now) > DEAF_S for one in gone)
                await self._leave(adopted, gone, doubtful=not deaf)

    def _absent_s(self, reader: str, now: float) -> float:
        """Return for how long a reader's gateway has been away at two looks."""
        return now - self._absent.get(_gateway(reader), now)

    async def drops(self, adopted: Adopted) -> bool:
        """Tell, and see to it, that a job just adopted isn't worth beginning."""
        readers = adopted.readers
        if adopted.job.patience_s != 0 or not readers or not self._presence.sound():
            return False
        if any(_gateway(one) in self._live for one in readers):
            return False
        # It may have come since the last look.
        live = await self._registry.gateways()
        if any(_gateway(one) in live for one in readers):
            return False
        left = await self._leave(adopted, readers, doubtful=True)
        return left.word == "running"

    async def _leave(self, adopted: Adopted, gone: Sequence[str], *, doubtful: bool) -> Left:
        job = adopted.job
        left = await self._transitions.leave(job.id, job.lane, gone, doubtful=doubtful)
        if left.word == "running":
            log.info("job.abandoned", **about(job), readers=" ".join(gone))
        return left


def _gateway(reader: str) -> str:
    return reader.partition("/")[0]
