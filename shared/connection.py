"""Connections to the Redis protocol servers, with the driver's dangerous defaults replaced.

redis-py retries commands by itself, which doubles an `XADD` whose reply was lost, and its socket
time-out breaks blocking reads that are longer. Here nothing is retried behind our back but what a
cluster has refused because it moved, every wait is bounded, and the transitions are safe to repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

import hiredis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AskError, ClusterDownError, ReadOnlyError, RedisError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeout

from shared.servers import Location, Servers, parse
from shared.settings import RedisSettings

T = TypeVar("T")

_MOVED = (AskError, ClusterDownError, ReadOnlyError, TryAgainError)
"""Refusals of a server that isn't, or not any more, the one to ask. Nothing was done."""
_MOVES = 6
"""How often to ask again, 10 ms apart at first, twice as long each time."""
_MOVE_S = 0.01


class Clients(Protocol):
    """Clients for the keys of each tag."""

    @property
    def sharded(self) -> bool:
        """Whether tags live on different servers, whose channels are their own."""

    def at(self, tag: str) -> Redis:
        """Return the client for the keys of a tag."""

    async def run(self, tag: str, operation: Callable[[Redis], Awaitable[T]]) -> T:
        """Do something at a tag's server, following the tag where it has moved."""


class Fixed:
    """One client for all tags."""

    sharded = False

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def at(self, tag: str) -> Redis:
        return self._redis

    async def run(self, tag: str, operation: Callable[[Redis], Awaitable[T]]) -> T:
        return await operation(self._redis)


def clients_of(redis: Redis | Clients) -> Clients:
    """Return clients for each tag, also where there is one for all."""
    return Fixed(redis) if isinstance(redis, Redis) else redis


class _Sender(AbstractConnection):
    """redis-py's asyncio connections, packing in C and open to cancels.

    They pack in Python, a quarter of a busy worker's time.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        name = args[0].encode() if isinstance(args[0], str) else args[0]
        return [hiredis.pack_command((*name.split(), *args[1:]))]

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        """Send without `asyncio.wait_for`.

        Until Python 3.12 that swallows a cancel which comes as the sending is done: a loop that is
        to end by it would go on for ever.
        """
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()  # type: ignore[no-untyped-call]
        if isinstance(command, str):
            command = command.encode()
        parts = [command] if isinstance(command, bytes) else command
        try:
            async with asyncio.timeout(self.socket_timeout):
                await self._send_packed_command(parts)
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise RedisTimeout("Timeout writing to socket") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"Error while writing to socket: {error}") from error
        except BaseException:
            # Half a command may be on its way: the connection is of no more use.
            await self.disconnect(nowait=True)
            raise


def _packed(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    return type(f"Packed{kind.__name__}", (_Sender, kind), {})


def _located(
    kind: type[AbstractConnection], servers: Servers, tag: str
) -> type[AbstractConnection]:
    """Return a kind of connection that finds its server whenever it connects."""

    async def connect(self: Any) -> None:
        address = await servers.locate(tag)
        self.host, self.port = address.host, address.port
        try:
            await kind._connect(self)  # type: ignore[no-untyped-call]
        except (OSError, TimeoutError, RedisError):
            servers.forget()
            raise

    return type(f"Located{kind.__name__}", (kind,), {"_connect": connect})


class Connections:
    """Bounded pools of connections for commands: one pool, or in a cluster one per tag.

    With `block_s` each pool is one connection, for commands that block for up to so long.
    """

    def __init__(
        self,
        settings: RedisSettings,
        *,
        name: str,
        connections: int | None = None,
        block_s: float = 0,
    ) -> None:
        self._url = settings.redis_url.get_secret_value()
        self._location = parse(self._url)
        self._servers = servers_of(settings)
        timeout_s = settings.redis_timeout_s
        self._options: dict[str, Any] = {
            "max_connections": 1 if block_s else connections or settings.redis_connections,
            "timeout": block_s + timeout_s,
            "socket_timeout": block_s + timeout_s,
            "socket_connect_timeout": timeout_s,
            "socket_keepalive": True,
            "client_name": name,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
        }
        self._clients: dict[str, Redis] = {}

    @property
    def sharded(self) -> bool:
        """Whether tags live on different servers, whose channels are their own."""
        return self._servers is not None and self._servers.sharded

    def at(self, tag: str) -> Redis:
        """Return the client for the keys of a tag; nothing is connected yet."""
        place = tag if self.sharded else ""
        client = self._clients.get(place)
        if client is None:
            client = self._clients[place] = Redis.from_pool(self._pool(tag))
        return client

    def _pool(self, tag: str) -> BlockingConnectionPool:
        if self._location is None or self._servers is None:
            pool = BlockingConnectionPool.from_url(self._url, **self._options)
            pool.connection_class = _packed(pool.connection_class)
            return pool
        kind = SSLConnection if self._location.tls else Connection
        return BlockingConnectionPool(
            connection_class=_packed(_located(kind, self._servers, tag)),
            **self._location.login,
            **self._options,
        )

    async def run(self, tag: str, operation: Callable[[Redis], Awaitable[T]]) -> T:
        """Do something at a tag's server, following the tag where it has moved."""
        client = self.at(tag)
        if self._servers is None:
            return await operation(client)
        for attempt in range(_MOVES):
            try:
                return await operation(client)
            except _MOVED:
                self._servers.forget()
                await client.connection_pool.disconnect(inuse_connections=False)
                await asyncio.sleep(_MOVE_S * 2**attempt)
        return await operation(client)

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()


def servers_of(settings: RedisSettings) -> Servers | None:
    """Return how to find the servers; None where there is one, at a fixed place."""
    location: Location | None = parse(settings.redis_url.get_secret_value())
    if location is None:
        return None
    return Servers(location, timeout_s=settings.redis_timeout_s)


def connect(settings: RedisSettings, *, name: str, connections: int | None = None) -> Redis:
    """Return a client of a single server, or of Sentinel's master."""
    return Connections(settings, name=name, connections=connections).at("")


def connect_blocking(settings: RedisSettings, *, name: str, block_s: float) -> Redis:
    """The same with one connection, for commands that block for up to `block_s`."""
    return Connections(settings, name=name, block_s=block_s).at("")
