"""A TCP proxy that a test puts between a process and Redis, to break the link in chosen ways.

It runs in the test's own event loop. What it does can be changed at any moment and holds for open
connections too, so that a fault can strike in the middle of a conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_CHUNK = 65536
_CUT_AFTER_S = 0.02
"""Time for the server to read a request before its connection is reset under it."""
_RESET = struct.pack("ii", 1, 0)


class TcpProxy:
    """Listens on a port of its own inside `async with`, and forwards until told otherwise."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self.port = 0
        self.accepted = 0
        """Connections accepted so far."""
        self.delay_s = 0.0
        """How long each chunk takes, in both directions."""
        self.dropping_replies = False
        self.swallowing = False
        self.refusing = False
        self._cut_after: tuple[bytes, int] | None = None

    @classmethod
    def to(cls, url: str) -> Self:
        """Return a proxy to the server of a `redis://` URL, of several to the first."""
        parts = urlsplit(url.partition(",")[0])
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(parts.hostname, parts.port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def open(self) -> int:
        """Connections open now."""
        return len(self._links)

    # --- faults ---

    def delay(self, seconds: float) -> None:
        """Hold each chunk back for so long, without changing their order."""
        self.delay_s = seconds

    def drop_replies(self) -> None:
        """Let requests through and lose what the server answers, connections staying open."""
        self.dropping_replies = True

    def swallow(self) -> None:
        """Lose everything, both ways, connections staying open: a link that is silently gone."""
        self.swallowing = True

    def strand(self) -> int:
        """Lose everything on the connections open now, which stay open; return how many there are.

        New ones work: a link that only one side could see to be gone.
        """
        for link in self._links:
            link.stranded = True
        return len(self._links)

    def refuse(self) -> None:
        """Reset each new connection at once. Open ones go on."""
        self.refusing = True

    def cut(self) -> int:
        """Reset the open connections and return how many there were. New ones work."""
        links = list(self._links)
        for link in links:
            link.reset()
        return len(links)

    def cut_after(self, pattern: bytes, times: int = 1) -> None:
        """Reset a connection once a request holding the pattern was forwarded, its reply lost.

        The server does what it was asked, and the client can't know.
        """
        self._cut_after = (pattern, times)

    def heal(self) -> None:
        """Forward normally again. What was lost meanwhile stays lost."""
        self.delay_s = 0.0
        self.dropping_replies = self.swallowing = self.refusing = False
        self._cut_after = None

    # --- forwarding ---

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        links = list(self._links)
        self.cut()
        await asyncio.gather(*(link.forgotten.wait() for link in links))
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.refusing:
            _reset(writer)
            return
        try:
            there = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        link = _Link(reader, writer, *there)
        self._links.add(link)
        pumps = [
            asyncio.ensure_future(pump)
            for way in (link.requests, link.replies)
            for pump in (self._read(link, way), self._write(link, way))
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._links.discard(link)
            link.close()
            link.forgotten.set()

    async def _read(self, link: _Link, way: _Way) -> None:
        """Take what arrives, and note when it may go on. Ends when the link is broken."""
        now = asyncio.get_running_loop().time
        with contextlib.suppress(ConnectionError):
            while data := await way.source.read(_CHUNK):
                if not self._lost(link, way):
                    way.late.put_nowait((now() + self.delay_s, data))
            if self.swallowing or link.stranded:
                # Nor does the other side hear of the end.
                await link.broken.wait()
            way.late.put_nowait((now() + self.delay_s, b""))
            await link.broken.wait()

    async def _write(self, link: _Link, way: _Way) -> None:
        """Pass on what is due, in order. Ends with the end of the source."""
        now = asyncio.get_running_loop().time
        with contextlib.suppress(ConnectionError):
            while True:
                due, data = await way.late.get()
                if due > now():
                    await asyncio.sleep(due - now())
                if not data:
                    return
                way.target.write(data)
                self._check_cut(link, way, data)
                await way.target.drain()

    def _lost(self, link: _Link, way: _Way) -> bool:
        unheard = self.dropping_replies or link.mute
        return self.swallowing or link.stranded or (way is link.replies and unheard)

    def _check_cut(self, link: _Link, way: _Way, data: bytes) -> None:
        if way is link.replies or self._cut_after is None or self._cut_after[0] not in data:
            return
        pattern, times = self._cut_after
        self._cut_after = (pattern, times - 1) if times > 1 else None
        link.mute = True
        asyncio.get_running_loop().call_later(_CUT_AFTER_S, link.reset)


class _Way:
    """One direction of a link, and what is on its way."""

    def __init__(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        self.source = source
        self.target = target
        # Without a bound: a delay must not become a narrow pipe.
        self.late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()


class _Link:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(
        self,
        client_reader: asyncio.StreamReader,
        client: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> None:
        self.requests = _Way(client_reader, server)
        self.replies = _Way(server_reader, client)
        self.mute = False
        """Whether the client hears nothing more."""
        self.stranded = False
        """Whether nothing more gets through, for good."""
        self.broken = asyncio.Event()
        """Set when both connections were reset."""
        self.forgotten = asyncio.Event()

    def reset(self) -> None:
        self.broken.set()
        _reset(self.requests.target)
        _reset(self.replies.target)

    def close(self) -> None:
        self.requests.target.close()
        self.replies.target.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, dropping what wasn't sent."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None and not writer.transport.is_closing():
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
