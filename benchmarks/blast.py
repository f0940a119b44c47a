"""A server that streams chunks as fast as they are taken: it shows the load generator's ceiling.

python -m benchmarks.blast PORT SECONDS
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"simulated","choices":[{"index":0,"delta":{"content":" @%d"},'
    b'"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Blast(asyncio.Protocol):
    """Answers a POST with chunks, one write each, until its time is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open = asyncio.Event()
        self._open.set()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET"):  # whether it is there yet
            assert self._transport is not None
            self._transport.write(b"HTTP/1.0 404 Not Found\r\n\r\n")
            self._transport.close()
        elif self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._stream())

    def pause_writing(self) -> None:
        self._open.clear()

    def resume_writing(self) -> None:
        self._open.set()

    async def _stream(self) -> None:
        assert self._transport is not None
        write = self._transport.write
        write(_HEAD)
        event = _EVENT % time.monotonic_ns()
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            write(chunk)
            await asyncio.sleep(0)
            await self._open.wait()
        write(_END)


async def serve(port: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Blast(seconds), "127.0.0.1", port, backlog=4096)
    async with server:
        await asyncio.Event().wait()


def main() -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), float(sys.argv[2])))


if __name__ == "__main__":
    main()
