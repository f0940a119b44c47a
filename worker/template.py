"""Thins a stream's events: the beginning and end that they share are said once.

The events of a stream differ only in a few bytes: id, object, model and time are the same in each.
The parts stay opaque; nothing here knows JSON.
"""

from __future__ import annotations

from shared.protocol import Item

_WORTH_BYTES = 48
"""A template that saves less per event isn't worth its own frame."""
_MISSES = 4
"""So many events in a row that don't fit: the stream has changed, learn again."""


def _shared(one: bytes, other: bytes) -> int:
    """Return how many bytes two texts have in common from their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class Template:
    """Learns the template of one stream from its events."""

    def __init__(self) -> None:
        self._prefix = b""
        self._suffix = b""
        self._previous = b""
        self._misses = _MISSES
        self.fresh: tuple[bytes, bytes] | None = None
        """A template just learnt, to be sent with the frame of the item that follows."""

    def thin(self, event: bytes) -> Item:
        """Return what differs from the template, or the whole event where it doesn't fit."""
        prefix, suffix = self._prefix, self._suffix
        if (
            prefix
            and len(event) >= len(prefix) + len(suffix)
            and event.startswith(prefix)
            and event.endswith(suffix)
        ):
            self._misses = 0
            return event[len(prefix) : len(event) - len(suffix)]
        self._misses += 1
        if self._misses > _MISSES and self._learn(event):
            return self.thin(event)
        self._previous = event
        return (event,)

    def _learn(self, event: bytes) -> bool:
        """Take what this event and the one before it have in common."""
        previous = self._previous
        prefix = event[: _shared(previous, event)]
        rest = min(len(previous), len(event)) - len(prefix)
        suffix = event[len(event) - min(_shared(previous[::-1], event[::-1]), rest) :]
        if not prefix or len(prefix) + len(suffix) < _WORTH_BYTES:
            return False
        self._prefix, self._suffix = prefix, suffix
        self.fresh = (prefix, suffix)
        return True
