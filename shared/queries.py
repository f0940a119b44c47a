"""What can be asked of the queue: nothing here changes a job's state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis

from shared import protocol
from shared.border import translated
from shared.connection import Clients, clients_of
from shared.keys import GROUP, LANES, Keys, hash_tag, tag_of
from shared.outcomes import Claimed, LogPage, Readers
from shared.scripts import NAMES, Script

LOG_PAGE = 200
"""Log entries read at once."""

T = TypeVar("T")


class Queries:
    """Reads of the queue, and how scripts are called. Raises `QueueUnavailable`."""

    def __init__(
        self,
        redis: Redis | Clients,
        keys: Keys,
        *,
        result_ttl_s: float,
        max_strikes: int = 3,
        shebang: bool = True,
    ) -> None:
        self._clients = clients_of(redis)
        self._keys = keys
        self._result_ttl_ms = int(result_ttl_s * 1000)
        self._max_strikes = max_strikes
        self._scripts = {
            name: Script(name, shebang=shebang, sharded=self._clients.sharded) for name in NAMES
        }

    async def _call(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        script = self._scripts[name]
        return await self._at(hash_tag(keys[0]), lambda redis: script(redis, keys, args))

    async def _at(self, job_tag: str, operation: Callable[[Redis], Awaitable[T]]) -> T:
        async with translated():
            return await self._clients.run(job_tag, operation)

    def _lanes(self, job_id: str, lane: str) -> list[str]:
        job_tag = tag_of(job_id)
        return [self._keys.lane(job_tag, lane), self._keys.returned(job_tag, lane)]

    def _streams(
        self, job_tag: str, lanes: Iterable[str] = LANES, *, returned: bool = True
    ) -> dict[str, tuple[str, bool]]:
        """Return stream → (lane, returned), in order of urgency: what was handed back first."""
        streams = {}
        for lane in lanes:
            if returned:
                streams[self._keys.returned(job_tag, lane)] = (lane, True)
            streams[self._keys.lane(job_tag, lane)] = (lane, False)
        return streams

    async def pending(
        self, job_tag: str, *, worker: str | None = None, idle_s: float = 0
    ) -> list[Claimed]:
        """Return entries that are claimed: a worker's own, or those whose lease has lapsed."""

        async def read(redis: Redis) -> list[Claimed]:
            return [
                Claimed(job_tag, lane, returned, entry, job_id)
                for stream, (lane, returned) in self._streams(job_tag).items()
                async for entry, job_id in self._held(redis, stream, worker, int(idle_s * 1000))
            ]

        return await self._at(job_tag, read)

    async def _held(
        self, redis: Redis, stream: str, worker: str | None, idle_ms: int
    ) -> AsyncIterator[tuple[bytes, str]]:
        """Yield the claimed entries of a stream, page by page, with their jobs."""
        start = "-"
        while True:
            page: Any = await redis.xpending_range(
                stream, GROUP, start, "+", LOG_PAGE, consumername=worker, idle=idle_ms or None
            )
            for one in page:
                entry = one["message_id"]
                rows: Any = await redis.xrange(stream, entry, entry)
                yield entry, rows[0][1][b"j"].decode() if rows else ""
            if len(page) < LOG_PAGE:
                return
            start = f"({page[-1]['message_id'].decode()}"

    async def readers(self, job_ids: Sequence[str]) -> list[Readers]:
        """Return who reads the answers of jobs, which share one tag."""
        names = [self._keys.job(job_id) for job_id in job_ids]
        return [
            Readers(tuple(found.decode().split()), over_ms >= 0)
            for found, over_ms in await self._call("readers", names, [])
        ]

    async def lane_of(self, job_id: str, *, tenant: str | None = None) -> str | None:
        """Return the lane of a job, or None if there is no such job, of this tenant if one is
        given."""
        key, fields = self._keys.job(job_id), ["lane", "tenant"]
        found: Any = await self._at(tag_of(job_id), lambda redis: redis.hmget(key, fields))
        lane, owner = (one.decode() if one else "" for one in found)
        return lane if lane and tenant in (None, owner) else None

    async def read_log(self, job_id: str, after: int, count: int = LOG_PAGE) -> LogPage:
        """Read a page of a job's log behind a sequence number."""

        async def read(redis: Redis) -> Any:
            pipeline = redis.pipeline(transaction=False)
            pipeline.xrange(self._keys.log(job_id), f"({after}-0", "+", count=count)
            pipeline.hget(self._keys.job(job_id), "state")
            return await pipeline.execute()

        entries, state = await self._at(tag_of(job_id), read)
        envelopes = [protocol.open_message(fields[b"f"]) for _, fields in entries]
        return LogPage(envelopes, state.decode() if state else None, len(entries) == count)

    async def depths(self, job_tag: str) -> dict[str, int]:
        """Return the number of jobs in each lane, queued and running."""
        streams = self._streams(job_tag)

        async def read(redis: Redis) -> Any:
            pipeline = redis.pipeline(transaction=False)
            for stream in streams:
                pipeline.xlen(stream)
            return await pipeline.execute()

        lengths = await self._at(job_tag, read)
        depths = dict.fromkeys(LANES, 0)
        for (lane, _), length in zip(streams.values(), lengths, strict=True):
            depths[lane] += length
        return depths
