"""Reads lanes: what waits, what is claimed, and in which order. Page by page, never a whole lane.

A stream holds the claimed entries, which its group has delivered, and behind the group's last
delivered id those that wait. An entry is acknowledged and deleted in one step: what waits is the
stream's length less the claimed entries.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

from shared.admin.access import Access, Pool
from shared.border import translated
from shared.keys import GROUP, LANES

PAGE = 100
COUNTED = 10_000
"""Highest position that is counted out."""


@dataclass(frozen=True)
class Stream:
    """One of the two streams of one lane of one shard, at one moment."""

    key: str
    pool: str
    lane: str
    returned: bool
    length: int
    claimed: int
    delivered: str
    """The last entry that a worker was given."""
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
    access: Access, pools: Sequence[Pool], lanes: Sequence[str] = LANES
) -> list[Stream]:
    """Return the streams of lanes, in the order in which their entries are claimed."""
    places = [
        (pool.name, lane, job_tag, returned)
        for lane in lanes
        for pool in pools
        for job_tag in pool.tags
        for returned in (True, False)
    ]
    found: list[Stream] = []
    async with translated():
        pipeline = access.redis.pipeline(transaction=False)
        keys = []
        for _, lane, job_tag, returned in places:
            key = access.keys.returned if returned else access.keys.lane
            keys.append(key(job_tag, lane))
            pipeline.xlen(keys[-1])
            pipeline.xinfo_groups(keys[-1])
        replies = await _replies(pipeline)
    for index, (pool, lane, _, returned) in enumerate(places):
        length, groups = replies[2 * index] or 0, replies[2 * index + 1] or []
        claimed, delivered = _group(groups)
        before = 0 if returned else found[-1].queued
        key_name = keys[index]
        found.append(Stream(key_name, pool, lane, returned, length, claimed, delivered, before))
    return found


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


def _group(groups: list[dict[str, Any]]) -> tuple[int, str]:
    for group in groups:
        if group["name"] == GROUP.encode():
            return group["pending"], group["last-delivered-id"].decode()
    return 0, "0-0"


async def waiting(access: Access, stream: Stream, limit: int) -> AsyncGenerator[Place, None]:
    """Yield the first entries that wait, in order."""
    position, start = stream.before, f"({stream.delivered}"
    while limit > 0:
        count = min(limit, PAGE)
        async with translated():
            page: Any = await access.redis.xrange(stream.key, start, "+", count=count)
        for entry, fields in page:
            position += 1
            yield Place(stream, entry, fields[b"j"].decode(), position=position)
        if len(page) < count:
            return
        limit -= count
        start = f"({page[-1][0].decode()}"


async def claimed(access: Access, stream: Stream, limit: int) -> AsyncGenerator[Place, None]:
    """Yield the first entries that workers hold, oldest first."""
    start = "-"
    while limit > 0:
        count = min(limit, PAGE)
        async with translated():
            pipeline = access.redis.pipeline(transaction=False)
            pipeline.xpending_range(stream.key, GROUP, start, "+", count)
            page = (await _replies(pipeline))[0] or []
            for one in page:
                pipeline.xrange(stream.key, one["message_id"], one["message_id"])
            rows = await _replies(pipeline) if page else []
        for one, row in zip(page, rows, strict=True):
            if row:
                worker = one["consumer"].decode()
                yield Place(stream, row[0][0], row[0][1][b"j"].decode(), worker=worker)
        if len(page) < count:
            return
        limit -= count
        start = f"({page[-1]['message_id'].decode()}"


async def position(access: Access, stream: Stream, entry: str) -> int | None:
    """Return the place of an entry in its lane; None if it doesn't wait or waits too far back."""
    counted, start = 0, f"({stream.delivered}"
    while counted < COUNTED:
        async with translated():
            page: Any = await access.redis.xrange(stream.key, start, entry, count=PAGE * 10)
        counted += len(page)
        if page and page[-1][0].decode() == entry:
            return stream.before + counted
        if len(page) < PAGE * 10:
            return None
        start = f"({page[-1][0].decode()}"
    return None
