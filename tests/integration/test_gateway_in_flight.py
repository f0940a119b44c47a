"""A key's requests in flight: one bound over all gateways, that nothing can get stuck at."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from shared.connection import clients_of
from shared.in_flight import InFlightCounts
from shared.keys import new_job_id
from tests.support import sse
from tests.support.apikeys import MadeKey, make_key
from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway
from tests.support.processes import Pool
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

WHOLE = {"model": "tiny", "messages": []}
STREAM = {**WHOLE, "stream": True}


class Scene:
    """Two gateways and a worker."""

    def __init__(self, worker: FakeWorker, gateways: list[RunningGateway]) -> None:
        self.worker = worker
        self.gateways = gateways

    async def key(self, **fields: Any) -> MadeKey:
        return await make_key(clients_of(self.worker.redis), self.worker.keys, **fields)

    async def counted(self, key: MadeKey) -> set[str]:
        found: Any = await self.worker.redis.hkeys(self.worker.keys.in_flight(key.id))
        return {one.decode() for one in found}

    async def wait_counted(self, key: MadeKey, count: int) -> None:
        async def so_many() -> bool:
            return len(await self.counted(key)) == count

        await until(so_many, f"{count} are counted", every=0.005)


@pytest.fixture
async def scene(valkey: ValkeyServer) -> AsyncIterator[Scene]:
    prefix = f"inflight{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(FakeWorker(valkey.url, key_prefix=prefix))
        own: dict[str, Any] = {"key_prefix": prefix, "auth": "keys", "first_byte_grace_s": 0.05}
        gateways = [
            await stack.enter_async_context(RunningGateway(valkey.url, **own)) for _ in range(2)
        ]
        yield Scene(worker, gateways)


def ask(
    gateway: RunningGateway, key: MadeKey, body: object = WHOLE, **headers: str
) -> asyncio.Task[tuple[sse.Response, bytes]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.ensure_future(sse.fetch(gateway.chat, body, headers={**key.headers, **named}))


async def check_refused(gateway: RunningGateway, key: MadeKey) -> None:
    response, body = await sse.fetch(gateway.chat, WHOLE, headers=key.headers)
    error = json.loads(body)["error"]
    assert (response.status, error["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(response.headers["retry-after"]) <= 3
    assert "x-should-retry" not in response.headers


async def test_the_bound_holds_over_all_gateways(scene: Scene) -> None:
    key, other = await scene.key(max_in_flight=2), await scene.key(max_in_flight=2)
    first, second = scene.gateways
    asked = [ask(first, key), ask(second, key)]
    jobs = [await scene.worker.take() for _ in range(2)]
    for gateway in scene.gateways:
        await check_refused(gateway, key)
    assert len(await scene.worker.job_ids()) == 2
    free = ask(first, other)
    await (await scene.worker.take()).whole(b"{}")
    assert (await free)[0].status == 200
    for job in jobs:
        await job.whole(b"{}")
    assert [(await one)[0].status for one in asked] == [200, 200]
    await scene.wait_counted(key, 0)
    # One after the other, each as soon as it can be.
    for number in range(10):
        again = [ask(scene.gateways[number % 2], key) for _ in range(2)]
        for _ in range(2):
            await (await scene.worker.take()).whole(b"{}")
        assert [(await one)[0].status for one in again] == [200, 200]


async def test_many_at_once_are_never_more_than_may_be(scene: Scene) -> None:
    key = await scene.key(max_in_flight=5)
    asked = [ask(scene.gateways[number % 2], key) for number in range(40)]
    jobs = [await scene.worker.take() for _ in range(5)]
    refused = 0
    for one in asyncio.as_completed(asked):
        assert (await one)[0].status == 429
        refused += 1
        if refused == 35:
            break
    assert len(await scene.worker.job_ids()) == 5
    for job in jobs:
        await job.whole(b"{}")
    assert sorted([(await one)[0].status for one in asked])[:5] == [200] * 5


async def test_a_client_that_leaves_makes_room(scene: Scene) -> None:
    key = await scene.key(max_in_flight=1)
    async with sse.open_response(scene.gateways[0].chat, STREAM, headers=key.headers):
        job = await scene.worker.take()
        await check_refused(scene.gateways[1], key)
    await scene.wait_counted(key, 0)
    await job.end("cancelled", code="cancelled")
    asked = ask(scene.gateways[1], key)
    await (await scene.worker.take()).whole(b"{}")
    assert (await asked)[0].status == 200


async def test_a_job_that_goes_on_without_its_client_counts_to_its_end(scene: Scene) -> None:
    key = await scene.key(max_in_flight=1)
    first, second = scene.gateways
    stays = {**key.headers, "X-On-Disconnect": "continue"}
    async with sse.open_response(first.chat, STREAM, headers=stays):
        job = await scene.worker.take()
    await until(lambda: first.gateway.submitter.open_streams == 0, "the client has left")
    for gateway in scene.gateways:
        await check_refused(gateway, key)
    await job.stream(b"1")
    await asyncio.sleep(0.06)  # A full count is looked through only so often.
    asked = ask(second, key)
    await (await scene.worker.take()).whole(b"{}")
    assert (await asked)[0].status == 200


async def test_another_reader_keeps_the_count(scene: Scene) -> None:
    key = await scene.key(max_in_flight=1)
    first, second = scene.gateways
    async with sse.open_response(first.chat, STREAM, headers=key.headers):
        job = await scene.worker.take()
        await job.head()
        url = f"{second.url}/v1/jobs/{job.job.id}/stream"
        reading = asyncio.ensure_future(sse.fetch(url, headers=key.headers))
        await until(lambda: second.gateway.submitter.open_streams == 1, "another reads")
    await until(lambda: first.gateway.canceller.pending == 0, "the first has left")
    await check_refused(first, key)
    await job.end()
    await reading


async def test_a_shared_job_counts_once(scene: Scene) -> None:
    key = await scene.key(max_in_flight=1)
    asked = [ask(gateway, key, Idempotency_Key="once") for gateway in scene.gateways]
    job = await scene.worker.take()
    second = scene.gateways[1].gateway.submitter
    await until(lambda: second.open_streams == 1, "both wait for it")
    await check_refused(scene.gateways[0], key)
    await job.whole(b"{}")
    assert [(await one)[0].status for one in asked] == [200, 200]
    await scene.wait_counted(key, 0)


async def test_what_a_dead_gateway_left_is_found(scene: Scene) -> None:
    key = await scene.key(max_in_flight=3)
    counts = InFlightCounts(clients_of(scene.worker.redis), scene.worker.keys)
    asked = ask(scene.gateways[0], key)
    runs = await scene.worker.take()
    name = scene.worker.keys.in_flight(key.id)
    now_ms = int((await scene.worker.redis.time())[0]) * 1000
    never_came, may_come = (new_job_id(scene.worker.tag) for _ in range(2))
    await scene.worker.redis.hset(name, never_came, now_ms - 60_000)
    await scene.worker.redis.hset(name, may_come, now_ms)
    assert await counts.prune(key.id, unknown_s=30) == 1
    assert await scene.counted(key) == {runs.job.id, may_come}
    assert await scene.worker.redis.pttl(name) > 0
    await runs.whole(b"{}")
    await asked


async def test_a_gateway_that_dies_blocks_nobody_for_long(valkey: ValkeyServer) -> None:
    prefix = f"inflight{secrets.token_hex(4)}"
    both = {"key_prefix": prefix}
    own = {**both, "auth": "keys", "gateway_lease_s": 0.5}
    async with (
        FakeWorker(valkey.url, key_prefix=prefix, pool="unused") as keeper,
        Pool(valkey.url, gateways=2, gateway=own, worker=both, simulated={"tpot_ms": 20}) as pool,
    ):
        scene = Scene(keeper, [])
        key = await scene.key(max_in_flight=1)
        body = {"model": "simulated", "stream": True, "max_tokens": 3000, "messages": []}
        body["messages"] = [{"role": "user", "content": "long"}]
        dying, other = pool.gateways
        wire = await sse.connect(dying.url)
        chat = "/v1/chat/completions"
        await wire.send(sse.request_bytes(dying.url + chat, body, headers=key.headers))
        await scene.wait_counted(key, 1)
        short = {**body, "stream": False, "max_tokens": 1}
        response, _ = await sse.fetch(other.url + chat, short, headers=key.headers)
        assert response.status == 429
        dying.kill()

        async def served() -> bool:
            response, _ = await sse.fetch(other.url + chat, short, headers=key.headers)
            return response.status == 200

        await until(served, "the key is served again", timeout=20, every=0.1)
        wire.close()
