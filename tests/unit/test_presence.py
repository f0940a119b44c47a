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
from worker import presence
from worker.engine.interface import Load, Model
from worker.presence import STARTING_LEASES, Presence
from worker.running import Running
from worker.settings import WorkerSettings


class Announcements(Registry):
    def __init__(self) -> None:
        self.said: list[tuple[WorkerRecord, Sequence[ModelRecord], float]] = []
        self.failure: Exception | None = None
        self.before: list[WorkerRecord] = []
        """What stood there before each announcement, the next one last."""

    async def announce(
        self, worker: WorkerRecord, models: Sequence[ModelRecord], lease_s: float
    ) -> WorkerRecord | None:
        if self.failure is not None:
            raise self.failure
        self.said.append((worker, models, lease_s))
        return self.before.pop() if self.before else worker


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
        values = {"beat_s": 0.005, "lease_s": 0.05} | settings
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


class Clock:
    """Stands for the module `time`, and stands still."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(presence, "time", made)
    return made


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
    bench = Bench(beat_s=60, lease_s=200)
    async with beating(bench):
        await bench.turn()
        bench.presence.state = "draining"
        bench.presence.beat_now()
        await bench.turn()
    assert [worker.state for worker, _, _ in bench.registry.said] == ["ready", "draining"]


@pytest.mark.parametrize(("announcements", "warnings"), [(1, 0), (4, 1)])
async def test_another_worker_of_its_name_that_lives_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, announcements: int, warnings: int
) -> None:
    """At the first beat it may be an earlier process of the same name."""
    bench = Bench()
    other = WorkerRecord(id="w1", pool="m", models=[], state="ready", seats=8, started_ms=1)
    bench.registry.before = [other] * announcements
    async with beating(bench):
        await bench.turn(announcements + 1)
    assert caplog.text.count("worker.twin") == warnings


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


async def test_a_link_is_sound_after_a_whole_lease_of_beats(clock: Clock) -> None:
    bench = Bench(lease_s=3)
    async with beating(bench):
        await bench.turn()
        assert not bench.presence.sound()
        clock.now += 3
        assert bench.presence.sound()
        bench.registry.failure = QueueUnavailable()
        await bench.turn(2)
        assert not bench.presence.sound()
        bench.registry.failure = None
        await bench.turn(2)
        clock.now += 2.9
        assert not bench.presence.sound()
        clock.now += 0.2
        assert bench.presence.sound()


async def test_an_engine_with_work_and_no_steps_is_stalled_and_its_worker_silent(
    clock: Clock,
) -> None:
    bench = Bench()
    bench.running.add(make_run())
    async with beating(bench):
        await bench.turn()
        clock.now += 61
        await asyncio.wait_for(bench.presence.stalled.wait(), 5)
        await bench.turn()
        said, beats = len(bench.registry.said), len(bench.beats.beats)
        await bench.turn(3)
    assert (len(bench.registry.said), len(bench.beats.beats)) == (said, beats)


@pytest.mark.parametrize("why", ["steps", "idle", "flushing"])
async def test_what_is_no_stall(why: str, clock: Clock) -> None:
    bench = Bench()
    run = make_run()
    if why != "idle":
        bench.running.add(run)
    if why == "flushing":  # The engine is done with it; its last frames wait for the queue.
        bench.running.free(run)
    async with beating(bench):
        for _ in range(4):
            await bench.turn()
            bench.engine.steps += why == "steps"
            clock.now += 61
            await bench.turn(2)
    assert not bench.presence.stalled.is_set()


async def test_an_engine_gets_its_time_anew_with_each_step(clock: Clock) -> None:
    bench = Bench()
    bench.running.add(make_run())
    async with beating(bench):
        for _ in range(4):
            await bench.turn(2)
            clock.now += 59
            await bench.turn(2)
            bench.engine.steps += 1
        assert not bench.presence.stalled.is_set()
        await bench.turn(2)
        clock.now += 61
        await asyncio.wait_for(bench.presence.stalled.wait(), 5)
