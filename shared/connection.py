"""Connections to the Redis protocol server, with the driver's dangerous defaults replaced.

redis-py retries commands by itself, which doubles an `XADD` whose reply was lost, and its socket
time-out breaks blocking reads that are longer. Here nothing is retried behind our back, every wait
is bounded, and the transitions are safe to repeat.
"""

from __future__ import annotations

from typing import Any

import hiredis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared.settings import RedisSettings


class _PackedInC(AbstractConnection):
    """redis-py's asyncio connections pack in Python: a quarter of a busy worker's time."""

    def pack_command(self, *args: Any) -> list[bytes]:
        name = args[0].encode() if isinstance(args[0], str) else args[0]
        return [hiredis.pack_command((*name.split(), *args[1:]))]


def _packed(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    return type(f"Packed{kind.__name__}", (_PackedInC, kind), {})


def connect(settings: RedisSettings, *, name: str, connections: int | None = None) -> Redis:
    """Return a client with a bounded pool; nothing is connected yet."""
    pool = BlockingConnectionPool.from_url(
        settings.redis_url.get_secret_value(),
        max_connections=connections or settings.redis_connections,
        timeout=settings.redis_timeout_s,
        socket_timeout=settings.redis_timeout_s,
        socket_connect_timeout=settings.redis_timeout_s,
        socket_keepalive=True,
        client_name=name,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
    )
    pool.connection_class = _packed(pool.connection_class)
    return Redis.from_pool(pool)


def connect_blocking(settings: RedisSettings, *, name: str, block_s: float) -> Redis:
    """Return a client with one connection, for commands that block for up to `block_s`."""
    pool = BlockingConnectionPool.from_url(
        settings.redis_url.get_secret_value(),
        max_connections=1,
        timeout=block_s + settings.redis_timeout_s,
        socket_timeout=block_s + settings.redis_timeout_s,
        socket_connect_timeout=settings.redis_timeout_s,
        socket_keepalive=True,
        client_name=name,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
    )
    pool.connection_class = _packed(pool.connection_class)
    return Redis.from_pool(pool)
