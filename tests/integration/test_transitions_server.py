"""What only a real server does to the transitions: run full, lose its data, go away."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis

from shared.connection import clients_of, connect, connect_blocking
from shared.errors import LanesLost, QueueFull, QueueUnavailable
from shared.keys import Keys
from shared.outcomes import Adopted, Finish, Verdict
from shared.protocol import End, Frame, Job, ModelRecord, WorkerRecord, encode
from shared.registry import Registry
from shared.settings import RedisSettings
from shared.status import read_status
from shared.transitions import Transitions
from tests.support.appends import append_of
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyServer
from tests.wire.records import TAG, make_job

KEYS = Keys("test")
END = encode(Frame(end=End(outcome="completed")))
BOTH = {"interactive": 4, "batch": 4}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def server(shared_server: ValkeyServer) -> Iterator[ValkeyServer]:
    shared_server.command("FLUSHALL")
    yield shared_server
    shared_server.command("CONFIG", "SET", "maxmemory", 0)


def _settings(url: str, timeout_s: float = 1.5) -> RedisSettings:
    return RedisSettings(redis_url=SecretStr(url), redis_timeout_s=timeout_s)


@pytest.fixture
async def redis(server: ValkeyServer) -> AsyncIterator[Redis]:
    redis = connect(_settings(server.url), name="test")
    yield redis
    await redis.aclose()


@pytest.fixture
async def transitions(redis: Redis) -> Transitions:
    transitions = Transitions(redis, KEYS, result_ttl_s=100)
    await transitions.create_lanes([TAG])
    return transitions


async def _adopt(transitions: Transitions, owner: str = "o1") -> Adopted:
    await transitions.submit(make_job(), limit=9, timeout_s=60)
    (claimed,) = await transitions.claim(TAG, BOTH, "w1")
    adopted = await transitions.adopt(claimed, owner, "w1")
    assert isinstance(adopted, Adopted)
    return adopted


def _finish(adopted: Adopted, seq: int) -> Finish:
    return Finish(adopted.job.id, adopted.owner, adopted.job.lane, seq, END, "completed")


# At maxmemory


@pytest.mark.parametrize("scripts", ["known", "forgotten"])
async def test_a_full_server_takes_no_new_work_and_finishes_what_it_has(
    transitions: Transitions, server: ValkeyServer, scripts: str
) -> None:
    done, cancelled, back = [await _adopt(transitions, f"o{n}") for n in range(3)]
    queued, waiting = make_job(), make_job()
    await transitions.submit(queued, limit=9, timeout_s=60)
    await transitions.submit(waiting, limit=9, timeout_s=60)
    server.command("CONFIG", "SET", "maxmemory", 1)
    if scripts == "forgotten":
        server.command("SCRIPT", "FLUSH")

    refused = make_job()
    with pytest.raises(QueueFull):
        await transitions.submit(refused, limit=9, timeout_s=60)

    append = append_of(done.job.id, done.owner, 0, 1, [b"a"])
    verdicts, ended = await transitions.write([append], [_finish(done, 2)])
    assert (verdicts, ended) == ([Verdict("ok", 1)], [Verdict("ok")])
    assert (await transitions.cancel(queued.id, queued.lane)).word == "queued"
    assert (await transitions.cancel(cancelled.job.id, cancelled.job.lane)).word == "running"
    forced = await transitions.cancel(cancelled.job.id, cancelled.job.lane, force=True)
    assert forced.word == "forced"
    assert (await transitions.cancel(refused.id, refused.lane, early=True)).word == "unknown"
    assert await transitions.beat(TAG, "w1", [back]) == ["ok"]
    assert await transitions.hand_back(back)
    claimed = await transitions.claim(TAG, BOTH, "w1")
    assert [one.job_id for one in claimed] == [back.job.id, waiting.id]
    assert isinstance(await transitions.adopt(claimed[1], "o9", "w1"), Adopted)

    server.command("CONFIG", "SET", "maxmemory", 0)
    assert (await transitions.submit(make_job(), limit=9, timeout_s=60)).verdict == "queued"


async def test_a_full_server_still_takes_what_keeps_workers_alive(
    transitions: Transitions, redis: Redis, server: ValkeyServer
) -> None:
    """A worker that loses its link for a moment must be able to come back."""
    registry = Registry(redis, KEYS)
    worker = WorkerRecord(id="w1", pool="m", models=["m"], state="ready", seats=1)
    job = make_job()
    await transitions.submit(job, limit=9, timeout_s=60)
    server.command("CONFIG", "SET", "maxmemory", 1)
    await transitions.create_lanes([TAG])
    await registry.announce(worker, [ModelRecord(name="m", pool="m")], lease_s=3)
    assert [one.id for one in (await registry.snapshot()).ready("m")] == ["w1"]
    blocking = connect_blocking(_settings(server.url), name="claim", block_s=1)
    (claimed,) = await transitions.wait_claim(blocking, TAG, BOTH, "w1", 5)
    assert await transitions.pending(TAG, worker="w1") == [claimed]
    await registry.leave("w1")
    await blocking.aclose()


# Tenants and bells


async def test_ten_thousand_of_one_tenant_delay_anothers_first_by_one_round(
    transitions: Transitions,
) -> None:
    for _ in range(100):
        many = [make_job(tenant="many") for _ in range(100)]
        await asyncio.gather(*(transitions.submit(one, limit=99_999, timeout_s=60) for one in many))
    assert len(await transitions.claim(TAG, BOTH, "w1")) == 4
    first = make_job(tenant="first")
    await transitions.submit(first, limit=99_999, timeout_s=60)
    claimed = await transitions.claim(TAG, {"interactive": 2}, "w1")
    assert first.id in [one.job_id for one in claimed]


async def test_a_jobs_place_goes_by_its_tenants_turns(
    transitions: Transitions, redis: Redis
) -> None:
    async def place(job: Job) -> int | None:
        found = await read_status(clients_of(redis), KEYS, job.id)
        assert found is not None
        return found.position

    large = [make_job(tenant="large") for _ in range(6)]
    small = [make_job(tenant="small") for _ in range(2)]
    for job in large + small:
        await transitions.submit(job, limit=99, timeout_s=60)
    assert [await place(job) for job in large] == [2, 4, 6, 8, 8, 8]
    assert [await place(job) for job in small] == [2, 4]
    claimed = await transitions.claim(TAG, {"interactive": 4}, "w1")
    assert {one.job_id for one in claimed} == {one.id for one in large[:2] + small}
    assert await place(large[0]) is None
    adopted = await transitions.adopt(claimed[0], "o1", "w1")
    assert isinstance(adopted, Adopted)
    assert await transitions.hand_back(adopted)
    assert await place(adopted.job) == 1
    assert await place(large[5]) == 5
    assert len(await transitions.claim(TAG, {"interactive": 5}, "w1")) == 5
    assert await place(large[5]) is None


async def test_no_worker_sleeps_while_something_waits(
    transitions: Transitions, redis: Redis, server: ValkeyServer
) -> None:
    """None looks by itself here: a wake-up that is lost leaves its job in the lane."""
    count, claimed = 400, asyncio.Queue[str]()

    async def work(name: str) -> None:
        blocking = connect_blocking(_settings(server.url), name=name, block_s=60)
        try:
            while True:
                limits = {"interactive": random.choice([1, 2])}
                found = await transitions.claim(TAG, limits, name)
                for one in found:
                    claimed.put_nowait(one.job_id)
                if not found:
                    found = await transitions.wait_claim(blocking, TAG, limits, name, 60)
                    for one in found:
                        claimed.put_nowait(one.job_id)
        finally:
            await blocking.aclose()

    workers = [asyncio.create_task(work(f"w{n}")) for n in range(5)]
    submitted = []
    for at in range(count):
        job = make_job(tenant=random.choice("abc"))
        submitted.append(job.id)
        await transitions.submit(job, limit=9999, timeout_s=60)
        if at % 7 == 0:
            await asyncio.sleep(0.001)
    async with asyncio.timeout(10):
        found = [await claimed.get() for _ in range(count)]
    assert sorted(found) == sorted(submitted)
    await _blocked(redis, 5)
    for task in workers:
        task.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


# Data loss


async def test_after_data_loss_lanes_are_made_again(transitions: Transitions, redis: Redis) -> None:
    lost = await _adopt(transitions)
    await redis.flushall()
    with pytest.raises(LanesLost):
        await transitions.claim(TAG, BOTH, "w1")
    with pytest.raises(LanesLost):
        await transitions.pending(TAG, worker="w1")
    append = append_of(lost.job.id, lost.owner, 0, 1, [b"a"])
    verdicts, ended = await transitions.write([append], [_finish(lost, 2)])
    assert [v.word for v in verdicts + ended] == ["fenced", "fenced"]
    assert await transitions.beat(TAG, "w1", [lost]) == ["fenced"]
    assert await redis.keys("*") == []

    job = make_job()
    assert (await transitions.submit(job, limit=9, timeout_s=60)).verdict == "queued"
    with pytest.raises(LanesLost):
        await transitions.claim(TAG, BOTH, "w1")
    await transitions.create_lanes([TAG])
    assert [one.job_id for one in await transitions.claim(TAG, BOTH, "w1")] == [job.id]


async def _blocked(redis: Redis, count: int) -> None:
    async with asyncio.timeout(5):
        while (await redis.info("clients"))["blocked_clients"] != count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# A server that is away


async def test_a_blocking_read_is_ended_from_another_connection(
    transitions: Transitions, redis: Redis, server: ValkeyServer
) -> None:
    blocking = connect_blocking(_settings(server.url), name="claim", block_s=30)
    client_id = await blocking.client_id()
    wait = asyncio.create_task(transitions.wait_claim(blocking, TAG, BOTH, "w1", block_s=30))
    await _blocked(redis, 1)
    await redis.client_unblock(client_id)
    assert await asyncio.wait_for(wait, 1) == []
    await transitions.submit(make_job(), limit=9, timeout_s=60)
    assert len(await transitions.wait_claim(blocking, TAG, BOTH, "w1", block_s=30)) == 1
    await blocking.aclose()


async def test_a_blocking_read_outlasts_the_timeout_of_ordinary_commands(
    transitions: Transitions, server: ValkeyServer
) -> None:
    blocking = connect_blocking(_settings(server.url, timeout_s=0.1), name="claim", block_s=0.4)
    begun = time.monotonic()
    assert await transitions.wait_claim(blocking, TAG, BOTH, "w1", 0.4) == []
    assert time.monotonic() - begun >= 0.4
    await blocking.aclose()


async def test_every_call_says_so_when_the_server_is_away() -> None:
    with ValkeyServer() as gone:
        url = gone.url
    redis = connect(_settings(url), name="test")
    transitions, registry = Transitions(redis, KEYS, result_ttl_s=100), Registry(redis, KEYS)
    job = make_job()
    calls = [
        transitions.submit(job, limit=9, timeout_s=60),
        transitions.create_lanes([TAG]),
        transitions.claim(TAG, BOTH, "w1"),
        transitions.pending(TAG, worker="w1"),
        transitions.wait_claim(redis, TAG, BOTH, "w1", 0.01),
        transitions.write([append_of(job.id, "o", 0, 1, [b"a"])], []),
        transitions.cancel(job.id, job.lane),
        transitions.beat(TAG, "w1", []),
        transitions.lane_of(job.id),
        transitions.read_log(job.id, 0),
        transitions.depths(TAG),
        registry.snapshot(),
        registry.leave("w1"),
    ]
    begun = time.monotonic()
    for call in calls:
        with pytest.raises(QueueUnavailable):
            await call
    assert time.monotonic() - begun < 2
    await redis.aclose()


async def test_a_server_that_does_not_answer_is_given_up_in_time(server: ValkeyServer) -> None:
    redis = connect(_settings(server.url, timeout_s=0.2), name="test")
    transitions = Transitions(redis, KEYS, result_ttl_s=100)
    await transitions.depths(TAG)
    server.pause()
    try:
        begun = time.monotonic()
        with pytest.raises(QueueUnavailable):
            await transitions.submit(make_job(), limit=9, timeout_s=60)
        assert 0.15 < time.monotonic() - begun < 1
    finally:
        server.resume()
    assert await transitions.depths(TAG) is not None
    await redis.aclose()


async def test_a_lost_reply_makes_no_second_job(server: ValkeyServer) -> None:
    """The driver repeats nothing, and repeating by hand is harmless."""
    async with TcpProxy.to(server.url) as proxy:
        redis = connect(_settings(proxy.url, timeout_s=0.5), name="test")
        transitions = Transitions(redis, KEYS, result_ttl_s=100)
        await transitions.create_lanes([TAG])
        await transitions.submit(make_job(), limit=9, timeout_s=60)
        job = make_job()
        proxy.cut_after(job.id.encode())
        with pytest.raises(QueueUnavailable):
            await transitions.submit(job, limit=9, timeout_s=60)
        assert (await transitions.depths(TAG))["interactive"] == 2
        assert (await transitions.submit(job, limit=9, timeout_s=60)).verdict == "known"
        assert (await transitions.depths(TAG))["interactive"] == 2

        claimed = await transitions.claim(TAG, BOTH, "w1")
        adopted = await transitions.adopt(claimed[1], "o1", "w1")
        assert isinstance(adopted, Adopted)
        append = append_of(job.id, "o1", 0, 1, [b"needle"])
        proxy.cut_after(b"needle")
        with pytest.raises(QueueUnavailable):
            await transitions.write([append], [_finish(adopted, 2)])
        verdicts, ended = await transitions.write([append], [_finish(adopted, 2)])
        assert [v.word for v in verdicts] in (["fenced"], ["ok"])
        assert ended == [Verdict("ok")]
        page = await transitions.read_log(job.id, 0)
        assert [e.body for e in page.envelopes] == [b"needle", END]
        await redis.aclose()


async def test_a_cancelled_call_gives_its_reply_to_nobody_else(server: ValkeyServer) -> None:
    async with TcpProxy.to(server.url) as proxy:
        redis = connect(_settings(proxy.url, timeout_s=1), name="test", connections=4)
        transitions = Transitions(redis, KEYS, result_ttl_s=100)
        await transitions.create_lanes([TAG])
        jobs = [make_job(lane=lane) for lane in ("interactive", "batch") * 10]
        for job in jobs:
            await transitions.submit(job, limit=99, timeout_s=60)
        proxy.delay(0.01)
        reads = [asyncio.create_task(transitions.lane_of(jobs[0].id)) for _ in range(4)]
        await asyncio.sleep(0.012)
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        proxy.heal()
        for job in jobs[1:]:
            assert await transitions.lane_of(job.id) == job.lane
        await redis.aclose()


async def test_a_cancel_is_never_swallowed(server: ValkeyServer) -> None:
    """Python 3.11's `wait_for`, which the driver sends with, drops one that comes as it is done.

    A loop that is ended by a cancel would go on for ever.
    """
    redis = connect(_settings(server.url), name="test", connections=4)
    transitions = Transitions(redis, KEYS, result_ttl_s=100)

    async def loop() -> None:
        while True:
            await transitions.depths(TAG)

    for turns in range(300):
        task = asyncio.create_task(loop())
        for _ in range(turns % 30):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=2)
        if not done:
            task.cancel()
            await asyncio.wait([task], timeout=2)
        assert done, f"the cancel after {turns % 30} turns was lost"
    await redis.aclose()
