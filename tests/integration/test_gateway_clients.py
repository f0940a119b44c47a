"""What clients see: SDKs, HTTP/1.0, long silences, and a gateway that is shut down."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from shared.protocol import Usage
from tests.support import sse
from tests.support.fake_worker import DONE, SSE, FakeWorker
from tests.support.gateway import RunningGateway, pool
from tests.support.valkey import ValkeyServer, free_port
from tests.support.waiting import until

STREAM = {"model": "tiny", "stream": True, "messages": []}
WHOLE = {"model": "tiny", "messages": []}
MESSAGES: Any = [{"role": "user", "content": "hello"}]

Pair = tuple[RunningGateway, FakeWorker]


@pytest.fixture
async def pair(valkey: ValkeyServer) -> AsyncIterator[Pair]:
    async with pool(valkey.url) as both:
        yield both


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[openai.AsyncOpenAI]:
    gateway, _ = pair
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=10
    ) as client:
        yield client


def chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return b"data: " + json.dumps({**body, "choices": [choice]}).encode() + b"\n\n"


async def test_openai_reads_a_stream(pair: Pair, client: openai.AsyncOpenAI) -> None:
    _, worker = pair

    async def work() -> None:
        job = await worker.take()
        await job.head()
        for text in ("a", "b", "c"):
            await job.items((chunk(text),))
            await asyncio.sleep(0.01)
        await job.end(items=[DONE], usage=Usage(1, 3))

    working = asyncio.ensure_future(work())
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    texts = [part.choices[0].delta.content async for part in stream]
    assert texts == ["a", "b", "c"]
    await working


async def test_openai_raises_when_a_stream_fails(pair: Pair, client: openai.AsyncOpenAI) -> None:
    _, worker = pair

    async def work() -> None:
        job = await worker.take()
        await job.head()
        await job.items((chunk("a"),))
        await job.end("failed", code="engine_error", message="the engine failed")

    working = asyncio.ensure_future(work())
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert (await anext(stream)).choices[0].delta.content == "a"
    with pytest.raises(openai.APIError, match="the engine failed"):
        await anext(stream)
    await working


async def test_openai_raises_its_own_types(pair: Pair, client: openai.AsyncOpenAI) -> None:
    gateway, worker = pair
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nope", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="tiny", input="x", background=True)
    working = asyncio.ensure_future(worker.take())
    answering = asyncio.ensure_future(
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    )
    await (await working).end("failed", code="engine_error")
    with pytest.raises(openai.InternalServerError):
        await answering
    gateway.gateway.submitter.open_streams += 1_000_000
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="tiny", messages=MESSAGES)
    gateway.gateway.submitter.open_streams -= 1_000_000
    assert caught.value.status_code == 503


async def test_openai_lists_models(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == ["tiny"]


async def test_curl_sees_a_failed_stream_as_broken(pair: Pair) -> None:
    gateway, worker = pair
    curl = await asyncio.create_subprocess_exec(
        "curl",
        "-sN",
        gateway.chat,
        "-H",
        "content-type: application/json",
        "-d",
        json.dumps(STREAM),
        stdout=subprocess.PIPE,
    )
    job = await worker.take()
    await job.head()
    await job.items((b"data: 1\n\n",))
    await job.end("failed", code="engine_error", message="x")
    output, _ = await curl.communicate()
    assert output.startswith(b"data: 1\n\ndata: {")
    assert curl.returncode == 18  # CURLE_PARTIAL_FILE


async def test_http_1_0_gets_tokens_one_by_one_without_chunks(pair: Pair) -> None:
    gateway, worker = pair
    wire = await sse.connect(gateway.url)
    await wire.send(sse.request_bytes(gateway.chat, STREAM, version="1.0"))
    job = await worker.take()
    await job.head()
    await job.items((b"data: 1\n\n",))
    response = await sse.read_head(wire, "1.0")
    assert "content-length" not in response.headers
    assert response.headers["connection"] == "close"
    assert await response.part() == b"data: 1\n\n"
    await job.items((b"data: 2\n\n",))
    assert await response.part() == b"data: 2\n\n"
    await job.end(items=[DONE])
    assert await response.body() == DONE[0]
    assert response.ending == "closed"
    wire.close()


async def test_http_1_0_whole_answers_and_errors(pair: Pair) -> None:
    gateway, worker = pair
    for body in (STREAM, WHOLE):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, body, version="1.0"))
        await (await worker.take()).whole(b'{"a": 1}', 400)
        response, raw = await answering
        assert (response.status, raw) == (400, b'{"a": 1}')
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, STREAM, version="1.0"))
    job = await worker.take()
    await job.head()
    await job.items((b"data: 1\n\n",))
    await asyncio.sleep(0.02)
    await job.end("failed", code="engine_error", message="x")
    _, raw = await answering
    assert b'"engine_error"' in raw


async def test_silence_is_filled_with_comments(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, first_byte_grace_s=0.3, keepalive_s=0.5) as (gateway, worker):
        wire = await sse.connect(gateway.url)
        await wire.send(sse.request_bytes(gateway.chat, STREAM))
        response = await sse.read_head(wire)  # Still queued: nobody has claimed it.
        assert response.status == 200
        assert response.headers["content-type"] == SSE
        assert await response.part() == b": keep-alive\n\n"
        assert await response.part() == b": keep-alive\n\n"
        job = await worker.take()
        await job.head()
        await job.items((b"data: half",))
        assert await response.part() == b"data: half"
        with pytest.raises(TimeoutError):  # Never into the middle of an event.
            async with asyncio.timeout(1.2):
                await response.part()
        await job.end(items=[(b"\n\n",), DONE])
        assert await response.body() == b"\n\n" + DONE[0]
        assert response.ending == "complete"
        wire.close()


async def test_whole_answers_are_not_begun_early(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, first_byte_grace_s=0.2, keepalive_s=0.2) as (gateway, worker):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
        job = await worker.take()
        await asyncio.sleep(0.8)
        await job.whole(b'{"error": {}}', 400)
        assert (await answering)[0].status == 400


@pytest.mark.parametrize("how", ["refused", "failed"])
async def test_failure_after_the_grace_is_an_event(valkey: ValkeyServer, how: str) -> None:
    async with pool(valkey.url, first_byte_grace_s=0.2) as (gateway, worker):
        wire = await sse.connect(gateway.url)
        await wire.send(sse.request_bytes(gateway.chat, STREAM))
        response = await sse.read_head(wire)
        assert response.status == 200
        job = await worker.take()
        if how == "refused":
            await job.whole(b'{"error": {"message": "caf\xc3\xa9", "code": "x"}}', 400)
        else:
            await job.end("failed", code="x", message="caf\u00e9")
        events = await response.all_events()
        assert events[-1].json()["error"]["message"] == "caf\u00e9"
        assert events[-1].data is not None
        assert events[-1].data.isascii()
        assert response.ending == "cut"
        wire.close()


async def test_metrics_and_health(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, STREAM))
    job = await worker.take()
    await asyncio.sleep(0.15)
    _, raw = await sse.fetch(f"{gateway.url}/metrics")
    assert b"headrace_gateway_open_streams 1.0" in raw
    assert b'headrace_queue_depth{lane="interactive",pool="tiny"} 1.0' in raw
    await job.stream(b"1", b"2", b"3", usage=Usage(1, 3))
    await answering
    await sse.fetch(gateway.chat, {**WHOLE, "model": "made-up-name"})
    _, raw = await sse.fetch(f"{gateway.url}/metrics")
    labels = b'endpoint="/v1/chat/completions",lane="interactive",model="tiny"'
    assert b"headrace_gateway_requests_total{" + labels + b',outcome="completed"} 1.0' in raw
    assert b"headrace_gateway_open_streams 0.0" in raw
    for name in (b"time_to_first_token", b"time_per_output_token", b"request_duration"):
        assert b"headrace_gateway_" + name + b"_seconds_count{" in raw
    assert b"made-up-name" not in raw
    assert job.job.id.encode() not in raw
    response, raw = await sse.fetch(f"{gateway.url}/readyz")
    assert response.status == 200
    assert json.loads(raw) == {"ready": True, "redis": True, "workers": 1, "draining": False}


async def test_drain_lets_short_streams_end_and_cuts_the_rest(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, drain_timeout_s=0.6) as (gateway, worker):
        short = asyncio.ensure_future(sse.fetch(gateway.chat, STREAM))
        first = await worker.take()
        long = asyncio.ensure_future(sse.fetch(gateway.chat, STREAM))
        second = await worker.take()
        await second.head()
        await second.items((b"data: 1\n\n",))
        stopping = asyncio.ensure_future(gateway.stop())
        await until(lambda: gateway.gateway.draining, "the drain begins")
        await first.stream(b"1")
        response, _ = await short
        assert response.ending == "complete"
        response, raw = await long
        assert b'"draining"' in raw
        assert response.ending == "cut"
        await stopping
        assert (await second.state())["cancel"] == "cancelled"


async def test_side_task_that_dies_ends_the_process(valkey: ValkeyServer) -> None:
    async with pool(valkey.url) as (gateway, _):

        class Bomb:
            def tick(self, now: float) -> None:
                raise RuntimeError("boom")

        gateway.gateway.sweeper.swept.add(Bomb())
        assert gateway.task is not None
        await asyncio.wait_for(asyncio.shield(gateway.task), 5)
        assert gateway.gateway.failed


async def test_process_drains_and_exits_0(valkey: ValkeyServer) -> None:
    port = free_port()
    environment = {
        **os.environ,
        "HEADRACE_REDIS_URL": valkey.url,
        "HEADRACE_KEY_PREFIX": "process",
        "HEADRACE_PORT": str(port),
        "HEADRACE_DRAIN_TIMEOUT_S": "5",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env=environment, stderr=subprocess.PIPE
    )
    async with FakeWorker(valkey.url, key_prefix="process") as worker:
        url = f"http://127.0.0.1:{port}"

        async def ready() -> bool:
            try:
                return (await sse.fetch(f"{url}/readyz"))[0].status == 200
            except OSError:
                return False

        await until(ready, "the process is ready", timeout=15)
        # uvloop's transports are others than asyncio's: the same once more on them.
        failing = asyncio.ensure_future(sse.fetch(f"{url}/v1/chat/completions", STREAM))
        job = await worker.take()
        await job.head()
        await job.end("failed", code="engine_error")
        assert (await failing)[0].ending == "cut"
        old = asyncio.ensure_future(sse.fetch(f"{url}/v1/chat/completions", STREAM, version="1.0"))
        await (await worker.take()).stream(b"1")
        assert (await old)[1] == b"data: 1\n\n" + DONE[0]
        streaming = asyncio.ensure_future(sse.fetch(f"{url}/v1/chat/completions", STREAM))
        job = await worker.take()
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        await job.stream(b"1")
        assert (await streaming)[0].ending == "complete"
        _, errors = await process.communicate()
    assert process.returncode == 0
    assert b"Traceback" not in errors
    assert b"ASGI callable returned" not in errors


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.7"])
def test_an_address_that_cannot_be_listened_on_is_named(valkey: ValkeyServer, host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "gateway"],
            env={
                **os.environ,
                "HEADRACE_AUTH": "open",
                "HEADRACE_HOST": host,
                "HEADRACE_PORT": str(port),
                "HEADRACE_LOG_FORMAT": "json",
                "HEADRACE_REDIS_URL": valkey.url,
            },
            capture_output=True,
            timeout=30,
        )
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    (told,) = [line for line in lines if line["level"] == "error"]
    assert told["wrong"] == "HEADRACE_HOST, HEADRACE_PORT"
    assert (told["host"], told["port"]) == (host, port)
    assert "traceback" not in told


def test_wrong_settings_stop_the_start_and_are_named() -> None:
    wrong = {
        "HEADRACE_PORT": "x",
        "HEADRACE_MAX_BODY_BYTES": "0",
        "HEADRACE_REQUEST_TIMEOUT_S": "-1",
        "HEADRACE_GATEWAY_ID": "a b",
    }
    done = subprocess.run(
        [sys.executable, "-m", "gateway"],
        env={**os.environ, **wrong},
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 2
    for name in wrong:
        assert name.encode() in done.stderr
    assert b"Traceback" not in done.stderr
