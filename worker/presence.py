"""Says that this worker is alive: a beat renews its record and the leases of its jobs.

It beats only while the engine makes progress. A worker whose engine hangs falls silent, and says so
to its supervisor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from shared.errors import LanesLost, Unavailable
from shared.keys import tag_of
from shared.logs import Log
from shared.outage import Outage
from shared.protocol import ModelRecord, WorkerRecord
from shared.registry import Registry
from shared.transitions import Transitions
from worker.claims import reserve
from worker.engine.interface import Engine
from worker.run import Run
from worker.running import Running
from worker.settings import WorkerSettings

log = Log("presence")

STARTING_LEASES = 20
"""How many leases a worker that loads its model may be silent for."""


class Presence:
    """The worker's beat. `state` is what it says of itself."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        registry: Registry,
        transitions: Transitions,
        running: Running,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._registry = registry
        self._transitions = transitions
        self._running = running
        self._outage = Outage(log, "beat.failed", "beat.resumed")
        self._now = asyncio.Event()
        self.stalled = asyncio.Event()
        """Set when the engine has work and has made no step for `stall_s`."""
        self._started_ms = int(time.time() * 1000)
        self._announced = False
        self._twin = False
        """Whether another worker that lives has this one's id."""
        self._progress = -1
        self._progressed_at = 0.0
        self._sound_since: float | None = None
        self.state = "starting"
        self.pool = settings.pool
        self.adapters: dict[str, tuple[int, str]] = {}
        """What has become of the adapters that are wanted: see `WorkerRecord`."""
        self._named: set[str] = set()
        """Names that the registry may have from here."""
        self.on_beat: Callable[[], None] = lambda: None

    def beat_now(self) -> None:
        """Don't wait for the next beat: something has changed."""
        self._now.set()

    def sound(self) -> bool:
        """Tell whether every beat has gone through for a whole lease."""
        since = self._sound_since
        return since is not None and time.monotonic() - since >= self._settings.lease_s

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self._check_progress()
            try:
                if not self.stalled.is_set():
                    # They may live on different servers: one that is away must not hold up the
                    # leases of the others.
                    await _all(self._beat_jobs(), self._announce())
                self._sound_since = self._sound_since or time.monotonic()
                self._outage.over()
            except LanesLost:
                self._sound_since = None
                log.warning("beat.lanes_lost")
            except Unavailable as error:
                self._sound_since = None
                self._outage.note(error)
            self.on_beat()
            try:
                async with asyncio.timeout(self._settings.beat_s):
                    await self._now.wait()
            except TimeoutError:
                pass
            self._now.clear()

    def _check_progress(self) -> None:
        now = time.monotonic()
        progress = self._engine.progress() if self.state != "starting" else -1
        # Jobs whose last frames wait for the queue have no seats: that is no fault of the engine.
        if progress != self._progress or not self._running.sequences:
            self._progress, self._progressed_at = progress, now
        elif now - self._progressed_at > self._settings.stall_s:
            self.stalled.set()

    async def _beat_jobs(self) -> None:
        runs = list(self._running.jobs.values())
        if not runs or not self.pool:
            return
        by_tag: dict[str, list[Run]] = {}
        for run in runs:
            by_tag.setdefault(tag_of(run.adopted.job.id), []).append(run)
        await _all(*(self._beat_tag(job_tag, owned) for job_tag, owned in by_tag.items()))

    async def _beat_tag(self, job_tag: str, owned: Sequence[Run]) -> None:
        words = await self._transitions.beat(
            job_tag, self._settings.worker_id, [run.adopted for run in owned]
        )
        for run, word in zip(owned, words, strict=True):
            if word != "ok":
                run.stop(word)

    async def _announce(self) -> None:
        engine, load = self._engine, self._engine.load()
        seats = engine.seats
        worker = WorkerRecord(
            id=self._settings.worker_id,
            pool=self.pool,
            shards=self._settings.shards,
            models=[model.name for model in engine.models],
            state=self.state,
            seats=seats,
            reserve=reserve(seats, self._settings.interactive_reserve),
            running=len(self._running.jobs),
            waiting=load.waiting,
            kv_usage=load.kv_usage,
            engine=engine.version,
            started_ms=self._started_ms,
            adapters=dict(self.adapters),
        )
        # A worker that loads beats late; the record of one that dies then stays a little longer.
        starting = self.state == "starting"
        lease_s = self._settings.lease_s * (STARTING_LEASES if starting else 1)
        models = [] if starting else self._models()
        names = {model.name for model in models}
        self._named |= names
        before = await self._registry.announce(worker, models, lease_s)
        if dropped := self._named - names:
            # An adapter that was unloaded is unknown from now on, not away.
            await self._registry.forget_models(dropped)
            self._named = names
        # At the first beat it is that of a predecessor with this name.
        twin = self._announced and before is not None and before.started_ms != self._started_ms
        if twin and not self._twin:
            log.warning("worker.twin", worker=worker.id, hint="HEADRACE_WORKER_ID must be unique")
        self._announced, self._twin = True, twin

    def _models(self) -> list[ModelRecord]:
        return [
            ModelRecord(
                name=model.name,
                pool=self.pool,
                shards=self._settings.shards,
                max_model_len=model.max_model_len,
                parent=model.parent,
                created=self._started_ms // 1000,
            )
            for model in self._engine.models
        ]


async def _all(*steps: Awaitable[None]) -> None:
    """Do all, also when one fails; then raise the first failure."""
    for failure in await asyncio.gather(*steps, return_exceptions=True):
        if failure is not None:
            raise failure
