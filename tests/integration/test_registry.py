"""Who is there, on fakeredis and on a real server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import fakeredis
import pytest
from pydantic import SecretStr
from redis.asyncio import Redis

from shared.connection import connect
from shared.keys import Keys
from shared.protocol import ModelRecord, WorkerRecord
from shared.registry import Registry, Snapshot
from shared.settings import RedisSettings
from tests.support.valkey import ValkeyServer

KEYS = Keys("test")
MODEL = ModelRecord(name="m", pool="m", max_model_len=4096, created=1)


def worker(name: str = "w1", **changes: Any) -> WorkerRecord:
    fields: dict[str, Any] = {"pool": "m", "models": ["m"], "state": "ready", "seats": 4}
    return WorkerRecord(id=name, **(fields | changes))


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture(params=["fake", "real"])
async def redis(request: pytest.FixtureRequest) -> AsyncIterator[Redis]:
    if request.param == "fake":
        redis: Redis = fakeredis.FakeAsyncRedis(protocol=2)
    else:
        server: ValkeyServer = request.getfixturevalue("server")
        server.command("FLUSHALL")
        redis = connect(RedisSettings(redis_url=SecretStr(server.url)), name="test")
    yield redis
    names: Any = await redis.keys("*")
    assert [name for name in names if await redis.pttl(name) < 0] == []
    await redis.aclose()


@pytest.fixture
def registry(redis: Redis) -> Registry:
    return Registry(redis, KEYS, shebang=not isinstance(redis, fakeredis.FakeAsyncRedis))


async def test_an_empty_registry(registry: Registry) -> None:
    assert await registry.snapshot() == Snapshot()


async def test_workers_and_models_are_read_as_they_were_announced(registry: Registry) -> None:
    adapter = ModelRecord(name="adapter/ü", pool="m", parent="m")
    one, two = worker("w1", models=["m", "adapter/ü"]), worker("w2", state="draining")
    await registry.announce(one, [MODEL, adapter], lease_s=3)
    await registry.announce(two, [MODEL], lease_s=3)
    snapshot = await registry.snapshot()
    assert snapshot.workers == (one, two)
    assert snapshot.models == {"m": MODEL, "adapter/ü": adapter}
    assert snapshot.ready("adapter/ü") == [one]
    assert snapshot.ready() == [one]
    assert snapshot.ready("unknown") == []


async def test_a_starting_worker_is_seen_but_not_ready(registry: Registry) -> None:
    await registry.announce(worker(state="starting", pool="", models=["m"]), [], lease_s=3)
    snapshot = await registry.snapshot()
    assert [one.state for one in snapshot.workers] == ["starting"]
    assert snapshot.models == {}
    assert snapshot.ready() == []


async def test_each_announcement_renews_and_replaces(registry: Registry, redis: Redis) -> None:
    assert await registry.announce(worker(running=1), [MODEL], lease_s=3) is None
    await redis.pexpire(KEYS.worker("w1"), 500)
    before = await registry.announce(worker(running=2), [MODEL], lease_s=3)
    assert before == worker(running=1)
    assert 2000 < await redis.pttl(KEYS.worker("w1")) <= 3000
    assert [one.running for one in (await registry.snapshot()).workers] == [2]


async def test_another_versions_record_is_replaced_unread(registry: Registry, redis: Redis) -> None:
    await redis.set(KEYS.worker("w1"), b"\xc1")
    assert await registry.announce(worker(), [MODEL], lease_s=3) is None
    assert [one.id for one in (await registry.snapshot()).workers] == ["w1"]


async def test_a_lapsed_worker_is_forgotten_its_model_is_not(
    registry: Registry, redis: Redis
) -> None:
    await registry.announce(worker("w1"), [MODEL], lease_s=3)
    await registry.announce(worker("w2"), [MODEL], lease_s=3)
    await redis.delete(KEYS.worker("w1"))
    snapshot = await registry.snapshot()
    assert [one.id for one in snapshot.workers] == ["w2"]
    assert await redis.smembers(KEYS.workers()) == {b"w2"}
    await redis.delete(KEYS.worker("w2"))
    snapshot = await registry.snapshot()
    assert snapshot.workers == ()
    assert snapshot.models == {"m": MODEL}


async def test_leaving(registry: Registry, redis: Redis) -> None:
    await registry.announce(worker("w1"), [MODEL], lease_s=3)
    await registry.leave("w1")
    await registry.leave("w1")
    assert (await registry.snapshot()).workers == ()
    assert not await redis.exists(KEYS.workers(), KEYS.worker("w1"))


async def test_models_outlive_their_workers_by_days(registry: Registry, redis: Redis) -> None:
    await registry.announce(worker(), [MODEL], lease_s=3)
    assert await redis.pttl(KEYS.models()) > 6 * 24 * 3600 * 1000


async def test_a_registry_lost_with_its_server_fills_again(
    registry: Registry, redis: Redis
) -> None:
    await registry.announce(worker(), [MODEL], lease_s=3)
    await redis.flushall()
    assert await registry.snapshot() == Snapshot()
    await registry.announce(worker(), [MODEL], lease_s=3)
    assert (await registry.snapshot()).ready("m") == [worker()]


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
async def test_a_server_that_evicts_is_warned_of(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ValkeyServer("--maxmemory-policy", policy) as server:
        redis = connect(RedisSettings(redis_url=SecretStr(server.url)), name="test")
        with caplog.at_level(logging.WARNING, "headrace.registry"):
            await Registry(redis, Keys()).warn_of_eviction()
        await redis.aclose()
    warned = [record.getMessage() for record in caplog.records]
    assert warned == ([] if policy == "noeviction" else ["queue.evicts"])
