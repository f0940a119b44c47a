"""Who is there: workers announce themselves with a lease, gateways read the list.

A worker's record disappears with its lease. Model names are remembered longer, so that a model
whose workers are all gone is "not available now" rather than "unknown".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from shared import protocol
from shared.border import translated
from shared.connection import Clients, clients_of
from shared.errors import QueueUnavailable
from shared.keys import REGISTRY, Keys
from shared.logs import Log
from shared.protocol import ModelRecord, WorkerRecord
from shared.scripts import Script

log = Log("registry")

T = TypeVar("T")

MODELS_TTL_MS = 7 * 24 * 3600 * 1000
WORKERS_TTL_MS = 3600 * 1000
GATEWAYS_TTL_MS = 3600 * 1000


@dataclass(frozen=True)
class Snapshot:
    """The registry at one moment."""

    workers: tuple[WorkerRecord, ...] = ()
    models: dict[str, ModelRecord] = field(default_factory=dict)

    def ready(self, model: str | None = None) -> list[WorkerRecord]:
        """Return the workers that take jobs, of one model or of any."""
        return [
            one
            for one in self.workers
            if one.state == "ready" and (model is None or model in one.models)
        ]

    def served(self, model: str) -> bool:
        """Tell whether a request for a known model finds it wherever it is claimed.

        Any ready worker of the pool may claim it, and an adapter may be on some of them only.
        """
        record = self.models[model]
        if record.parent is None:
            return bool(self.ready(model))
        pool = [one for one in self.ready() if one.pool == record.pool]
        return bool(pool) and all(model in one.models for one in pool)


class Registry:
    """Reads and writes the registry. Raises `QueueUnavailable`."""

    def __init__(self, redis: Redis | Clients, keys: Keys, *, shebang: bool = True) -> None:
        self._clients = clients_of(redis)
        self._keys = keys
        self._announce = Script("announce", shebang=shebang)

    async def announce(
        self, worker: WorkerRecord, models: Sequence[ModelRecord], lease_s: float
    ) -> WorkerRecord | None:
        """Say that a worker is there, until its lease ends. `models` may be empty before start.

        Returns what stood under its id before, if it can be read here.
        """
        keys = self._keys
        names = [keys.worker(worker.id), keys.workers(), keys.models()]
        args: list[Any] = [worker.id, protocol.encode(worker), int(lease_s * 1000)]
        args += [WORKERS_TTL_MS, MODELS_TTL_MS]
        for model in models:
            args += [model.name, protocol.encode(model)]
        before = await self._at(lambda redis: self._announce(redis, names, args))
        try:
            return protocol.decode_worker(before) if before else None
        except msgspec.MsgspecError:
            return None  # Another version's.

    async def leave(self, worker_id: str) -> None:
        """Say that a worker is gone."""
        await self._forget(self._keys.worker(worker_id), self._keys.workers(), worker_id)

    async def forget_models(self, names: Iterable[str]) -> None:
        """Forget names of models that are served no more; a worker that does brings them back."""
        fields = list(names)
        await self._at(lambda redis: redis.hdel(self._keys.models(), *fields))

    async def announce_gateway(self, name: str, lease_s: float) -> None:
        """Say that a gateway is there, until its lease ends."""
        keys = self._keys
        names = [keys.gateway(name), keys.gateways(), keys.models()]
        args: list[Any] = [name, "", int(lease_s * 1000), GATEWAYS_TTL_MS, MODELS_TTL_MS]
        await self._at(lambda redis: self._announce(redis, names, args))

    async def leave_gateway(self, name: str) -> None:
        """Say that a gateway is gone."""
        await self._forget(self._keys.gateway(name), self._keys.gateways(), name)

    async def gateways(self) -> frozenset[str]:
        """Return the gateways whose lease stands; forget the names whose lease has ended."""
        keys = self._keys

        async def read(redis: Redis) -> frozenset[str]:
            members: Any = await redis.smembers(keys.gateways())
            return frozenset(await _present(redis, keys.gateways(), keys.gateway, members))

        return await self._at(read)

    async def snapshot(self) -> Snapshot:
        """Read all workers and models; forget the ids whose lease has ended."""
        keys = self._keys

        async def read(redis: Redis) -> tuple[dict[str, bytes], dict[bytes, bytes]]:
            pipeline = redis.pipeline(transaction=False)
            pipeline.smembers(keys.workers())
            pipeline.hgetall(keys.models())
            members, models = await pipeline.execute()
            return await _present(redis, keys.workers(), keys.worker, members), models

        workers, models = await self._at(read)
        return Snapshot(
            tuple(protocol.decode_worker(one) for one in workers.values()),
            {name.decode(): protocol.decode_model(record) for name, record in models.items()},
        )

    async def warn_of_eviction(self) -> None:
        """Log a warning if the server may drop keys when its memory is full.

        A server that doesn't let itself be asked is trusted.
        """
        try:
            told: Any = await self._at(lambda redis: redis.info("memory"))
        except QueueUnavailable:
            return
        policy = told.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            log.warning("queue.evicts", maxmemory_policy=policy, wanted="noeviction")

    async def _at(self, operation: Callable[[Redis], Awaitable[T]]) -> T:
        async with translated():
            return await self._clients.run(REGISTRY, operation)

    async def _forget(self, record: str, names: str, name: str) -> None:
        async def forget(redis: Redis) -> None:
            pipeline = redis.pipeline(transaction=False)
            pipeline.delete(record)
            pipeline.srem(names, name)
            await pipeline.execute()

        await self._at(forget)


async def _present(
    redis: Redis, names: str, key: Callable[[str], str], members: Iterable[bytes]
) -> dict[str, bytes]:
    """Return name → record of those whose lease stands; forget the others' names."""
    wanted = sorted(one.decode() for one in members)
    found: Any = await redis.mget([key(one) for one in wanted]) if wanted else []
    gone = [one for one, record in zip(wanted, found, strict=True) if record is None]
    if gone:
        await redis.srem(names, *gone)
    return {one: rec for one, rec in zip(wanted, found, strict=True) if rec is not None}
