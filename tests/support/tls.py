"""Certificates of an authority of one's own, and a front that speaks TLS for a plain server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

_CHUNK = 65536


class Certificates:
    """An authority, and a server's certificate for 127.0.0.1 that it has signed."""

    def __init__(self, directory: Path) -> None:
        self.authority = directory / "ca.pem"
        self.certificate, self.key = directory / "server.pem", directory / "server.key"
        request, extensions = directory / "server.csr", directory / "extensions"
        authority_key = directory / "ca.key"
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl(
            *("req", "-x509", *new_key, "-days", "2", "-subj", "/CN=test authority"),
            *("-keyout", authority_key, "-out", self.authority),
        )
        _openssl(
            *("req", *new_key, "-subj", "/CN=server", "-keyout", self.key, "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.authority, "-CAkey", authority_key),
            *("-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", self.certificate),
        )


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


class TlsFront:
    """Listens for TLS inside `async with`, and forwards what it hears to a plain server."""

    def __init__(self, certificates: Certificates, host: str, port: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.certificate, certificates.key)
        self._target = (host, port)
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, ssl=self._context, ssl_shutdown_timeout=0.2
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_connection(*self._target)
        pumps = [
            asyncio.create_task(_pump(reader, there)),
            asyncio.create_task(_pump(there_reader, writer)),
        ]
        self._pumps |= set(pumps)
        await asyncio.wait(pumps)
        self._pumps -= set(pumps)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while data := await source.read(_CHUNK):
                target.write(data)
                await target.drain()
    finally:
        target.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
            await target.wait_closed()
