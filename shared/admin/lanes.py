"""Reads lanes: what waits, what is claimed, and in which order. Page by page, never a whole lane.

A stream holds the claimed entries, which are pending in its group, and those that wait. An entry is
acknowledged and deleted in one step: what waits is the stream's length less the claimed entries. It
is listed in order of age; tenants take turns, so it is not claimed quite so.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

from shared.admin.access import Access, Pool
from shared.errors import QueueUnavailable
from shared.keys import GROUP, LANES

PAGE = 100


@dataclass(frozen=True)
class Stream:
    """One of the two streams of one lane of one shard, at one moment."""

    key: str
    tag: str
    pool: str
    lane: str
    returned: bool
    length: int
    claimed: int
    before: int = 0
    """Entries that wait in the lane's other stream and are claimed first."""

    @property
    def queued(self) -> int:
        return max(self.length - self.claimed, 0)


@dataclass(frozen=True)
class Place:
    """An entry of a stream."""

    stream: Stream
    entry: bytes
    job_id: str
    worker: str | None = None
    """Who has claimed it."""
    position: int | None = None
    """Of one that waits."""


async def streams(
    access: Access,
    pools: Sequence[Pool],
    lanes: Sequence[str] = LANES,
    away: set[str] | None = None,
) -> list[Stream]:
    """Return the streams of lanes, in the order in which their entries are claimed.

    With `away` those of shards that can't be reached, unless none can, are missing; it tells them.
    """
    places = [
        (pool.name, lane, job_tag, returned)
        for lane in lanes
        for pool in pools
        for job_tag in pool.tags
        for returned in (True, False)
    ]
    wanted: dict[str, list[str]] = {}
    for _, lane, job_tag, returned in places:
        key = access.keys.returned if returned else access.keys.lane
        wanted.setdefault(job_tag, []).append(key(job_tag, lane))
    told: dict[str, list[Any]] = {}
    for job_tag, keys in wanted.items():
        try:
            told[job_tag] = await access.at(job_tag, partial(_sizes, keys=keys))
        except QueueUnavailable:
            if away is None or len(away) + 1 == len(wanted):
                raise
            away.add(job_tag)
    found: list[Stream] = []
    for pool, lane, job_tag, returned in places:
        if job_tag not in told:
            continue
        length, groups = told[job_tag].pop(0)
        claimed = _claimed(groups)
        before = 0 if returned else found[-1].queued
        key_name = wanted[job_tag].pop(0)
        found.append(Stream(key_name, job_tag, pool, lane, returned, length, claimed, before))
    return found


async def _sizes(redis: Redis, keys: Sequence[str]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the length and the groups of streams."""
    pipeline = redis.pipeline(transaction=False)
    for key in keys:
        pipeline.xlen(key)
        pipeline.xinfo_groups(key)
    replies = await _replies(pipeline)
    return [(replies[at] or 0, replies[at + 1] or []) for at in range(0, len(replies), 2)]


async def _replies(pipeline: Pipeline) -> list[Any]:
    """Run a pipeline; what isn't there, a stream or its group, gives None."""
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    for index, reply in enumerate(replies):
        if isinstance(reply, ResponseError) and _is_missing(reply):
            replies[index] = None
        elif isinstance(reply, Exception):
            raise reply
    return replies


def _is_missing(error: ResponseError) -> bool:
    text = str(error)
    return "no such key" in text or "NOGROUP" in text


def _claimed(groups: list[dict[str, Any]]) -> int:
    return sum(group["pending"] for group in groups if group["name"] == GROUP.encode())


async def _waiting_page(
    redis: Redis, key: str, start: str
) -> tuple[list[tuple[bytes, Any]], set[bytes]]:
    """Return a page of a stream, and which of it are claimed."""
    page: Any = await redis.xrange(key, start, "+", count=PAGE)
    pipeline = redis.pipeline(transaction=False)
    if page:
        pipeline.xpending_range(key, GROUP, page[0][0], page[-1][0], PAGE)
    held = (await _replies(pipeline))[0] or [] if page else []
    return page, {one["message_id"] for one in held}


async def waiting(access: Access, stream: Stream, limit: int) -> AsyncGenerator[Place, None]:
    """Yield the first entries that wait, the oldest first."""
    position, start = stream.before, "-"
    while True:
        page, held = await access.at(
            stream.tag, partial(_waiting_page, key=stream.key, start=start)
        )
        for entry, fields in page:
            if entry in held:
                continue
            if limit == 0:
                return
            limit -= 1
            position += 1
            yield Place(stream, entry, fields[b"j"].decode(), position=position)
        if len(page) < PAGE:
            return
        start = f"({page[-1][0].decode()}"


async def _held(redis: Redis, key: str, start: str, count: int) -> tuple[list[Any], list[Any]]:
    """Return a page of the claimed entries, and of each what it holds."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.xpending_range(key, GROUP, start, "+", count)
    page = (await _replies(pipeline))[0] or []
    for one in page:
        pipeline.xrange(key, one["message_id"], one["message_id"])
    return page, await _replies(pipeline) if page else []


async def claimed(access: Access, stream: Stream, limit: int) -> AsyncGenerator[Place, None]:
    """Yield the first entries that workers hold, oldest first."""
    start = "-"
    while limit > 0:
        count = min(limit, PAGE)
        read = partial(_held, key=stream.key, start=start, count=count)
        page, rows = await access.at(stream.tag, read)
        for one, row in zip(page, rows, strict=True):
            if row:
                worker = one["consumer"].decode()
                yield Place(stream, row[0][0], row[0][1][b"j"].decode(), worker=worker)
        if len(page) < count:
            return
        limit -= count
        start = f"({page[-1]['message_id'].decode()}"
