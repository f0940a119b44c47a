"""uvicorn's own request cycle over a transport that the test holds."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class FakeTransport(asyncio.Transport):
    """Takes what is written, as a client does that reads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.closing = True

    def close(self) -> None:
        self.closing = True

    def resume_reading(self) -> None: ...


def make_cycle(transport: FakeTransport, http_version: str = "1.1") -> RequestResponseCycle:
    """Return the cycle of one request."""
    logger = logging.getLogger("uvicorn.error")
    scope: Any = {
        "type": "http",
        "http_version": http_version,
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [],
    }
    return RequestResponseCycle(
        scope=scope,
        transport=transport,
        flow=FlowControl(transport),
        logger=logger,
        access_logger=logger,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )


def unchunked(data: bytes) -> tuple[bytes, bytes]:
    """Return head and body of an answer, and see that its framing is right to the last byte."""
    head, _, rest = data.partition(b"\r\n\r\n")
    parts: list[bytes] = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        part, end, rest = rest[:length], rest[length : length + 2], rest[length + 2 :]
        assert len(part) == length
        assert end == b"\r\n"
        if not part:
            assert rest == b""
            return head, b"".join(parts)
        parts.append(part)
