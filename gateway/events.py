"""Numbers the events of a stream, for clients that asked for ids, and skips those they have had.

An event's id is its number in the job's whole answer. The answer's events are the same whichever
gateway relays them and whichever workers made them, and so are their numbers.
"""

from __future__ import annotations


class Numbering:
    """Goes through one stream's bytes; `ids` says whether numbers are shown."""

    def __init__(self, *, after: int = 0, ids: bool = True) -> None:
        self.ids = ids
        self._after = after
        self._number = 0
        self._rest = b""

    def pass_on(self, data: bytes) -> bytes:
        """Return the whole events among what has come, but for those that are skipped."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        out = []
        for event in events:
            if event.startswith(b":") and b"\ndata:" not in event:
                out.append(event + b"\n")  # A comment. After an id, a blank line would be an event.
                continue
            self._number += 1
            if self._number > self._after:
                head = b"id: %d\n" % self._number if self.ids else b""
                out.append(b"%b%b\n\n" % (head, event))
        return b"".join(out)

    def rest(self) -> bytes:
        """Return what was left without an event's end."""
        rest, self._rest = self._rest, b""
        return rest
