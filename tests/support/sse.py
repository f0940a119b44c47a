"""A strict HTTP/1.1 and SSE client on a raw socket, for tests of what really goes over the wire.

It reads only when asked to, so a test can be a slow reader or none; it tells a body that ended as
HTTP demands from one that was cut, which clients must not mistake for each other; it can leave at
any moment with FIN or RST; and it refuses what a lenient client would forgive.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

Ending = Literal["complete", "closed", "cut", "reset"]
"""By its own framing, by FIN where the framing allows it, by FIN before its end, by RST."""

_RECEIVE = 65536
_RESET = struct.pack("ii", 1, 0)
_FIELDS = frozenset(("data", "event", "id", "retry"))


class ProtocolError(AssertionError):
    """The server sent something that HTTP or SSE doesn't allow."""


@dataclass(frozen=True)
class Event:
    """One SSE event, or a comment, and when its last byte arrived (`time.monotonic()`)."""

    data: str | None
    at: float
    event: str | None = None
    id: str | None = None
    retry: str | None = None
    comment: str | None = None
    """Set when it is a comment alone."""

    @property
    def done(self) -> bool:
        return self.data == "[DONE]"

    def json(self) -> Any:
        assert self.data is not None
        return json.loads(self.data)


class Response:
    """An answer whose head has arrived. Its body is read on demand, and reading can be broken off
    at any moment (a timeout) and taken up again."""

    def __init__(self, status: int, headers: dict[str, str], version: str, wire: Wire) -> None:
        self.status = status
        self.headers = headers
        """Lower-case names. A name that came twice is a protocol error, but for `set-cookie`."""
        self.version = version
        self.ending: Ending | None = None
        """How the body ended; None until it has."""
        self.received = 0
        """Bytes of body read so far."""
        self.chunks: list[int] = []
        """Sizes of the HTTP chunks, to see what was joined into one write."""
        self.leftover = b""
        """What an event stream ended with that is no whole event."""
        self._wire = wire
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None and (coding != "chunked" or length is not None):
            raise ProtocolError(f"framed as {coding!r} and by length {length!r}")
        self._chunked = coding is not None
        self._left = 0 if length is None else int(length)
        self._framed = self._chunked or length is not None
        self._line: Literal["size", "end", "last"] = "size"
        """Which line of the chunked coding comes next."""
        if status in (204, 304) or length == "0":
            self._end("complete")

    @property
    def clean(self) -> bool:
        """Whether a client may take the answer for whole."""
        return self.ending in ("complete", "closed")

    async def part(self) -> bytes:
        """Return the next bytes of the body, none when it has ended."""
        part = b""
        try:
            while not part and self.ending is None:
                part = await self._next()
        except ConnectionError:
            self.ending = "reset"
        self.received += len(part)
        return part

    async def body(self) -> bytes:
        parts = []
        while part := await self.part():
            parts.append(part)
        return b"".join(parts)

    async def json(self) -> Any:
        return json.loads(await self.body())

    async def events(self) -> AsyncIterator[Event]:
        """Yield events as they become complete, and comments as their line does."""
        content_type = self.headers.get("content-type", "")
        if content_type.partition(";")[0] != "text/event-stream":
            raise ProtocolError(f"not an event stream: {self.status} {content_type}")
        block: list[bytes] = []
        self.leftover = b""
        while part := await self.part():
            at = time.monotonic()
            *lines, self.leftover = (self.leftover + part).split(b"\n")
            for line in lines:
                if b"\r" in line:
                    raise ProtocolError(f"event stream line {line!r}")
                if line.startswith(b":"):
                    yield Event(None, at, comment=_text(line[1:]).strip())
                elif line:
                    block.append(line)
                elif block:
                    yield _event(block, at)
                    block = []
        self.leftover = b"\n".join([*block, self.leftover])

    async def all_events(self) -> list[Event]:
        return [event async for event in self.events()]

    async def read_slowly(self, bytes_per_second: float, for_s: float) -> int:
        """Read at a limited rate for a while, and return how many bytes of body that were."""
        before = self.received
        self._wire.rate = bytes_per_second
        try:
            async with asyncio.timeout(for_s):
                await self.body()
        except TimeoutError:
            pass
        finally:
            self._wire.rate = None
        return self.received - before

    def disconnect(self, *, reset: bool = False) -> None:
        """Leave: close with FIN, or with RST."""
        self._wire.close(reset=reset)

    async def _next(self) -> bytes:
        """Take one step: return bytes of body, or none after a line of framing or the end."""
        if self._chunked and self._left == 0:
            await self._next_line()
            return b""
        part = await self._wire.some(self._left if self._framed else _RECEIVE)
        if not self._framed:
            return part or self._end("closed")
        if not part:
            return self._end("cut")
        self._left -= len(part)
        if self._left == 0 and not self._chunked:
            self._end("complete")
        return part

    async def _next_line(self) -> None:
        line = await self._wire.line()
        if line is None:
            self._end("cut")
        elif self._line == "size":
            self._left = _chunk_size(line)
            self._line = "end" if self._left else "last"
            if self._left:
                self.chunks.append(self._left)
        elif line:
            raise ProtocolError(f"a chunk is followed by {line!r}")
        elif self._line == "end":
            self._line = "size"
        else:
            self._end("complete")

    def _end(self, ending: Ending) -> bytes:
        if ending == "complete" and self._wire.buffered:
            raise ProtocolError(f"bytes after the end: {self._wire.buffered!r}")
        self.ending = ending
        return b""


