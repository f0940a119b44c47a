"""The loop that fills the engine, against a scripted queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from shared.connection import Clients, Fixed
from shared.errors import LanesLost, QueueFull, QueueUnavailable
from shared.outcomes import Adopted, Claimed
from shared.protocol import Job
from shared.transitions import Transitions
from tests.unit.engines import ScriptedEngine
from tests.unit.test_publisher import Server
from tests.wire.records import TAG, make_job
from worker.claims import AT_ONCE, Claims, reserve
from worker.engine.interface import Load
from worker.publisher import Publisher
from worker.run import Run
from worker.running import Running
from worker.settings import WorkerSettings


class Queue(Transitions):
    """Lanes in memory. `handed_back` comes before the lane, as in the real one."""

    def __init__(self) -> None:
        self.lanes: dict[str, list[Job]] = {"interactive": [], "batch": []}
        self.back: list[Job] = []
        self.held: dict[bytes, tuple[Claimed, Job]] = {}
        self.limits: list[dict[str, int]] = []
        self.waits: list[tuple[str, ...]] = []
        self.returned: list[bool] = []
        self.turns: list[tuple[int, float]] = []
        self.created = 0
        self.handed_back: list[str] = []
        self.cancelled: list[str] = []
        self.owners: list[str] = []
        self.verdicts: dict[str, str] = {}
        self.strikes: dict[str, int] = {}
        self.failures: dict[str, list[Exception]] = {}
        self.lose_reply: set[str] = set()
        self.adopting: dict[str, asyncio.Event] = {}
        """Gates of jobs whose adoption takes long."""
        self.news = asyncio.Event()
        self.unblocked = asyncio.Event()
        self._entries = 0

    def put(self, *jobs: Job) -> None:
        for job in jobs:
            self.lanes[job.lane].append(job)
        self.news.set()

    def _fail(self, name: str) -> None:
        if self.failures.get(name):
            raise self.failures[name].pop(0)

    def _take(self, lane: str, job: Job, returned: bool = False) -> Claimed:
        self._entries += 1
        claimed = Claimed(TAG, lane, returned, b"%d-0" % self._entries, job.id)
        self.held[claimed.entry] = (claimed, job)
        return claimed

    async def create_lanes(self, tags: object) -> None:
        self._fail("create_lanes")
        self.created += 1

    async def claim(
        self,
        job_tag: str,
        limits: dict[str, int],
        worker: str,
        *,
        returned: bool = True,
        batch_turn: int = 0,
        batch_max_wait_s: float = 0,
    ) -> list[Claimed]:
        await asyncio.sleep(0)
        self.turns.append((batch_turn, batch_max_wait_s))
        self.limits.append(limits)
        self.returned.append(returned)
        claimed = self._claimed(limits, returned)
        self._fail("claim")
        return claimed

    def _claimed(self, limits: dict[str, int], returned: bool) -> list[Claimed]:
        claimed: list[Claimed] = []
        for lane, limit in limits.items():
            while returned and self.back and len(claimed) < limit:
                claimed.append(self._take(lane, self.back.pop(0), True))
            while self.lanes[lane] and len(claimed) < limit:
                claimed.append(self._take(lane, self.lanes[lane].pop(0)))
        return claimed

    async def wait_claim(
        self,
        blocking: Redis | Clients,
        job_tag: str,
        limits: dict[str, int],
        worker: str,
        block_s: float,
        *,
        returned: bool = True,
        batch_turn: int = 0,
        batch_max_wait_s: float = 0,
    ) -> list[Claimed]:
        lanes = tuple(lane for lane in limits if limits[lane])
        self.waits.append(lanes)
        self._fail("wait_claim")
        while not any(self.lanes[lane] for lane in lanes):
            self.news.clear()
            news = asyncio.ensure_future(self.news.wait())
            stop = asyncio.ensure_future(self.unblocked.wait())
            await asyncio.wait([news, stop], timeout=block_s, return_when="FIRST_COMPLETED")
            news.cancel()
            stop.cancel()
            if self.unblocked.is_set() or not self.news.is_set():
                self.unblocked.clear()
                return []
        self.turns.append((batch_turn, batch_max_wait_s))
        self.limits.append(limits)
        return self._claimed(limits, returned)

    async def pending(
        self, job_tag: str, *, worker: str | None = None, idle_s: float = 0
    ) -> list[Claimed]:
        return [claimed for claimed, _ in self.held.values()]

    async def adopt(
        self, claimed: Claimed, owner: str, worker: str, *, idle_s: float = 0
    ) -> Adopted | str:
        if claimed.job_id in self.adopting:
            await self.adopting[claimed.job_id].wait()
        self._fail("adopt")
        _, job = self.held[claimed.entry]
        if claimed.job_id in self.verdicts:
            del self.held[claimed.entry]
            return self.verdicts[claimed.job_id]
        self.owners.append(owner)
        if claimed.job_id in self.lose_reply:
            self.lose_reply.discard(claimed.job_id)
            raise QueueUnavailable
        strikes = self.strikes.get(job.id, 0)
        return Adopted(job, claimed, owner, 1, 0, 60, 0.01, strikes)

    async def hand_back(self, adopted: Adopted, *, blame: bool = False, begun: bool = True) -> bool:
        assert not begun
        del self.held[adopted.claimed.entry]
        self.handed_back.append(adopted.job.id)
        self.back.append(adopted.job)
        return True

    def end(self, adopted: Adopted) -> None:
        del self.held[adopted.claimed.entry]


class Connections(Redis):
    """What the claims use of a client."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.unblocks = 0

    async def client_id(self) -> int:  # type: ignore[override]
        return 7

    async def client_unblock(self, client_id: int, error: bool = False) -> bool:  # type: ignore[override]
        assert client_id == 7
        self.unblocks += 1
        self._queue.unblocked.set()
        return True

    def __del__(self, *args: object) -> None: ...


