"""Streams taken up again, on the same gateway and on another; a fake worker sets the pace."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI

from shared.protocol import Usage
from tests.support import sse
from tests.support.fake_worker import DONE, FakeWorker, Running
from tests.support.gateway import RunningGateway
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

STREAM = {"model": "tiny", "stream": True, "messages": []}
WHOLE = {"model": "tiny", "messages": []}
IDS = {"X-Stream-Resumable": "true"}
CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"tiny",'
    b'"choices":[{"index":0,"delta":{"content":"%d"},"finish_reason":null}]}\n\n'
)


class Bench:
    """Two gateways and a worker."""

    def __init__(self, worker: FakeWorker, gateways: list[RunningGateway]) -> None:
        self.worker = worker
        self.gateways = gateways

    async def send(
        self, body: object = STREAM, at: int = 0, *, ids: bool = False, policy: str = ""
    ) -> sse.Wire:
        wire = await sse.connect(self.gateways[at].url)
        named = (IDS if ids else {}) | ({"X-On-Disconnect": policy} if policy else {})
        await wire.send(sse.request_bytes(self.gateways[at].chat, body, headers=named))
        return wire

    def url(self, job: str, at: int = 1, query: str = "") -> str:
        return f"{self.gateways[at].url}/v1/jobs/{job}/stream{query}"

    async def rest(self, job: str, at: int = 1, query: str = "") -> tuple[sse.Response, bytes]:
        return await sse.fetch(self.url(job, at, query), headers=IDS)

    async def state(self, job: str, at: int = 1) -> Any:
        response, body = await sse.fetch(f"{self.gateways[at].url}/v1/jobs/{job}")
        return response.status, json.loads(body)

    async def outcome_within(self, job: str, seconds: float) -> str:
        return await self.worker.wait_outcome(job, seconds)


@asynccontextmanager
async def benched(url: str, gateways: int = 2, **settings: Any) -> AsyncIterator[Bench]:
    prefix = f"t{secrets.token_hex(6)}"
    running = [
        RunningGateway(url, key_prefix=prefix, gateway_id=f"g{at}", **settings)
        for at in range(gateways)
    ]
    async with FakeWorker(url, key_prefix=prefix) as worker:
        for gateway in running:
            await gateway.__aenter__()
        try:
            yield Bench(worker, running)
        finally:
            await asyncio.gather(*(gateway.stop() for gateway in running))


@pytest.fixture
async def bench(valkey: ValkeyServer) -> AsyncIterator[Bench]:
    async with benched(valkey.url) as made:
        yield made


async def answer(job: Running, events: int) -> None:
    """Send a number of events, some to a frame, some with a template."""
    await job.head()
    await job.items((CHUNK % 1,), (CHUNK % 2,))
    before, after = CHUNK.split(b"%d")
    await job.items(*(b"%d" % n for n in range(3, 6)), template=(before, after))
    for number in range(6, events + 1):
        await job.items(b"%d" % number)


def numbered(first: int, last: int) -> bytes:
    return b"".join(b"id: %d\n%b" % (n, CHUNK % n) for n in range(first, last + 1))


async def asked_to_stop(bench: Bench, job: str) -> bool:
    return "cancel" in await bench.worker.job_state(job)


async def test_at_every_position_while_it_runs_and_after_its_end(bench: Bench) -> None:
    wire = await bench.send(ids=True)
    job = await bench.worker.take()
    await answer(job, 10)
    await sse.read_head(wire)
    reading = [
        asyncio.ensure_future(bench.rest(job.job.id, at % 2, f"?after={at}")) for at in range(13)
    ]
    submitters = [gateway.gateway.submitter for gateway in bench.gateways]
    await until(lambda: sum(one.open_streams for one in submitters) == 14, "all are reading")
    await job.items(b"11")
    await job.end(items=[DONE], usage=Usage(1, 11))
    whole = numbered(1, 11) + b"id: 12\n" + DONE[0]
    ends = [whole] + [numbered(n + 1, 11) + b"id: 12\n" + DONE[0] for n in range(1, 12)] + [b""]
    for at, (response, body) in enumerate(await asyncio.gather(*reading)):
        assert (response.status, response.ending) == (200, "complete")
        assert body == ends[at], f"after {at}"
        assert response.headers["x-job-id"] == job.job.id
    for at, expected in enumerate([*ends, b""]):
        response, body = await bench.rest(job.job.id, at % 2, f"?after={at}")
        assert (response.status, response.ending, body) == (200, "complete", expected)
    wire.close()
    await until(lambda: sum(one.open_streams for one in submitters) == 0, "all are closed")
    assert [gateway.gateway.subscriber.of("").sinks for gateway in bench.gateways] == [{}, {}]


async def test_original_stream_has_the_same_ids_and_only_on_request(bench: Bench) -> None:
    for ids in (True, False):
        wire = await bench.send(ids=ids)
        job = await bench.worker.take()
        await answer(job, 7)
        await job.end(items=[DONE])
        body = await (await sse.read_head(wire)).body()
        done = b"id: 8\n" + DONE[0]
        if ids:
            assert body == numbered(1, 7) + done
        else:
            assert body == b"".join(CHUNK % n for n in range(1, 8)) + DONE[0]
        # Without the header none are shown here either; Last-Event-ID does as well.
        _, plain = await sse.fetch(bench.url(job.job.id), headers={"Last-Event-ID": "5"})
        assert plain == CHUNK % 6 + CHUNK % 7 + DONE[0]
        wire.close()


async def test_readers_leave_and_come_without_harm_to_the_others(bench: Bench) -> None:
    wire = await bench.send()
    job = await bench.worker.take()
    await job.head()
    readers = [await sse.connect(gateway.url) for gateway in bench.gateways * 2]
    for at, reader in enumerate(readers):
        await reader.send(sse.request_bytes(bench.url(job.job.id, at % 2), headers=IDS))
    await job.items((CHUNK % 1,))
    await asyncio.gather(*(sse.read_head(one) for one in [wire, *readers[2:]]))
    wire.close()
    readers[0].close(reset=True)
    readers[1].close()
    await asyncio.sleep(0.2)
    assert not await asked_to_stop(bench, job.job.id), "two are still reading"
    readers[2].close()
    await asyncio.sleep(0.1)
    assert not await asked_to_stop(bench, job.job.id)
    readers[3].close()
    await until(lambda: asked_to_stop(bench, job.job.id), "the last one's leaving cancels")
    await job.end("cancelled")


async def test_failed_answer_fails_again_for_each_reader(bench: Bench) -> None:
    wire = await bench.send(ids=True)
    job = await bench.worker.take()
    await answer(job, 6)
    await job.end("failed", code="engine_error", message="It failed.")
    for query, events in (("", 7), ("?after=5", 2), ("?after=6", 1), ("?after=99", 1)):
        async with sse.open_response(bench.url(job.job.id, 1, query), headers=IDS) as response:
            seen = await response.all_events()
        assert len(seen) == events
        assert seen[-1].json()["error"]["code"] == "engine_error"
        assert seen[-1].id is None
        assert response.ending == "cut"
    wire.close()


async def test_answer_in_one_piece_is_given_when_it_is_there(bench: Bench) -> None:
    wire = await bench.send(WHOLE, policy="continue")
    job = await bench.worker.take()
    reading = asyncio.ensure_future(bench.rest(job.job.id, 1, "?after=3"))
    wire.close()
    await asyncio.sleep(0.05)
    assert not reading.done()
    await job.whole(b'{"answer": 42}', status=422)
    for response, body in (await reading, await bench.rest(job.job.id, 0)):
        assert (response.status, body) == (422, b'{"answer": 42}')
        assert response.headers["content-type"] == "application/json"


async def test_stream_that_became_a_refusal_is_one_again(bench: Bench) -> None:
    wire = await bench.send()
    job = await bench.worker.take()
    await job.whole(b'{"error": {"code": "no"}}', status=400)
    response, body = await bench.rest(job.job.id)
    assert (response.status, body) == (400, b'{"error": {"code": "no"}}')
    wire.close()


async def test_queued_job_is_kept_alive_and_then_streams(valkey: ValkeyServer) -> None:
    async with benched(valkey.url, first_byte_grace_s=0.2, keepalive_s=0.2) as bench:
        wire = await bench.send(ids=True)
        (job_id,) = await until(bench.worker.job_ids, "it is submitted")
        reading = asyncio.ensure_future(bench.rest(job_id))
        await asyncio.sleep(1)
        job = await bench.worker.take()
        await answer(job, 6)
        await asyncio.sleep(0.8)
        await job.end(items=[DONE])
        _, body = await reading
        assert body.count(b": keep-alive\n") >= 2
        assert b": keep-alive\n\n" not in body, "after an id it would be an event without data"
        events = body.replace(b": keep-alive\n", b"")
        assert events == numbered(1, 6) + b"id: 7\n" + DONE[0]
        wire.close()


async def test_what_is_wrong_is_said(bench: Bench) -> None:
    wire = await bench.send()
    job = await bench.worker.take()
    await answer(job, 6)
    await job.end(items=[DONE])
    for query in ("?after=x", "?after=-1", "?after=", "?after=1e3"):
        response, body = await bench.rest(job.job.id, 1, query)
        assert (response.status, b'"param":"after"' in body) == (400, True)
    response, _ = await sse.fetch(bench.url(job.job.id), headers={"Last-Event-ID": "chunk-1"})
    assert response.status == 400
    for unknown in ("0" * 32, "nonsense", job.job.id[:-1] + "g"):
        response, body = await bench.rest(unknown)
        assert (response.status, b"job_not_found" in body) == (404, True)
        assert (await bench.state(unknown))[0] == 404
    await bench.worker.redis.delete(bench.worker.keys.log(job.job.id))
    response, body = await bench.rest(job.job.id)
    assert (response.status, b"answer_gone" in body) == (410, True)
    wire.close()


async def test_finished_stream_of_a_thousand_tokens_is_quick(bench: Bench) -> None:
    wire = await bench.send()
    job = await bench.worker.take()
    await answer(job, 1000)
    await job.end(items=[DONE])
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        _, body = await bench.rest(job.job.id)
        times.append(time.perf_counter() - begun)
        assert body.count(b"id: ") == 1001
    assert min(times) < 0.05, times
    wire.close()


async def test_grace_waits_for_a_reader_to_come_back(bench: Bench) -> None:
    wire = await bench.send(policy="grace=1", ids=True)
    job = await bench.worker.take()
    await answer(job, 6)
    await sse.read_head(wire)
    wire.close()
    await asyncio.sleep(0.6)
    back = await sse.connect(bench.gateways[1].url)
    await back.send(sse.request_bytes(bench.url(job.job.id, 1, "?after=6"), headers=IDS))
    await asyncio.sleep(0.7)
    assert not await asked_to_stop(bench, job.job.id), "it is read again"
    back.close()
    await asyncio.sleep(0.6)
    assert not await asked_to_stop(bench, job.job.id), "a new grace has begun"
    await until(lambda: asked_to_stop(bench, job.job.id), "nobody came", timeout=1)
    await job.end("cancelled")


async def test_grace_of_a_queued_job(bench: Bench) -> None:
    wire = await bench.send(policy="grace=0.5")
    (job_id,) = await until(bench.worker.job_ids, "it is submitted")
    wire.close()
    await asyncio.sleep(0.3)
    assert await bench.worker.depth() == 1
    assert await bench.outcome_within(job_id, 1) == "cancelled"
    assert await bench.worker.depth() == 0


async def test_policy_continue_runs_to_the_end(bench: Bench) -> None:
    wire = await bench.send(policy="continue")
    job = await bench.worker.take()
    await job.head()
    wire.close()
    await asyncio.sleep(0.3)
    assert not await asked_to_stop(bench, job.job.id)
    await job.items((CHUNK % 1,))
    await job.end(items=[DONE])
    _, body = await bench.rest(job.job.id)
    assert body == numbered(1, 1) + b"id: 2\n" + DONE[0]


async def test_state_of_a_job(bench: Bench) -> None:
    wires = [await bench.send(at=at % 2) for at in range(3)]

    async def three() -> list[str]:
        ids = await bench.worker.job_ids()
        return ids if len(ids) == 3 else []

    ids = await until(three, "all are queued")
    states = [(await bench.state(one))[1] for one in ids]
    assert sorted(one["position"] for one in states) == [1, 2, 3]
    assert {one["state"] for one in states} == {"queued"}
    job = await bench.worker.take()
    assert [one["id"] for one in states if one["position"] == 1] == [job.job.id]
    status, running = await bench.state(job.job.id)
    assert status == 200
    expected = {
        "object": "job",
        "state": "running",
        "outcome": None,
        "model": "tiny",
        "lane": "interactive",
        "stream": True,
        "attempts": 1,
        "strikes": 0,
        "position": None,
        "finished_at": None,
        "usage": None,
    }
    assert expected.items() <= running.items()
    left = [(await bench.state(one))[1]["position"] for one in ids if one != job.job.id]
    assert sorted(left) == [1, 2]
    await job.stream(b"x", usage=Usage(3, 4))
    _, done = await bench.state(job.job.id, 0)
    assert (done["state"], done["outcome"], done["model"]) == ("done", "completed", "tiny")
    assert done["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert done["submitted_at"] <= done["started_at"] <= done["finished_at"] < done["deadline"]
    assert "messages" not in str(done)
    for wire in wires:
        wire.close()


@pytest.mark.parametrize("resumable", ["false", "true"])
async def test_openai_sdk_is_not_harmed(valkey: ValkeyServer, resumable: str) -> None:
    async with benched(valkey.url, 1, keepalive_s=0.2, first_byte_grace_s=0.1) as bench:
        client = AsyncOpenAI(base_url=f"{bench.gateways[0].url}/v1", api_key="none", max_retries=0)
        streaming = asyncio.ensure_future(
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                extra_headers={"X-Stream-Resumable": resumable},
            )
        )
        job = await bench.worker.take()
        await asyncio.sleep(0.6)

        async def work() -> None:
            await job.head()
            for number in range(5):
                await job.items((CHUNK % number,))
                await asyncio.sleep(0.6 if number == 2 else 0)
            await job.end(items=[DONE])

        working = asyncio.ensure_future(work())
        texts = [chunk.choices[0].delta.content async for chunk in await streaming]
        await working
        await client.close()
        assert texts == ["0", "1", "2", "3", "4"]
