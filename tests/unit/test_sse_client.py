"""The tests' own client, against a server that says exactly what the test wrote down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.support.sse import ProtocolError, fetch, open_response

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
CHUNKED = SSE + b"Transfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
Step = bytes | float | str


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Script:
    """What a server does: bytes are sent, numbers are pauses, and a word is how it leaves."""

    def __init__(self, *steps: Step) -> None:
        self._steps = steps
        self.request = b""
        self.left_by_client: bool | None = None
        """True once the client has closed, False if it was reset."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request = await reader.readuntil(b"\r\n\r\n")
        try:
            for step in self._steps:
                if isinstance(step, bytes):
                    writer.write(step)
                    await writer.drain()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                elif step == "reset":
                    writer.transport.abort()
                elif step == "listen":
                    self.left_by_client = await reader.read() == b""
        except ConnectionError:
            self.left_by_client = False
        finally:
            writer.close()


@asynccontextmanager
async def served(script: Script) -> AsyncIterator[str]:
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def test_events_comments_and_a_clean_end() -> None:
    script = Script(
        CHUNKED,
        chunk(b": ping\n\n"),
        chunk(b"data: on"),
        0.03,
        chunk(b"e\n\nid: 7\nevent: note\ndata: two\ndata: lines\n\n: more\ndata: [DONE]\n\n"),
        END,
    )
    async with served(script) as url, open_response(url + "/path?q=1", {"a": 1}) as response:
        events = await response.all_events()
        assert response.status == 200
    assert [event.data for event in events] == [None, "one", "two\nlines", None, "[DONE]"]
    assert [event.comment for event in events] == ["ping", None, None, "more", None]
    assert (events[2].id, events[2].event) == ("7", "note")
    assert events[4].done
    assert events[1].at - events[0].at >= 0.025
    assert (response.ending, response.clean, response.leftover) == ("complete", True, b"")
    assert len(response.chunks) == 3
    assert script.request.startswith(b"POST /path?q=1 HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("steps", "ending", "leftover"),
    [
        ((CHUNKED, chunk(b"data: 1\n\n")), "cut", b""),
        ((CHUNKED, b"50\r\ndata: 1\n\nda"), "cut", b"da"),
        ((CHUNKED, chunk(b"data: 1\n\ndata: 2\n"), END), "complete", b"data: 2\n"),
        ((CHUNKED, chunk(b"data: 1\n\n"), b"0\r\n"), "cut", b""),
        ((CHUNKED, chunk(b"data: 1\n\n"), 0.05, "reset"), "cut", b""),
        ((SSE + b"Content-Length: 9\r\n\r\ndata: 1\n\n",), "complete", b""),
        ((SSE + b"Content-Length: 10\r\n\r\ndata: 1\n\n",), "cut", b""),
        ((SSE + b"\r\ndata: 1\n\n",), "closed", b""),
    ],
)
async def test_how_a_body_ends(steps: tuple[Step, ...], ending: str, leftover: bytes) -> None:
    async with served(Script(*steps)) as url, open_response(url) as response:
        events = await response.all_events()
    assert [event.data for event in events] == ["1"]
    assert (response.ending, response.leftover) == (ending, leftover)
    assert response.clean == (ending in ("complete", "closed"))


@pytest.mark.parametrize(
    "said",
    [
        CHUNKED + b"5 \r\n",
        CHUNKED + b"xyz\r\n",
        CHUNKED + b"2\r\nabc\r\n",
        CHUNKED + chunk(b"data: 1\n\n") + END + b"more",
        CHUNKED + chunk(b"data: 1\r\n\r\n"),
        CHUNKED + chunk(b"data: \xff\n\n"),
        CHUNKED + chunk(b"wrong: 1\n\n"),
        SSE + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
        SSE + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx",
        SSE.replace(b"\r\n", b"\n") + b"\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{}",
    ],
)
async def test_what_a_lenient_client_would_forgive(said: bytes) -> None:
    async with served(Script(said)) as url:
        with pytest.raises(ProtocolError):
            async with open_response(url) as response:
                await response.all_events()


async def test_an_answer_that_never_comes() -> None:
    async with served(Script()) as url:
        with pytest.raises(ConnectionResetError):
            await fetch(url)


async def test_http_1_0_gets_no_chunks() -> None:
    script = Script(SSE.replace(b"1.1", b"1.0") + b"\r\ndata: 1\n\n")
    async with served(script) as url, open_response(url, version="1.0") as response:
        assert [event.data for event in await response.all_events()] == ["1"]
        assert response.version == "1.0"
    assert script.request.startswith(b"GET / HTTP/1.0\r\n")
    async with served(Script(CHUNKED + END)) as url:
        with pytest.raises(ProtocolError, match="transfer coding"):
            await fetch(url, version="1.0")


async def test_json_and_interim_answers() -> None:
    said = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"
    async with served(Script(said)) as url:
        response, body = await fetch(url)
    assert (response.status, body) == (404, b"{}")


@pytest.mark.parametrize("reset", [False, True])
async def test_leaving(reset: bool) -> None:
    script = Script(CHUNKED, chunk(b"data: 1\n\n"), "listen")
    async with served(script) as url, open_response(url) as response:
        async for _ in response.events():
            response.disconnect(reset=reset)
            break
        async with asyncio.timeout(1):
            while script.left_by_client is None:  # noqa: ASYNC110 - the server is a plain class
                await asyncio.sleep(0.005)
    assert script.left_by_client is not reset


async def test_reading_slowly_and_going_on() -> None:
    data = b"x" * 200_000
    script = Script(CHUNKED, chunk(data), END)
    async with served(script) as url, open_response(url, receive_buffer=4096) as response:
        began = time.monotonic()
        slowly = await response.read_slowly(10_000, for_s=0.4)
        assert 0.35 < time.monotonic() - began < 5
        assert 1_000 <= slowly <= 10_000
        assert response.ending is None
        rest = await response.body()
    assert slowly + len(rest) == len(data)
    assert response.ending == "complete"


async def test_a_reader_that_reads_nothing_holds_the_server_up() -> None:
    written = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        try:
            while True:
                writer.write(chunk(b"x" * 65536))
                await writer.drain()
                written += 65536
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with open_response(url, receive_buffer=4096):
        await _still(lambda: written)
        assert 0 < written < 16 << 20
    server.close()


async def _still(value: Callable[[], int]) -> None:
    """Wait until a number has stopped growing."""
    before = -1
    while value() != before:
        before = value()
        await asyncio.sleep(0.1)
