"""What the commands need of the queue."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from redis.asyncio import Redis

from shared import protocol
from shared.adapters import AdapterStore
from shared.admin.documents import Attempt
from shared.admin.settings import AdminSettings
from shared.apikeys import KeyStore
from shared.border import translated
from shared.connection import Connections
from shared.keys import REGISTRY, Keys, tag_of, tags
from shared.protocol import Job, Usage
from shared.registry import Registry, Snapshot
from shared.scripts import Script
from shared.transitions import Transitions

T = TypeVar("T")

PEEKED_AT_ONCE = 10
"""The server copies a job's record, body included, to look at it."""


class Refused(Exception):
    """What was asked for isn't there or can't be done."""

    def __init__(self, message: str, code: str = "refused") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Pool:
    """A pool of workers and the tags of its shards."""

    name: str
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Peeked:
    """What is kept of a job. `job`, without its body, is there until it ends."""

    fields: dict[str, str]
    job: Job | None
    usage: Usage | None

    def number(self, name: str) -> int:
        return int(self.fields.get(name) or 0)

    def time(self, name: str) -> float | None:
        """Return a moment, as Unix time."""
        return self.number(name) / 1000 if self.fields.get(name) else None


class Access:
    """The queue, as `headrace-admin` sees it; raises `QueueUnavailable`."""

    def __init__(self, settings: AdminSettings) -> None:
        self.settings = settings
        self.clients = Connections(settings, name="headrace-admin", connections=4)
        self.keys = Keys(settings.key_prefix)
        self.transitions = Transitions(self.clients, self.keys, result_ttl_s=settings.result_ttl_s)
        self.registry = Registry(self.clients, self.keys)
        self.adapters = AdapterStore(self.clients, self.keys)
        self.api_keys = KeyStore(self.clients, self.keys)
        self._peek = Script("peek")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.clients.aclose()

    async def at(self, job_tag: str, operation: Callable[[Redis], Awaitable[T]]) -> T:
        """Do something where a tag's keys are."""
        async with translated():
            return await self.clients.run(job_tag, operation)

    async def now(self) -> float:
        """Return a server's time: jobs are dated by that of their own, not by this machine's."""
        told: Any = await self.at(REGISTRY, lambda redis: redis.time())
        return float(told[0]) + float(told[1]) / 1e6

    async def pools(self, only: str | None = None) -> list[Pool]:
        """Return the pools that are known, or one of them. Raises `Refused`."""
        found = pools_of(await self.registry.snapshot())
        if only is None:
            return found
        chosen = [pool for pool in found if pool.name == only]
        if not chosen:
            known = ", ".join(pool.name for pool in found) or "none"
            raise Refused(f"no pool `{only}`; known: {known}", "pool_not_found")
        return chosen

    async def pool_of(self, job_tag: str) -> str | None:
        """Return the name of the pool that a tag belongs to, if it is still known."""
        for pool in await self.pools():
            if job_tag in pool.tags:
                return pool.name
        return None

    async def peek(self, job_ids: Sequence[str]) -> dict[str, Peeked]:
        """Return what is kept of jobs, by id; those that are gone are missing."""
        found = {}
        by_tag: dict[str, list[str]] = {}
        for job_id in job_ids:
            by_tag.setdefault(tag_of(job_id), []).append(job_id)
        for job_tag, ids in by_tag.items():
            for start in range(0, len(ids), PEEKED_AT_ONCE):
                page = ids[start : start + PEEKED_AT_ONCE]
                replies = await self._peek_at(job_tag, page)
                found.update(
                    {i: _peeked(flat) for i, flat in zip(page, replies, strict=True) if flat}
                )
        return found

    async def _peek_at(self, job_tag: str, job_ids: Sequence[str]) -> Any:
        names = [self.keys.job(one) for one in job_ids]
        return await self.at(job_tag, lambda redis: self._peek(redis, names, []))


def pools_of(snapshot: Snapshot) -> list[Pool]:
    """Return the pools of a snapshot's models and workers, by name."""
    shards: dict[str, int] = {}
    told = [(one.pool, one.shards) for one in snapshot.models.values()]
    told += [(one.pool, one.shards) for one in snapshot.workers if one.pool]
    for name, count in told:
        shards[name] = max(shards.get(name, 1), count)
    return [Pool(name, tuple(tags(name, count))) for name, count in sorted(shards.items())]


def readable(record: bytes) -> Job | None:
    """Decode a job's record; None where it was written in a form that isn't known here."""
    try:
        return protocol.decode_job(record)
    except msgspec.MsgspecError:
        return None


def attempts(history: str) -> list[Attempt]:
    """Read a job's history: a line per attempt, `<milliseconds> <worker>`."""
    lines = [line.partition(" ") for line in history.splitlines()]
    return [Attempt(worker=worker, at=int(at) / 1000) for at, _, worker in lines if at.isdigit()]


def entry_time(entry: bytes) -> float:
    """Return when a stream's entry was added."""
    return int(entry.split(b"-", 1)[0]) / 1000


def wall_age(started_ms: int) -> float:
    """Return the age of what another machine has dated."""
    return max(time.time() - started_ms / 1000, 0.0)


def _peeked(flat: list[bytes]) -> Peeked:
    raw: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
    job = readable(raw.pop(b"rec", b""))
    # The token is what a worker proves its ownership with: it isn't for show.
    raw.pop(b"owner", None)
    counted = raw.pop(b"usage", b"")
    usage = protocol.decode_usage(counted) if counted else None
    fields = {name.decode(): value.decode(errors="replace") for name, value in raw.items()}
    return Peeked(fields, job, usage)
