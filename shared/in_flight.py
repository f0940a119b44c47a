"""The jobs that each API key has in flight, counted for all gateways.

A key's jobs have tags of many pools, and so may live on other servers than its count: what nobody
has taken out of it, because a gateway died, is found by looking at the jobs themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis

from shared.border import translated
from shared.connection import Clients
from shared.errors import QueueUnavailable
from shared.keys import Keys, tag_of
from shared.scripts import Script
from shared.transitions import MAX_TIMEOUT_S

T = TypeVar("T")

_PAGE = 500


class InFlightCounts:
    """Reads and writes the counts. Raises `QueueUnavailable`, `QueueFull`."""

    def __init__(self, clients: Clients, keys: Keys) -> None:
        self._clients = clients
        self._keys = keys
        self._admit = Script("admit")

    async def admit(self, key_id: str, limit: int, job_id: str) -> bool:
        """Count a job, once, unless its key has `limit` in flight already."""
        names = [self._keys.in_flight(key_id)]
        args = [job_id, limit, MAX_TIMEOUT_S * 1000]
        return bool(await self._at(key_id, lambda redis: self._admit(redis, names, args)))

    async def release(self, key_id: str, job_ids: Sequence[str]) -> None:
        """Take jobs out of a key's count."""
        name = self._keys.in_flight(key_id)
        await self._at(key_id, lambda redis: redis.hdel(name, *job_ids))

    async def prune(self, key_id: str, *, unknown_s: float) -> int:
        """Take out the jobs that have ended, and those that have not come in `unknown_s`.

        Returns how many those were.
        """
        name = self._keys.in_flight(key_id)

        async def read(redis: Redis) -> Any:
            pipeline = redis.pipeline(transaction=False)
            pipeline.hgetall(name)
            pipeline.time()
            return await pipeline.execute()

        counted, (seconds, _) = await self._at(key_id, read)
        admitted = {job_id.decode(): int(at) / 1000 for job_id, at in counted.items()}
        states = await self._states(list(admitted))
        over = [
            job_id
            for job_id, state in states.items()
            if state == b"done" or (state is None and seconds - admitted[job_id] > unknown_s)
        ]
        if over:
            await self.release(key_id, over)
        return len(over)

    async def _states(self, job_ids: Sequence[str]) -> dict[str, bytes | None]:
        """Return the states of jobs; those whose server is away are missing."""
        by_tag: dict[str, list[str]] = {}
        for job_id in job_ids:
            by_tag.setdefault(tag_of(job_id), []).append(job_id)
        states: dict[str, bytes | None] = {}
        for job_tag, ids in by_tag.items():
            for start in range(0, len(ids), _PAGE):
                page = ids[start : start + _PAGE]
                try:
                    found = await self._states_at(job_tag, page)
                except QueueUnavailable:
                    break
                states |= dict(zip(page, found, strict=True))
        return states

    async def _states_at(self, job_tag: str, job_ids: Sequence[str]) -> Any:
        async def read(redis: Redis) -> Any:
            pipeline = redis.pipeline(transaction=False)
            for job_id in job_ids:
                pipeline.hget(self._keys.job(job_id), "state")
            return await pipeline.execute()

        return await self._at(job_tag, read)

    async def _at(self, tag: str, operation: Callable[[Redis], Awaitable[T]]) -> T:
        async with translated():
            return await self._clients.run(tag, operation)
