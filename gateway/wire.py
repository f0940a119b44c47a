"""What ASGI lacks, on servers whose inside we know: the transport behind an answer.

uvicorn's internals are touched here and nowhere else. On another server, or when they have
changed, everything here says "don't know" and the callers fall back on plain ASGI.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import Any

import uvicorn
from starlette.types import Send

_UNBOUNDED = 1 << 62
_KNOWN = ((0, 30), (0, 54))
"""Versions of uvicorn, first and last, that are known to write each part of a body as one chunk and
to keep nothing back: between two of its own writes there may be one of ours."""


def _is_known(version: str) -> bool:
    try:
        major, minor = (int(number) for number in version.split(".")[:2])
    except ValueError:
        return False
    return _KNOWN[0] <= (major, minor) <= _KNOWN[1]


_WRITES = _is_known(uvicorn.__version__)


class Wire:
    """The connection that an answer goes out on."""

    __slots__ = ("_chunks_always", "_cycle", "_transport")

    def __init__(self, send: Send) -> None:
        cycle: Any = getattr(send, "__self__", None)
        module = type(cycle).__module__
        self._cycle: Any = cycle if module.startswith("uvicorn.protocols.http.") else None
        self._chunks_always = module.endswith(".httptools_impl")
        transport: Any = getattr(self._cycle, "transport", None)
        known = all(hasattr(transport, name) for name in ("abort", "get_write_buffer_size"))
        self._transport: asyncio.Transport | None = transport if known else None

    def abort(self) -> None:
        """Cut the connection; what was not sent yet is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def unsent(self) -> int | None:
        """Return the number of bytes that the client hasn't taken yet, if that is known."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return None
        return transport.get_write_buffer_size() + _unacknowledged(transport)

    def can_write(self) -> bool:
        """Tell whether an answer that has begun may be written past the server."""
        cycle, transport = self._cycle, self._transport
        return (
            _WRITES
            and self._chunks_always
            and hasattr(transport, "write")
            and getattr(cycle, "response_started", False) is True
            and getattr(cycle, "response_complete", True) is False
            and getattr(cycle, "chunked_encoding", False) is True
            and getattr(cycle, "disconnected", None) is not None
            and getattr(getattr(cycle, "flow", None), "write_paused", None) is not None
        )

    def flows(self) -> bool:
        """Tell, where it can be written, whether the client is there and takes what it is sent."""
        cycle = self._cycle
        if cycle.disconnected or cycle.flow.write_paused:
            return False
        return not cycle.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write a part of the body, where it flows. Not while the server is sending another."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def can_unchunk(self) -> bool:
        """Tell whether an HTTP/1.0 client can be sent a body of unknown length on this server.

        uvicorn's httptools protocol would send it chunked, which HTTP/1.0 doesn't know.
        """
        if not self._chunks_always:
            return True
        cycle = self._cycle
        return (
            getattr(cycle, "chunked_encoding", 0) is None
            and getattr(cycle, "expected_content_length", None) == 0
        )

    def unchunk(self) -> None:
        """Before the answer starts: let its end be the connection's end."""
        if self._chunks_always:
            self._cycle.chunked_encoding = False
            self._cycle.expected_content_length = _UNBOUNDED

    def end_unchunked(self, last_bytes: int) -> None:
        """Before the last body message, of this length."""
        if self._chunks_always:
            self._cycle.expected_content_length = last_bytes


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Return the bytes in the kernel's queue.

    It takes new ones only in large steps: a slow reader's progress shows here long before it shows
    in the transport's own buffer.
    """
    sock = transport.get_extra_info("socket")
    try:
        reply = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except (AttributeError, OSError, ValueError):
        return 0
    return int(struct.unpack("i", reply)[0])
