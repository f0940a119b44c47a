"""A job's readers: who comes, who goes, and what then becomes of the job, on a real server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from shared.connection import connect
from shared.keys import Keys, new_job_id
from shared.outcomes import Adopted, Left, Readers
from shared.protocol import Job
from shared.settings import RedisSettings
from shared.transitions import Transitions
from tests.support.valkey import ValkeyServer
from tests.wire.records import TAG, make_job

KEYS = Keys(f"readers{secrets.token_hex(4)}")


@pytest.fixture
async def queue(valkey: ValkeyServer) -> AsyncIterator[Transitions]:
    redis = connect(RedisSettings.model_validate({"redis_url": valkey.url}), name="readers")
    transitions = Transitions(redis, KEYS, result_ttl_s=60)
    await transitions.create_lanes([TAG])
    yield transitions
    async for key in redis.scan_iter(f"{KEYS.prefix}:*"):
        await redis.delete(key)
    await redis.aclose()


async def submit(queue: Transitions, patience_s: float | None, reader: str = "g/1") -> Job:
    job = make_job(patience_s=patience_s, stream=True)
    await queue.submit(job, limit=100, timeout_s=60, reader=reader)
    return job


async def adopt(queue: Transitions) -> Adopted | str:
    (claimed,) = await queue.claim(TAG, {"interactive": 1}, "w")
    return await queue.adopt(claimed, "o", "w")


async def leave(queue: Transitions, job: Job, *readers: str, doubtful: bool = False) -> str:
    return (await queue.leave(job.id, job.lane, readers, doubtful=doubtful)).word


async def test_last_readers_going_cancels(queue: Transitions) -> None:
    job = await submit(queue, 0)
    assert await queue.attach(job.id, "h/1") is not None
    assert await leave(queue, job, "g/1") == "read"
    assert await leave(queue, job, "g/1") == "read"
    assert await leave(queue, job, "h/1") == "queued"
    assert await leave(queue, job, "h/1") == "finished"
    assert sum((await queue.depths(TAG)).values()) == 0


async def test_running_job_is_asked_to_stop(queue: Transitions) -> None:
    job = await submit(queue, 0)
    adopted = await adopt(queue)
    assert isinstance(adopted, Adopted)
    assert adopted.readers == ("g/1",)
    assert await leave(queue, job, "g/1") == "running"
    assert await queue.beat(TAG, "w", [adopted]) == ["cancelled"]


async def test_grace_begins_with_the_last_going_and_ends_with_a_coming(queue: Transitions) -> None:
    job = await submit(queue, 0.3)
    left = await queue.leave(job.id, job.lane, ["g/1"])
    assert left.word == "waiting"
    assert 0.2 < left.wait_s <= 0.3
    await asyncio.sleep(0.2)
    assert await queue.attach(job.id, "h/1") is not None
    assert await queue.attach(job.id, "h/1") is not None
    assert await leave(queue, job) == "read"
    # Another grace of its own: what is left of the first doesn't count.
    assert (await queue.leave(job.id, job.lane, ["h/1"])).wait_s > 0.25
    await asyncio.sleep(0.35)
    assert await leave(queue, job) == "queued"


async def test_policy_continue_is_kept(queue: Transitions) -> None:
    job = await submit(queue, None)
    assert await leave(queue, job, "g/1") == "kept"
    assert isinstance(await adopt(queue), Adopted)


async def test_job_that_never_had_readers_is_kept(queue: Transitions) -> None:
    job = await submit(queue, 0, reader="")
    assert await leave(queue, job, "g/1") == "kept"
    assert [one.abandoned for one in await queue.readers([job.id])] == [False]


async def test_unread_beyond_its_patience_is_not_begun(queue: Transitions) -> None:
    job = await submit(queue, 0.05)
    await leave(queue, job, "g/1")
    assert [one.abandoned for one in await queue.readers([job.id])] == [False]
    await asyncio.sleep(0.1)
    (readers,) = await queue.readers([job.id])
    assert readers.abandoned
    assert readers.names == ()
    assert await adopt(queue) == "cancelled"


async def test_doubt_is_dispelled_by_a_subscription(
    valkey: ValkeyServer, queue: Transitions
) -> None:
    job = await submit(queue, 0)
    redis = connect(RedisSettings.model_validate({"redis_url": valkey.url}), name="frozen")
    async with redis.pubsub() as listening:
        await listening.subscribe(KEYS.channel(job.id))
        await listening.get_message(timeout=1)
        assert await leave(queue, job, "g/1", doubtful=True) == "read"
        assert (await queue.readers([job.id]))[0].names == ("g/1",)
    await asyncio.sleep(0.05)
    assert await leave(queue, job, "g/1", doubtful=True) == "queued"
    await redis.aclose()


async def test_unknown_job(queue: Transitions) -> None:
    job_id = new_job_id(TAG)
    assert await queue.attach(job_id, "g/1") is None
    assert await queue.leave(job_id, "interactive", ["g/1"]) == Left("unknown")
    assert await queue.readers([job_id]) == [Readers((), abandoned=False)]


async def test_key_belongs_to_one_request_and_one_job(queue: Transitions) -> None:
    async def remember(fingerprint: str, job: str, instead: str = "") -> str | None:
        return await queue.remember("d1", fingerprint, job, ttl_s=10, instead=instead)

    assert await remember("f", "one") == "one"
    assert await remember("f", "two") == "one"
    assert await remember("g", "two") is None
    assert await remember("g", "two", instead="one") is None
    assert await remember("f", "two", instead="one") == "two"
    assert await remember("f", "three", instead="one") == "two", "only one may take its place"
