"""`status`: the pool at one glance."""

from __future__ import annotations

from typing import Any

from shared.admin.access import Access, Pool, pools_of, wall_age
from shared.admin.documents import Dead, Lane, Model, Server, Status, Worker
from shared.admin.lanes import Place, Stream, streams, waiting
from shared.border import translated
from shared.keys import LANES
from shared.protocol import WorkerRecord
from shared.registry import Snapshot

_FULL = 0.9
"""Share of the server's memory above which status warns."""


async def status(access: Access) -> Status:
    """Read the registry, the lanes and the server."""
    snapshot = await access.registry.snapshot()
    pools = pools_of(snapshot)
    lanes = await _lanes(access, pools)
    server = await _server(access)
    return Status(
        lanes=lanes,
        workers=[_worker(one) for one in snapshot.workers],
        models=_models(snapshot),
        dead=await _dead(access, pools),
        server=server,
        warnings=_warnings(lanes, snapshot, server),
    )


async def _lanes(access: Access, pools: list[Pool]) -> list[Lane]:
    found = await streams(access, pools)
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


async def _dead(access: Access, pools: list[Pool]) -> list[Dead]:
    counts = []
    for pool in pools:
        async with translated():
            lengths = [await access.redis.xlen(access.keys.dead(one)) for one in pool.tags]
        counts.append(Dead(pool=pool.name, jobs=sum(lengths)))
    return counts


async def _server(access: Access) -> Server:
    async with translated():
        told: dict[str, Any] = await access.redis.info("server")
        memory: dict[str, Any] = await access.redis.info("memory")
    return Server(
        name=str(told.get("server_name", "redis")),
        version=str(told.get("valkey_version") or told.get("redis_version", "")),
        used_memory=int(memory.get("used_memory", 0)),
        maxmemory=int(memory.get("maxmemory", 0)),
        maxmemory_policy=str(memory.get("maxmemory_policy", "")),
    )


def _warnings(lanes: list[Lane], snapshot: Snapshot, server: Server) -> list[str]:
    found = []
    if server.maxmemory_policy != "noeviction":
        found.append(
            f"maxmemory-policy is {server.maxmemory_policy or 'unknown'}: the server may throw "
            "jobs away; set it to noeviction"
        )
    if server.maxmemory and server.used_memory > _FULL * server.maxmemory:
        found.append(f"more than {_FULL:.0%} of the server's memory is in use")
    serving = {one.pool for one in snapshot.ready()}
    for pool in sorted({one.pool for one in lanes if one.queued} - serving):
        found.append(f"jobs wait in pool {pool}, and no worker is ready there")
    return found
