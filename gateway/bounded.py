"""uvicorn's HTTP protocol with limits that it lacks: the size of a request's head, and its time.

It also reads on where uvicorn stops: Java's client offers an upgrade to HTTP/2 with every request.
"""

from __future__ import annotations

import asyncio
import json

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.cors import Cors
from gateway.errors import HeadTooLarge
from gateway.exchange import request_id
from shared.errors import HeadraceError, InvalidRequest
from shared.logs import Log

log = Log("gateway")

_FRAMING = (b"content-length", b"transfer-encoding")
_PER_HEADER = 4
"""`: ` and the line's end."""
_MOST_AHEAD = 8
"""Requests sent before the answer to one is whole; with more, what follows is not read yet, and
that the client has left shows only in what it is sent."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a request whose target and headers are larger than `limit_bytes`, and hangs up.

    It hangs up too where a head is not whole in the time that an idle connection is kept.
    """

    limit_bytes: int
    cors: Cors
    _head_bytes = 0
    _unparsed_bytes = 0
    _in_head = False
    _head_known = False
    """The parser is told again what framed the body."""
    _head_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None
    """The request whose turn it is; uvicorn knows the newest alone."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        if (cycle := self._unanswered()) is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count also what the parser keeps to itself: a field without an end."""
        self._unset_keepalive_if_required()
        self._unparsed_bytes += len(data)
        self._parse(data)
        if self._unparsed_bytes > 2 * self.limit_bytes and not self.transport.is_closing():
            self._refuse()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline(data[upgrade.args[0] :])
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _decline(self, rest: bytes) -> bytes:
        """Go on as if no upgrade had been offered; the old parser takes the body for its bytes."""
        framing = [name + b": " + value for name, value in self.headers if name in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._head_known = True
        return b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", rest])

    def on_message_begin(self) -> None:
        if self._head_known:
            return
        super().on_message_begin()
        self._in_head, self._head_bytes, self._unparsed_bytes = True, 0, 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        if self._head_known:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_known:
            return
        self._count(len(name) + len(value) + _PER_HEADER)
        if self._in_head:  # What follows a body is no header.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._head_known:
            self._head_known = False
            return
        self._in_head = False
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # It doesn't know of interim answers.
        self._head_came()
        super().on_headers_complete()
        if self._unanswered() is None:
            self._answering = self.cycle
        elif len(self.pipeline) <= _MOST_AHEAD:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._answering = following

    def _unanswered(self) -> RequestResponseCycle | None:
        cycle = self._answering
        return None if cycle is None or cycle.response_complete else cycle

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong in the form of every error."""
        if self._head_bytes > self.limit_bytes:
            self._refuse()
        else:
            self._answer(InvalidRequest("The request is not valid HTTP."), "Bad Request")

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._head_is_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # The head of the next request, while this one is answered.
            self._await_head()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limit_bytes:
            raise HeadTooLarge  # The parser takes it for a fault of the request.

    def _refuse(self) -> None:
        self._answer(HeadTooLarge(), "Request Header Fields Too Large")

    def _answer(self, error: HeadraceError, phrase: str) -> None:
        cycle = self._unanswered()
        if cycle is not None and cycle.response_started:
            self.transport.close()  # Within an answer it could not be told from its parts.
            return
        request = request_id(self.headers or [])
        log.info("request.unreadable", request=request, status=error.status, outcome=error.code)
        content = json.dumps(error.body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
            (b"x-should-retry", b"false"),
            (b"x-request-id", request.encode()),
            *self.cors.headers(self.headers or []),
        ]
        lines = [f"HTTP/1.1 {error.status} {phrase}".encode(), *(b": ".join(h) for h in headers)]
        self.transport.write(b"\r\n".join([*lines, b"", content]))
        self.transport.close()


def bounded(limit_bytes: int, cors: Cors) -> type[BoundedProtocol]:
    """Return the protocol with a limit."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limit_bytes": limit_bytes, "cors": cors})
