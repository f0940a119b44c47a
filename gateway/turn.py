"""What a turn of the loop brings for many streams, dealt with at its end: once per stream."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Delivering(Protocol):
    """A stream that has got something."""

    def deliver(self, now: float) -> None:
        """Deal with all that came. `now`: by the performance counter. Must not raise."""


class Turn:
    """Streams that have got something, in the order in which they got it."""

    def __init__(self) -> None:
        self._streams: list[Delivering] = []

    def add(self, stream: Delivering) -> None:
        """Have `deliver` called, after all that the connection has to give now."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._end)
        self._streams.append(stream)

    def _end(self) -> None:
        streams, self._streams = self._streams, []
        now = time.perf_counter()
        for stream in streams:
            stream.deliver(now)
