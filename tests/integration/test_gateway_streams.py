"""A gateway, a real Valkey, and a worker whose frames the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.channels import Fan
from shared.errors import BY_CODE
from shared.protocol import Frame, Head, Usage
from tests.support import sse
from tests.support.fake_worker import DONE, SSE, FakeWorker, Running
from tests.support.gateway import RunningGateway, pool
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

STREAM = {"model": "tiny", "stream": True, "messages": []}
WHOLE = {"model": "tiny", "messages": []}

Pair = tuple[RunningGateway, FakeWorker]


@pytest.fixture
async def pair(valkey: ValkeyServer) -> AsyncIterator[Pair]:
    async with pool(valkey.url) as both:
        yield both


def data_of(events: list[sse.Event]) -> list[str]:
    return [event.data for event in events if event.data is not None]


def error_code(events: list[sse.Event]) -> str:
    return str(events[-1].json()["error"]["code"])


def event(number: int) -> bytes:
    return b"data: %d\n\n" % number


async def test_stream_goes_through_byte_for_byte(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, STREAM))
    job = await worker.take()
    assert job.job.path == "/v1/chat/completions"
    assert job.job.stream
    assert not job.job.max_tokens_given
    await job.head()
    await job.items((b'data: {"a":"x"}\n\n',))
    await job.items(b"y", b"z", template=(b'data: {"a":"', b'"}\n\n'))
    await job.end(items=[DONE], usage=Usage(3, 2))
    response, body = await answering
    expected = b'data: {"a":"x"}\n\ndata: {"a":"y"}\n\ndata: {"a":"z"}\n\ndata: [DONE]\n\n'
    assert body == expected
    assert response.status == 200
    assert response.ending == "complete"
    assert response.headers["content-type"] == SSE
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-job-id"] == job.job.id
    assert await worker.depth() == 0


async def test_frames_that_are_ready_leave_in_one_write(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, STREAM))
    job = await worker.take()
    await job.frame(Frame(head=Head(200, SSE)), *(Frame(items=[(event(n),)]) for n in range(50)))
    await asyncio.sleep(0.1)
    await job.end(items=[DONE])
    response, body = await answering
    assert body.count(b"data: ") == 51
    assert len(response.chunks) <= 4


async def test_whole_answers_keep_status_type_and_length(pair: Pair) -> None:
    gateway, worker = pair
    for status in (200, 400, 404, 500):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
        job = await worker.take()
        await job.whole(b'{"status": %d}' % status, status)
        response, body = await answering
        assert (response.status, body) == (status, b'{"status": %d}' % status)
        assert response.headers["content-length"] == str(len(body))
        assert response.headers["content-type"] == "application/json"


async def test_error_before_the_first_token_keeps_its_status_for_streams(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, STREAM))
    job = await worker.take()
    await job.whole(b'{"error": {"message": "too long"}}', 400)
    response, body = await answering
    assert response.status == 400
    assert b"too long" in body


@pytest.mark.parametrize("code", ["engine_error", "worker_lost", "poisoned", "diverged"])
async def test_failure_before_the_first_token_is_an_error_answer(pair: Pair, code: str) -> None:
    gateway, worker = pair
    for body in (STREAM, WHOLE):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, body))
        job = await worker.take()
        await job.end("failed", code=code, message="caf\u00e9")
        response, raw = await answering
        assert response.status == BY_CODE[code].status
        assert raw.isascii()
        assert response.headers.get("x-should-retry") == (
            None if BY_CODE[code].retryable else "false"
        )


async def test_failure_in_mid_stream_is_an_event_and_a_broken_body(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(_events(gateway.chat, STREAM))
    job = await worker.take()
    await job.head()
    await job.items((event(1),))
    await job.end("failed", code="worker_lost", message="lost")
    response, events = await answering
    assert events[-1].json() == {
        "error": {"message": "lost", "type": "server_error", "param": None, "code": "worker_lost"}
    }
    assert data_of(events)[0] == "1"
    assert response.ending == "cut"
    assert not any(one.done for one in events)


async def test_zero_milliseconds_to_the_first_token_loses_none(pair: Pair) -> None:
    gateway, worker = pair
    count = 400

    async def work() -> None:
        for _ in range(count):
            job = await worker.take()
            await job.end(items=[(event(7),), DONE], head=Head(200, SSE))

    async with asyncio.TaskGroup() as group:
        group.create_task(work())
        gate = asyncio.Semaphore(64)

        async def ask() -> bytes:
            async with gate:
                response, body = await sse.fetch(gateway.chat, STREAM)
                assert response.ending == "complete"
                return body

        tasks = [group.create_task(ask()) for _ in range(count)]
    assert {task.result() for task in tasks} == {b"data: 7\n\ndata: [DONE]\n\n"}
    assert gateway.gateway.submitter.open_streams == 0
    assert gateway.gateway.subscriber.of("").sinks == {}


async def test_link_cut_again_and_again_loses_nothing(valkey: ValkeyServer) -> None:
    async with (
        TcpProxy.to(valkey.url) as proxy,
        pool(valkey.url, gateway_url=proxy.url) as (gateway, worker),
    ):
        answering = asyncio.ensure_future(_events(gateway.chat, STREAM))
        job = await worker.take()
        await job.head()
        for number in range(200):
            await job.items((event(number),))
            if number % 40 == 20:
                proxy.cut()
            await asyncio.sleep(0.005)
        await job.end(items=[DONE])
        response, events = await answering
        assert data_of(events) == [*map(str, range(200)), "[DONE]"]
        assert response.ending == "complete"
        assert gateway.gateway.subscriber.reconnects >= 4


async def test_link_that_is_silently_gone_is_replaced(valkey: ValkeyServer) -> None:
    async with (
        TcpProxy.to(valkey.url) as proxy,
        pool(valkey.url, gateway_url=proxy.url) as (gateway, worker),
    ):
        answering = asyncio.ensure_future(_events(gateway.chat, STREAM))
        job = await worker.take()
        await job.head()
        await job.items((event(0),))
        await asyncio.sleep(0.05)
        proxy.swallow()
        await job.items((event(1),))
        subscriber = gateway.gateway.subscriber
        await until(lambda: not subscriber.connected, "the silence is noticed", timeout=4)
        proxy.heal()
        await job.end(items=[DONE])
        _, events = await answering
        assert data_of(events) == ["0", "1", "[DONE]"]


async def test_lost_message_is_found_after_a_silence(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(_events(gateway.chat, STREAM))
    job = await worker.take()
    await job.head()
    await job.items((event(0),))
    await asyncio.sleep(0.05)
    (sink,) = gateway.gateway.subscriber.of("").sinks
    stream = gateway.gateway.subscriber.of("").sinks.pop(sink)
    await job.end(items=[(event(1),), DONE])
    gateway.gateway.subscriber.of("").sinks[sink] = stream
    _, events = await answering
    assert data_of(events) == ["0", "1", "[DONE]"]


async def test_flushed_queue_ends_in_an_explicit_error(own_valkey: ValkeyServer) -> None:
    async with pool(own_valkey.url) as (gateway, worker):
        streaming = asyncio.ensure_future(_events(gateway.chat, STREAM))
        job = await worker.take()
        await job.head()
        await job.items((event(0),))
        waiting = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
        await until(lambda: gateway.gateway.submitter.open_streams == 2, "both are open")
        await asyncio.sleep(0.1)
        own_valkey.command("FLUSHALL")
        response, events = await streaming
        assert error_code(events) == "job_lost"
        assert response.ending == "cut"
        response, body = await waiting
        assert response.status == 500
        assert b"job_lost" in body


async def test_another_owner_continues_only_where_the_client_stands(pair: Pair) -> None:
    gateway, worker = pair
    for diverges in (False, True):
        answering = asyncio.ensure_future(_events(gateway.chat, STREAM))
        job = await worker.take()
        await job.head()
        await job.items((event(0),))
        await worker.transitions.hand_back(job.adopted)
        second = await worker.take()
        assert second.adopted.base == 2
        if diverges:
            # A worker of another mind: its base isn't where the log ended.
            sink = next(iter(gateway.gateway.subscriber.of("").sinks.values()))
            body = b"\x91\x91\x91\xc4\x01x"
            sink.on_message(b"3 other 1 " + body)
            _, events = await answering
            assert error_code(events) == "diverged"
        else:
            await second.items((event(1),))
            await second.end(items=[DONE])
            response, events = await answering
            assert data_of(events) == ["0", "1", "[DONE]"]
            assert response.ending == "complete"


async def test_second_attempt_at_a_whole_answer_replaces_the_first(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
    job = await worker.take()
    await job.head(200, "application/json")
    await job.items((b'{"half": ',))
    await worker.transitions.hand_back(job.adopted)
    second = await worker.take()
    await second.whole(b'{"whole": 1}')
    response, body = await answering
    assert (response.status, body) == (200, b'{"whole": 1}')


async def test_slow_reader_costs_no_memory_and_misses_nothing(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, stream_buffer_bytes=16 << 10) as (gateway, worker):
        wire = await sse.connect(gateway.chat, receive_buffer=4096)
        await wire.send(sse.request_bytes(gateway.chat, STREAM))
        job = await worker.take()
        await job.head()
        padding = b"x" * 8000
        for number in range(600):
            await job.items((b"data: %d %s\n\n" % (number, padding),))
        await job.end(items=[DONE])
        (fan,) = gateway.gateway.subscriber.of("").sinks.values()
        assert isinstance(fan, Fan)
        (stream,) = fan.streams
        held = sum(len(one.body) for one in stream._queue)
        assert held <= 16 << 10
        response = await sse.read_head(wire)
        events = await response.all_events()
        assert [one.split(" ")[0] for one in data_of(events)] == [*map(str, range(600)), "[DONE]"]
        assert response.ending == "complete"
        wire.close()


async def test_forty_megabytes_of_one_answer(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
    job = await worker.take()
    await job.head(200, "application/json")
    part = b"[" + b"1," * 500_000
    for _ in range(40):
        await job.items((part,))
    await job.end()
    response, body = await answering
    assert body == part * 40
    assert response.ending == "complete"


async def test_answer_above_its_limit_is_an_error(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, max_answer_bytes=10_000) as (gateway, worker):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
        job = await worker.take()
        await job.head(200, "application/json")
        await job.items((b"x" * 20_000,))
        response, body = await answering
        assert response.status == 500
        assert b"answer_too_large" in body
        await until(lambda: _cancelled(job), "the job is cancelled")


async def _cancelled(job: Running) -> bool:
    return (await job.state()).get("cancel") == "cancelled"


async def _events(url: str, body: object) -> tuple[sse.Response, list[sse.Event]]:
    async with sse.open_response(url, body) as response:
        return response, await response.all_events()


async def test_terminal_frame_of_nobody_ends_a_stream(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(_events(gateway.chat, STREAM))
    job = await worker.take()
    await job.head()
    await job.items((event(0),))
    await worker.transitions.cancel(job.job.id, job.job.lane, force=True)
    response, events = await answering
    assert error_code(events) == "cancelled"
    assert response.ending == "cut"
