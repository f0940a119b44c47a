"""The beat: what a worker says, what it learns, and when it falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from shared.errors import LanesLost, QueueFull, QueueUnavailable
from shared.outcomes import Adopted
from shared.protocol import ModelRecord, WorkerRecord
from shared.registry import Registry
from shared.transitions import Transitions
from tests.unit.engines import ScriptedEngine
from tests.unit.test_running import make_run
from worker.engine.interface import Load, Model
from worker.presence import STARTING_LEASES, Presence
from worker.running import Running
from worker.settings import WorkerSettings


class Announcements(Registry):
    def __init__(self) -> None:
        self.said: list[tuple[WorkerRecord, Sequence[ModelRecord], float]] = []
        self.failure: Exception | None = None

    async def announce(
        self, worker: WorkerRecord, models: Sequence[ModelRecord], lease_s: float
    ) -> None:
        if self.failure is not None:
            raise self.failure
        self.said.append((worker, models, lease_s))


class Beats(Transitions):
    def __init__(self) -> None:
        self.beats: list[list[str]] = []
        self.words: dict[str, str] = {}
        self.failure: Exception | None = None

    async def beat(self, job_tag: str, worker: str, owned: Sequence[Adopted]) -> list[str]:
        self.beats.append([one.job.id for one in owned])
        if self.failure is not None:
            raise self.failure
        return [self.words.get(one.job.id, "ok") for one in owned]


class Bench:
    def __init__(self, **settings: float) -> None:
        values = {"beat_s": 0.005, "lease_s": 0.05, "stall_s": 0.05} | settings
        self.settings = WorkerSettings(worker_id="w1", **values)  # type: ignore[arg-type]
        self.engine = ScriptedEngine(seats=8)
        self.registry, self.beats, self.running = Announcements(), Beats(), Running()
        self.presence = Presence(
            self.settings, self.engine, self.registry, self.beats, self.running
        )
        self.presence.pool = "test-model"
        self.presence.state = "ready"
        self.turns = 0
        self._turned = asyncio.Event()
        self.presence.on_beat = self._turn

    def _turn(self) -> None:
        self.turns += 1
        self._turned.set()

    async def turn(self, count: int = 1) -> None:
        """Wait for so many more beats."""
        until = self.turns + count
        async with asyncio.timeout(5):
            while self.turns < until:
                self._turned.clear()
                await self._turned.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await self.turn()


@asynccontextmanager
async def beating(bench: Bench) -> AsyncIterator[None]:
    task = asyncio.create_task(bench.presence.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_ready_worker_says_what_it_is() -> None:
    bench = Bench()
    bench.engine.models = [Model("test-model", 4096), Model("adapter", 4096, "test-model")]
    bench.engine.now = Load(2, 1, 0.25)
    bench.running.add(make_run())
    async with beating(bench):
        await bench.turn()
    worker, models, lease_s = bench.registry.said[0]
    assert (worker.id, worker.pool, worker.state) == ("w1", "test-model", "ready")
    assert (worker.seats, worker.reserve) == (8, 2)
    assert (worker.running, worker.waiting, worker.kv_usage) == (1, 1, 0.25)
    assert worker.models == ["test-model", "adapter"]
    assert worker.engine == "scripted 1"
    assert lease_s == 0.05
    assert [(m.name, m.parent, m.pool) for m in models] == [
        ("test-model", None, "test-model"),
        ("adapter", "test-model", "test-model"),
    ]


async def test_a_starting_worker_names_no_model_and_has_time() -> None:
    bench = Bench()
    bench.presence.state = "starting"
    async with beating(bench):
        await bench.turn()
    worker, models, lease_s = bench.registry.said[0]
    assert worker.state == "starting"
    assert models == []
    assert lease_s == STARTING_LEASES * bench.settings.lease_s


async def test_a_change_is_said_at_once() -> None:
    bench = Bench(beat_s=60)
    async with beating(bench):
        await bench.turn()
        bench.presence.state = "draining"
        bench.presence.beat_now()
        await bench.turn()
    assert [worker.state for worker, _, _ in bench.registry.said] == ["ready", "draining"]


@pytest.mark.parametrize("word", ["cancelled", "expired", "fenced"])
async def test_a_beat_learns_what_to_stop(word: str) -> None:
    """Also when the nudge was lost."""
    bench = Bench()
    fine, other = make_run(), make_run()
    bench.running.add(fine)
    bench.running.add(other)
    bench.beats.words[other.adopted.job.id] = word
    async with beating(bench):
        await bench.turn()
    assert (fine.stopped, other.stopped) == (None, word)


async def test_no_beat_for_jobs_where_there_are_none() -> None:
    bench = Bench()
    async with beating(bench):
        await bench.turn(2)
    assert bench.beats.beats == []
    assert len(bench.registry.said) >= 2


@pytest.mark.parametrize("failure", [QueueUnavailable(), LanesLost(), QueueFull()])
@pytest.mark.parametrize("where", ["registry", "jobs"])
async def test_a_failed_beat_is_not_the_last(failure: Exception, where: str) -> None:
    bench = Bench()
    bench.running.add(make_run())
    part: Announcements | Beats = bench.registry if where == "registry" else bench.beats
    part.failure = failure
    async with beating(bench):
        await bench.turn(2)
        part.failure = None
        await bench.until(lambda: bool(bench.registry.said))


async def test_a_link_is_sound_after_a_whole_lease_of_beats() -> None:
    bench = Bench(lease_s=0.04)
    assert not bench.presence.sound()
    async with beating(bench):
        await bench.turn()
        assert not bench.presence.sound()
        await bench.until(bench.presence.sound)
        bench.registry.failure = QueueUnavailable()
        await bench.turn(2)
        assert not bench.presence.sound()
        bench.registry.failure = None
        await bench.turn()
        assert not bench.presence.sound()
        await bench.until(bench.presence.sound)


async def test_an_engine_with_work_and_no_steps_is_stalled_and_its_worker_silent() -> None:
    bench = Bench(stall_s=0.03)
    bench.running.add(make_run())
    async with beating(bench):
        await asyncio.wait_for(bench.presence.stalled.wait(), 5)
        await bench.turn()
        said, beats = len(bench.registry.said), len(bench.beats.beats)
        await bench.turn(3)
    assert (len(bench.registry.said), len(bench.beats.beats)) == (said, beats)


@pytest.mark.parametrize("why", ["steps", "idle", "flushing"])
async def test_what_is_no_stall(why: str) -> None:
    bench = Bench(stall_s=0.03)
    run = make_run()
    if why != "idle":
        bench.running.add(run)
    if why == "flushing":  # The engine is done with it; its last frames wait for the queue.
        bench.running.free(run)
    loop = asyncio.get_running_loop()
    until = loop.time() + 0.1
    async with beating(bench):
        while loop.time() < until:
            bench.engine.steps += why == "steps"
            await bench.turn()
    assert not bench.presence.stalled.is_set()


async def test_an_engine_gets_its_time_anew_with_each_step() -> None:
    bench = Bench(stall_s=0.06)
    bench.running.add(make_run())
    loop = asyncio.get_running_loop()
    async with beating(bench):
        for _ in range(4):
            until = loop.time() + 0.03
            while loop.time() < until:
                await bench.turn()
            bench.engine.steps += 1
        assert not bench.presence.stalled.is_set()
        await asyncio.wait_for(bench.presence.stalled.wait(), 5)
