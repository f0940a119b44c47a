"""A cluster: what lives where, what is done while a part is away, and pools of several shards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeout

from shared.admin import jobs
from shared.admin.access import Access
from shared.admin.drain import drain
from shared.admin.settings import AdminSettings
from shared.admin.status import status
from shared.apikeys import KeyStore
from shared.connection import Connections
from shared.in_flight import InFlightCounts
from shared.keys import REGISTRY, Keys, hash_tag, new_job_id, tags
from shared.protocol import Job
from shared.servers import SLOTS, slot
from shared.settings import RedisSettings
from shared.subscribers import IDLE_TAGS, Subscribers
from shared.transitions import Transitions
from tests.faults.clients import EXACT, Client
from tests.integration.test_pubsub import Ear
from tests.support import sse
from tests.support.apikeys import make_key
from tests.support.cluster import PRIMARIES, Cluster
from tests.support.processes import Pool
from tests.support.valkey import free_port
from tests.support.waiting import until
from tests.wire.records import make_job

SHARDS = 3
TAGS = tags("simulated", SHARDS)
SIMULATED = {"ttft_ms": 10, "tpot_ms": 10, "seats": 32}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Tests share it: use channels and keys that no other test uses, and lose nothing of it."""
    with Cluster() as servers:
        yield servers


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    with Cluster() as servers:
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
    made = Subscribers(settings(url), name="test-pubsub", ack_timeout_s=3)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def tag_at(cluster: Cluster, index: int, *, but: str = "") -> str:
    """Return one of the pool's tags, or any, whose slot the n-th primary has from the start."""
    found = (f"{n:010x}" for n in range(100_000))
    return next(one for one in [*TAGS, *found] if slot(one) * PRIMARIES // SLOTS == index)


# Commands


async def test_each_tag_has_its_server_and_one_pool_for_each(cluster: Cluster) -> None:
    async with connections(cluster.url) as redis:
        for tag in [tag_at(cluster, at) for at in range(PRIMARIES)] + TAGS:
            await redis.run(tag, partial(_set, key=f"{{{tag}}}:k", value=tag))
            assert cluster.command(tag, "GET", f"{{{tag}}}:k") == tag.encode()
        assert len(await redis.everywhere()) == PRIMARIES
        assert len(redis._clients) == PRIMARIES


async def _set(redis: Redis, key: str, value: str) -> None:
    await redis.set(key, value)


@pytest.mark.parametrize("whole", [False, True])
async def test_commands_follow_a_slot(cluster: Cluster, whole: bool) -> None:
    tag = "moving-whole" if whole else "moving"
    async with connections(cluster.url) as redis:
        await redis.run(tag, lambda one: one.set(f"{{{tag}}}:k", 0))
        (cluster.move_whole if whole else cluster.move)(tag, cluster.other(tag))
        assert await redis.run(tag, lambda one: one.incr(f"{{{tag}}}:k")) == 1
        assert cluster.command(tag, "GET", f"{{{tag}}}:k") == b"1"


async def test_commands_wait_for_a_slot_that_is_half_moved(cluster: Cluster) -> None:
    tag = "half"
    async with connections(cluster.url) as redis:
        keys = [f"{{{tag}}}:{n}" for n in range(2)]
        await redis.run(tag, lambda one: one.mset(dict.fromkeys(keys, "v")))
        source, to = cluster.owner(tag), cluster.other(tag)
        cluster.open_move(tag, to)
        source.command("MIGRATE", to.host, to.port, "", 0, 5000, "KEYS", keys[0])
        reading = asyncio.create_task(redis.run(tag, lambda one: one.mget(keys)))
        await asyncio.wait({reading}, timeout=0.1)
        assert not reading.done()
        await asyncio.to_thread(cluster.move, tag, to)
        assert await reading == [b"v", b"v"]


async def test_a_slot_that_stays_half_moved_is_given_up(cluster: Cluster) -> None:
    tag = "stuck"
    async with connections(cluster.url) as redis:
        keys = [f"{{{tag}}}:{n}" for n in range(2)]
        await redis.run(tag, lambda one: one.mset(dict.fromkeys(keys, "v")))
        source, to = cluster.owner(tag), cluster.other(tag)
        cluster.open_move(tag, to)
        source.command("MIGRATE", to.host, to.port, "", 0, 5000, "KEYS", keys[0])
        try:
            async with asyncio.timeout(3):
                with pytest.raises(Exception, match=r"(?i)tryagain|multiple keys"):
                    await redis.run(tag, lambda one: one.mget(keys))
        finally:
            cluster.move(tag, to)


async def test_dead_and_frozen_seeds(own_cluster: Cluster) -> None:
    frozen, *_ = own_cluster.servers
    tag = tag_at(own_cluster, 1)
    seeds = [
        f"127.0.0.1:{free_port()}",
        f"127.0.0.1:{frozen.port}",
        own_cluster.servers[2].url[8:-2],
    ]
    frozen.pause()
    async with connections(f"redis+cluster://{','.join(seeds)}") as redis:
        async with asyncio.timeout(1.5):
            await redis.run(tag, lambda one: one.set(f"{{{tag}}}:k", "1"))
        gone = tag_at(own_cluster, 0)
        with pytest.raises((RedisTimeout, RedisConnectionError)):
            await redis.run(gone, lambda one: one.get(f"{{{gone}}}:k"))
    frozen.resume()


# Subscriptions


@pytest.mark.parametrize("whole", [False, True])
async def test_all_subscriptions_of_a_slot_follow_it(cluster: Cluster, whole: bool) -> None:
    tag = "channels-whole" if whole else "channels"
    async with subscribers(cluster.url) as subscriber:
        ears = {f"{{{tag}}}:{n}": Ear() for n in range(700)}
        other = Ear()
        await subscriber.subscribe("{elsewhere}:0", other)
        for channel, ear in ears.items():
            subscriber.keep(channel, ear)
        await until(lambda: all(ear.subscriptions == 1 for ear in ears.values()), "all stand")
        source, to = cluster.owner(tag), cluster.other(tag)
        (cluster.move_whole if whole else cluster.move)(tag, to)
        await until(lambda: all(ear.subscriptions == 2 for ear in ears.values()), "all moved")
        for channel in ears:
            assert to.command("SPUBLISH", channel, "hello") == 1
        await until(lambda: all(ear.messages == [b"hello"] for ear in ears.values()), "all heard")
        assert source.command("PUBSUB", "SHARDCHANNELS", f"{{{tag}}}*") == []
        assert other.subscriptions == 1


async def test_leaving_and_coming_back_at_once_is_no_move(cluster: Cluster) -> None:
    async with subscribers(cluster.url) as subscriber:
        ear = Ear()
        await subscriber.subscribe("{back}:0", ear)
        for _ in range(20):
            subscriber.unsubscribe("{back}:0", ear)
            await subscriber.subscribe("{back}:0", ear)
        await until(
            lambda: cluster.command("back", "SPUBLISH", "{back}:0", "x") == 1, "one listens"
        )
        await ear.heard(1)
        assert subscriber.reconnects == 0


async def test_tags_from_outside_do_not_add_up(cluster: Cluster) -> None:
    async with subscribers(cluster.url) as subscriber:
        kept = Ear()
        await subscriber.subscribe("{kept}:0", kept)
        for n in range(IDLE_TAGS + 20):
            ear = Ear()
            await subscriber.subscribe(f"{{made-up-{n}}}:0", ear)
            subscriber.unsubscribe(f"{{made-up-{n}}}:0", ear)
        listed = [
            one.command("CLIENT", "LIST").count(b"name=test-pubsub") for one in cluster.servers
        ]
        assert sum(listed) <= IDLE_TAGS + 2
        assert cluster.command("kept", "SPUBLISH", "{kept}:0", "x") == 1


async def test_a_reader_that_still_listens_is_not_thought_to_have_gone(cluster: Cluster) -> None:
    keys = Keys("listening")
    job = Job(id=new_job_id(TAGS[0]), path="/", body=b"", model="tiny", lane="batch", patience_s=0)
    async with connections(cluster.url) as redis, subscribers(cluster.url) as subscriber:
        transitions = Transitions(redis, keys, result_ttl_s=10)
        await transitions.submit(job, limit=9, timeout_s=60, reader="g/1")
        ear = Ear()
        await subscriber.subscribe(keys.channel(job.id), ear)
        left = await transitions.leave(job.id, job.lane, ["g/1"], doubtful=True)
        assert left.word == "read"
        subscriber.unsubscribe(keys.channel(job.id), ear)

        async def gone() -> bool:
            left = await transitions.leave(job.id, job.lane, ["g/1"], doubtful=True)
            return left.word == "queued"

        await until(gone, "nobody listens")


# Pools


async def send(pool: Pool, count: int, **fields: object) -> list[Client]:
    kinds = ("chat", "completion", "whole")
    clients = [
        Client(pool.url, f"say {n}", 30, kinds[n % 3], extra=fields)  # type: ignore[arg-type]
        for n in range(count)
    ]
    await asyncio.gather(*(client.run() for client in clients))
    return clients


async def test_pools_with_different_numbers_of_shards(cluster: Cluster) -> None:
    async with Pool(cluster.url, workers=0, gateways=1, simulated=SIMULATED) as pool:
        for name, shards in (("one", 1), ("five", 5)):
            pool.add_worker(shards=shards, simulated={"models": name})
        await pool.wait_ready()
        used = {}
        for name, shards in (("one", 1), ("five", 5)):
            clients = await send(pool, 30, model=name)
            assert Counter(client.outcome() for client in clients) == {EXACT: 30}
            used[name] = {client.job_id[:10] for client in clients}
            assert used[name] <= set(tags(name, shards))
        assert len(used["five"]) > 2


async def test_a_lane_is_bounded_over_all_shards(cluster: Cluster) -> None:
    gateway = {"max_queue_depth": 9, "key_prefix": "bounded", "drain_timeout_s": 0.5}
    worker = {"shards": SHARDS, "key_prefix": "bounded", "drain_timeout_s": 0.5}
    slow = {"seats": 3, "ttft_ms": 10_000}
    async with Pool(
        cluster.url, workers=1, gateways=1, gateway=gateway, worker=worker, simulated=slow
    ) as pool:
        clients = [Client(pool.url, f"wait {n}", 2, "whole") for n in range(40)]
        runs = [asyncio.create_task(client.run()) for client in clients]

        async def queued() -> int:
            """Return the jobs in all lanes, once all that are not among them are refused."""
            keys = [key(tag, "interactive") for tag in TAGS for key in (lanes.lane, lanes.returned)]
            depth = sum(cluster.command(hash_tag(key), "XLEN", key) for key in keys)
            assert depth + sum(client.status == 503 for client in clients) == len(clients)
            return int(depth)

        lanes = Keys("bounded")
        depth = await until(queued, "refusals")
        # 3 seats and 9 that wait, a third in each shard; what is handed back makes room.
        assert 12 <= depth <= 12 + SHARDS * 3
        assert {client.outcome() for client in clients if client.status} == {"queue_full"}
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def test_starting_and_working_while_a_primary_is_down(own_cluster: Cluster) -> None:
    """Without a replica its shards stay away; all else goes on, and it comes back by itself."""
    registry = slot(REGISTRY) * PRIMARIES // SLOTS
    down = next(at for at in range(PRIMARIES) if at != registry)
    assert any(slot(tag) * PRIMARIES // SLOTS == down for tag in tags("simulated", 8))
    dead = own_cluster.servers[down]
    dead.kill()
    worker = {"shards": 8}
    async with Pool(own_cluster.url, workers=1, worker=worker, simulated=SIMULATED) as pool:
        clients = await send(pool, 30)
        assert Counter(client.outcome() for client in clients) == {EXACT: 30}
        given = AdminSettings(redis_url=SecretStr(own_cluster.url))
        async with Access(given) as access:
            told = await status(access)
        assert [one.address for one in told.servers if not one.reached] == [
            f"127.0.0.1:{dead.port}"
        ]
        assert any("shards are not shown" in one for one in told.warnings)
        lines = pool.gateways[0].log.splitlines()
        assert len([line for line in lines if " shards.away " in line]) == 1
        dead.start()
        await until(lambda: " shards.reached" in pool.gateways[0].log, "all shards", timeout=8)
        clients = await send(pool, 30)
        assert Counter(client.outcome() for client in clients) == {EXACT: 30}


async def test_cancels_and_headrace_admin(cluster: Cluster) -> None:
    keys = {"key_prefix": "administered"}
    async with Pool(
        cluster.url,
        gateway=keys,
        worker={"shards": SHARDS, **keys},
        simulated={**SIMULATED, "tpot_ms": 50},
    ) as pool:
        clients = [Client(pool.url, f"go on {n}", 5000) for n in range(12)]
        runs = [asyncio.create_task(client.run()) for client in clients]
        await until(lambda: all(client.words for client in clients), "all stream")
        given = AdminSettings(redis_url=SecretStr(cluster.url), key_prefix="administered")
        async with Access(given) as access:
            told = await status(access)
            assert len(told.servers) == PRIMARIES
            assert next((one.lane, one.running) for one in told.lanes) == ("interactive", 12)
            listed = await jobs.jobs(access, pool=None, lane=None, state=None, limit=100)
            assert {one.id for one in listed.jobs} == {client.job_id for client in clients}
            shown = await jobs.show(access, clients[0].job_id)
            assert (shown.state, shown.pool) == ("running", "simulated")
            done = await jobs.cancel(access, clients[0].job_id)
            assert done.outcome == "cancelled_running"
            for client in clients[1:]:
                response, _ = await sse.fetch(f"{pool.url}/v1/jobs/{client.job_id}/cancel", {})
                assert response.status == 200
            await asyncio.wait(runs, timeout=5)
            assert Counter(client.outcome() for client in clients) == {"cancelled": 12}
            left = await drain(access, "worker-0", 10)
            assert left.outcome == "left"
        assert await pool.workers[0].wait() == 0


async def test_a_keys_jobs_are_counted_whatever_servers_they_are_on(cluster: Cluster) -> None:
    keys = Keys("counted")
    async with connections(cluster.url) as clients:
        key = await make_key(clients, keys, max_in_flight=SHARDS, tokens_per_minute=100)
        (record,) = await KeyStore(clients, keys).find([key.id])
        assert record is not None
        assert record.max_in_flight == SHARDS
        counts, queue = InFlightCounts(clients, keys), Transitions(clients, keys, result_ttl_s=60)
        jobs_of_all = [make_job(id=new_job_id(one)) for one in TAGS]
        for job in jobs_of_all:
            assert (await counts.admit(record, job.id)).verdict == "ok"
            await queue.submit(job, limit=9, timeout_s=60)
        assert (await counts.admit(record, new_job_id(TAGS[0]))).verdict == "in_flight"
        assert await counts.prune(key.id, unknown_s=0) == 0
        for job in jobs_of_all[1:]:
            await queue.cancel(job.id, job.lane)
        assert await counts.prune(key.id, unknown_s=0) == SHARDS - 1
        assert await counts.settle_ended(key.id, unknown_s=60) == 1
        assert (await counts.admit(record, new_job_id(TAGS[0]))).verdict == "ok"
