"""Subscriptions wherever their channels live: one connection, or in a cluster one per tag."""

from __future__ import annotations

import asyncio

from shared.connection import servers_of
from shared.errors import QueueUnavailable
from shared.keys import hash_tag
from shared.pubsub import Sink, Subscriber
from shared.settings import RedisSettings

_LINK_POLL_S = 0.02
IDLE_TAGS = 64
"""So many tags may keep a connection without a channel: ids from outside can name any tag."""


class Subscribers:
    """`Subscriber` for any kind of server. `run()` is one of the process's long tasks.

    In a cluster the connections begin with the first channel of their tag.
    """

    def __init__(self, settings: RedisSettings, *, name: str, ack_timeout_s: float) -> None:
        servers = servers_of(settings)
        self._sharded = servers is not None and servers.sharded
        self._settings = settings
        self._name = name
        self._ack_timeout_s = ack_timeout_s
        self._made: dict[str, Subscriber] = {}
        self._begun: asyncio.Queue[tuple[str, Subscriber]] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._gone_reconnects = 0
        if not self._sharded:
            self._of_tag("")

    @property
    def connected(self) -> bool:
        """Whether the link stands; of several any, since each tag's fate is its own."""
        links = [one.connected for one in self._made.values()]
        return any(links) or not links

    @property
    def reconnects(self) -> int:
        """Links that were lost."""
        return self._gone_reconnects + sum(one.reconnects for one in self._made.values())

    async def run(self) -> None:
        """Hold the connections until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                tag, subscriber = await self._begun.get()
                if self._made.get(tag) is subscriber:
                    self._tasks[tag] = group.create_task(subscriber.run())

    def of(self, channel: str) -> Subscriber:
        """Return the connection of a channel, begun if need be."""
        return self._of_tag(hash_tag(channel) if self._sharded else "")

    def _of_tag(self, tag: str) -> Subscriber:
        found = self._made.get(tag)
        if found is None:
            self._drop_idle()
            found = self._made[tag] = Subscriber(
                self._settings, name=self._name, ack_timeout_s=self._ack_timeout_s, tag=tag
            )
            self._begun.put_nowait((tag, found))
        return found

    def _drop_idle(self) -> None:
        idle = [tag for tag, one in self._made.items() if not one.sinks]
        for tag in idle[: len(idle) - IDLE_TAGS + 1] if len(idle) >= IDLE_TAGS else ():
            self._gone_reconnects += self._made.pop(tag).reconnects
            if (task := self._tasks.pop(tag, None)) is not None:
                task.cancel()

    async def subscribe(self, channel: str, sink: Sink) -> None:
        """Attach a sink and wait until its subscription stands. Raises `QueueUnavailable`.

        A link that is lost meanwhile is waited for: the channel may be about to move.
        """
        subscriber = self.of(channel)
        try:
            async with asyncio.timeout(self._ack_timeout_s):
                while True:
                    try:
                        return await subscriber.subscribe(channel, sink)
                    except QueueUnavailable:
                        await asyncio.sleep(_LINK_POLL_S)
        except TimeoutError as error:
            raise QueueUnavailable from error

    def keep(self, channel: str, sink: Sink) -> None:
        """Attach a sink for the life of the process, whether or not the link stands now."""
        self.of(channel).keep(channel, sink)

    def unsubscribe(self, channel: str, sink: Sink) -> None:
        """Detach a sink, if it is still the channel's."""
        self.of(channel).unsubscribe(channel, sink)
