"""What a client sends is bounded: heads, one by one, and bodies, all together."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support import sse
from tests.support.gateway import pool
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

WHOLE = {"model": "tiny", "messages": []}


@pytest.mark.parametrize(
    "head",
    [
        {"x-long": "x" * 20_000},
        {f"x-{number}": "x" * 100 for number in range(200)},
    ],
    ids=["one long", "many"],
)
async def test_head_that_is_too_large(valkey: ValkeyServer, head: dict[str, str]) -> None:
    async with pool(valkey.url, max_header_bytes=8192) as (gateway, worker):
        response, body = await sse.fetch(gateway.chat, WHOLE, headers=head)
        assert response.status == 431
        assert json.loads(body)["error"]["code"] == "headers_too_large"
        assert await worker.job_ids() == []
        fitting = {name: value[:40] for name, value in list(head.items())[:100]}
        response, _ = await sse.fetch(f"{gateway.url}/healthz", headers=fitting)
        assert response.status == 200


async def test_head_without_an_end(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, max_header_bytes=8192) as (gateway, _):
        wire = await sse.connect(gateway.url)
        await wire.send(b"GET /healthz HTTP/1.1\r\nx-endless: ")
        for _ in range(17):  # The last one is one too many.
            await asyncio.sleep(0.002)
            await wire.send(b"x" * 1000)
        response = await sse.read_head(wire)
        assert response.status == 431
        await response.body()
        wire.close()


@pytest.mark.parametrize(
    "field", [b"0\r\nx-endless: ", b"2;endless="], ids=["trailer", "extension"]
)
async def test_body_with_a_field_without_an_end(valkey: ValkeyServer, field: bytes) -> None:
    async with pool(valkey.url, max_header_bytes=8192) as (gateway, worker):
        wire = await sse.connect(gateway.url)
        head = {"transfer-encoding": "chunked"}
        await wire.send(sse.request_bytes(gateway.chat, method="POST", headers=head) + field)
        for _ in range(17):
            await asyncio.sleep(0.002)
            await wire.send(b"x" * 1000)
        async with asyncio.timeout(5):
            assert (await sse.read_head(wire)).status == 431
        wire.close()
        assert await worker.job_ids() == []


async def test_what_follows_a_body_is_no_header(valkey: ValkeyServer) -> None:
    async with pool(valkey.url) as (gateway, worker):
        wire = await sse.connect(gateway.url)
        content = json.dumps(WHOLE).encode()
        head = {"transfer-encoding": "chunked"}
        await wire.send(
            sse.request_bytes(gateway.chat, method="POST", headers=head)
            + b"%x\r\n%b\r\n0\r\nx-on-disconnect: continue\r\n\r\n" % (len(content), content)
        )
        job = await worker.take()
        assert job.job.patience_s == 0
        await job.whole(b"{}")
        assert (await sse.read_head(wire)).status == 200
        wire.close()


async def test_what_is_no_http_is_not_answered_within_an_answer(valkey: ValkeyServer) -> None:
    async with pool(valkey.url) as (gateway, worker):
        wire = await sse.connect(gateway.url)
        await wire.send(sse.request_bytes(gateway.chat, {**WHOLE, "stream": True}))
        job = await worker.take()
        await job.head()
        await job.items((b"data: 1\n\n",))
        response = await sse.read_head(wire)
        await wire.send(b"GARBAGE\r\n\r\n")
        async with asyncio.timeout(5):
            assert await response.body() == b"data: 1\n\n"
        assert response.ending == "cut"
        wire.close()


async def test_connection_that_is_kept_is_counted_anew(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, max_header_bytes=8192) as (gateway, _):
        wire = await sse.connect(gateway.url)
        headers = {"x-some": "x" * 3000}
        for _ in range(6):
            await wire.send(sse.request_bytes(f"{gateway.url}/healthz", headers=headers))
            response = await sse.read_head(wire)
            assert response.status == 200
            await response.body()
        wire.close()


async def test_bodies_together_are_bounded(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, max_pending_body_bytes=1 << 20) as (gateway, worker):
        padded = {**WHOLE, "user": "x" * 400_000}
        request = sse.request_bytes(gateway.chat, padded)
        begun = [await sse.connect(gateway.url) for _ in range(2)]
        for wire in begun:
            await wire.send(request[:-10])
        bodies = gateway.gateway.bodies
        await until(lambda: bodies.taken > 790_000, "two bodies are being read")
        response, body = await sse.fetch(gateway.chat, padded)
        assert (response.status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert await worker.job_ids() == []
        begun[0].close()
        await until(lambda: bodies.taken < 500_000, "what a client leaves is given back")
        await begun[1].send(request[-10:])
        job = await worker.take()
        await job.whole(b"{}")
        assert (await sse.read_head(begun[1])).status == 200
        assert bodies.taken == 0
        begun[1].close()


@pytest.mark.parametrize(
    "what",
    [b"GARBAGE\r\n\r\n", b"FOO / HTTP/1.1\r\n\r\n", b"GET /caf\xc3\xa9 HTTP/1.1\r\n\r\n"],
)
async def test_what_is_no_http_is_refused_in_the_form_of_every_error(
    valkey: ValkeyServer, what: bytes
) -> None:
    async with pool(valkey.url) as (gateway, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(what)
        head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("said", [b"", b"POST /v1/chat", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-"])
async def test_a_head_that_does_not_come_is_not_waited_for(
    valkey: ValkeyServer, said: bytes
) -> None:
    async with pool(valkey.url, http_keepalive_s=1) as (gateway, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(said)
        for more in b"aaa":
            await asyncio.sleep(0.25)
            if said:
                writer.write(bytes([more]))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_the_next_head_that_does_not_come_cuts_no_answer(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, http_keepalive_s=1) as (gateway, worker):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        body = json.dumps({"model": "tiny", "messages": [], "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body + b"GET /healthz HTTP/1.1\r\nX-")
        job = await worker.take()
        await asyncio.sleep(2)
        await job.stream(b"1")
        told = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    assert b"data: [DONE]" in told
    assert told.endswith(b"0\r\n\r\n")
