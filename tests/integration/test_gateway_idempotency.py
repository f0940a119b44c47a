"""Requests that are sent again with their `Idempotency-Key`: one job, one answer."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from hashlib import sha1
from typing import Any

import pytest

from shared.scripts import source
from tests.integration.test_resume import STREAM, WHOLE, Bench, answer, benched
from tests.support import sse
from tests.support.fake_worker import DONE
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until
from tests.unit.test_gateway_form import upload


@pytest.fixture
async def bench(valkey: ValkeyServer) -> AsyncIterator[Bench]:
    async with benched(valkey.url) as made:
        yield made


async def ask(
    bench: Bench, key: str, body: object = STREAM, at: int = 0, **headers: str
) -> tuple[sse.Response, bytes]:
    return await sse.fetch(
        bench.gateways[at].chat, body, headers={"Idempotency-Key": key, **headers}
    )


def asking(bench: Bench, key: str, body: object = STREAM, at: int = 0) -> asyncio.Task[Any]:
    return asyncio.create_task(ask(bench, key, body, at))


def code_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_twenty_at_once_on_two_gateways_are_one_job(bench: Bench, body: object) -> None:
    key = secrets.token_hex(8)
    asked = [asking(bench, key, body, at % 2) for at in range(20)]
    job = await bench.worker.take()
    submitters = [gateway.gateway.submitter for gateway in bench.gateways]
    await until(lambda: sum(one.open_streams for one in submitters) == 20, "all have joined")
    if body is STREAM:
        await answer(job, 8)
        await job.end(items=[DONE])
    else:
        await job.whole(b'{"error": {}}', status=418)
    answers = await asyncio.gather(*asked)
    assert {response.headers["x-job-id"] for response, _ in answers} == {job.job.id}
    assert {response.status for response, _ in answers} == {200 if body is STREAM else 418}
    assert {response.ending for response, _ in answers} == {"complete"}
    assert len({data for _, data in answers}) == 1
    assert len(await bench.worker.job_ids()) == 1
    # And afterwards: from the log, on any gateway.
    for at in range(2):
        response, data = await ask(bench, key, body, at)
        assert (response.status, data) == (answers[0][0].status, answers[0][1])
    assert len(await bench.worker.job_ids()) == 1


async def test_key_with_another_body_is_refused(bench: Bench) -> None:
    asked = asking(bench, "k")
    job = await bench.worker.take()
    for at in range(2):
        response, body = await ask(bench, "k", {**STREAM, "seed": 1}, at)
        assert (response.status, code_of(body)) == (409, "idempotency_conflict")
        assert response.headers["x-should-retry"] == "false"
    url = f"{bench.gateways[0].url}/v1/completions"
    response, body = await sse.fetch(url, STREAM, headers={"Idempotency-Key": "k"})
    assert (response.status, code_of(body)) == (409, "idempotency_conflict")
    await job.stream(b"x")
    await asked
    assert len(await bench.worker.job_ids()) == 1


async def test_an_upload_is_sent_again_with_another_boundary(bench: Bench) -> None:
    url = f"{bench.gateways[0].url}/v1/audio/transcriptions"

    def sending(fields: dict[str, str]) -> asyncio.Task[Any]:
        sent, kind = upload(fields)  # With a boundary of its own.
        headers = {"Idempotency-Key": "upload", "content-type": kind}
        return asyncio.create_task(sse.fetch(url, sent, headers=headers))

    first = sending({"model": "tiny"})
    job = await bench.worker.take()
    await job.whole(b"{}")
    answers = [await first, await sending({"model": "tiny"})]
    assert {response.headers["x-job-id"] for response, _ in answers} == {job.job.id}
    response, body = await sending({"model": "tiny", "language": "en"})
    assert (response.status, code_of(body)) == (409, "idempotency_conflict")


async def test_keys_are_apart_and_their_text_is_not_stored(bench: Bench) -> None:
    first, second = asking(bench, "secret-one"), asking(bench, "secret-two")
    jobs = [await bench.worker.take(), await bench.worker.take()]
    assert jobs[0].job.id != jobs[1].job.id
    redis = bench.worker.redis
    keys = [key async for key in redis.scan_iter(f"{bench.worker.keys.prefix}:*")]
    requests = [key for key in keys if key.endswith(b":request")]
    assert len(requests) == 2
    assert not any(b"secret" in key for key in keys)
    for key in requests:
        assert b"secret" not in (await redis.get(key) or b"")
        assert 0 < await redis.pttl(key) <= (600 + 300) * 1000
    for job in jobs:
        await job.stream(b"x")
    await asyncio.gather(first, second)


async def test_client_that_lost_its_connection_finds_its_job(bench: Bench) -> None:
    wire = await sse.connect(bench.gateways[0].url)
    headers = {"Idempotency-Key": "k"}
    await wire.send(sse.request_bytes(bench.gateways[0].chat, STREAM, headers=headers))
    job = await bench.worker.take()
    await answer(job, 6)
    await sse.read_head(wire)
    wire.close(reset=True)
    await asyncio.sleep(0.2)
    again = asking(bench, "k", at=1)
    await until(lambda: bench.gateways[1].gateway.submitter.open_streams, "it has joined")
    assert "cancel" not in await job.state(), "a client with a key has a grace"
    await job.end(items=[DONE])
    response, body = await again
    assert (response.headers["x-job-id"], body.count(b"data: ")) == (job.job.id, 7)


@pytest.mark.parametrize("outcome", ["cancelled", "failed", "expired"])
async def test_job_without_an_answer_gives_way(bench: Bench, outcome: str) -> None:
    first = asking(bench, "k")
    job = await bench.worker.take()
    await job.end(outcome, code="engine_error" if outcome == "failed" else "")
    response, _ = await first
    assert response.status >= 499
    asked = [asking(bench, "k", at=at % 2) for at in range(6)]
    second = await bench.worker.take()
    assert second.job.id != job.job.id
    submitters = [gateway.gateway.submitter for gateway in bench.gateways]
    await until(lambda: sum(one.open_streams for one in submitters) == 6, "all have joined")
    await second.stream(b"x")
    answers = await asyncio.gather(*asked)
    assert {one.headers["x-job-id"] for one, _ in answers} == {second.job.id}
    assert len(await bench.worker.job_ids()) == 2


async def test_lost_reply_to_the_submission_is_made_up_for(valkey: ValkeyServer) -> None:
    """The client is told no, sends again, and finds the job that was there all the same."""
    async with benched(valkey.url) as bench, TcpProxy.to(valkey.url) as proxy:
        settings = bench.gateways[0].settings.model_copy()
        bad = type(bench.gateways[0])(
            proxy.url, key_prefix=settings.key_prefix, gateway_id="bad", submit_timeout_s=0.5
        )
        async with bad:
            bench.gateways.append(bad)
            first = asking(bench, "first", at=2)  # So that the server knows the script.
            await (await bench.worker.take()).stream(b"x")
            await first
            before = set(await bench.worker.job_ids())
            proxy.cut_after(sha1(source("submit").encode()).hexdigest().encode(), times=1)
            response, body = await ask(bench, "k", at=2)
            assert (response.status, code_of(body)) == (503, "queue_unavailable")
            await until(lambda: not bad.gateway.canceller.pending, "it has been cleaned up after")
            (submitted,) = set(await bench.worker.job_ids()) - before
            again = asking(bench, "k", at=1)
            job = await bench.worker.take()
            assert job.job.id == submitted
            await job.stream(b"x")
            response, _ = await again
            assert (response.status, response.headers["x-job-id"]) == (200, job.job.id)
            assert len(await bench.worker.job_ids()) == 2
            bench.gateways.pop()


async def test_key_of_a_job_cancelled_before_its_submission(bench: Bench) -> None:
    first = asking(bench, "k")
    job = await bench.worker.take()
    keys, redis = bench.worker.keys, bench.worker.redis
    await redis.delete(keys.job(job.job.id), keys.log(job.job.id))
    await redis.set(keys.cancel(job.job.id), "cancelled", px=10_000)
    again = asking(bench, "k", at=1)
    second = await bench.worker.take()
    assert second.job.id != job.job.id
    await second.stream(b"x")
    assert (await again)[0].status == 200
    assert (await first)[0].status in (200, 500)
