"""The load generator: streaming requests on raw connections, parsed with as little as will do.

A token's moment is read from its text, where the engine was told to write it, and its arrival is
the moment at which the bytes that hold it were read. Both clocks are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from array import array
from collections.abc import Mapping
from typing import Any, cast

STAMPED = re.compile(rb'"content":" @(\d+)"')
"""A token that says when it was made."""
WORDS = re.compile(rb'"content":"()[^"]')
"""A token that doesn't."""
_USAGE = re.compile(rb'"completion_tokens":(\d+)')


def chat_request(port: int, fields: Mapping[str, Any], more_headers: str = "") -> bytes:
    """Return a streaming chat as the bytes of an HTTP request."""
    body = json.dumps({"stream": True, **fields}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        f"host: 127.0.0.1:{port}\r\n"
        "content-type: application/json\r\n"
        f"{more_headers}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Answer:
    """What came, and when. Times are nanoseconds."""

    __slots__ = ("arrivals", "chunks", "done", "fault", "first_ns", "sent_ns", "size", "stamps")

    def __init__(self) -> None:
        self.sent_ns = 0
        self.first_ns = 0
        """Arrival of the first token."""
        self.stamps = array("q")
        self.arrivals = array("q")
        self.chunks = 0
        """Of the transfer coding: writes that the server made."""
        self.size = 0
        self.done = False
        """Whether it came to its proper end, `[DONE]`."""
        self.fault = ""

    @property
    def ttft_ms(self) -> float:
        return (self.first_ns - self.sent_ns) / 1e6


class Connection(asyncio.Protocol):
    """One connection; one request after the other."""

    def __init__(self, pattern: re.Pattern[bytes] = STAMPED) -> None:
        self._find = pattern.findall
        self._stamped = pattern is STAMPED
        self._transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._end: asyncio.Future[Answer] | None = None
        self._rest = b""
        self._events = b""
        """An event's beginning, where a chunk ends within it."""
        self._last = b""
        self._in_body = False
        self.usage_tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None and not self._end.done():
            self._finish("the connection was cut")

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """Send a request; the answer is there when it has ended."""
        self._answer = Answer()
        self._end = asyncio.get_running_loop().create_future()
        self._rest = self._events = self._last = b""
        self._in_body = False
        self._answer.sent_ns = time.monotonic_ns()
        assert self._transport is not None
        self._transport.write(request)
        return self._end

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        answer = self._answer
        answer.size += len(data)
        buffer = self._rest + data if self._rest else data
        at = 0
        if not self._in_body:
            at = self._read_head(buffer)
            if at == 0:
                self._rest = buffer
                return
        while True:
            eol = buffer.find(b"\r\n", at)
            if eol < 0:
                break
            size = int(buffer[at:eol], 16)
            end = eol + 2 + size
            if len(buffer) < end + 2:
                break
            at = end + 2
            if size == 0:
                self._rest = b""
                self._finish("" if b"[DONE]" in self._last else "ended without [DONE]")
                return
            answer.chunks += 1
            self._take(buffer[eol + 2 : end], now)
        self._rest = buffer[at:]

    def _read_head(self, buffer: bytes) -> int:
        """Return where the body begins; 0 while the head isn't whole."""
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return 0
        head = buffer[:end].lower()
        if not head.startswith(b"http/1.1 200") or b"transfer-encoding: chunked" not in head:
            self._finish(buffer[:2000].decode(errors="replace"))
            self.close()
            return 0
        self._in_body = True
        return end + 4

    def _take(self, body: bytes, now: int) -> None:
        if self._events:
            body = self._events + body
        if body.endswith(b"\n\n"):
            self._events = b""
        else:
            whole = body.rfind(b"\n\n") + 2
            if whole == 1:
                self._events = body
                return
            self._events, body = body[whole:], body[:whole]
        self._last = body
        answer = self._answer
        for found in self._find(body):
            if not answer.first_ns:
                answer.first_ns = now
            answer.arrivals.append(now)
            if self._stamped:
                answer.stamps.append(int(found))
        if b'"completion_tokens"' in body and (usage := _USAGE.findall(body)):
            self.usage_tokens = int(usage[-1])

    def _finish(self, fault: str) -> None:
        answer = self._answer
        answer.fault, answer.done = fault, not fault
        if self._end is not None and not self._end.done():
            self._end.set_result(answer)


async def connect(port: int, pattern: re.Pattern[bytes] = STAMPED) -> Connection:
    """Open a connection to this machine."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(pattern), "127.0.0.1", port)
    return connection


def check(answers: list[Answer]) -> None:
    """Raise for the first answer that isn't whole: figures of a broken run mean nothing."""
    for answer in answers:
        if not answer.done:
            raise RuntimeError(f"an answer failed: {answer.fault or 'not ended in time'}")
