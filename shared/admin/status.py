"""`status`: the pool at one glance."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from shared.admin import dead
from shared.admin.access import Access, Pool, pools_of, wall_age
from shared.admin.documents import Dead, Lane, Model, Server, Status, Worker
from shared.admin.lanes import Place, Stream, streams, waiting
from shared.border import translated
from shared.errors import QueueUnavailable
from shared.keys import LANES
from shared.protocol import WorkerRecord
from shared.registry import Snapshot

_FULL = 0.9
"""Share of the server's memory above which status warns."""


async def status(access: Access) -> Status:
    """Read the registry, the lanes and the servers."""
    snapshot = await access.registry.snapshot()
    pools = pools_of(snapshot)
    away: set[str] = set()
    lanes = await _lanes(access, pools, away)
    servers = await _servers(access)
    return Status(
        lanes=lanes,
        workers=[_worker(one) for one in snapshot.workers],
        models=_models(snapshot),
        dead=await _dead(access, pools, away),
        servers=servers,
        warnings=_warnings(lanes, snapshot, servers, away),
    )


async def _lanes(access: Access, pools: list[Pool], away: set[str]) -> list[Lane]:
    found = await streams(access, pools, away=away)
    now = await access.now()
    lanes = []
    for pool in pools:
        for lane in LANES:
            parts = [one for one in found if (one.pool, one.lane) == (pool.name, lane)]
            lanes.append(
                Lane(
                    pool=pool.name,
                    lane=lane,
                    queued=sum(one.queued for one in parts),
                    running=sum(one.claimed for one in parts),
                    oldest_s=await _oldest(access, parts, now),
                )
            )
    return lanes


async def _oldest(access: Access, parts: list[Stream], now: float) -> float | None:
    """Return the age of the oldest of the jobs that stand first in a lane's streams."""
    first: list[Place] = []
    for stream in parts:
        first += [place async for place in waiting(access, stream, 1)]
    peeked = await access.peek([place.job_id for place in first])
    times = [job.time("submitted") for job in peeked.values()]
    ages = [max(now - at, 0.0) for at in times if at is not None]
    return max(ages, default=None)


def _worker(record: WorkerRecord) -> Worker:
    return Worker(
        id=record.id,
        pool=record.pool,
        state=record.state,
        seats=record.seats,
        reserve=record.reserve,
        running=record.running,
        waiting=record.waiting,
        kv_usage=record.kv_usage,
        version=record.version,
        engine=record.engine,
        models=record.models,
        age_s=wall_age(record.started_ms),
    )


def _models(snapshot: Snapshot) -> list[Model]:
    return [
        Model(
            name=name,
            pool=record.pool,
            shards=record.shards,
            workers=len(snapshot.ready(name)),
            max_model_len=record.max_model_len,
            parent=record.parent,
        )
        for name, record in sorted(snapshot.models.items())
    ]


async def _dead(access: Access, pools: list[Pool], away: set[str]) -> list[Dead]:
    counts = []
    for pool in pools:
        lengths = [await dead.length(access, one) for one in pool.tags if one not in away]
        counts.append(Dead(pool=pool.name, jobs=sum(lengths)))
    return counts


async def _servers(access: Access) -> list[Server]:
    async with translated():
        clients = await access.clients.everywhere()
    return [await _server(address, redis) for address, redis in clients.items()]


async def _server(address: str, redis: Redis) -> Server:
    told: dict[str, Any] = {}
    reached = True
    try:
        async with translated():
            told = {**await redis.info("server"), **await redis.info("memory")}
    except QueueUnavailable:
        reached = False
    return Server(
        address=address,
        reached=reached,
        name=str(told.get("server_name", "redis")) if reached else "",
        version=str(told.get("valkey_version") or told.get("redis_version", "")),
        used_memory=int(told.get("used_memory", 0)),
        maxmemory=int(told.get("maxmemory", 0)),
        maxmemory_policy=str(told.get("maxmemory_policy", "")),
    )


def _warnings(
    lanes: list[Lane], snapshot: Snapshot, servers: list[Server], away: set[str]
) -> list[str]:
    found = [f"the server at {one.address} cannot be reached" for one in servers if not one.reached]
    if away:
        found.append(f"jobs of {len(away)} shards are not shown: their server cannot be reached")
    reached = [one for one in servers if one.reached]
    for policy in sorted({one.maxmemory_policy for one in reached} - {"noeviction"}):
        found.append(
            f"maxmemory-policy is {policy or 'unknown'}: the server may throw "
            "jobs away; set it to noeviction"
        )
    if any(one.maxmemory and one.used_memory > _FULL * one.maxmemory for one in reached):
        found.append(f"more than {_FULL:.0%} of the server's memory is in use")
    serving = {one.pool for one in snapshot.ready()}
    for pool in sorted({one.pool for one in lanes if one.queued} - serving):
        found.append(f"jobs wait in pool {pool}, and no worker is ready there")
    return found
