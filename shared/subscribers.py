"""Subscriptions wherever their channels live: one connection, or in a cluster one per tag."""

from __future__ import annotations

import asyncio
import re

from shared.connection import servers_of
from shared.errors import QueueUnavailable
from shared.pubsub import Sink, Subscriber
from shared.settings import RedisSettings

_TAG = re.compile(r"\{(\w+)\}")
_LINK_POLL_S = 0.02


class Subscribers:
    """`Subscriber` for any kind of server. `run()` is one of the process's long tasks.

    In a cluster the connections begin with the first channel of their tag, and stay: there are as
    many as pools have shards.
    """

    def __init__(self, settings: RedisSettings, *, name: str, ack_timeout_s: float) -> None:
        servers = servers_of(settings)
        self._sharded = servers is not None and servers.sharded
        self._settings = settings
        self._name = name
        self._ack_timeout_s = ack_timeout_s
        self._made: dict[str, Subscriber] = {}
        self._begun: asyncio.Queue[Subscriber] = asyncio.Queue()
        if not self._sharded:
            self.of("")

    @property
    def connected(self) -> bool:
        """Whether all links stand, as far as is known."""
        return all(one.connected for one in self._made.values())

    @property
    def reconnects(self) -> int:
        """Links that were lost."""
        return sum(one.reconnects for one in self._made.values())

    async def run(self) -> None:
        """Hold the connections until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task((await self._begun.get()).run())

    def of(self, channel: str) -> Subscriber:
        """Return the connection of a channel, begun if need be."""
        match = _TAG.search(channel) if self._sharded else None
        tag = match[1] if match else ""
        found = self._made.get(tag)
        if found is None:
            found = self._made[tag] = Subscriber(
                self._settings, name=self._name, ack_timeout_s=self._ack_timeout_s, tag=tag
            )
            self._begun.put_nowait(found)
        return found

    async def subscribe(self, channel: str, sink: Sink) -> None:
        """Attach a sink and wait until its subscription stands. Raises `QueueUnavailable`."""
        subscriber = self.of(channel)
        try:
            async with asyncio.timeout(self._ack_timeout_s):
                while not subscriber.connected:  # noqa: ASYNC110 (a short cut is nobody's fault)
                    await asyncio.sleep(_LINK_POLL_S)
        except TimeoutError as error:
            raise QueueUnavailable from error
        await subscriber.subscribe(channel, sink)

    def keep(self, channel: str, sink: Sink) -> None:
        """Attach a sink for the life of the process, whether or not the link stands now."""
        self.of(channel).keep(channel, sink)

    def unsubscribe(self, channel: str, sink: Sink) -> None:
        """Detach a sink, if it is still the channel's."""
        self.of(channel).unsubscribe(channel, sink)
