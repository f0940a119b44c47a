"""Which adapters (LoRA) are wanted on all workers of a pool. The workers bring that about."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from shared import protocol
from shared.border import translated
from shared.connection import Clients
from shared.keys import REGISTRY, Keys
from shared.protocol import AdapterRecord

T = TypeVar("T")

WANTED_TTL_MS = 7 * 24 * 3600 * 1000
MOST_ADAPTERS = 64
"""Of one pool."""


class AdapterStore:
    """Reads and writes the wishes. Raises `QueueUnavailable`."""

    def __init__(self, clients: Clients, keys: Keys) -> None:
        self._clients = clients
        self._keys = keys

    async def wanted(self, pool: str, *, renew: bool = False) -> dict[str, AdapterRecord]:
        """Return name → wish, first asked for first. `renew` is for whoever fulfils them.

        Those that can't be read here are missing.
        """
        name = self._keys.adapters(pool)

        async def read(redis: Redis) -> Any:
            pipeline = redis.pipeline(transaction=False)
            pipeline.hgetall(name)
            if renew:
                pipeline.pexpire(name, WANTED_TTL_MS)
            return (await pipeline.execute())[0]

        found = await self._at(read)
        records = [one for one in map(readable, found.values()) if one is not None]
        return {one.name: one for one in sorted(records, key=lambda one: (one.asked_ms, one.name))}

    async def want(self, pool: str, record: AdapterRecord) -> None:
        """Have an adapter wanted, in place of what was wanted under its name."""
        name = self._keys.adapters(pool)

        async def write(redis: Redis) -> None:
            pipeline = redis.pipeline(transaction=True)
            pipeline.hset(name, record.name, protocol.encode(record))
            pipeline.pexpire(name, WANTED_TTL_MS)
            await pipeline.execute()

        await self._at(write)

    async def unwant(self, pool: str, adapter: str) -> None:
        """Have it wanted no more."""
        await self._at(lambda redis: redis.hdel(self._keys.adapters(pool), adapter))

    async def _at(self, operation: Callable[[Redis], Awaitable[T]]) -> T:
        async with translated():
            return await self._clients.run(REGISTRY, operation)


def readable(record: bytes) -> AdapterRecord | None:
    """Decode a wish; None where it was written in a form that isn't known here."""
    try:
        return protocol.decode_adapter(record)
    except msgspec.MsgspecError:
        return None
