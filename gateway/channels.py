"""Several readers on one channel: the pub/sub connection knows one sink per channel.

Nearly every channel has one reader, whose method then is the channel's own: no call is added to a
frame's way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.relay import JobStream
from shared.subscribers import Subscribers


class Fan:
    """A channel's sink. `standing` is done when its subscription stands or has failed."""

    __slots__ = ("on_message", "standing", "streams")

    on_message: Callable[[bytes], None]

    def __init__(self) -> None:
        self.streams: list[JobStream] = []
        self.standing: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def add(self, stream: JobStream) -> None:
        self.streams.append(stream)
        self._aim()

    def remove(self, stream: JobStream) -> None:
        self.streams.remove(stream)
        self._aim()

    def _aim(self) -> None:
        only = len(self.streams) == 1
        self.on_message = self.streams[0].on_message if only else self._on_message

    def _on_message(self, message: bytes) -> None:
        for stream in self.streams:
            stream.on_message(message)

    def on_subscribed(self) -> None:
        for stream in self.streams:
            stream.on_subscribed()


class Channels:
    """The channels that this process listens to, each with its readers."""

    def __init__(self, subscriber: Subscribers) -> None:
        self._subscriber = subscriber
        self._fans: dict[str, Fan] = {}

    async def open(self, channel: str, stream: JobStream) -> None:
        """Attach a reader and wait until the subscription stands. Raises `QueueUnavailable`."""
        while True:
            fan = self._fans.get(channel)
            if fan is None:
                await self._open_first(channel, stream)
                return
            fan.add(stream)
            try:
                if await asyncio.shield(fan.standing):
                    return
            except BaseException:
                self._leave(channel, fan, stream)
                raise
            # Whoever was first has given up: be the first.
            fan.remove(stream)

    async def _open_first(self, channel: str, stream: JobStream) -> None:
        fan = self._fans[channel] = Fan()
        fan.add(stream)
        stands = False
        try:
            await self._subscriber.subscribe(channel, fan)
            stands = True
        finally:
            if not stands and self._fans.get(channel) is fan:
                del self._fans[channel]
            fan.standing.set_result(stands)

    def close(self, channel: str, stream: JobStream) -> None:
        """Detach a reader, if it is attached; the last one ends the subscription."""
        fan = self._fans.get(channel)
        if fan is not None and stream in fan.streams:
            self._leave(channel, fan, stream)

    def _leave(self, channel: str, fan: Fan, stream: JobStream) -> None:
        fan.remove(stream)
        if not fan.streams and self._fans.get(channel) is fan:
            del self._fans[channel]
            self._subscriber.unsubscribe(channel, fan)
