"""Connections to the Redis protocol server, with the driver's dangerous defaults replaced.

redis-py retries commands by itself, which doubles an `XADD` whose reply was lost, and its socket
time-out breaks blocking reads that are longer. Here nothing is retried behind our back, every wait
is bounded, and the transitions are safe to repeat.
"""

from __future__ import annotations

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared.settings import RedisSettings


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
    return Redis.from_pool(pool)
