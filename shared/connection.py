"""Connections to the Redis protocol servers, with the driver's dangerous defaults replaced.

redis-py retries commands by itself, which doubles an `XADD` whose reply was lost, and its socket
time-out breaks blocking reads that are longer. Here nothing is retried behind our back but what a
cluster has refused because it moved, every wait is bounded, and the transitions are safe to repeat.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import hiredis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeout

from shared.errors import QueueUnavailable
from shared.servers import Address, Servers, parse
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


class NotConnected(RedisConnectionError):
    """There was no connection, so nothing was sent."""


class _Sender(AbstractConnection):
    """redis-py's asyncio connections, packing in C and open to cancels.

    They pack in Python, a quarter of a busy worker's time.
    """

    async def connect(self) -> None:
        """Connect, unless it is connected. Raises `NotConnected`."""
        try:
            await super().connect()  # type: ignore[no-untyped-call]
        except (RedisConnectionError, RedisTimeout) as error:
            raise NotConnected(str(error)) from error

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


class Connections:
    """Bounded pools of connections for commands: one for each server that is met.

    With `block_s` each tag has one connection, for commands that block for up to so long.
    """

    def __init__(
        self,
        settings: RedisSettings,
        *,
        name: str,
        connections: int | None = None,
        block_s: float = 0,
    ) -> None:
        self.location = parse(settings.redis_url.get_secret_value())
        self._servers = servers_of(settings)
        self._blocking = block_s > 0
        timeout_s = settings.redis_timeout_s
        self._options: dict[str, Any] = {
            "max_connections": 1 if block_s else connections or settings.redis_connections,
            "timeout": block_s + timeout_s,
            "socket_timeout": block_s + timeout_s,
            "socket_connect_timeout": timeout_s,
            "client_name": name,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            **self.location.login,
        }
        self._clients: dict[tuple[Address | None, str], Redis] = {}

    @property
    def sharded(self) -> bool:
        """Whether tags live on different servers, whose channels are their own."""
        return self._servers is not None and self._servers.sharded

    def at(self, tag: str) -> Redis:
        """Return the client for the keys of a tag, as far as is known; nothing is connected yet.

        Raises `QueueUnavailable` where the server of the tag is not known now.
        """
        if self._servers is None:
            return self._client(None, tag)
        address = self._servers.known(tag)
        if address is None:
            raise QueueUnavailable
        return self._client(address, tag)

    def _client(self, address: Address | None, tag: str) -> Redis:
        place = address, tag if self._blocking else ""
        client = self._clients.get(place)
        if client is None:
            client = self._clients[place] = Redis.from_pool(self._pool(address))
        return client

    def _pool(self, address: Address | None) -> BlockingConnectionPool:
        location = self.location
        if location.kind == "unix":
            return BlockingConnectionPool(
                connection_class=_packed(UnixDomainSocketConnection),
                path=location.path,
                **self._options,
            )
        kind = SSLConnection if location.tls else Connection
        at = address or location.seeds[0]
        return BlockingConnectionPool(
            connection_class=_packed(kind),
            host=at.host,
            port=at.port,
            socket_keepalive=True,
            **self._options,
        )

    async def run(self, tag: str, operation: Callable[[Redis], Awaitable[T]]) -> T:
        """Do something at a tag's server, following the tag where it has moved."""
        servers = self._servers
        if servers is None:
            return await operation(self._client(None, tag))
        for attempt in range(_MOVES + 1):
            address = await servers.locate(tag)
            if (address, tag if self._blocking else "") not in self._clients:
                await self._drop_gone(servers.addresses)
            try:
                return await operation(self._client(address, tag))
            except _MOVED as error:
                if attempt == _MOVES:
                    raise
                servers.forget()
                if isinstance(error, MovedError):
                    servers.moved(error.slot_id, Address(error.host, error.port))
            except (RedisConnectionError, RedisTimeout, OSError, TimeoutError) as error:
                servers.forget()
                unsent = isinstance(error, NotConnected)
                if attempt == _MOVES or not unsent or await servers.locate(tag) == address:
                    raise
                continue
            await asyncio.sleep(_MOVE_S * 2**attempt)
        raise AssertionError("unreachable")

    async def everywhere(self) -> dict[str, Redis]:
        """Return a client for each server that has keys, by where it is."""
        if self._servers is None:
            return {str(self.location): self._client(None, "")}
        await self._servers.locate("")
        return {str(one): self._client(one, "") for one in sorted(self._servers.addresses)}

    async def _drop_gone(self, addresses: Collection[Address]) -> None:
        """Close the connections to servers that have no keys any more."""
        for place in [one for one in self._clients if one[0] not in addresses]:
            await self._clients.pop(place).aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()


def servers_of(settings: RedisSettings) -> Servers | None:
    """Return how to find the servers; None where there is one, at a fixed place."""
    location = parse(settings.redis_url.get_secret_value())
    if location.kind in ("server", "unix"):
        return None
    return Servers(location, timeout_s=settings.redis_timeout_s)


def connect(settings: RedisSettings, *, name: str, connections: int | None = None) -> Redis:
    """Return a client of a server at a fixed place."""
    return Connections(settings, name=name, connections=connections).at("")


def connect_blocking(settings: RedisSettings, *, name: str, block_s: float) -> Redis:
    """The same with one connection, for commands that block for up to `block_s`."""
    return Connections(settings, name=name, block_s=block_s).at("")


def tls_context(login: Mapping[str, Any]) -> ssl.SSLContext:
    """Return how to speak TLS, as redis-py does it with the same options."""
    options = {name: value for name, value in login.items() if name.startswith("ssl_")}
    return SSLConnection(**options).ssl_context.get()


def reason(error: BaseException) -> str:
    """Say on one line why the queue couldn't be used: what the server or the driver said of it."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split()) or type(cause).__name__
