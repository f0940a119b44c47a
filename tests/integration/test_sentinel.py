"""What Sentinel is for: commands and subscriptions follow the master, and its replicas count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr
from redis.exceptions import ReadOnlyError

from shared.admin.access import Access
from shared.admin.settings import AdminSettings
from shared.admin.status import status
from shared.connection import Connections
from shared.errors import QueueUnavailable
from shared.keys import Keys, new_job_id, tag
from shared.protocol import Job
from shared.settings import RedisSettings
from shared.subscribers import Subscribers
from shared.transitions import Transitions
from tests.integration.test_pubsub import Ear
from tests.support import sse
from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway
from tests.support.sentinel import SERVICE, Watched, sentinel_of
from tests.support.valkey import free_port
from tests.support.waiting import until

CHAT = {"model": "tiny", "messages": []}


@pytest.fixture
def watched() -> Iterator[Watched]:
    with Watched() as servers:
        yield servers


def settings(url: str) -> RedisSettings:
    return RedisSettings(redis_url=SecretStr(url))


@asynccontextmanager
async def connections(url: str) -> AsyncIterator[Connections]:
    made = Connections(settings(url), name="test")
    try:
        yield made
    finally:
        await made.aclose()


@asynccontextmanager
async def subscribers(url: str) -> AsyncIterator[Subscribers]:
    made = Subscribers(settings(url), name="test-pubsub", ack_timeout_s=5)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_commands_and_subscriptions_follow_the_master(watched: Watched) -> None:
    async with connections(watched.url) as redis, subscribers(watched.url) as subscriber:
        ear = Ear()
        await subscriber.subscribe("news", ear)
        await redis.run("", lambda one: one.set("k", "1"))
        old = watched.master
        old.kill()
        new = await asyncio.to_thread(watched.wait_failover, old)
        # Nothing was sent to the old one: the first try reaches the new one.
        assert await redis.run("", lambda one: one.get("k")) == b"1"
        await until(lambda: ear.subscriptions == 2, "a subscription at the new master")
        assert new.command("PUBLISH", "news", "later") == 1
        assert await ear.heard(1) == [b"later"]


async def test_a_demoted_master_is_left(watched: Watched) -> None:
    """It goes on answering, with READONLY."""
    async with connections(watched.url) as redis:
        await redis.run("", lambda one: one.set("k", "1"))
        old, new = watched.master, watched.replica
        new.command("REPLICAOF", "NO", "ONE")
        old.command("REPLICAOF", new.host, new.port)
        with pytest.raises(ReadOnlyError):
            await redis.run("", lambda one: one.set("k", "2"))
        watched.sentinel.kill()
        watched.sentinel = sentinel_of(new, port=watched.sentinel.port)
        with watched.sentinel:
            await redis.run("", lambda one: one.set("k", "2"))
            assert new.command("GET", "k") == b"2"


async def test_a_replaced_master_is_left_though_it_takes_writes(watched: Watched) -> None:
    async with connections(watched.url) as redis, subscribers(watched.url) as subscriber:
        ear = Ear()
        await subscriber.subscribe("news", ear)
        await redis.run("", lambda one: one.set("k", "1"))
        old = watched.master
        watched.sentinel.command("SENTINEL", "FAILOVER", SERVICE)
        new = await asyncio.to_thread(watched.wait_failover, old)

        async def elsewhere() -> bool:
            await redis.run("", lambda one: one.incr("n"))
            return bool(new.command("EXISTS", "n"))

        await until(elsewhere, "writes to the new master", timeout=2.5)
        await until(lambda: ear.subscriptions == 2, "a subscription there", timeout=2.5)
        assert old.command("ROLE")[0] == b"master"


async def test_dead_and_frozen_sentinels_among_the_seeds(watched: Watched) -> None:
    dead = f"127.0.0.1:{free_port()}"
    with Watched() as other:
        other.sentinel.pause()
        frozen = f"127.0.0.1:{other.sentinel.port}"
        url = watched.url.replace("://", f"://{dead},{frozen},")
        async with connections(url) as redis:
            async with asyncio.timeout(1.5):
                await redis.run("", lambda one: one.set("k", "1"))
        other.sentinel.resume()
    assert watched.command("GET", "k") == b"1"


async def test_an_unknown_service_is_told(watched: Watched) -> None:
    async with connections(watched.url.replace("/queue", "/other")) as redis:
        with pytest.raises(QueueUnavailable) as raised:
            await redis.run("", lambda one: one.get("k"))
        assert "service" in str(raised.value.__cause__)


async def test_headrace_admin_asks_the_master(watched: Watched) -> None:
    given = AdminSettings(redis_url=SecretStr(watched.url))
    async with Access(given) as access:
        (server,) = (await status(access)).servers
    assert server.address == f"127.0.0.1:{watched.master.port}"


# Replicas that must have a job


async def test_a_job_is_accepted_once_a_replica_has_it(watched: Watched) -> None:
    async with (
        FakeWorker(watched.master.url, seats=4) as worker,
        RunningGateway(watched.url, redis_replicas=1, force_cancel_s=0.2) as gateway,
    ):
        request = asyncio.create_task(sse.fetch(gateway.chat, CHAT))
        running = await worker.take()
        name = worker.keys.job(running.job.id)
        assert watched.replica.command("HGET", name, "state") in (b"queued", b"running")
        request.cancel()
        await worker.wait_outcome(running.job.id, 8)


async def test_without_enough_replicas_it_is_refused_and_taken_back(watched: Watched) -> None:
    async with (
        FakeWorker(watched.master.url, seats=4) as worker,
        RunningGateway(watched.url, redis_replicas=1) as gateway,
    ):
        watched.replica.kill()
        async with asyncio.timeout(2.5):
            response, raw = await sse.fetch(gateway.chat, CHAT)
        assert response.status == 503
        assert b"queue_unavailable" in raw

        (job_id,) = await worker.job_ids()
        assert await worker.wait_outcome(job_id) == "cancelled"
        lane = worker.keys.lane(worker.tag, "interactive")
        assert watched.command("XLEN", lane) == 0


async def test_the_wait_is_bounded_and_no_reply_is_lost(watched: Watched) -> None:
    async with connections(watched.url) as redis:
        transitions = Transitions(redis, Keys(), result_ttl_s=10)
        watched.replica.pause()
        try:
            job = Job(id=new_job_id(tag("tiny", 0)), path="/", body=b"", model="tiny", lane="batch")
            with pytest.raises(QueueUnavailable):
                await transitions.submit(job, limit=9, timeout_s=9, replicas=1, wait_s=0.2)
            told = await transitions.submit(job, limit=9, timeout_s=9)
            assert told.verdict == "known"
        finally:
            watched.replica.resume()
        told = await transitions.submit(job, limit=9, timeout_s=9, replicas=1, wait_s=5)
        assert told.verdict == "known"