class Bench:
    def __init__(self, seats: int = 4, **settings: float) -> None:
        values = WorkerSettings(worker_id="w1", pool="test-model", **settings)  # type: ignore[arg-type]
        self.queue = Queue()
        self.engine = ScriptedEngine(seats=seats)
        self.running = Running()
        self.redis = Connections(self.queue)
        self.publisher = Publisher(Server())
        self.started: list[Run] = []
        self.load_when_running = Load(0, 0, 0.0)
        self._news = asyncio.Event()
        clients = Fixed(self.redis)
        self.claims = Claims(
            values, self.engine, self.queue, clients, clients, self.running, self._start
        )

    def _start(self, adopted: Adopted) -> None:
        run = Run(adopted, self.engine, self.publisher)
        self.running.add(run)
        self.engine.now = self.load_when_running
        self.started.append(run)
        self._news.set()

    @property
    def ids(self) -> list[str]:
        return [run.adopted.job.id for run in self.started]

    async def begun(self, count: int) -> None:
        """Wait until so many jobs were started in all."""
        async with asyncio.timeout(5):
            while len(self.started) < count:
                self._news.clear()
                await self._news.wait()

    async def end(self, run: Run) -> None:
        self.queue.end(run.adopted)
        self.running.remove(run)
        await self.claims.unblock()

    async def replaced(self, count: int) -> None:
        """Fill the engine; then end so many jobs one by one, each as another comes."""
        seats = self.engine.seats
        await self.begun(seats)
        for ended in range(count):
            self.queue.put(*jobs(1))
            await self.end(self.started[ended])
            await self.begun(seats + 1 + ended)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def turns(self) -> None:
        """Let the loop go as far as it can without anything new."""
        for _ in range(20):
            await asyncio.sleep(0)


@asynccontextmanager
async def claiming(bench: Bench) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(bench.claims.run())
    try:
        yield task
    finally:
        bench.claims.stop()
        bench.queue.unblocked.set()
        await asyncio.wait_for(task, 5)


def jobs(count: int, **changes: object) -> list[Job]:
    return [make_job(**changes) for _ in range(count)]


# Seats


async def test_the_engine_is_filled_and_not_more() -> None:
    bench = Bench(seats=3)
    waiting = jobs(5)
    bench.queue.put(*waiting)
    async with claiming(bench):
        await bench.begun(3)
        await bench.turns()
        assert bench.ids == [job.id for job in waiting[:3]]
        assert len(bench.queue.lanes["interactive"]) == 2
        await bench.end(bench.started[0])
        await bench.begun(4)
    assert bench.queue.handed_back == []


