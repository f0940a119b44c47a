"""Joins the answer of this attempt to what earlier ones have published.

The application runs from the beginning, over the recorded tokens, and says everything again. What
it repeats is compared with the log and left out. Where the two differ the answer can't be continued
without repeating or losing something.
"""

from __future__ import annotations

import re

from shared import protocol
from shared.errors import Diverged
from shared.protocol import Delta
from shared.transitions import Adopted, Transitions

_CREATED = re.compile(rb'"created":\d+')
_OWN_IDS = re.compile(rb'"(?:created":\d+|id":"(?:chatcmpl-tool-|call_)[0-9a-zA-Z]+")')
"""What an application makes up anew each time: the time, ids of tool calls."""


class Past:
    """What the log says of a job's earlier attempts."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.tokens: list[Delta] = []
        self.whole = True
        """False where a frame is missing."""
        self._template = (b"", b"")

    @classmethod
    async def read(cls, transitions: Transitions, adopted: Adopted) -> Past:
        """Read a job's log up to where this attempt begins. Raises `QueueUnavailable`."""
        past, seq = cls(), 0
        while seq < adopted.base:
            page = await transitions.read_log(adopted.job.id, seq)
            for envelope in page.envelopes:
                past.whole = past.whole and envelope.seq == seq + 1
                seq = envelope.seq
                past._add(protocol.decode_frame(envelope.body))
            if not page.envelopes:
                past.whole = False
                break
        return past

    def _add(self, frame: protocol.Frame) -> None:
        self._template = frame.template or self._template
        prefix, suffix = self._template
        for item in frame.items:
            self.events.append(item[0] if isinstance(item, tuple) else prefix + item + suffix)
        self.tokens += frame.tokens


class Splice:
    """Lets through only what is new, with the time of the first attempt."""

    def __init__(self, past: Past) -> None:
        self._events = past.events
        self._at = 0
        self._created: tuple[bytes, bytes] | None = None

    def pass_on(self, event: bytes) -> bytes | None:
        """Return an event if it is new, else None. Raises `Diverged`."""
        if self._at < len(self._events):
            known = self._events[self._at]
            if self._at == 0:
                self._learn(known, event)
            self._at += 1
            if _OWN_IDS.sub(b"", event) != _OWN_IDS.sub(b"", known):
                raise Diverged
            return None
        if self._created is not None:
            return event.replace(*self._created, 1)
        return event

    def _learn(self, known: bytes, event: bytes) -> None:
        then, now = _CREATED.search(known), _CREATED.search(event)
        if then and now and then.group() != now.group():
            self._created = (now.group(), then.group())
