"""Thins a stream's events: the beginning and end that they share are said once.

The events of a stream differ only in a few bytes: id, object, model and time are the same in each.
The parts stay opaque; nothing here knows JSON.
"""

from __future__ import annotations

from shared.protocol import Item

_WORTH_BYTES = 48
"""A template that saves less per event isn't worth its own frame."""
_BETTER_BYTES = 8
"""Nor does one replace another for less."""
_MISSES = 4
"""So many events in a row that don't fit: the stream has changed, learn again."""


def _shared(one: bytes, other: bytes) -> int:
    """Return how many bytes two texts have in common from their beginnings."""
    size = min(len(one), len(other))
    # As two large numbers: their first differing bit is found without a loop over bytes.
    differing = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return size - (differing.bit_length() + 7) // 8


class Template:
    """Learns the template of one stream from its events."""

    def __init__(self) -> None:
        self._prefix = b""
        self._suffix = b""
        self._prefix_bytes = self._suffix_bytes = 0
        self._previous = b""
        self._misses = _MISSES
        self._young = False
        """Whether it was learnt from the last event: the next may show it to be too short."""
        self.fresh: tuple[bytes, bytes] | None = None
        """A template just learnt, to be sent with the frame of the item that follows."""

    def thin(self, event: bytes) -> Item:
        """Return what differs from the template, or the whole event where it doesn't fit."""
        skipped, end = self._prefix_bytes, len(event) - self._suffix_bytes
        if (
            skipped
            and skipped <= end
            and event.startswith(self._prefix)
            and event.endswith(self._suffix)
        ):
            self._misses = 0
            if not self._young:
                return event[skipped:end]
            # A chat's first event has a form of its own: what it shares with the second is less
            # than what all later ones share with each other.
            self._young = False
            self._learn(event, skipped + self._suffix_bytes + _BETTER_BYTES)
            return self._cut(event)
        self._misses += 1
        if self._misses > _MISSES and self._learn(event, _WORTH_BYTES):
            self._misses = 0
            self._young = True
            self._previous = event
            return self._cut(event)
        self._previous = event
        return (event,)

    def _cut(self, event: bytes) -> bytes:
        return event[self._prefix_bytes : len(event) - self._suffix_bytes]

    def _learn(self, event: bytes, worth_bytes: int) -> bool:
        """Take what this event and the one before it have in common, if that is enough."""
        previous = self._previous
        prefix = event[: _shared(previous, event)]
        rest = min(len(previous), len(event)) - len(prefix)
        suffix = event[len(event) - min(_shared(previous[::-1], event[::-1]), rest) :]
        if not prefix or len(prefix) + len(suffix) < worth_bytes:
            return False
        self._prefix, self._suffix = prefix, suffix
        self._prefix_bytes, self._suffix_bytes = len(prefix), len(suffix)
        self.fresh = (prefix, suffix)
        return True
