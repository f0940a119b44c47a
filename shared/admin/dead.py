"""`dead …`: jobs that cost too many workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from redis.asyncio import Redis

from shared.admin.access import (
    PEEKED_AT_ONCE,
    Access,
    Refused,
    attempts,
    entry_time,
    readable,
)
from shared.admin.documents import DeadJob, DeadJobs, Purged, Requeued
from shared.keys import is_job_id, new_job_id, tag_of
from shared.lanes import LANE_TTL_MS
from shared.scripts import Script

_peek = Script("peek_dead")
_requeue = Script("requeue")

Row = list[Any]
"""Entry, job id, record without its body, length of the body, history."""


async def _read(access: Access, job_tag: str, limit: int) -> AsyncGenerator[Row, None]:
    """Yield what is in a shard's dead-letter, oldest first."""
    start = "-"
    while limit > 0:
        count = min(limit, PEEKED_AT_ONCE)
        page = await _peek_at(access, job_tag, start, count)
        for row in page:
            yield row
        if len(page) < count:
            return
        limit -= count
        start = f"({page[-1][0].decode()}"


async def _peek_at(access: Access, job_tag: str, start: str, count: int) -> list[Row]:
    key = access.keys.dead(job_tag)
    page: list[Row] = await access.at(job_tag, lambda redis: _peek(redis, [key], [start, count]))
    return page


async def _look(access: Access, job_id: str) -> Row | None:
    if is_job_id(job_id):
        count = await length(access, tag_of(job_id))
        async with aclosing(_read(access, tag_of(job_id), count)) as rows:
            async for row in rows:
                if row[1].decode() == job_id:
                    return row
    return None


async def _find(access: Access, job_id: str) -> Row:
    """Return a job's row in the dead-letter. Raises `Refused`."""
    row = await _look(access, job_id)
    if row is None:
        raise Refused(f"no job `{job_id}` in the dead-letter", "job_not_found")
    return row


async def holds(access: Access, job_id: str) -> bool:
    """Tell whether a job is in the dead-letter."""
    return await _look(access, job_id) is not None


async def length(access: Access, job_tag: str) -> int:
    """Return how many jobs are in a shard's dead-letter."""
    key = access.keys.dead(job_tag)
    return int(await access.at(job_tag, lambda redis: redis.xlen(key)))


async def listing(access: Access, *, pool: str | None, limit: int) -> DeadJobs:
    """List the dead-letter, oldest first within a pool."""
    now = await access.now()
    found: list[DeadJob] = []
    total = 0
    for one in await access.pools(pool):
        for job_tag in one.tags:
            total += await length(access, job_tag)
            async for row in _read(access, job_tag, limit - len(found)):
                found.append(_job(row, one.name, now))
    return DeadJobs(jobs=found, total=total)


async def show(access: Access, job_id: str) -> DeadJob:
    """Tell all about a job in the dead-letter but what was asked."""
    row = await _find(access, job_id)
    return _job(row, await access.pool_of(tag_of(job_id)), await access.now())


def _job(row: Row, pool: str | None, now: float) -> DeadJob:
    entry, job_id, record, body_bytes, history = row
    job = readable(record)
    died = entry_time(entry)
    return DeadJob(
        id=job_id.decode(),
        pool=pool,
        died=died,
        age_s=max(now - died, 0.0),
        model=job.model if job else None,
        lane=job.lane if job else None,
        tenant=job.tenant or None if job else None,
        path=job.path if job else None,
        stream=job.stream if job else None,
        sequences=job.sequences if job else None,
        body_bytes=body_bytes,
        request_id=job.request_id or None if job else None,
        gateway=job.gateway or None if job else None,
        history=attempts(history.decode(errors="replace")),
    )


async def requeue(access: Access, job_id: str, timeout_s: float) -> Requeued:
    """Submit a job of the dead-letter again, as a new one. Raises `Refused`."""
    row = await _find(access, job_id)
    job = readable(row[2])
    if job is None:
        raise Refused(f"the record of job `{job_id}` can't be read here", "unreadable")
    job_tag, keys = tag_of(job_id), access.keys
    new_id = new_job_id(job_tag)
    names = [keys.job(new_id), keys.lane(job_tag, job.lane), keys.dead(job_tag)]
    args = [
        row[0],
        new_id,
        job.lane,
        int(timeout_s * 1000),
        int(access.settings.result_ttl_s * 1000),
        LANE_TTL_MS,
        job.model,
        int(job.stream),
        job.tenant,
        job.weight,
    ]
    reply = await access.at(job_tag, lambda redis: _requeue(redis, names, args))
    if reply[0] == b"unreadable":
        raise Refused(f"the record of job `{job_id}` can't be read here", "unreadable")
    if reply[0] != b"queued":
        raise Refused(f"no job `{job_id}` in the dead-letter any more", "job_not_found")
    return Requeued(id=new_id, was=job_id, pool=await access.pool_of(job_tag), lane=job.lane)


async def _empty(redis: Redis, key: str) -> int:
    """Delete a stream and return how long it was."""
    pipeline = redis.pipeline(transaction=True)
    pipeline.xlen(key)
    pipeline.unlink(key)
    return int((await pipeline.execute())[0])


async def purge(access: Access, job_id: str | None, *, pool: str | None) -> Purged:
    """Forget a job of the dead-letter, or all of them, or all of a pool."""
    if job_id is not None:
        row = await _find(access, job_id)
        job_tag = tag_of(job_id)
        key = access.keys.dead(job_tag)
        gone = await access.at(job_tag, lambda redis: redis.xdel(key, row[0]))
        return Purged(purged=int(gone))
    purged = 0
    for one in await access.pools(pool):
        for job_tag in one.tags:
            purged += await access.at(job_tag, partial(_empty, key=access.keys.dead(job_tag)))
    return Purged(purged=purged)