class Wire:
    """The socket, and the bytes read from it that nobody has taken."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.buffered = b""
        self.rate: float | None = None

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def line(self) -> bytes | None:
        """Return a line without its CRLF, or None at the end of the connection."""
        while (end := self.buffered.find(b"\r\n")) < 0:
            if b"\n" in self.buffered:
                raise ProtocolError(f"a line ends without CR: {self.buffered[:80]!r}")
            if not await self._fill():
                return None
        line, self.buffered = self.buffered[:end], self.buffered[end + 2 :]
        return line

    async def some(self, most: int) -> bytes:
        """Return up to `most` bytes, none at the end of the connection."""
        if not self.buffered:
            await self._fill()
        part, self.buffered = self.buffered[:most], self.buffered[most:]
        return part

    async def _fill(self) -> bool:
        size = _RECEIVE
        if self.rate is not None:
            size = max(1, int(self.rate / 10))
            await asyncio.sleep(size / self.rate)
        data = await asyncio.get_running_loop().sock_recv(self._socket, size)
        self.buffered += data
        return bool(data)

    def close(self, *, reset: bool = False) -> None:
        if reset and self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()


@asynccontextmanager
async def open_response(
    url: str,
    body: object = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    version: Literal["1.1", "1.0"] = "1.1",
    receive_buffer: int | None = None,
) -> AsyncIterator[Response]:
    """Send a request and yield its answer once the head is there; leave with FIN at the end.

    A body of bytes goes as it is, anything else as JSON; with a body the method is POST. A small
    `receive_buffer` makes a reader that stops felt sooner.
    """
    wire = await connect(url, receive_buffer=receive_buffer)
    try:
        await wire.send(request_bytes(url, body, method=method, headers=headers, version=version))
        yield await read_head(wire, version)
    finally:
        wire.close()


async def fetch(url: str, body: object = None, **options: Any) -> tuple[Response, bytes]:
    """Make a request and return its answer and the whole body."""
    async with open_response(url, body, **options) as response:
        return response, await response.body()


async def connect(url: str, *, receive_buffer: int | None = None) -> Wire:
    """Connect to a URL's server, for a test that sends bytes of its own."""
    parts = urlsplit(url)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = (parts.hostname or "127.0.0.1", parts.port or 80)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return Wire(sock)


def request_bytes(
    url: str,
    body: object = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    version: str = "1.1",
) -> bytes:
    """Return a request as it goes over the wire."""
    parts = urlsplit(url)
    content = (
        b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    method = method or ("GET" if body is None else "POST")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fields = {"host": parts.netloc}
    if body is not None:
        fields |= {"content-type": "application/json", "content-length": str(len(content))}
    fields |= {name.lower(): value for name, value in (headers or {}).items()}
    lines = [f"{method} {target} HTTP/{version}", *(f"{k}: {v}" for k, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


async def read_head(wire: Wire, version: str = "1.1") -> Response:
    """Read an answer's status line and headers. Interim answers (1xx) are skipped."""
    while True:
        status_line = await wire.line()
        if status_line is None:
            raise ConnectionResetError("closed without an answer")
        protocol, _, rest = status_line.decode("latin-1").partition(" ")
        status = int(rest[:3])
        headers: dict[str, str] = {}
        while line := await wire.line():
            name, colon, value = line.decode("latin-1").partition(":")
            name = name.lower()
            if not colon or name != name.strip() or (name in headers and name != "set-cookie"):
                raise ProtocolError(f"header line {line!r}")
            headers[name] = value.strip()
        if line is None:
            raise ConnectionResetError("closed within the head")
        if status >= 200:
            break
    if version == "1.0" and "transfer-encoding" in headers:
        raise ProtocolError("an HTTP/1.0 client was sent a transfer coding")
    return Response(status, headers, protocol.removeprefix("HTTP/"), wire)


def _event(lines: list[bytes], at: float) -> Event:
    """Read one block of lines. Invalid UTF-8 and unknown fields are errors."""
    fields: dict[str, list[str]] = {}
    for line in lines:
        name, _, value = _text(line).partition(":")
        if name not in _FIELDS:
            raise ProtocolError(f"event stream line {line!r}")
        fields.setdefault(name, []).append(value.removeprefix(" "))
    return Event(
        "\n".join(fields["data"]) if "data" in fields else None,
        at,
        event=fields.get("event", [None])[-1],
        id=fields.get("id", [None])[-1],
        retry=fields.get("retry", [None])[-1],
    )


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"not UTF-8: {line!r}") from error


def _chunk_size(line: bytes) -> int:
    if not line or not all(digit in b"0123456789abcdefABCDEF" for digit in line):
        raise ProtocolError(f"chunk size {line!r}")
    return int(line, 16)