async def test_few_are_claimed_at_once() -> None:
    bench = Bench(seats=16)
    bench.queue.put(*jobs(10))
    async with claiming(bench):
        await bench.begun(10)
    assert bench.queue.limits[0] == {"interactive": AT_ONCE, "batch": AT_ONCE}


async def test_an_empty_engine_claims_a_share_of_its_seats() -> None:
    bench = Bench(seats=100)
    bench.queue.put(*jobs(30))
    async with claiming(bench):
        await bench.begun(30)
    assert bench.queue.limits[0] == {"interactive": 25, "batch": 18}


async def test_a_job_of_many_sequences_takes_as_many_seats() -> None:
    bench = Bench(seats=4)
    bench.queue.put(*jobs(1, sequences=4), *jobs(1))
    async with claiming(bench):
        await bench.begun(1)
        await bench.until(lambda: bench.queue.handed_back or bench.running.sequences >= 4)
        await bench.turns()
        assert len(bench.started) == 1
        await bench.end(bench.started[0])
        await bench.begun(2)


async def test_a_job_that_needs_more_seats_than_there_are_runs_alone() -> None:
    bench = Bench(seats=2)
    bench.queue.put(*jobs(1, sequences=16))
    async with claiming(bench):
        await bench.begun(1)
    assert bench.running.sequences == 16


async def test_batch_leaves_the_reserve_to_interactive_work() -> None:
    bench = Bench(seats=8, interactive_reserve=0.25)
    bench.queue.put(*jobs(20, lane="batch"))
    async with claiming(bench):
        await bench.begun(6)
        await bench.turns()
        assert len(bench.started) == 6
        assert bench.queue.waits[-1] == ("interactive",)
        chats = jobs(2)
        bench.queue.put(*chats)
        await bench.begun(8)
        assert bench.ids[6:] == [job.id for job in chats]


async def test_when_a_seat_gets_free_for_batch_the_wait_for_chats_ends() -> None:
    bench = Bench(seats=4, interactive_reserve=0.25)
    bench.queue.put(*jobs(4, lane="batch"))
    async with claiming(bench):
        await bench.begun(3)
        await bench.until(lambda: bench.queue.waits and bench.queue.waits[-1] == ("interactive",))
        begun = asyncio.get_running_loop().time()
        await bench.end(bench.started[0])
        await bench.begun(4)
        assert asyncio.get_running_loop().time() - begun < 0.5
        assert bench.redis.unblocks == 1


async def test_a_wait_for_both_lanes_is_not_disturbed() -> None:
    bench = Bench(seats=8)
    bench.queue.put(*jobs(1))
    async with claiming(bench):
        await bench.begun(1)
        await bench.until(lambda: bench.queue.waits)
        await bench.end(bench.started[0])
        assert bench.redis.unblocks == 0


async def test_chats_go_before_batch() -> None:
    bench = Bench(seats=2, interactive_reserve=0)
    batch, chats = jobs(2, lane="batch"), jobs(2)
    bench.queue.put(*batch, *chats)
    async with claiming(bench):
        await bench.begun(2)
        assert bench.ids == [job.id for job in chats]
        for run in bench.started[:2]:
            await bench.end(run)
        await bench.begun(4)
        assert bench.ids[2:] == [job.id for job in batch]


@pytest.mark.parametrize("load", [Load(1, 1, 0.1), Load(1, 0, 0.99)])
async def test_a_busy_engine_gets_nothing_more(load: Load) -> None:
    bench = Bench(seats=8, kv_high=0.9)
    bench.load_when_running = load
    bench.queue.put(*jobs(1))
    async with claiming(bench):
        await bench.begun(1)
        bench.queue.put(*jobs(1))
        await asyncio.sleep(0.06)
        assert len(bench.started) == 1
        bench.engine.now = Load(1, 0, 0.1)
        await bench.begun(2)


async def test_an_idle_engine_gets_work_whatever_its_load_says() -> None:
    """Without a running job nothing would ever bring the figures up to date."""
    bench = Bench()
    bench.engine.now = Load(0, 3, 1.0)
    bench.queue.put(*jobs(1))
    async with claiming(bench):
        await bench.begun(1)


