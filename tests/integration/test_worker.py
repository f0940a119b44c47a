"""A whole worker in this process, on a real server, with an engine written by hand."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from redis.asyncio import Redis

from shared.connection import connect
from shared.errors import QueueUnavailable
from shared.keys import Keys
from shared.protocol import End, Frame, Head, Job, Usage, decode_frame
from shared.registry import Registry
from shared.settings import RedisSettings
from shared.transitions import Transitions
from tests.support.valkey import ValkeyServer
from tests.unit.engines import ScriptedEngine, complete, gone, part, start
from tests.wire.records import TAG, make_job
from worker.engine.interface import Call, EngineStartError, Load, Receive, Send
from worker.metrics import WorkerMetrics
from worker.settings import WorkerSettings
from worker.worker import Exit, Worker

KEYS = Keys("test")


class Pool:
    """The queue, seen from a gateway, and the worker at its other end."""

    def __init__(self, url: str) -> None:
        self.url = url
        settings = RedisSettings(redis_url=SecretStr(url))
        self.redis: Redis = connect(settings, name="test-gateway")
        self.transitions = Transitions(self.redis, KEYS, result_ttl_s=100)
        self.registry = Registry(self.redis, KEYS)
        self.registries: list[CollectorRegistry] = []
        self._names = itertools.count(1)

    def make(self, engine: ScriptedEngine, **changes: Any) -> Worker:
        fields: dict[str, Any] = {
            "redis_url": SecretStr(self.url),
            "redis_timeout_s": 0.5,
            "worker_id": f"w{next(self._names)}",
            "key_prefix": "test",
            "beat_s": 0.1,
            "lease_s": 1,
        }
        self.registries.append(CollectorRegistry())
        settings = WorkerSettings(**(fields | changes))
        return Worker(settings, engine, WorkerMetrics(self.registries[-1]))

    @asynccontextmanager
    async def working(
        self, engine: ScriptedEngine, **changes: Any
    ) -> AsyncIterator[tuple[Worker, asyncio.Task[Exit]]]:
        """A worker that is ready, and stopped at the end if it still runs."""
        worker = self.make(engine, **changes)
        task = asyncio.create_task(worker.run())
        try:
            await self.state("ready", task)
            yield worker, task
        finally:
            worker.stop()
            worker.stop()
            await asyncio.wait_for(asyncio.wait([task]), 20)

    async def state(self, state: str, task: asyncio.Task[Exit] | None = None) -> None:
        """Wait until the registry shows one worker in this state."""

        async def there() -> bool:
            assert task is None or not task.done(), task.result()
            workers = (await self.registry.snapshot()).workers
            return [one.state for one in workers] == [state]

        await until(there)

    async def submit(self, *, timeout_s: float = 60, **changes: Any) -> Job:
        job = make_job(**changes)
        submitted = await self.transitions.submit(job, limit=1000, timeout_s=timeout_s)
        assert submitted.verdict == "queued"
        return job

    async def frames(self, job: Job) -> list[Frame]:
        page = await self.transitions.read_log(job.id, 0)
        assert [e.seq for e in page.envelopes] == list(range(1, len(page.envelopes) + 1))
        return [decode_frame(envelope.body) for envelope in page.envelopes]

    async def answer(self, job: Job) -> bytes:
        parts: list[bytes] = []
        prefix = suffix = b""
        for frame in await self.frames(job):
            prefix, suffix = frame.template or (prefix, suffix)
            for item in frame.items:
                parts.append(prefix + item + suffix if isinstance(item, bytes) else item[0])
        return b"".join(parts)

    async def end(self, job: Job, timeout_s: float = 10) -> End:
        """Wait for a job's end; there is exactly one, and it comes last."""

        async def done() -> bool:
            try:
                return (await self.transitions.read_log(job.id, 0)).state == "done"
            except QueueUnavailable:
                return False

        await until(done, timeout_s)
        ends = [frame.end for frame in await self.frames(job)]
        assert [end for end in ends if end is not None] == ends[-1:]
        assert ends[-1] is not None
        return ends[-1]

    async def depth(self) -> int:
        return sum((await self.transitions.depths(TAG)).values())

    async def immortal(self) -> list[str]:
        found: Any = await self.redis.keys("*")
        return [name.decode() for name in found if await self.redis.pttl(name) == -1]


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10) -> None:
    """Wait for something that only the server knows."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def server(shared_server: ValkeyServer) -> Iterator[ValkeyServer]:
    shared_server.command("FLUSHALL")
    yield shared_server
    shared_server.command("CONFIG", "SET", "maxmemory", 0)


@asynccontextmanager
async def pool_on(server: ValkeyServer) -> AsyncIterator[Pool]:
    pool = Pool(server.url)
    yield pool
    await pool.redis.aclose()


@pytest.fixture
async def pool(server: ValkeyServer) -> AsyncIterator[Pool]:
    async with pool_on(server) as pool:
        yield pool


class Stage:
    """Applications that a test leads step by step."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)
        self.left = asyncio.Semaphore(0)
        self.go = asyncio.Event()

    async def wait(self, call: Call, body: bytes, receive: Receive, send: Send) -> None:
        """Say nothing until told to, or until the client leaves."""
        call.usage.prompt_tokens = 5
        self.begun.release()
        await self._leave(receive)
        if self.go.is_set():
            await complete(call, body, receive, send)

    async def stream(self, call: Call, body: bytes, receive: Receive, send: Send) -> None:
        """Say one event, and the rest when told to."""
        call.usage.prompt_tokens, call.usage.completion_tokens = 5, 1
        await start(send, "text/event-stream")
        await part(send, b"data: first\n\n")
        self.begun.release()
        await self._leave(receive)
        if self.go.is_set():
            await part(send, b"data: [DONE]\n\n", more=False)

    async def _leave(self, receive: Receive) -> None:
        going = asyncio.ensure_future(self.go.wait())
        leaving = asyncio.ensure_future(gone(receive))
        await asyncio.wait([going, leaving], return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.left.release()
        going.cancel()
        leaving.cancel()


@pytest.fixture
async def stage() -> Stage:
    return Stage()


async def acquire(semaphore: asyncio.Semaphore, count: int = 1) -> None:
    async with asyncio.timeout(5):
        for _ in range(count):
            await semaphore.acquire()


async def streaming(call: Call, body: bytes, receive: Receive, send: Send) -> None:
    """Stream 50 events with a turn of the loop between them."""
    await start(send, "text/event-stream")
    for n in range(50):
        call.usage.completion_tokens += 1
        await part(send, EVENTS[n])
        await asyncio.sleep(0)
    await part(send, b"data: [DONE]\n\n", more=False)


EVENTS = [b'data: {"id":"chatcmpl-1","object":"chunk","text":"w%d"}\n\n' % n for n in range(50)]
WHOLE = b"".join(EVENTS) + b"data: [DONE]\n\n"


# Life


async def test_ready_only_once_the_engine_has_started(pool: Pool) -> None:
    engine = ScriptedEngine()
    engine.loaded.clear()
    worker = pool.make(engine)
    task = asyncio.create_task(worker.run())
    await pool.state("starting", task)
    assert (await pool.registry.snapshot()).models == {}
    job = await pool.submit()
    await asyncio.sleep(0.25)
    await pool.state("starting", task)
    assert engine.scopes == []
    assert pool.registries[0].get_sample_value("headrace_worker_ready") == 0
    engine.loaded.set()
    await pool.state("ready", task)
    snapshot = await pool.registry.snapshot()
    assert [one.id for one in snapshot.ready("test-model")] == ["w1"]
    assert snapshot.models["test-model"].max_model_len == 4096
    assert (await pool.end(job)).outcome == "completed"
    worker.stop()
    assert await asyncio.wait_for(task, 5) == Exit.OK
    assert (await pool.registry.snapshot()).workers == ()
    assert engine.stopped == 1


async def test_jobs_are_answered(pool: Pool) -> None:
    async with pool.working(ScriptedEngine(seats=8)) as (worker, task):
        jobs = [await pool.submit(body=b"%d" % n, lane=lane) for n, lane in _lanes(40)]
        for n, job in enumerate(jobs):
            assert await pool.end(job) == End(outcome="completed", usage=Usage(3, 2))
            assert await pool.answer(job) == b"%d" % n
            assert (await pool.frames(job))[0].head == Head(200, "application/json")
        assert await pool.depth() == 0
        worker.stop()
        assert await asyncio.wait_for(task, 5) == Exit.OK
    value = pool.registries[0].get_sample_value
    labels = {"lane": "interactive", "outcome": "completed"}
    assert value("headrace_worker_jobs_total", labels) == 20
    assert value("headrace_worker_tokens_total", {"kind": "prompt"}) == 120
    assert value("headrace_worker_queue_wait_seconds_count", {"lane": "batch"}) == 20
    assert await pool.immortal() == []


def _lanes(count: int) -> Iterator[tuple[int, str]]:
    return zip(range(count), itertools.cycle(["interactive", "batch"]), strict=False)


async def test_streams_are_whole_and_written_together(pool: Pool) -> None:
    engine = ScriptedEngine(streaming, seats=16)
    async with pool.working(engine):
        jobs = [await pool.submit(stream=True) for _ in range(16)]
        for job in jobs:
            assert (await pool.end(job)).usage == Usage(0, 50)
            assert await pool.answer(job) == WHOLE


async def test_no_connections_pile_up(pool: Pool, server: ValkeyServer) -> None:
    def connections() -> int:
        listed: str = server.command("CLIENT", "LIST").decode()
        return sum("headrace-worker-" in line for line in listed.splitlines())

    async with pool.working(ScriptedEngine(seats=8)):
        for _ in range(3):
            jobs = [await pool.submit() for _ in range(50)]
            for job in jobs:
                await pool.end(job)
            assert connections() < 16
    assert connections() == 0


# Cancels


@pytest.mark.parametrize("phase", ["silent", "streaming"])
async def test_a_cancel_reaches_a_running_job_at_once(pool: Pool, stage: Stage, phase: str) -> None:
    engine = ScriptedEngine(stage.wait if phase == "silent" else stage.stream)
    async with pool.working(engine, beat_s=60, lease_s=200):
        job = await pool.submit()
        await acquire(stage.begun)
        begun = time.monotonic()
        outcome = await pool.transitions.cancel(job.id, job.lane)
        assert outcome.word == "running"
        end = await pool.end(job)
        assert time.monotonic() - begun < 0.1
        await acquire(stage.left)
        assert (end.outcome, end.code) == ("cancelled", "cancelled")
        assert end.usage == (Usage(5, 0) if phase == "silent" else Usage(5, 1))
        assert (await pool.transitions.cancel(job.id, job.lane)).word == "finished"
        assert await pool.depth() == 0


async def test_a_cancel_whose_nudge_was_lost_is_found_by_a_beat(pool: Pool, stage: Stage) -> None:
    async with pool.working(ScriptedEngine(stage.wait)):
        job = await pool.submit()
        await acquire(stage.begun)
        await pool.redis.hset(KEYS.job(job.id), "cancel", "cancelled")
        assert (await pool.end(job, timeout_s=2)).outcome == "cancelled"


async def test_a_cancel_whose_nudge_was_lost_is_found_by_a_write(pool: Pool, stage: Stage) -> None:
    async with pool.working(ScriptedEngine(stage.stream), beat_s=60, lease_s=200):
        job = await pool.submit()
        await acquire(stage.begun)
        await pool.redis.hset(KEYS.job(job.id), "cancel", "cancelled")
        stage.go.set()
        end = await pool.end(job, timeout_s=2)
        # Whichever was faster: the answer was nearly whole.
        assert end.outcome in ("cancelled", "completed")


async def test_a_forced_cancel_stops_the_engine_too(pool: Pool, stage: Stage) -> None:
    async with pool.working(ScriptedEngine(stage.wait)):
        job = await pool.submit()
        await acquire(stage.begun)
        outcome = await pool.transitions.cancel(job.id, job.lane, force=True)
        assert outcome.word == "forced"
        await acquire(stage.left)
        assert len(await pool.frames(job)) == 1


async def test_cancels_leave_the_engine_free(pool: Pool, stage: Stage) -> None:
    async with pool.working(ScriptedEngine(stage.wait, seats=2)):
        for _ in range(50):
            job = await pool.submit()
            await acquire(stage.begun)
            await pool.transitions.cancel(job.id, job.lane)
            await acquire(stage.left)
        stage.go.set()
        assert (await pool.end(await pool.submit())).outcome == "completed"


async def test_a_job_past_its_deadline_is_stopped(pool: Pool, stage: Stage) -> None:
    async with pool.working(ScriptedEngine(stage.wait)):
        job = await pool.submit(timeout_s=0.1)
        end = await pool.end(job)
        assert (end.outcome, end.code) == ("expired", "request_timeout")


# Leaving


async def test_a_drain_finishes_what_runs_and_takes_nothing_more(pool: Pool, stage: Stage) -> None:
    engine = ScriptedEngine(stage.stream, seats=2)
    async with pool.working(engine) as (worker, task):
        running = [await pool.submit() for _ in range(2)]
        await acquire(stage.begun, 2)
        waiting = await pool.submit()
        worker.stop()
        await pool.state("draining", task)
        late = await pool.submit()
        await asyncio.sleep(0.15)
        assert not task.done()
        stage.go.set()
        for job in running:
            assert (await pool.end(job)).outcome == "completed"
            assert await pool.answer(job) == b"data: first\n\ndata: [DONE]\n\n"
        assert await asyncio.wait_for(task, 5) == Exit.OK
        assert (await pool.registry.snapshot()).workers == ()
        assert len(engine.scopes) == 2
        assert await pool.depth() == 2
    async with pool.working(ScriptedEngine()):
        for job in (waiting, late):
            assert (await pool.end(job)).outcome == "completed"


async def test_an_idle_worker_leaves_at_once(pool: Pool) -> None:
    async with pool.working(ScriptedEngine()) as (worker, task):
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        worker.stop()
        assert await asyncio.wait_for(task, 5) == Exit.OK
        assert time.monotonic() - begun < 0.5


@pytest.mark.parametrize("how", ["second signal", "timeout"])
async def test_a_drain_that_takes_too_long_ends_with_an_error(
    pool: Pool, stage: Stage, how: str
) -> None:
    timeout_s = 60 if how == "second signal" else 0.2
    engine = ScriptedEngine(stage.stream)
    async with pool.working(engine, drain_timeout_s=timeout_s) as (worker, task):
        job = await pool.submit(stream=True)
        await acquire(stage.begun)
        await until(lambda: _said(pool, job, 1))
        worker.stop()
        await pool.state("draining", task)
        if how == "second signal":
            worker.stop()
        end = await pool.end(job, timeout_s=3)
        assert (end.outcome, end.code) == ("failed", "worker_lost")
        assert await asyncio.wait_for(task, 5) == Exit.OK


async def test_an_answer_that_nobody_has_seen_begins_again_elsewhere(
    pool: Pool, stage: Stage
) -> None:
    """The gateway holds an answer that is no stream back until it is whole."""
    engine = ScriptedEngine(stage.wait)
    async with pool.working(engine, drain_grace_s=0.1, drain_timeout_s=0.2) as (worker, task):
        job = await pool.submit()
        await acquire(stage.begun)
        worker.stop()
        assert await asyncio.wait_for(task, 10) == Exit.OK
        assert await pool.depth() == 1
    async with pool.working(ScriptedEngine()):
        assert (await pool.end(job)).outcome == "completed"
        assert await pool.answer(job) == job.body


async def test_nothing_is_left_behind(pool: Pool, stage: Stage) -> None:
    before = asyncio.all_tasks()
    async with pool.working(ScriptedEngine(stage.wait)):
        job = await pool.submit()
        await acquire(stage.begun)
        await pool.transitions.cancel(job.id, job.lane)
        await pool.end(job)
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    assert await pool.immortal() == []


# The engine fails


async def test_an_engine_that_fails_ends_its_jobs_and_its_worker(pool: Pool, stage: Stage) -> None:
    engine = ScriptedEngine(stage.stream)
    async with pool.working(engine) as (_, task):
        jobs = [await pool.submit(stream=True) for _ in range(3)]
        await acquire(stage.begun, 3)
        for job in jobs:
            await until(lambda job=job: _said(pool, job, 1))  # type: ignore[misc]
        engine.failure.set_result("the engine's process is gone")
        for job in jobs:
            end = await pool.end(job)
            assert (end.outcome, end.code) == ("failed", "engine_error")
            assert await pool.answer(job) == b"data: first\n\n"
        assert await asyncio.wait_for(task, 5) == Exit.ENGINE_FAILED
        assert (await pool.registry.snapshot()).workers == ()
        assert engine.stopped == 1


async def _said(pool: Pool, job: Job, frames: int) -> bool:
    return len(await pool.frames(job)) >= frames


async def test_a_job_of_which_nothing_was_said_goes_to_another_worker(
    pool: Pool, stage: Stage
) -> None:
    engine = ScriptedEngine(stage.wait)
    async with pool.working(engine) as (_, task):
        job = await pool.submit()
        await acquire(stage.begun)
        engine.failure.set_result("the engine's process is gone")
        assert await asyncio.wait_for(task, 10) == Exit.ENGINE_FAILED
        assert await pool.depth() == 1
    async with pool.working(ScriptedEngine()):
        assert (await pool.end(job)).outcome == "completed"


async def test_an_engine_that_makes_no_step_has_failed(pool: Pool, stage: Stage) -> None:
    engine = ScriptedEngine(stage.stream)
    async with pool.working(engine, stall_s=0.3) as (_, task):
        job = await pool.submit(stream=True)
        await acquire(stage.begun)
        await until(lambda: _said(pool, job, 1))
        assert await asyncio.wait_for(task, 10) == Exit.ENGINE_FAILED
        assert (await pool.end(job)).code == "engine_error"


async def test_an_engine_that_does_not_start(pool: Pool) -> None:
    engine = ScriptedEngine()
    engine.start_error = EngineStartError("no such model")
    assert await asyncio.wait_for(pool.make(engine).run(), 5) == Exit.ENGINE_NOT_STARTED
    assert (await pool.registry.snapshot()).workers == ()
    assert engine.stopped == 1


async def test_an_engine_that_loads_for_too_long(pool: Pool) -> None:
    engine = ScriptedEngine()
    engine.loaded.clear()
    worker = pool.make(engine, start_timeout_s=0.2)
    assert await asyncio.wait_for(worker.run(), 5) == Exit.ENGINE_NOT_STARTED


async def test_a_stop_while_the_engine_loads(pool: Pool) -> None:
    engine = ScriptedEngine()
    engine.loaded.clear()
    worker = pool.make(engine)
    task = asyncio.create_task(worker.run())
    await pool.state("starting", task)
    worker.stop()
    assert await asyncio.wait_for(task, 5) == Exit.OK
    assert engine.stopped == 1


async def test_a_side_task_that_dies_takes_the_worker_along(pool: Pool) -> None:
    """Better a worker that is restarted than one that only looks alive."""
    engine = ScriptedEngine()
    async with pool.working(engine) as (_, task):

        def broken() -> Load:
            raise ZeroDivisionError

        engine.load = broken  # type: ignore[method-assign]
        await asyncio.wait_for(asyncio.wait([task]), 5)
        assert isinstance(task.exception(), BaseExceptionGroup)
        assert engine.stopped == 1
        assert (await pool.registry.snapshot()).workers == ()


async def test_an_application_that_raises_costs_its_own_job_only(pool: Pool) -> None:
    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        if body == b"bad":
            raise ZeroDivisionError
        await complete(call, body, receive, send)

    async with pool.working(ScriptedEngine(answer)):
        bad, good = await pool.submit(body=b"bad"), await pool.submit(body=b"good")
        assert (await pool.end(bad)).code == "engine_error"
        assert (await pool.end(good)).outcome == "completed"


# The queue fails


async def test_a_queue_that_is_away_at_the_start_is_waited_for() -> None:
    with ValkeyServer() as server:
        port = server.port
    engine = ScriptedEngine()
    with ValkeyServer(port=port) as again:
        again.kill()
        async with pool_on(again) as pool:
            worker = pool.make(engine)
            task = asyncio.create_task(worker.run())
            await asyncio.sleep(0.2)
            assert not task.done()
            assert engine.started == 0
            again.start()
            await pool.state("ready", task)
            assert (await pool.end(await pool.submit())).outcome == "completed"
            worker.stop()
            assert await asyncio.wait_for(task, 5) == Exit.OK


async def test_a_stop_while_the_queue_is_away() -> None:
    with ValkeyServer() as server:
        url = server.url
    pool = Pool(url)
    worker = pool.make(ScriptedEngine())
    task = asyncio.create_task(worker.run())
    await asyncio.sleep(0.1)
    worker.stop()
    assert await asyncio.wait_for(task, 3) == Exit.OK
    await pool.redis.aclose()


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_streams_outlive_a_restart_of_the_server(how: str) -> None:
    """With data on disk nothing is lost and nothing is said twice."""
    halves = asyncio.Semaphore(0)
    go = asyncio.Event()

    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        await start(send, "text/event-stream")
        for n in range(50):
            if n == 25:
                halves.release()
                await go.wait()
            await part(send, EVENTS[n])
            await asyncio.sleep(0.001)
        await part(send, b"data: [DONE]\n\n", more=False)

    with ValkeyServer(appendonly=True) as server:
        async with pool_on(server) as pool, pool.working(ScriptedEngine(answer, seats=8)):
            jobs = [await pool.submit(stream=True) for _ in range(8)]
            await acquire(halves, 8)
            if how == "kill":
                server.kill()
            else:
                server.stop()
            go.set()
            await asyncio.sleep(0.2)
            server.start()
            for job in jobs:
                end = await pool.end(job)
                assert end.outcome == "completed"
                assert await pool.answer(job) == WHOLE
            assert await pool.depth() == 0
            assert (await pool.end(await pool.submit())).outcome == "completed"
            await pool.state("ready")


async def test_a_frozen_server_delays_streams_and_breaks_none(
    pool: Pool, server: ValkeyServer
) -> None:
    engine = ScriptedEngine(streaming, seats=8)
    async with pool.working(engine):
        jobs = [await pool.submit(stream=True) for _ in range(8)]
        server.pause()
        await asyncio.sleep(1.2)
        server.resume()
        for job in jobs:
            assert (await pool.end(job)).outcome == "completed"
            assert await pool.answer(job) == WHOLE


async def test_cut_connections_break_nothing(
    pool: Pool, server: ValkeyServer, stage: Stage
) -> None:
    async with pool.working(ScriptedEngine(stage.stream, seats=4)):
        jobs = [await pool.submit() for _ in range(3)]
        await acquire(stage.begun, 3)
        for _ in range(3):
            for kind in ("normal", "pubsub"):
                server.command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            await asyncio.sleep(0.05)
        stage.go.set()
        for job in jobs:
            assert (await pool.end(job)).outcome == "completed"
            assert await pool.answer(job) == b"data: first\n\ndata: [DONE]\n\n"
        assert (await pool.end(await pool.submit())).outcome == "completed"


async def test_a_worker_outlives_the_loss_of_all_data(
    pool: Pool, server: ValkeyServer, stage: Stage
) -> None:
    async with pool.working(ScriptedEngine(stage.wait)):
        lost = await pool.submit()
        await acquire(stage.begun)
        server.command("FLUSHALL")
        await acquire(stage.left)
        assert await pool.frames(lost) == []
        await pool.state("ready")
        stage.go.set()
        assert (await pool.end(await pool.submit())).outcome == "completed"


async def test_a_worker_outlives_a_full_server(
    pool: Pool, server: ValkeyServer, stage: Stage
) -> None:
    async with pool.working(ScriptedEngine(stage.stream)) as (_, task):
        job = await pool.submit()
        await acquire(stage.begun)
        server.command("CONFIG", "SET", "maxmemory", 1)
        for kind in ("normal", "pubsub"):
            server.command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        await asyncio.sleep(0.4)
        stage.go.set()
        assert (await pool.end(job)).outcome == "completed"
        await pool.state("ready", task)
        server.command("CONFIG", "SET", "maxmemory", 0)
        assert (await pool.end(await pool.submit())).outcome == "completed"


async def test_an_idle_worker_starts_a_job_at_once(pool: Pool) -> None:
    async with pool.working(ScriptedEngine()):
        await asyncio.sleep(2.3)
        begun = time.monotonic()
        assert (await pool.end(await pool.submit())).outcome == "completed"
        assert time.monotonic() - begun < 0.2


async def test_frames_that_the_server_lost_are_sent_again() -> None:
    """A server that falls back to its last save, in the middle of the streams."""
    quarter, half, go = asyncio.Semaphore(0), asyncio.Semaphore(0), asyncio.Event()
    saved = asyncio.Event()

    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        await start(send, "text/event-stream")
        for n in range(50):
            if n == 10:
                quarter.release()
                await saved.wait()
            if n == 30:
                half.release()
                await go.wait()
            await part(send, EVENTS[n])
            await asyncio.sleep(0.001)
        await part(send, b"data: [DONE]\n\n", more=False)

    with ValkeyServer() as server:
        async with pool_on(server) as pool, pool.working(ScriptedEngine(answer, seats=4)):
            jobs = [await pool.submit(stream=True) for _ in range(4)]
            await acquire(quarter, 4)
            for job in jobs:
                await until(lambda job=job: _all_said(pool, job, 10))  # type: ignore[misc]
            server.command("SAVE")
            saved.set()
            await acquire(half, 4)
            for job in jobs:
                await until(lambda job=job: _all_said(pool, job, 30))  # type: ignore[misc]
            server.restart()
            await until(lambda: _all_said(pool, jobs[0], 10))
            go.set()
            for job in jobs:
                assert (await pool.end(job)).outcome == "completed"
                assert await pool.answer(job) == WHOLE


async def _all_said(pool: Pool, job: Job, events: int) -> bool:
    try:
        return await pool.answer(job) == b"".join(EVENTS[:events])
    except QueueUnavailable:
        return False


async def test_a_job_whose_adoption_the_server_forgot_runs_again_alone() -> None:
    """Two attempts with one id at once have crashed engines."""
    now: set[str] = set()
    both: list[str] = []
    begun, go = asyncio.Semaphore(0), asyncio.Event()

    async def answer(call: Call, body: bytes, receive: Receive, send: Send) -> None:
        both.extend(now & {call.job_id})
        now.add(call.job_id)
        begun.release()
        await start(send, "text/event-stream")
        await part(send, EVENTS[0])
        going = asyncio.ensure_future(go.wait())
        leaving = asyncio.ensure_future(gone(receive))
        await asyncio.wait([going, leaving], return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        if leaving.done():
            await asyncio.sleep(0.05)  # An engine needs a step to let go of a request.
        leaving.cancel()
        now.discard(call.job_id)
        if go.is_set():
            await part(send, b"data: [DONE]\n\n", more=False)

    with ValkeyServer() as server:
        async with pool_on(server) as pool:
            await pool.transitions.create_lanes([TAG])
            job = await pool.submit()
            server.command("SAVE")
            async with pool.working(ScriptedEngine(answer)):
                await acquire(begun)
                server.restart()
                await acquire(begun)
                go.set()
                assert (await pool.end(job)).outcome == "completed"
                assert await pool.answer(job) == EVENTS[0] + b"data: [DONE]\n\n"
    assert both == []


def test_a_metrics_port_that_is_taken_stops_the_start_and_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {"HEADRACE_ENGINE": "simulated", "HEADRACE_METRICS_PORT": port}
        done = subprocess.run(
            [sys.executable, "-m", "worker"],
            env={**os.environ, **variables},
            capture_output=True,
            timeout=60,
        )
    assert done.returncode == Exit.WRONG_SETTING
    told = done.stdout + done.stderr
    assert b"HEADRACE_METRICS_PORT" in told
    assert b"Traceback" not in told
