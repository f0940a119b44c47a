"""uvicorn's HTTP protocol with a limit that it lacks: the size of a request's head."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import HeadTooLarge

_PER_HEADER = 4
"""`: ` and the line's end."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a request whose target and headers are larger than `limit_bytes`, and hangs up."""

    limit_bytes: int
    _head_bytes = 0
    _unparsed_bytes = 0
    _in_head = False

    def data_received(self, data: bytes) -> None:
        """Count also what the parser keeps to itself: a header without an end."""
        super().data_received(data)
        if self._in_head:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > 2 * self.limit_bytes and not self.transport.is_closing():
                self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._unparsed_bytes = True, 0, 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _PER_HEADER)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong, if it is that; else what uvicorn says."""
        if self._head_bytes > self.limit_bytes:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limit_bytes:
            raise HeadTooLarge  # The parser takes it for a fault of the request.

    def _refuse(self) -> None:
        content = json.dumps(HeadTooLarge().body()).encode()
        head = (
            f"HTTP/1.1 {HeadTooLarge.status} Request Header Fields Too Large\r\n"
            "content-type: application/json\r\nx-should-retry: false\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()


def bounded(limit_bytes: int) -> type[BoundedProtocol]:
    """Return the protocol with a limit."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limit_bytes": limit_bytes})