async def test_batch_has_every_other_turn_where_it_has_waited_too_long() -> None:
    bench = Bench(seats=3, interactive_reserve=0, batch_max_wait_s=7)
    bench.queue.put(*jobs(3))
    async with claiming(bench):
        await bench.replaced(4)
        single = [
            turn
            for turn, limits in zip(bench.queue.turns, bench.queue.limits, strict=True)
            if limits["batch"] == 1
        ]
    assert single == [(1, 7), (0, 7)] * 2
    assert bench.queue.turns[0] == (1, 7)


async def test_batch_that_waited_too_long_has_turns_beside_the_reserve_in_a_full_engine() -> None:
    bench = Bench(seats=4, interactive_reserve=0.25, batch_max_wait_s=7)
    bench.queue.put(*jobs(4))
    async with claiming(bench):
        await bench.replaced(2)
        assert {(1, 7), (0, 7)} <= set(bench.queue.turns[-3:])
    for _ in range(3):
        adopted = replace(bench.started[0].adopted, job=make_job(lane="batch"))
        bench.running.add(Run(adopted, bench.engine, bench.publisher))
    assert bench.running.sequences_of("batch") == 3
    assert bench.claims._batch_room() <= 0


async def test_batch_has_no_turns_of_its_own_without_a_longest_wait() -> None:
    bench = Bench(seats=4, batch_max_wait_s=0)
    bench.queue.put(*jobs(2))
    async with claiming(bench):
        await bench.begun(2)
    assert {turn for turn, _ in bench.queue.turns} == {0}


@pytest.mark.parametrize(
    ("seats", "share", "kept"),
    [(8, 0.25, 2), (7, 0.25, 1), (1, 0.25, 0), (1, 1, 0), (4, 1, 3), (4, 0, 0), (2, 0.5, 1)],
)
def test_the_reserve(seats: int, share: float, kept: int) -> None:
    assert reserve(seats, share) == kept


# Jobs that don't start


@pytest.mark.parametrize("word", ["cancelled", "expired", "gone", "poisoned", "held"])
async def test_a_job_that_must_not_run_takes_no_seat(word: str) -> None:
    bench = Bench(seats=1)
    dead, alive = make_job(), make_job()
    bench.queue.verdicts[dead.id] = word
    bench.queue.put(dead, alive)
    async with claiming(bench):
        await bench.begun(1)
        assert bench.ids == [alive.id]


async def test_each_adoption_has_an_owner_of_its_own() -> None:
    bench = Bench(seats=4)
    bench.queue.put(*jobs(4))
    async with claiming(bench):
        await bench.begun(4)
    assert len(set(bench.queue.owners)) == 4
    assert all(len(owner) >= 16 for owner in bench.queue.owners)


# Suspects


async def test_suspects_of_one_strike_run_together() -> None:
    bench = Bench(seats=4)
    suspects = jobs(3)
    bench.queue.strikes = {job.id: 1 for job in suspects}
    bench.queue.put(*suspects)
    async with claiming(bench):
        await bench.begun(3)
    assert bench.queue.handed_back == []


async def test_a_suspect_of_two_strikes_runs_alone() -> None:
    bench = Bench(seats=4)
    suspects = jobs(2)
    for job in suspects:
        bench.queue.strikes[job.id] = 2
    bench.queue.put(*suspects)
    async with claiming(bench):
        await bench.begun(1)
        await bench.until(lambda: bench.queue.handed_back)
        await bench.until(lambda: bench.queue.returned and not bench.queue.returned[-1])
        assert bench.ids == [suspects[0].id]
        other = make_job()
        bench.queue.put(other)
        await bench.begun(2)
        assert bench.ids[1] == other.id
        await bench.end(bench.started[0])
        bench.queue.unblocked.set()
        await bench.begun(3)
        assert bench.ids[2] == suspects[1].id


