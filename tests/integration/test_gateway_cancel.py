"""Clients leave, deadlines pass, people cancel: the job ends, in every phase and mode."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from shared.protocol import Usage
from tests.support import sse
from tests.support.fake_worker import DONE, FakeWorker
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


async def send(gateway: RunningGateway, body: object, **headers: str) -> sse.Wire:
    wire = await sse.connect(gateway.url)
    await wire.send(sse.request_bytes(gateway.chat, body, headers=headers))
    return wire


async def is_asked_to_stop(worker: FakeWorker, job_id: str, reason: str = "cancelled") -> None:
    async def asked() -> bool:
        return (await worker.job_state(job_id)).get("cancel") == reason

    await until(asked, f"the worker is asked to stop ({reason})", timeout=1, every=0.002)


async def the_job(worker: FakeWorker) -> str:
    (job_id,) = await until(worker.job_ids, "the job is submitted", every=0.002)
    return str(job_id)


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_client_leaves_while_queued(pair: Pair, body: object, reset: bool) -> None:
    gateway, worker = pair
    wire = await send(gateway, body)
    job_id = await the_job(worker)
    wire.close(reset=reset)
    assert await worker.wait_outcome(job_id, 1) == "cancelled"
    assert await worker.depth() == 0
    await until(lambda: gateway.gateway.submitter.open_streams == 0, "the stream is closed")
    assert gateway.gateway.subscriber.of("").sinks == {}


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_client_leaves_before_the_first_token(pair: Pair, body: object, reset: bool) -> None:
    gateway, worker = pair
    wire = await send(gateway, body)
    job = await worker.take()
    await asyncio.sleep(0.02)
    wire.close(reset=reset)
    await is_asked_to_stop(worker, job.job.id)


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
async def test_client_leaves_between_tokens(pair: Pair, reset: bool) -> None:
    gateway, worker = pair
    wire = await send(gateway, STREAM)
    job = await worker.take()
    await job.head()
    await job.items((b"data: 1\n\n",))
    await sse.read_head(wire)
    wire.close(reset=reset)
    await is_asked_to_stop(worker, job.job.id)
    await job.end("cancelled", usage=Usage(1, 1))
    assert await worker.wait_outcome(job.job.id) == "cancelled"
    assert await worker.depth() == 0


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
async def test_client_leaves_with_requests_in_a_row(pair: Pair, reset: bool) -> None:
    gateway, worker = pair
    wire = await send(gateway, WHOLE)
    job_id = await the_job(worker)
    await wire.send(2 * sse.request_bytes(gateway.chat, WHOLE))
    await asyncio.sleep(0.02)
    wire.close(reset=reset)
    assert await worker.wait_outcome(job_id, 1) == "cancelled"
    assert await worker.job_ids() == [job_id]


async def test_client_leaves_while_its_body_is_read(pair: Pair) -> None:
    gateway, worker = pair
    wire = await sse.connect(gateway.url)
    await wire.send(sse.request_bytes(gateway.chat, STREAM)[:-5])
    await asyncio.sleep(0.02)
    wire.close()
    await asyncio.sleep(0.05)
    assert await worker.job_ids() == []
    assert gateway.gateway.submitter.open_streams == 0


async def test_worker_that_does_not_obey_is_overruled(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, force_cancel_s=0.2) as (gateway, worker):
        wire = await send(gateway, STREAM)
        job = await worker.take()
        wire.close()
        assert await worker.wait_outcome(job.job.id, 2) == "cancelled"
        assert (await job.items((b"data: late\n\n",))).word == "fenced"


async def test_answer_that_is_complete_is_not_cancelled(pair: Pair) -> None:
    gateway, worker = pair
    for body in (STREAM, WHOLE):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, body))
        job = await worker.take()
        await job.whole(b"{}")
        await answering
        await asyncio.sleep(0.05)
        assert (await job.state())["outcome"] == "completed"
        assert gateway.gateway.canceller.pending == 0


async def test_five_hundred_disconnects_over_a_slow_link_are_five_hundred_cancels(
    valkey: ValkeyServer,
) -> None:
    count = 500
    async with (
        TcpProxy.to(valkey.url) as proxy,
        pool(valkey.url, gateway_url=proxy.url, submit_timeout_s=20, redis_timeout_s=10) as (
            gateway,
            worker,
        ),
    ):
        wires = [await send(gateway, STREAM) for _ in range(count)]

        async def all_submitted() -> bool:
            return await worker.depth() == count

        await until(all_submitted, "all are queued", timeout=30)
        proxy.delay(0.1)
        picked = random.Random(1)
        for wire in wires:
            wire.close(reset=picked.random() < 0.5)

        async def all_gone() -> bool:
            return await worker.depth() == 0

        await until(all_gone, "all are cancelled", timeout=30)
        outcomes = {(await worker.job_state(one))["outcome"] for one in await worker.job_ids()}
        assert outcomes == {"cancelled"}
        assert len(await worker.job_ids()) == count
        proxy.heal()
        await until(lambda: gateway.gateway.canceller.pending == 0, "nothing is left to do")


async def test_cancels_wait_for_a_queue_that_is_away(own_valkey: ValkeyServer) -> None:
    async with (
        TcpProxy.to(own_valkey.url) as proxy,
        pool(own_valkey.url, gateway_url=proxy.url) as (gateway, worker),
    ):
        wire = await send(gateway, STREAM)
        job_id = await the_job(worker)
        await asyncio.sleep(0.05)
        proxy.refuse()
        proxy.cut()
        wire.close()
        await asyncio.sleep(0.5)
        assert (await worker.job_state(job_id))["state"] == "queued"
        proxy.heal()
        assert await worker.wait_outcome(job_id, 5) == "cancelled"


async def test_client_that_leaves_at_any_moment_leaves_nothing_behind(pair: Pair) -> None:
    gateway, worker = pair
    moments = random.Random(7)

    async def come_and_go() -> None:
        wire = await send(gateway, STREAM)
        await asyncio.sleep(moments.random() * 0.03)
        wire.close(reset=moments.random() < 0.5)

    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(come_and_go())

    async def nothing_left() -> bool:
        return await worker.depth() == 0 and gateway.gateway.submitter.open_streams == 0

    await until(nothing_left, "nothing is left")
    assert gateway.gateway.subscriber.of("").sinks == {}
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, STREAM))
    await (await worker.take()).stream(b"1")
    assert (await answering)[0].ending == "complete"


async def test_submission_of_unknown_outcome_is_cancelled(valkey: ValkeyServer) -> None:
    async with (
        TcpProxy.to(valkey.url) as proxy,
        pool(valkey.url, gateway_url=proxy.url, submit_timeout_s=0.3, redis_timeout_s=1) as (
            gateway,
            worker,
        ),
    ):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))  # Teaches the script.
        await (await worker.take()).whole(b"{}")
        await answering
        proxy.cut_after(b"/v1/chat/completions")
        response, body = await sse.fetch(gateway.chat, STREAM)
        assert response.status == 503
        assert b"queue_unavailable" in body

        async def nothing_left() -> bool:
            return await worker.depth() == 0 and gateway.gateway.canceller.pending == 0

        await until(nothing_left, "the job that nobody knows of is gone", timeout=6)
        states = [await worker.job_state(job_id) for job_id in await worker.job_ids()]
        assert sorted(state["outcome"] for state in states) == ["cancelled", "completed"]


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_deadline_of_a_queued_job_needs_no_worker(pair: Pair, body: object) -> None:
    gateway, worker = pair
    response, raw = await sse.fetch(gateway.chat, body, headers={"X-Request-Timeout": "0.3"})
    assert response.status == 504
    assert b"request_timeout" in raw
    assert response.headers["x-should-retry"] == "false"
    assert await worker.wait_outcome(await the_job(worker)) == "expired"
    assert await worker.depth() == 0


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_a_time_limit_that_ends_while_the_job_is_submitted_is_no_outage(
    pair: Pair, body: object
) -> None:
    gateway, worker = pair
    response, raw = await sse.fetch(
        gateway.chat, body, headers={"X-Request-Timeout": "0.000000001"}
    )
    assert response.status == 504
    assert b"request_timeout" in raw
    assert response.headers["x-should-retry"] == "false"

    async def nothing_left() -> bool:
        return await worker.depth() == 0 and gateway.gateway.canceller.pending == 0

    await until(nothing_left, "no job is left")


async def test_deadline_in_mid_stream_is_an_error_event(pair: Pair) -> None:
    gateway, worker = pair
    wire = await send(gateway, STREAM, **{"X-Request-Timeout": "0.4"})
    job = await worker.take()
    await job.head()
    await job.items((b"data: 1\n\n",))
    response = await sse.read_head(wire)
    events = await response.all_events()
    assert events[-1].json()["error"]["code"] == "request_timeout"
    assert response.ending == "cut"
    await is_asked_to_stop(worker, job.job.id, "expired")
    wire.close()


async def test_time_limit_is_bounded_and_checked(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, request_timeout_s=0.3, max_request_timeout_s=0.6) as (gateway, _):
        loop = asyncio.get_running_loop()
        start = loop.time()
        response, _ = await sse.fetch(gateway.chat, WHOLE, headers={"X-Request-Timeout": "60"})
        assert response.status == 504
        assert 0.5 < loop.time() - start < 2
        for wrong in ("0", "-1", "soon", "nan", "inf"):
            response, raw = await sse.fetch(
                gateway.chat, WHOLE, headers={"X-Request-Timeout": wrong}
            )
            assert response.status == 400
            assert b"X-Request-Timeout" in raw


async def test_cancel_by_id_through_another_gateway(pair: Pair, valkey: ValkeyServer) -> None:
    gateway, worker = pair
    prefix = gateway.settings.key_prefix
    async with RunningGateway(valkey.url, key_prefix=prefix) as other:
        queued = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
        job_id = await the_job(worker)
        url = f"{other.url}/v1/jobs/{job_id}/cancel"
        _, body = await sse.fetch(url, b"", method="POST")
        assert b'"cancelled_queued"' in body
        response, _ = await queued
        assert response.status == 499
        _, body = await sse.fetch(url, b"", method="POST")
        assert b'"already_finished"' in body
        assert b'"cancelled"' in body


async def test_cancel_by_id_of_a_running_job_tells_its_usage(pair: Pair) -> None:
    gateway, worker = pair
    streaming = asyncio.ensure_future(sse.fetch(gateway.chat, STREAM))
    job = await worker.take()
    await job.head()
    await job.items((b"data: 1\n\n",))
    url = f"{gateway.url}/v1/jobs/{job.job.id}/cancel"
    cancelling = asyncio.ensure_future(sse.fetch(url, b"", method="POST"))
    await is_asked_to_stop(worker, job.job.id)
    await job.end("cancelled", code="cancelled", usage=Usage(5, 2))
    response, body = await cancelling
    assert response.status == 200
    assert b'"cancelled_running"' in body
    assert b'"completion_tokens":2' in body
    response, raw = await streaming
    assert response.ending == "cut"
    assert b'"code":"cancelled"' in raw


async def test_cancel_by_id_overrules_a_worker_that_does_not_obey(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, force_cancel_s=0.2) as (gateway, worker):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
        job = await worker.take()
        _, body = await sse.fetch(f"{gateway.url}/v1/jobs/{job.job.id}/cancel", b"", method="POST")
        assert b'"cancelled_running"' in body
        assert (await answering)[0].status == 499


async def test_cancel_that_comes_too_late_says_so(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
    job = await worker.take()
    url = f"{gateway.url}/v1/jobs/{job.job.id}/cancel"
    cancelling = asyncio.ensure_future(sse.fetch(url, b"", method="POST"))
    await is_asked_to_stop(worker, job.job.id)
    await job.whole(b"{}", usage=Usage(1, 1))
    _, body = await cancelling
    assert b'"already_finished"' in body
    assert b'"ended":"completed"' in body
    assert (await answering)[0].status == 200


async def test_cancel_of_an_unknown_job_is_404(pair: Pair) -> None:
    gateway, _ = pair
    for job_id in ("nope", "0" * 32, "%2e%2e", "G" * 32):
        await _is_unknown(gateway, job_id)


async def _is_unknown(gateway: RunningGateway, job_id: str) -> None:
    response, body = await sse.fetch(f"{gateway.url}/v1/jobs/{job_id}/cancel", b"", method="POST")
    assert response.status == 404
    assert b"job_not_found" in body


async def test_reader_that_stalls_is_cut_and_its_job_cancelled(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, stall_timeout_s=0.5) as (gateway, worker):
        wire = await sse.connect(gateway.url, receive_buffer=4096)
        await wire.send(sse.request_bytes(gateway.chat, STREAM))
        job = await worker.take()
        await job.head()
        for _ in range(100):
            await job.items((b"data: %s\n\n" % (b"x" * 100_000),))
        await is_asked_to_stop_within(worker, job.job.id, 4)
        await until(lambda: not gateway.server.server_state.connections, "the connection is cut")
        wire.close()


async def test_stalled_reader_of_a_whole_answer_is_cut(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, stall_timeout_s=0.5) as (gateway, worker):
        wire = await sse.connect(gateway.url, receive_buffer=4096)
        await wire.send(sse.request_bytes(gateway.chat, WHOLE))
        job = await worker.take()
        await job.head(200, "application/json")
        for _ in range(20):
            await job.items((b"x" * 1_000_000,))
        await job.end()
        await until(lambda: gateway.gateway.submitter.open_streams == 1, "it is being sent")
        await until(lambda: gateway.gateway.submitter.open_streams == 0, "it is given up")
        await until(lambda: not gateway.server.server_state.connections, "the connection is cut")
        wire.close()


async def is_asked_to_stop_within(worker: FakeWorker, job_id: str, timeout_s: float) -> None:
    async def asked() -> bool:
        return (await worker.job_state(job_id)).get("cancel") == "cancelled"

    await until(asked, "the worker is asked to stop", timeout=timeout_s)


async def test_reader_that_is_only_slow_is_not_cut(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, stall_timeout_s=0.7) as (gateway, worker):
        wire = await sse.connect(gateway.url, receive_buffer=4096)
        await wire.send(sse.request_bytes(gateway.chat, STREAM))
        job = await worker.take()
        await job.head()
        for _ in range(40):
            await job.items((b"data: %s\n\n" % (b"x" * 100_000),))
        await job.end(items=[DONE])
        response = await sse.read_head(wire)
        await response.read_slowly(2_000_000, 2)
        await response.body()
        assert response.ending == "complete"
        assert response.received > 4_000_000
        wire.close()
