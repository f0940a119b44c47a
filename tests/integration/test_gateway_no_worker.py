"""Requests for a model whose pool has no worker: they wait for one, as long as is set."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support import sse
from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, pool
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

WHOLE = {"model": "tiny", "messages": []}
STREAM = {**WHOLE, "stream": True}
DEPTH = b'headrace_queue_depth{lane="interactive",pool="tiny"} 1.0'

Pair = tuple[RunningGateway, FakeWorker]


@asynccontextmanager
async def deserted(url: str, wait_s: float, **settings: Any) -> AsyncIterator[Pair]:
    """A gateway that knows a model, and its only worker, which is not registered any more."""
    async with pool(url, no_worker_wait_s=wait_s, **settings) as (gateway, worker):
        await worker.registry.leave(worker.id)
        await until(lambda: gateway.gateway.models.ready_workers == 0, "it is noticed")
        yield gateway, worker


async def one_waits(worker: FakeWorker) -> None:
    async def waits() -> bool:
        return await worker.depth() == 1

    await until(waits, "a job waits")


@pytest.mark.parametrize("body", [WHOLE, STREAM, {"messages": []}], ids=["whole", "stream", "any"])
async def test_the_first_worker_finds_what_waited_for_it(
    valkey: ValkeyServer, body: dict[str, object]
) -> None:
    async with deserted(valkey.url, 30) as (gateway, worker):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, body))
        await one_waits(worker)

        async def shown() -> bool:
            return DEPTH in (await sse.fetch(f"{gateway.url}/metrics"))[1]

        await until(shown, "the depth is shown, to scale on")
        assert (await sse.fetch(f"{gateway.url}/readyz"))[0].status == 200
        assert json.loads((await sse.fetch(f"{gateway.url}/v1/models"))[1])["data"] == []
        await worker.announce()
        job = await worker.take()
        await (job.stream(b"1") if "stream" in body else job.whole(b"{}"))
        response, raw = await answering
        assert (response.status, response.ending) == (200, "complete")
        assert raw == (b"data: 1\n\ndata: [DONE]\n\n" if "stream" in body else b"{}")


@pytest.mark.parametrize("begun", [False, True], ids=["whole", "begun stream"])
async def test_none_comes(valkey: ValkeyServer, begun: bool) -> None:
    """However long the pool has had none, each request waits its time."""
    timing = {"first_byte_grace_s": 0.1, "keepalive_s": 0.1}
    async with deserted(valkey.url, 1, **timing) as (gateway, worker):
        await asyncio.sleep(0.6)
        start = time.monotonic()
        response, raw = await sse.fetch(gateway.chat, STREAM if begun else WHOLE)
        assert 0.9 < time.monotonic() - start < 3
        if begun:
            assert (response.status, response.ending) == (200, "cut")
            assert raw.startswith(b": keep-alive\n\n")
            assert b"[DONE]" not in raw
            error = json.loads(raw.rpartition(b"data: ")[2])["error"]
        else:
            assert response.status == 503
            assert 1 <= int(response.headers["retry-after"]) <= 60
            error = json.loads(raw)["error"]
        assert (error["code"], error["param"]) == ("no_worker", "model")
        assert "headrace-worker" in error["message"]
        assert await worker.wait_outcome(response.headers["x-job-id"]) == "cancelled"
        assert await worker.depth() == 0


async def test_a_worker_that_came_unseen_stops_what_was_given_up(valkey: ValkeyServer) -> None:
    async with deserted(valkey.url, 0.5) as (gateway, worker):
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
        job = await worker.take()
        assert (await answering)[0].status == 503

        async def cancelled() -> bool:
            return "cancel" in await job.state()

        await until(cancelled, "its cancel is noted")
        assert (await job.head()).word == "cancelled"
        assert (await job.end("cancelled")).word == "ok"
        assert await worker.wait_outcome(job.job.id) == "cancelled"
        assert await worker.depth() == 0


async def test_one_that_starts_is_waited_for(valkey: ValkeyServer) -> None:
    async with deserted(valkey.url, 0.5) as (gateway, worker):
        await worker.announce("starting")
        answering = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE))
        await asyncio.sleep(1)
        assert not answering.done()
        await worker.announce()
        await (await worker.take()).whole(b"{}")
        assert (await answering)[0].status == 200


async def test_waiting_is_turned_off(valkey: ValkeyServer) -> None:
    async with deserted(valkey.url, 0) as (gateway, worker):
        response, raw = await sse.fetch(gateway.chat, WHOLE)
        assert (response.status, json.loads(raw)["error"]["code"]) == (503, "no_worker")
        assert (await sse.fetch(f"{gateway.url}/readyz"))[0].status == 503
        assert await worker.job_ids() == []


async def test_a_name_that_the_pools_workers_have_dropped_is_not_waited_for(
    valkey: ValkeyServer,
) -> None:
    async with pool(valkey.url) as (gateway, worker):
        worker.models = ["tiny", "adapter"]
        await worker.announce()
        await until(lambda: _listed(gateway, "adapter"), "it is served")
        worker.models = ["tiny"]
        await worker.announce()
        await until(lambda: not _listed(gateway, "adapter"), "it is dropped")
        response, raw = await sse.fetch(gateway.chat, {**WHOLE, "model": "adapter"})
        assert (response.status, json.loads(raw)["error"]["code"]) == (503, "no_worker")
        assert await worker.job_ids() == []


def _listed(gateway: RunningGateway, name: str) -> bool:
    snapshot = gateway.gateway.models._snapshot
    return snapshot is not None and bool(snapshot.ready(name))
