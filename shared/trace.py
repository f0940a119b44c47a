"""W3C's trace context: the two headers by which spans of several processes find each other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = re.compile(rb"[\x20-\x7e]{1,512}")


class TraceContext(NamedTuple):
    """Values of `traceparent` and `tracestate`; empty where there is no trace."""

    parent: str = ""
    state: str = ""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that hand it on."""
        pairs = ((b"traceparent", self.parent), (b"tracestate", self.state))
        return [(name, value.encode()) for name, value in pairs if value]


def read_trace(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext:
    """Return what a request's headers say; none where they are not valid, as W3C asks."""
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1 or not _PARENT.fullmatch(parents[0]):
        return TraceContext()
    state = b",".join(states)
    return TraceContext(parents[0].decode(), state.decode() if _STATE.fullmatch(state) else "")