async def test_another_workers_job_is_taken_over_only_where_there_is_room() -> None:
    bench = Bench(seats=1)
    lost = make_job()
    claimed = Claimed(TAG, lost.lane, False, b"9-0", lost.id)
    bench.queue.held[claimed.entry] = (claimed, lost)
    bench.queue.strikes[lost.id] = 1
    assert await bench.claims.take_over(claimed)
    assert bench.ids == [lost.id]
    assert not await bench.claims.take_over(replace(claimed, job_id=make_job().id))
    bench.claims.stop()
    await bench.end(bench.started[0])
    assert not await bench.claims.take_over(claimed)


# Trouble


async def test_lost_lanes_are_made_again() -> None:
    bench = Bench()
    bench.queue.failures["claim"] = [LanesLost()]
    async with claiming(bench):
        await bench.until(lambda: bench.queue.created == 2)
        bench.queue.put(*jobs(1))
        await bench.begun(1)


@pytest.mark.parametrize("where", ["create_lanes", "claim", "wait_claim", "adopt"])
@pytest.mark.parametrize("error", [QueueUnavailable(), LanesLost(), QueueFull()])
async def test_trouble_in_any_call_ends_by_itself(where: str, error: Exception) -> None:
    bench = Bench()
    bench.queue.failures[where] = [error]
    if where != "wait_claim":
        bench.queue.put(*jobs(1))
    async with claiming(bench):
        if where == "wait_claim":
            await bench.until(lambda: not bench.queue.failures["wait_claim"])
            bench.queue.put(*jobs(1))
        await bench.begun(1)
        await bench.turns()
    assert len(bench.started) == 1


async def test_a_claim_whose_reply_was_lost_is_found() -> None:
    bench = Bench()
    waiting = jobs(3)
    bench.queue.put(*waiting)
    bench.queue.failures["claim"] = [QueueUnavailable()]
    async with claiming(bench):
        await bench.begun(3)
    assert bench.ids == [job.id for job in waiting]


async def test_an_adoption_whose_reply_was_lost_is_made_again() -> None:
    bench = Bench()
    job = make_job()
    bench.queue.lose_reply.add(job.id)
    bench.queue.put(job)
    async with claiming(bench):
        await bench.begun(1)
        await bench.turns()
    assert bench.ids == [job.id]
    assert bench.started[0].adopted.owner == bench.queue.owners[-1]


async def test_a_slow_adoption_is_not_made_twice_because_another_failed() -> None:
    """Two attempts at one job in one engine would have the same id."""
    bench = Bench()
    slow, failing = make_job(), make_job()
    gate = bench.queue.adopting[slow.id] = asyncio.Event()
    bench.queue.lose_reply.add(failing.id)
    bench.queue.put(slow, failing)
    async with claiming(bench):
        await bench.until(lambda: bench.queue.owners)
        await asyncio.sleep(0.15)
        gate.set()
        await bench.begun(2)
        await bench.turns()
        assert sorted(bench.ids) == sorted([slow.id, failing.id])


async def test_what_already_runs_is_not_adopted_again() -> None:
    bench = Bench()
    bench.queue.put(*jobs(1))
    async with claiming(bench):
        await bench.begun(1)
        await bench.until(lambda: bench.queue.waits)
        bench.queue.failures["wait_claim"] = [QueueUnavailable()]
        bench.queue.unblocked.set()
        await bench.until(lambda: bench.queue.created == 2)
        await bench.turns()
        assert len(bench.started) == 1


# The end


async def test_a_stop_ends_the_wait_at_once() -> None:
    bench = Bench()
    async with claiming(bench) as task:
        await bench.until(lambda: bench.queue.waits)
        begun = asyncio.get_running_loop().time()
        bench.claims.stop()
        await bench.claims.unblock()
        await asyncio.wait_for(task, 0.5)
        assert asyncio.get_running_loop().time() - begun < 0.5


async def test_what_was_claimed_while_stopping_goes_back() -> None:
    bench = Bench()
    job = make_job()
    gate = bench.queue.adopting[job.id] = asyncio.Event()
    bench.queue.put(job)
    async with claiming(bench) as task:
        await bench.until(lambda: bench.queue.held)
        bench.claims.stop()
        gate.set()
        await asyncio.wait_for(task, 1)
    assert bench.started == []
    assert bench.queue.handed_back == [job.id]
    assert bench.queue.held == {}
