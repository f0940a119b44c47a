"""One pub/sub connection for a whole process, read by hiredis with nothing in between.

redis-py's PubSub costs ten times as much per message, resubscribes without a word after a lost
link, and never notices a link that is half open. Here every subscription's acknowledgement reaches
its sink, the first and each after a reconnect, because what was published in between is lost and
must be read elsewhere; and a link without a reply for `dead_after_s` is replaced.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol, cast

import hiredis

from shared.connection import reason, servers_of, tls_context
from shared.errors import QueueUnavailable
from shared.logs import Log
from shared.servers import Address, parse
from shared.settings import RedisSettings

log = Log("pubsub")

PING_EVERY_S = 0.5
_SUBSCRIBE_CHUNK = 500
_MESSAGES = frozenset({b"message", b"smessage"})
_ACKS = frozenset({b"subscribe", b"ssubscribe"})
_UNACKS = frozenset({b"unsubscribe", b"sunsubscribe"})
_MOVED = re.compile(r"MOVED (\d+) (.*):(\d+)")
_AGAIN_S = 0.05
"""First wait before the next try; each further one is twice as long, up to a second."""


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
        self.at: Address | None = None
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
        self._servers = servers_of(settings)
        self._tag = tag
        self._location = parse(settings.redis_url.get_secret_value())
        self._tls = tls_context(self._location.login) if self._location.tls else None
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
        self._leaving: Counter[bytes] = Counter()
        """Own unsubscriptions that aren't acknowledged yet."""
        self._refusal: hiredis.ReplyError | None = None
        self._away_since: float | None = None
        """Since when the link is lost, once that was logged."""
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
                stood = self.reconnects
                try:
                    await self._hold()
                except (OSError, TimeoutError, QueueUnavailable, hiredis.ReplyError) as error:
                    self._note_away(error)
                self._forget_server()
                self._heed_move()
                # One that stood and was lost is sought at once; one that is refused, less and less.
                sound = self.reconnects > stood and self._refusal is None
                delay_s = _AGAIN_S if sound else min(max(delay_s * 2, _AGAIN_S), 1.0)
        finally:
            self._drop()

    def _note_away(self, error: Exception | None = None) -> None:
        """Log the loss of the link, once."""
        if self._away_since is None:
            self._away_since = asyncio.get_running_loop().time()
            fields = {"tag": self._tag} if self._tag else {}
            log.warning("pubsub.lost", reason=reason(error) if error else "closed", **fields)

    def _note_back(self) -> None:
        if self._away_since is not None:
            after_s = round(asyncio.get_running_loop().time() - self._away_since, 2)
            self._away_since = None
            fields = {"tag": self._tag} if self._tag else {}
            log.info("pubsub.back", after_s=after_s, **fields)

    async def _hold(self) -> None:
        """Hold one connection from its beginning to its end. Raises what it was refused with."""
        self._refusal = None
        link = await self._connect()
        try:
            await self._greet(link)
            self._link = link
            self._resubscribe(self.sinks)
            if not self.sinks:
                self._note_back()
            loop = asyncio.get_running_loop()
            while not link.lost.done():
                link.send("PING")
                await asyncio.wait([link.lost], timeout=PING_EVERY_S)
                if loop.time() - link.heard_at > self._dead_after_s:
                    raise TimeoutError(f"nothing heard for {self._dead_after_s:g} s")
                if self._servers is not None and await self._servers.locate(self._tag) != link.at:
                    raise ConnectionResetError("another server is the master now")
        finally:
            if self._link is not None:
                self.reconnects += 1
            self._drop()
            link.abort()
        if self._refusal is not None:
            raise self._refusal
        self._note_away()

    def _forget_server(self) -> None:
        """Find the server anew at the next connect: it may have failed over."""
        if self._servers is not None:
            self._servers.forget()

    def _heed_move(self) -> None:
        """Go where the server said that the channels are now."""
        moved = _MOVED.match(str(self._refusal)) if self._refusal else None
        if moved and self._servers is not None:
            self._servers.moved(int(moved[1]), Address(moved[2], int(moved[3])))

    def _drop(self) -> None:
        self._link = None
        self._leaving.clear()
        for ack in self._acks.values():
            if not ack.done():
                ack.set_exception(QueueUnavailable())
        self._acks.clear()

    async def _connect(self) -> _Link:
        loop, location = asyncio.get_running_loop(), self._location
        async with asyncio.timeout(self._timeout_s):
            if location.path:
                _, link = await loop.create_unix_connection(lambda: _Link(self), location.path)
                return link
            at = location.seeds[0]
            if self._servers is not None:
                at = await self._servers.locate(self._tag)
            _, link = await loop.create_connection(
                lambda: _Link(self), at.host, at.port, ssl=self._tls
            )
            link.at = at
        return link

    async def _greet(self, link: _Link) -> None:
        """Log in and name the connection; every reply until then belongs to the greeting."""
        commands: list[tuple[str, ...]] = []
        if password := self._location.login.get("password"):
            user = self._location.login.get("username")
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
                raise ConnectionResetError("closed while logging in")
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
            self._note_back()
            ack = self._acks.pop(reply[1], None)
            if ack is not None and not ack.done():
                ack.set_result(None)
            if (sink := self.sinks.get(reply[1])) is not None:
                sink.on_subscribed()
        elif isinstance(reply, list) and reply[0] in _UNACKS:
            self._on_unsubscribed(reply[1])
        elif isinstance(reply, hiredis.ReplyError) and self._link is not None:
            self._refusal = reply
            self._link.abort()

    def _on_unsubscribed(self, channel: bytes) -> None:
        """Take the acknowledgement of an own unsubscription, or the word that a slot has moved."""
        if self._leaving[channel]:
            self._leaving[channel] -= 1
            self._leaving += Counter()  # Drops what is 0.
        elif channel in self.sinks and self._link is not None:
            log.info("pubsub.moved", tag=self._tag)
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
                self._leaving[name] += 1
                self._link.send(self._unsubscribe, name)
