"""Finds ports for the demo's processes, and asks those for their state."""

from __future__ import annotations

import asyncio
import contextlib
import socket

HOST = "127.0.0.1"
SPAN = 100
"""Ports tried from the usual one on, before the kernel chooses one."""


class PortTaken(Exception):
    """Somebody listens there already."""


class Ports:
    """Hands out ports that nobody listens on, each once."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def pick(self, usual: int) -> int:
        """Return the usual port or, if that is taken, one of the next."""
        for port in (*range(usual, min(usual + SPAN, 65_536)), 0):
            with contextlib.suppress(PortTaken):
                return self.claim(port)
        raise PortTaken(f"no port is free from {usual} on")

    def claim(self, port: int) -> int:
        """Return exactly this port. Raises `PortTaken`."""
        if port in self._given:
            raise PortTaken(f"port {port} is given already")
        with socket.socket() as probe:
            # As the servers themselves do: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise PortTaken(f"port {port}: {error.strerror}") from error
            found: int = probe.getsockname()[1]
        self._given.add(found)
        return found


async def exchange(port: int, sent: bytes, *, timeout_s: float = 3) -> bytes:
    """Send bytes and return all that comes back, or nothing where nobody answers in time."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(sent)
                return await reader.read()
            finally:
                writer.close()
    return b""


async def http_get(port: int, path: str) -> tuple[int, bytes]:
    """Return an answer's status (0: none) and its body, chunked or not."""
    request = f"GET {path} HTTP/1.0\r\nHost: {HOST}\r\n\r\n"
    head, _, body = (await exchange(port, request.encode())).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), body


async def valkey_answers(port: int) -> bool:
    """Tell whether the server has loaded its data and takes commands."""
    return b"+PONG" in await exchange(port, b"PING\r\nQUIT\r\n")
