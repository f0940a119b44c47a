"""What each API key has in flight and has used within a minute, counted for all gateways.

A key's jobs have tags of many pools, and so may live on other servers than its counts: what nobody
has taken out of them, because a gateway died, is found by looking at the jobs themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from shared.border import translated
from shared.connection import Clients
from shared.errors import QueueUnavailable
from shared.keys import Keys, tag_of
from shared.protocol import KeyRecord, Usage, decode_usage
from shared.scripts import Script
from shared.transitions import MAX_TIMEOUT_S

T = TypeVar("T")

WINDOW_S = 60
_WINDOW_TTL_MS = (WINDOW_S + 2) * 1000
_PAGE = 500
_FIELDS = ("state", "usage", "finished")


@dataclass(frozen=True)
class Window:
    """What a key has used of a limit per minute."""

    limit: int
    used: int
    wait_s: float
    """Until there is room; 0: there is."""
    reset_s: float
    """Until nothing is used."""

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class Admission:
    """`ok`, or which limit is reached: `in_flight`, `requests` or `tokens`. None: no such limit."""

    verdict: str
    requests: Window | None = None
    tokens: Window | None = None


@dataclass(frozen=True)
class _Job:
    counted_s: float
    state: bytes | None
    usage: bytes | None
    finished_ms: bytes | None

    def is_over(self, now_s: float, unknown_s: float) -> bool:
        """Tell whether it has ended, or won't come any more."""
        if self.state is None:
            return now_s - self.counted_s > unknown_s
        return self.state == b"done"

    def tokens(self, now_s: float) -> int:
        """What is still to be charged: nothing for one that ended long ago, or before it was
        counted, which it was for somebody who sent it again."""
        if not self.usage or not self.finished_ms:
            return 0
        finished_s = int(self.finished_ms) / 1000
        late = finished_s < self.counted_s or now_s - finished_s > WINDOW_S
        try:
            return 0 if late else tokens_of(decode_usage(self.usage))
        except msgspec.MsgspecError:  # Another version's.
            return 0


def tokens_of(usage: Usage | None) -> int:
    """Return what a job's usage counts against its key's tokens."""
    return 0 if usage is None else usage.prompt_tokens + usage.completion_tokens


class InFlightCounts:
    """Reads and writes the counts. Raises `QueueUnavailable`, `QueueFull`."""

    def __init__(self, clients: Clients, keys: Keys) -> None:
        self._clients = clients
        self._keys = keys
        self._admit = Script("admit")
        self._settle = Script("settle")

    async def admit(self, caller: KeyRecord, job_id: str) -> Admission:
        """Count a request of a key, unless that has reached one of its limits.

        A job counts once among those in flight and for its tokens, each request for itself.
        """
        keys, key_id = self._keys, caller.id
        names = [
            keys.in_flight(key_id),
            keys.unsettled(key_id),
            keys.requests(key_id),
            keys.tokens(key_id),
        ]
        limits = (caller.max_in_flight, caller.requests_per_minute, caller.tokens_per_minute)
        args = [job_id, MAX_TIMEOUT_S * 1000, _WINDOW_TTL_MS, *limits]
        verdict, *windows = await self._at(key_id, lambda redis: self._admit(redis, names, args))
        requests, tokens = (
            Window(limit, used, wait_ms / 1000, reset_ms / 1000) if limit else None
            for limit, used, wait_ms, reset_ms in (
                (caller.requests_per_minute, *windows[:3]),
                (caller.tokens_per_minute, *windows[3:]),
            )
        )
        return Admission(verdict.decode(), requests, tokens)

    async def settle(self, key_id: str, jobs: Iterable[tuple[str, int | None]]) -> int:
        """Take jobs out of a key's count, and charge their tokens; None: they aren't known yet.

        Returns what was charged: each job is once, whoever settles it first.
        """
        keys = self._keys
        names = [keys.in_flight(key_id), keys.unsettled(key_id), keys.tokens(key_id)]
        args: list[Any] = [_WINDOW_TTL_MS]
        for job_id, tokens in jobs:
            args += [job_id, -1 if tokens is None else tokens]
        return int(await self._at(key_id, lambda redis: self._settle(redis, names, args)))

    async def prune(self, key_id: str, *, unknown_s: float) -> int:
        """Take out the jobs that have ended, and those that have not come in `unknown_s`.

        Returns how many those were.
        """
        jobs, now_s = await self._look(key_id, self._keys.in_flight(key_id))
        over = [(one, None) for one, job in jobs.items() if job.is_over(now_s, unknown_s)]
        if over:
            await self.settle(key_id, over)
        return len(over)

    async def settle_ended(self, key_id: str, *, unknown_s: float) -> int:
        """Charge the jobs that have ended and that nobody has settled: a client left them, or a
        gateway died. Returns how many are left.
        """
        name = self._keys.unsettled(key_id)
        jobs, now_s = await self._look(key_id, name)
        over = {
            one: job.tokens(now_s) for one, job in jobs.items() if job.is_over(now_s, unknown_s)
        }
        if over:
            await self.settle(key_id, over.items())
        return int(await self._at(key_id, lambda redis: redis.hlen(name)))

    async def _look(self, key_id: str, name: str) -> tuple[dict[str, _Job], float]:
        """Return the jobs of a hash of a key's, and the time; those whose server is away are
        missing."""

        async def read(redis: Redis) -> Any:
            pipeline = redis.pipeline(transaction=False)
            pipeline.hgetall(name)
            pipeline.time()
            return await pipeline.execute()

        counted, (seconds, micros) = await self._at(key_id, read)
        since_s = {job_id.decode(): int(at) / 1000 for job_id, at in counted.items()}
        found = await self._read(list(since_s))
        jobs = {job_id: _Job(since_s[job_id], *fields) for job_id, fields in found.items()}
        return jobs, seconds + micros / 1_000_000

    async def _read(self, job_ids: Sequence[str]) -> dict[str, list[bytes | None]]:
        by_tag: dict[str, list[str]] = {}
        for job_id in job_ids:
            by_tag.setdefault(tag_of(job_id), []).append(job_id)
        jobs: dict[str, list[bytes | None]] = {}
        for job_tag, ids in by_tag.items():
            for start in range(0, len(ids), _PAGE):
                page = ids[start : start + _PAGE]
                try:
                    found = await self._read_at(job_tag, page)
                except QueueUnavailable:
                    break
                jobs |= dict(zip(page, found, strict=True))
        return jobs

    async def _read_at(self, job_tag: str, job_ids: Sequence[str]) -> Any:
        async def read(redis: Redis) -> Any:
            pipeline = redis.pipeline(transaction=False)
            for job_id in job_ids:
                pipeline.hmget(self._keys.job(job_id), *_FIELDS)
            return await pipeline.execute()

        return await self._at(job_tag, read)

    async def _at(self, tag: str, operation: Callable[[Redis], Awaitable[T]]) -> T:
        async with translated():
            return await self._clients.run(tag, operation)
