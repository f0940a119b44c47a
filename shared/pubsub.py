"""One pub/sub connection for a whole process, read by hiredis with nothing in between.

redis-py's PubSub costs ten times as much per message, resubscribes without a word after a lost
link, and never notices a link that is half open. Here every subscription's acknowledgement reaches
its sink, the first and each after a reconnect, because what was published in between is lost and
must be read elsewhere; and a link without a reply for `dead_after_s` is replaced.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any, Protocol, cast

import hiredis
from redis.asyncio.connection import parse_url

from shared.connection import servers_of
from shared.errors import QueueUnavailable
from shared.logs import Log
from shared.servers import parse
from shared.settings import RedisSettings

log = Log("pubsub")

PING_EVERY_S = 0.5
_SUBSCRIBE_CHUNK = 500
_MESSAGES = frozenset({b"message", b"smessage"})
_ACKS = frozenset({b"subscribe", b"ssubscribe"})


class Sink(Protocol):
    """Where a channel's messages go. Called from the connection's reader: must not block."""

    def on_message(self, message: bytes) -> None: ...

    def on_subscribed(self) -> None:
        """The subscription stands, again perhaps: what came before it may be missing."""


class _Link(asyncio.Protocol):
    """A connection: bytes in, replies to the subscriber."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._reader = hiredis.Reader()
        self.transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heard_at = asyncio.get_running_loop().time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        reader, sinks = self._reader, self._subscriber.sinks
        self.heard_at = asyncio.get_running_loop().time()
        try:
            reader.feed(data)
            while True:
                reply = reader.gets()
                if reply is False:
                    return
                if type(reply) is list and reply[0] in _MESSAGES:
                    sink = sinks.get(reply[1])
                    if sink is not None:
                        sink.on_message(reply[2])
                else:
                    self._subscriber.on_reply(reply)
        except hiredis.ProtocolError:
            self.abort()

    def send(self, *parts: str | bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(hiredis.pack_command(parts))

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Subscriber:
    """Subscriptions that outlive their connection.

    `run()` keeps the connection; it is one of the process's long tasks. `subscribe()` waits for the
    acknowledgement, at most `ack_timeout_s`, else raises `QueueUnavailable`.
    """

    def __init__(
        self,
        settings: RedisSettings,
        *,
        name: str,
        ack_timeout_s: float,
        dead_after_s: float = 2,
        tag: str = "",
    ) -> None:
        """`tag`: in a cluster, the one whose channels are subscribed to."""
        url = settings.redis_url.get_secret_value()
        self._servers = servers_of(settings)
        self._tag = tag
        location = parse(url)
        self._options: dict[str, Any] = location.login if location else dict(parse_url(url))
        self._tls = url.startswith("rediss")
        sharded = self._servers is not None and self._servers.sharded
        self._subscribe, self._unsubscribe = (
            ("SSUBSCRIBE", "SUNSUBSCRIBE") if sharded else ("SUBSCRIBE", "UNSUBSCRIBE")
        )
        self._timeout_s = settings.redis_timeout_s
        self._name = name
        self._ack_timeout_s = ack_timeout_s
        self._dead_after_s = dead_after_s
        self._link: _Link | None = None
        self._acks: dict[bytes, asyncio.Future[None]] = {}
        self._handshake: asyncio.Future[None] | None = None
        self._handshakes_left = 0
        self.sinks: dict[bytes, Sink] = {}
        self.reconnects = 0

    @property
    def connected(self) -> bool:
        """Whether the link stands, as far as is known."""
        return self._link is not None

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        delay_s = 0.0
        try:
            while True:
                await asyncio.sleep(delay_s)
                try:
                    await self._hold()
                    delay_s = 0.05
                except (OSError, TimeoutError, QueueUnavailable, hiredis.ReplyError) as error:
                    self._forget_server()
                    delay_s = min(max(delay_s * 2, 0.1), 1.0)
                    log.warning("pubsub.unreachable", error=type(error).__name__)
        finally:
            self._drop()

    async def _hold(self) -> None:
        """Hold one connection from its beginning to its end."""
        link = await self._connect()
        try:
            await self._greet(link)
            self._link = link
            self._resubscribe(self.sinks)
            loop = asyncio.get_running_loop()
            while not link.lost.done():
                link.send("PING")
                await asyncio.wait([link.lost], timeout=PING_EVERY_S)
                if loop.time() - link.heard_at > self._dead_after_s:
                    log.warning("pubsub.silent", after_s=self._dead_after_s)
                    break
        finally:
            self._drop()
            link.abort()
            self._forget_server()
            self.reconnects += 1
        log.warning("pubsub.lost")

    def _forget_server(self) -> None:
        """Find the server anew at the next connect: it may have failed over."""
        if self._servers is not None:
            self._servers.forget()

    def _drop(self) -> None:
        self._link = None
        for ack in self._acks.values():
            if not ack.done():
                ack.set_exception(QueueUnavailable())
        self._acks.clear()

    async def _connect(self) -> _Link:
        loop, options = asyncio.get_running_loop(), self._options
        async with asyncio.timeout(self._timeout_s):
            if self._servers is not None:
                address = await self._servers.locate(self._tag)
                options = {**options, "host": address.host, "port": address.port}
            if path := options.get("path"):
                _, link = await loop.create_unix_connection(lambda: _Link(self), path)
            else:
                _, link = await loop.create_connection(
                    lambda: _Link(self),
                    options.get("host", "127.0.0.1"),
                    options.get("port", 6379),
                    ssl=ssl.create_default_context() if self._tls else None,
                )
        return link

    async def _greet(self, link: _Link) -> None:
        """Log in and name the connection; every reply until then belongs to the greeting."""
        commands: list[tuple[str, ...]] = []
        if password := self._options.get("password"):
            user = self._options.get("username")
            commands.append(("AUTH", user, password) if user else ("AUTH", password))
        commands.append(("CLIENT", "SETNAME", self._name))
        self._handshake = asyncio.get_running_loop().create_future()
        self._handshakes_left = len(commands)
        try:
            for command in commands:
                link.send(*command)
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wait([self._handshake, link.lost], return_when="FIRST_COMPLETED")
            if not self._handshake.done():
                raise QueueUnavailable
            self._handshake.result()
        except BaseException:
            link.abort()
            raise
        finally:
            self._handshake = None

    def _resubscribe(self, channels: Iterable[bytes]) -> None:
        names = list(channels)
        for start in range(0, len(names), _SUBSCRIBE_CHUNK):
            if self._link is not None:
                self._link.send(self._subscribe, *names[start : start + _SUBSCRIBE_CHUNK])

    def on_reply(self, reply: Any) -> None:
        """Take a reply that isn't a message: greeting, acknowledgement, pong or error."""
        if self._handshake is not None:
            self._on_greeting(reply)
        elif isinstance(reply, list) and reply[0] in _ACKS:
            ack = self._acks.pop(reply[1], None)
            if ack is not None and not ack.done():
                ack.set_result(None)
            if (sink := self.sinks.get(reply[1])) is not None:
                sink.on_subscribed()
        elif isinstance(reply, list) and reply[0] == b"sunsubscribe" and reply[1] in self.sinks:
            # The slot has moved: the server unsubscribes by itself.
            if self._link is not None:
                self._link.abort()
        elif isinstance(reply, hiredis.ReplyError):
            log.error("pubsub.refused", error=str(reply))
            if self._link is not None:
                self._link.abort()

    def _on_greeting(self, reply: Any) -> None:
        greeting = self._handshake
        if greeting is None or greeting.done():
            return
        self._handshakes_left -= 1
        if isinstance(reply, hiredis.ReplyError):
            greeting.set_exception(reply)
        elif self._handshakes_left == 0:
            greeting.set_result(None)

    async def subscribe(self, channel: str, sink: Sink) -> None:
        """Attach a sink and wait until its subscription stands.

        Where it fails the sink is detached again.
        """
        if self._link is None:
            raise QueueUnavailable
        name = channel.encode()
        ack: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sinks[name] = sink
        self._acks[name] = ack
        self._link.send(self._subscribe, name)
        try:
            async with asyncio.timeout(self._ack_timeout_s):
                await ack
        except BaseException as error:
            self._acks.pop(name, None)
            self.unsubscribe(channel, sink)
            if isinstance(error, TimeoutError):
                raise QueueUnavailable from error
            raise

    def keep(self, channel: str, sink: Sink) -> None:
        """Attach a sink for the life of the process, whether or not the link stands now."""
        self.sinks[channel.encode()] = sink
        self._resubscribe([channel.encode()])

    def unsubscribe(self, channel: str, sink: Sink) -> None:
        """Detach a sink, if it is still the channel's."""
        name = channel.encode()
        if self.sinks.get(name) is sink:
            del self.sinks[name]
            if self._link is not None:
                self._link.send(self._unsubscribe, name)
