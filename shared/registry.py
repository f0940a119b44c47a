"""Who is there: workers announce themselves with a lease, gateways read the list.

A worker's record disappears with its lease. Model names are remembered longer, so that a model
whose workers are all gone is "not available now" rather than "unknown".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redis.asyncio import Redis

from shared import protocol
from shared.keys import Keys
from shared.protocol import ModelRecord, WorkerRecord
from shared.scripts import Script
from shared.transitions import translated

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


class Registry:
    """Reads and writes the registry. Raises `QueueUnavailable`."""

    def __init__(self, redis: Redis, keys: Keys, *, shebang: bool = True) -> None:
        self._redis = redis
        self._keys = keys
        self._announce = Script("announce", shebang=shebang)

    async def announce(
        self, worker: WorkerRecord, models: Sequence[ModelRecord], lease_s: float
    ) -> None:
        """Say that a worker is there, until its lease ends. `models` may be empty before start."""
        keys = self._keys
        names = [keys.worker(worker.id), keys.workers(), keys.models()]
        args: list[Any] = [worker.id, protocol.encode(worker), int(lease_s * 1000)]
        args += [WORKERS_TTL_MS, MODELS_TTL_MS]
        for model in models:
            args += [model.name, protocol.encode(model)]
        async with translated():
            await self._announce(self._redis, names, args)

    async def leave(self, worker_id: str) -> None:
        """Say that a worker is gone."""
        async with translated():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.delete(self._keys.worker(worker_id))
            pipeline.srem(self._keys.workers(), worker_id)
            await pipeline.execute()

    async def announce_gateway(self, name: str, lease_s: float) -> None:
        """Say that a gateway is there, until its lease ends."""
        keys = self._keys
        names = [keys.gateway(name), keys.gateways(), keys.models()]
        args: list[Any] = [name, "", int(lease_s * 1000), GATEWAYS_TTL_MS, MODELS_TTL_MS]
        async with translated():
            await self._announce(self._redis, names, args)

    async def leave_gateway(self, name: str) -> None:
        """Say that a gateway is gone."""
        async with translated():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.delete(self._keys.gateway(name))
            pipeline.srem(self._keys.gateways(), name)
            await pipeline.execute()

    async def gateways(self) -> frozenset[str]:
        """Return the gateways whose lease stands; forget the names whose lease has ended."""
        keys = self._keys
        async with translated():
            names = sorted(one.decode() for one in await self._redis.smembers(keys.gateways()))
            found = await self._redis.mget([keys.gateway(one) for one in names]) if names else []
            gone = [one for one, there in zip(names, found, strict=True) if there is None]
            if gone:
                await self._redis.srem(keys.gateways(), *gone)
        return frozenset(names) - frozenset(gone)

    async def snapshot(self) -> Snapshot:
        """Read all workers and models; forget the ids whose lease has ended."""
        keys = self._keys
        async with translated():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.smembers(keys.workers())
            pipeline.hgetall(keys.models())
            members, models = await pipeline.execute()
            ids = sorted(member.decode() for member in members)
            records = await self._redis.mget([keys.worker(one) for one in ids]) if ids else []
            gone = [one for one, record in zip(ids, records, strict=True) if record is None]
            if gone:
                await self._redis.srem(keys.workers(), *gone)
        return Snapshot(
            tuple(protocol.decode_worker(cast(bytes, one)) for one in records if one),
            {name.decode(): protocol.decode_model(record) for name, record in models.items()},
        )
