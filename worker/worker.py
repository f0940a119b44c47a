"""The worker's life: announce → load → claim and run → drain → leave.

The drain, in order: stop claiming → hand back what hasn't started → finish what runs, up to
`drain_timeout_s` → flush → deregister → exit code. A second signal ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from prometheus_client import start_http_server

from shared.adapters import AdapterStore
from shared.connection import Connections
from shared.errors import QueueUnavailable
from shared.keys import Keys
from shared.logs import Log, about
from shared.outage import Outage
from shared.outcomes import Claimed
from shared.registry import Registry
from shared.subscribers import Subscribers
from shared.transitions import Transitions
from worker.abandoned import Abandoned
from worker.adapters import Adapters
from worker.cancellation import Nudges
from worker.claims import BLOCK_S, Claims
from worker.engine.interface import Engine, EngineStartError
from worker.jobs import Jobs
from worker.metrics import WorkerMetrics
from worker.presence import Presence
from worker.publisher import Publisher
from worker.running import Running
from worker.settings import WorkerSettings
from worker.takeover import Takeover
from worker.waiting import first

if TYPE_CHECKING:
    from shared.otel import Spans

log = Log("worker")

FLUSH_S = 10.0
"""Longest wait for the last frames to be written."""


class Exit(IntEnum):
    """What the process says to whoever started it."""

    OK = 0
    WRONG_SETTING = 2
    ENGINE_FAILED = 3
    ENGINE_NOT_STARTED = 4


class Worker:
    """One engine and the tasks around it."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        metrics: WorkerMetrics,
        spans: Spans | None = None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        name = f"headrace-worker-{settings.worker_id}"
        self._keys = Keys(settings.key_prefix)
        self._clients = Connections(settings, name=name)
        self._beats = Connections(settings, name=f"{name}-beat", connections=2)
        self._blocking = Connections(settings, name=f"{name}-claim", block_s=BLOCK_S)
        ttl_s = settings.result_ttl_s
        self._transitions = Transitions(self._clients, self._keys, result_ttl_s=ttl_s)
        self._registry = Registry(self._beats, self._keys)
        self._running = Running()
        self._publisher = Publisher(self._transitions)
        beats = Transitions(self._beats, self._keys, result_ttl_s=ttl_s)
        self._presence = Presence(settings, engine, self._registry, beats, self._running)
        self._presence.on_beat = self._measure
        wishes = AdapterStore(self._beats, self._keys)
        self._adapters = Adapters(settings, engine, wishes, self._presence)
        self._subscriber = Subscribers(settings, name=f"{name}-control", ack_timeout_s=2)
        self._jobs = Jobs(engine, self._transitions, self._publisher, self._running, metrics, spans)
        self._claims = [self._claims_of(shard) for shard in range(settings.shards)]
        self._jobs.freed = self._unblock
        self._abandoned = Abandoned(settings, self._registry, beats, self._presence, self._running)
        for claims in self._claims:
            claims.drops = self._abandoned.drops
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._counted = (0, 0)

    def _claims_of(self, shard: int) -> Claims:
        return Claims(
            self._settings,
            self._engine,
            self._transitions,
            self._blocking,
            self._clients,
            self._running,
            self._jobs.begin,
            shard,
        )

    async def _unblock(self) -> None:
        for claims in self._claims:
            await claims.unblock()

    async def _take_over(self, claimed: Claimed) -> bool:
        for claims in self._claims:
            if claims.tag() == claimed.tag:
                return await claims.take_over(claimed)
        return False

    def stop(self) -> None:
        """Begin the drain; the second call ends its wait."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self) -> Exit:
        """Live until stopped or until the engine has failed."""
        settings = self._settings
        if settings.metrics_port and not self._serve_metrics():
            return Exit.WRONG_SETTING
        log.info("worker.starting", worker=settings.worker_id, engine=settings.engine)
        try:
            if not await self._reach_queue():
                return Exit.OK
            return await self._live()
        finally:
            with contextlib.suppress(QueueUnavailable):
                await self._registry.leave(settings.worker_id)
            await self._engine.stop()
            for connections in (self._clients, self._beats, self._blocking):
                await connections.aclose()
            log.info("worker.left", worker=settings.worker_id)

    def _serve_metrics(self) -> bool:
        host, port = self._settings.metrics_host, self._settings.metrics_port
        try:
            start_http_server(port, host)
        except OSError as error:
            wrong = "HEADRACE_METRICS_HOST, HEADRACE_METRICS_PORT"
            log.error("metrics.not_served", wrong=wrong, host=host, port=port, reason=str(error))
            return False
        return True

    async def _reach_queue(self) -> bool:
        """Wait for the queue; False if stopped meanwhile."""
        delay_s = 0.5
        outage = Outage(log, "queue.unreachable", "queue.reached")
        while not self._stop.is_set():
            try:
                await self._registry.snapshot()
                await self._registry.warn_of_eviction()
                outage.over()
                return True
            except QueueUnavailable as error:
                outage.note(error)
                await first(self._stop.wait(), timeout_s=delay_s)
                delay_s = min(delay_s * 2, 5.0)
        return False

    async def _live(self) -> Exit:
        """Load and serve, with the long tasks beside; one of them that dies takes all along."""
        async with asyncio.TaskGroup() as side:
            presence = side.create_task(self._presence.run())
            others = [presence]
            try:
                if not await self._load():
                    return Exit.OK if self._stop.is_set() else Exit.ENGINE_NOT_STARTED
                # A worker without them would take requests for them and fail those.
                await first(self._adapters.load(), self._stop.wait())
                others.append(side.create_task(self._adapters.run()))
                others.append(side.create_task(self._subscriber.run()))
                others.append(side.create_task(self._publisher.run()))
                others.append(side.create_task(self._abandoned.run()))
                return await self._serve()
            finally:
                for task in others:
                    task.cancel()

    async def _load(self) -> bool:
        """Start the engine, unless stopped first."""
        begun = time.monotonic()
        start = asyncio.ensure_future(self._engine.start())
        timeout_s = self._settings.start_timeout_s
        await first(asyncio.shield(start), self._stop.wait(), timeout_s=timeout_s)
        if not start.done():
            start.cancel()
            await asyncio.wait({start}, timeout=FLUSH_S)
            log.warning("engine.not_started", reason="stopped or timed out")
            return False
        try:
            start.result()
        except EngineStartError as error:
            log.error("engine.not_started", reason=str(error))
            return False
        engine = self._engine
        self._presence.pool = self._settings.pool or engine.models[0].name
        log.info(
            "engine.started",
            engine=engine.version,
            model=engine.models[0].name,
            seats=engine.seats,
            took_s=round(time.monotonic() - begun, 1),
        )
        return True

    async def _serve(self) -> Exit:
        """Claim and run until told to stop or until the engine fails, then drain."""
        pool, worker_id = self._presence.pool, self._settings.worker_id
        beat, look = self._presence.beat_now, self._adapters.look_now
        nudges = Nudges(self._running, beat, self._stop.set, look)
        for claims in self._claims:
            claims.pool = pool
            self._subscriber.keep(self._keys.control(claims.tag(), worker_id), nudges)
        async with asyncio.TaskGroup() as runs:
            self._jobs.group = runs
            claiming = asyncio.gather(*(runs.create_task(one.run()) for one in self._claims))
            takeover = Takeover(self._settings, self._transitions, self._presence, self._take_over)
            taking = runs.create_task(takeover.run())
            failed = runs.create_task(self._failed())
            self._set_state("ready")
            log.info("worker.ready", worker=worker_id, pool=pool)
            await first(asyncio.shield(failed), self._stop.wait())
            self._set_state("draining")
            taking.cancel()
            await self._stop_claiming(claiming)
            if not failed.done():
                await self._drain(failed)
            code = Exit.OK
            if failed.done():
                log.error("engine.failed", reason=failed.result())
                code = Exit.ENGINE_FAILED
                for run in self._running.jobs.values():
                    run.fail(failed.result())
            failed.cancel()
            await first(self._running.drained(), timeout_s=FLUSH_S)
            if self._running.jobs:
                log.error("jobs.left", jobs=len(self._running.jobs))
                self._jobs.cancel()
        return code

    async def _failed(self) -> str:
        """Wait until the engine is of no more use, and return why."""
        await first(self._engine.wait_failed(), self._presence.stalled.wait())
        stalled = self._presence.stalled.is_set()
        reason = "stalled" if stalled else await self._engine.wait_failed()
        self._jobs.broken.set()
        return reason

    async def _stop_claiming(self, claiming: asyncio.Future[Any]) -> None:
        for claims in self._claims:
            claims.stop()
        await self._unblock()
        await first(asyncio.shield(claiming), timeout_s=2 * BLOCK_S)
        claiming.cancel()

    async def _drain(self, failed: asyncio.Task[str]) -> None:
        """Let what runs finish; after a grace, move what others have room for; at last, all."""
        log.info("worker.draining", running=len(self._running.jobs))
        settings, loop = self._settings, asyncio.get_running_loop()
        until = loop.time() + settings.drain_timeout_s
        await self._wait_drained(failed, min(settings.drain_grace_s, settings.drain_timeout_s))
        while self._running.jobs and not self._hurry.is_set() and loop.time() < until:
            room = await self._room_elsewhere()
            for run in list(self._running.jobs.values()):
                if room > 0 and run.stopped is None and self._jobs.move(run, restart=False):
                    room -= 1
            await self._wait_drained(failed, min(settings.beat_s, until - loop.time()))
            if failed.done():
                return
        for run in self._running.jobs.values():
            if run.stopped is None and not self._jobs.move(run, restart=True):
                log.warning("job.drained", **about(run.adopted.job))
                run.stop("drained")

    async def _wait_drained(self, failed: asyncio.Task[str], timeout_s: float) -> None:
        waits = self._running.drained(), self._hurry.wait(), asyncio.shield(failed)
        await first(*waits, timeout_s=max(timeout_s, 0))

    async def _room_elsewhere(self) -> int:
        """Return the free seats of the pool's other ready workers."""
        try:
            ready = (await self._registry.snapshot()).ready()
        except QueueUnavailable:
            return 0
        pool, own_id = self._presence.pool, self._settings.worker_id
        others = [one for one in ready if one.pool == pool and one.id != own_id]
        return sum(max(one.seats - one.running, 0) for one in others)

    def _set_state(self, state: str) -> None:
        self._presence.state = state
        self._metrics.ready.set(state == "ready")
        self._presence.beat_now()

    def _measure(self) -> None:
        """Bring the gauges up to date; once per beat."""
        metrics, load = self._metrics, self._engine.load()
        metrics.running.set(len(self._running.jobs))
        metrics.waiting.set(load.waiting)
        metrics.kv_usage.set(load.kv_usage)
        metrics.seats.set(self._engine.seats)
        metrics.publish_calls.inc(self._publisher.calls - self._counted[0])
        metrics.frames.inc(self._publisher.frames - self._counted[1])
        self._counted = (self._publisher.calls, self._publisher.frames)
