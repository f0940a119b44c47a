"""Joins the answer of this attempt to what earlier ones have published.

The application runs from the beginning, over the recorded tokens, and says everything again. What
it repeats is compared with the log and left out. Where the two differ the answer can't be continued
without repeating or losing something.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from shared import protocol
from shared.errors import Diverged
from shared.outcomes import Adopted
from shared.protocol import Delta
from shared.transitions import Transitions

_MADE_UP = frozenset({"created", "system_fingerprint"})
"""Fields whose values are each attempt's own, and the same in all of its events."""
_MEASURED = frozenset({"prompt_tokens_details", "metrics"})
"""Fields that say how an attempt went, not what it answered."""


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
    """Lets through only what is new, with the first attempt's time and ids in it."""

    def __init__(self, past: Past) -> None:
        self._events = past.events
        self._at = 0
        self._own: dict[bytes, bytes] = {}
        """What this attempt has made up, as it stands in its events; and the first attempt's."""

    def pass_on(self, event: bytes) -> bytes | None:
        """Return an event if it is new, else None. Raises `Diverged`."""
        for own, theirs in self._own.items():
            event = event.replace(own, theirs)
        if self._at == len(self._events):
            return event
        known = self._events[self._at]
        self._at += 1
        if event != known:
            try:
                self._own.update(_differences(_decode(event), _decode(known)))
            except msgspec.DecodeError:
                raise Diverged from None
        return None


def _decode(event: bytes) -> Any:
    return msgspec.json.decode(event.removeprefix(b"data:"))


def _differences(new: Any, known: Any, place: str = "") -> Iterator[tuple[bytes, bytes]]:
    """Yield how two events differ in what an attempt makes up. Raises `Diverged` on any other."""
    if isinstance(new, dict) and isinstance(known, dict):
        for name in new.keys() | known.keys():
            if name in _MEASURED:
                continue
            if (name in new) != (name in known):
                raise Diverged
            if new[name] == known[name]:
                continue
            if name in _MADE_UP or (name == "id" and place == "tool_calls"):
                yield _written(name, new[name]), _written(name, known[name])
            else:
                yield from _differences(new[name], known[name], name)
    elif isinstance(new, list) and isinstance(known, list) and len(new) == len(known):
        for one, other in zip(new, known, strict=True):
            yield from _differences(one, other, place)
    elif new != known:
        raise Diverged


def _written(name: str, value: object) -> bytes:
    """Return a field as applications write it. In no text can it be: quotes are escaped there."""
    return json.dumps({name: value}, separators=(",", ":"))[1:-1].encode()
