"""A key's requests and tokens per minute: one limit over all gateways, each job charged once."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest

from shared.connection import clients_of
from shared.in_flight import InFlightCounts
from shared.keys import new_job_id
from shared.protocol import Usage
from tests.support import sse
from tests.support.apikeys import MadeKey, make_key
from tests.support.fake_worker import FakeWorker, Running
from tests.support.gateway import RunningGateway
from tests.support.processes import Pool
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

WHOLE = {"model": "tiny", "messages": []}
STREAM = {**WHOLE, "stream": True}
USAGE = Usage(prompt_tokens=200, completion_tokens=100)
LEFT, LIMIT = "x-ratelimit-remaining-", "x-ratelimit-limit-"


class Scene:
    """Two gateways and a worker."""

    def __init__(self, worker: FakeWorker, gateways: list[RunningGateway]) -> None:
        self.worker = worker
        self.gateways = gateways
        self.redis, self.keys = worker.redis, worker.keys

    async def key(self, **fields: Any) -> MadeKey:
        return await make_key(clients_of(self.redis), self.keys, **fields)

    async def ask(self, key: MadeKey, at: int = 0, body: object = WHOLE, **headers: str) -> Any:
        """Return the answer's head and its document."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        given = {**key.headers, **named}
        response, text = await sse.fetch(self.gateways[at].chat, body, headers=given)
        return response, json.loads(text)

    async def served(self, key: MadeKey, at: int = 0, usage: Usage | None = None) -> Any:
        """Have a request answered by the worker; return the answer's headers."""
        asked = asyncio.ensure_future(self.ask(key, at))
        await (await self.worker.take()).whole(b"{}", usage=usage)
        response, _ = await asked
        assert response.status == 200
        return response.headers

    async def refused(self, key: MadeKey, kind: str, at: int = 0) -> Any:
        response, told = await self.ask(key, at)
        assert (response.status, told["error"]["code"]) == (429, "rate_limit_exceeded")
        assert f"{kind} within a minute" in told["error"]["message"]
        assert "x-should-retry" not in response.headers
        return response.headers

    async def used(self, name: str) -> int:
        found: Any = await self.redis.hgetall(name)
        counted = sum(int(count) for second, count in found.items() if second.isdigit())
        assert int(found.get(b"used", 0)) == counted, "their sum is right"
        return counted

    async def charged(self, key: MadeKey, tokens: int) -> None:
        """Wait until all jobs are settled, and see what they cost."""
        unsettled = self.keys.unsettled(key.id)

        async def none() -> bool:
            return not await self.redis.exists(unsettled)

        await until(none, "all is settled", every=0.01)
        assert await self.used(self.keys.tokens(key.id)) == tokens

    async def move(self, name: str, seconds: int) -> None:
        """Have what was counted have been counted earlier: all of it at one time."""
        count, now_s = await self.used(name), int((await self.redis.time())[0])
        await self.redis.delete(name)
        then: dict[Any, Any] = {"used": count, "last": now_s - seconds, now_s - seconds: count}
        await self.redis.hset(name, mapping=then)


@pytest.fixture
async def scene(valkey: ValkeyServer) -> AsyncIterator[Scene]:
    prefix = f"rates{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(FakeWorker(valkey.url, key_prefix=prefix))
        own: dict[str, Any] = {
            "key_prefix": prefix,
            "auth": "keys",
            "auth_cache_s": 0.3,
            "first_byte_grace_s": 0.05,
        }
        gateways = [RunningGateway(valkey.url, **own) for _ in range(2)]
        for gateway in gateways:
            gateway.gateway.in_flight._settle_s = 0.05
            await stack.enter_async_context(gateway)
        yield Scene(worker, gateways)


async def answer_all(worker: FakeWorker) -> None:
    while True:
        await (await worker.take(60)).whole(b"{}", usage=USAGE)


async def test_exactly_as_many_pass_as_may(scene: Scene) -> None:
    first, second = [await scene.key(requests_per_minute=10) for _ in range(2)]
    answering = asyncio.ensure_future(answer_all(scene.worker))
    told = await asyncio.gather(*(scene.ask(first, number % 2) for number in range(40)))
    assert Counter(response.status for response, _ in told) == {200: 10, 429: 30}
    left = sorted(int(r.headers[f"{LEFT}requests"]) for r, _ in told if r.status == 200)
    assert left == list(range(10))
    assert (await scene.ask(second))[0].status == 200
    assert await scene.used(scene.keys.requests(first.id)) == 10
    answering.cancel()


async def test_what_was_used_comes_back_a_minute_later(scene: Scene) -> None:
    key = await scene.key(requests_per_minute=2)
    name = scene.keys.requests(key.id)
    for at in (0, 1):
        await scene.served(key, at)
    assert 0 < await scene.redis.pttl(name) <= 62_000
    await scene.move(name, 59)
    headers = await scene.refused(key, "requests")
    assert 1000 < int(headers["retry-after-ms"]) <= 2000
    assert headers["retry-after"] == "2"
    assert headers["x-ratelimit-reset-requests"].endswith("s")
    await asyncio.sleep(int(headers["retry-after-ms"]) / 1000)
    assert (await scene.served(key))[f"{LEFT}requests"] == "1"
    # The one of now goes on counting, the two of before don't.
    assert await scene.used(name) == 1


async def test_a_refusal_counts_nowhere(scene: Scene) -> None:
    key = await scene.key(requests_per_minute=2, max_in_flight=1, tokens_per_minute=9)
    asked = asyncio.ensure_future(scene.ask(key))
    job = await scene.worker.take()
    response, told = await scene.ask(key, 1)
    assert (response.status, "in flight" in told["error"]["message"]) == (429, True)
    assert response.headers[f"{LEFT}requests"] == "1"
    await job.whole(b"{}")
    await asked
    await scene.charged(key, 0)
    assert (await scene.served(key))[f"{LEFT}requests"] == "0"
    await scene.refused(key, "requests")
    await scene.charged(key, 0)
    assert not await scene.redis.exists(scene.keys.in_flight(key.id))
    assert await scene.used(scene.keys.requests(key.id)) == 2


async def test_tokens_are_charged_once_whoever_reads(scene: Scene) -> None:
    key = await scene.key(tokens_per_minute=500)
    once = {"Idempotency_Key": "once"}
    asked = [asyncio.ensure_future(scene.ask(key, at, **once)) for at in (0, 1)]
    job = await scene.worker.take()
    second = scene.gateways[1].gateway.submitter
    await until(lambda: second.open_streams == 1, "both wait for it")
    await job.whole(b"{}", usage=USAGE)
    assert [(await one)[0].status for one in asked] == [200, 200]
    await scene.charged(key, 300)
    for at in (0, 1):  # Again, when it has ended.
        response, _ = await scene.ask(key, at, **once)
        assert (response.status, response.headers[f"{LEFT}tokens"]) == (200, "200")
    await scene.charged(key, 300)
    await scene.served(key, usage=USAGE)
    await scene.charged(key, 600)
    for at in (0, 1):
        headers = await scene.refused(key, "tokens", at)
        assert (headers[f"{LEFT}tokens"], headers[f"{LIMIT}tokens"]) == ("0", "500")
    await scene.move(scene.keys.tokens(key.id), 61)
    assert (await scene.served(key))[f"{LEFT}tokens"] == "500"


@pytest.mark.parametrize("policy", ["cancel", "continue"])
async def test_a_job_whose_client_left_is_charged(scene: Scene, policy: str) -> None:
    key = await scene.key(tokens_per_minute=1000)
    headers = {**key.headers, "X-On-Disconnect": policy}
    gateway = scene.gateways[0]
    async with sse.open_response(gateway.chat, STREAM, headers=headers):
        job = await scene.worker.take()
        await job.head()
    await until(lambda: gateway.gateway.submitter.open_streams == 0, "the client has left")
    await until(lambda: gateway.gateway.canceller.pending == 0, "the queue knows")
    if policy == "cancel":
        await job.end("cancelled", code="cancelled", usage=USAGE)
    else:
        await job.end(usage=USAGE)
    await scene.charged(key, 300)


async def test_a_job_that_another_worker_ends_is_charged_once(scene: Scene) -> None:
    key = await scene.key(tokens_per_minute=1000)
    for gateway in scene.gateways:  # By the gateway that relays its end, not by who looks for such.
        gateway.gateway.in_flight._settle_s = 60
    await asyncio.sleep(0.1)
    asked = asyncio.ensure_future(scene.ask(key))
    lost: Running = await scene.worker.take()
    await scene.worker.transitions.hand_back(lost.adopted, blame=True)
    limits = {"interactive": 1, "batch": 1}
    (claimed,) = await scene.worker.transitions.claim(scene.worker.tag, limits, scene.worker.id)
    adopted = await scene.worker.transitions.adopt(claimed, "other", scene.worker.id)
    assert not isinstance(adopted, str)
    assert (await lost.end(usage=USAGE)).word == "fenced"
    await Running(scene.worker, adopted).whole(b"{}", usage=USAGE)
    assert (await asked)[0].status == 200
    await scene.charged(key, 300)


class Idle(InFlightCounts):
    async def settle_ended(self, key_id: str, *, unknown_s: float) -> int:
        return 0


async def test_what_a_dead_gateway_left_is_charged_by_another(scene: Scene) -> None:
    key = await scene.key(tokens_per_minute=1000)
    counts = InFlightCounts(clients_of(scene.redis), scene.keys)
    asked = asyncio.ensure_future(scene.ask(key))
    job = await scene.worker.take()
    now_ms = int((await scene.redis.time())[0]) * 1000
    unsettled = scene.keys.unsettled(key.id)
    never_came = new_job_id(scene.worker.tag)
    # As if its gateway had died: it settles nothing, and the other one has not met the key.
    dead = scene.gateways[0].gateway.in_flight
    dead.release = lambda *_: None  # type: ignore[method-assign]
    dead._counts = Idle(clients_of(scene.redis), scene.keys)
    await asyncio.sleep(0.1)  # What it had begun is over.
    await scene.redis.hset(unsettled, never_came, str(now_ms - 60_000))
    await job.whole(b"{}", usage=USAGE)
    await asked
    assert await scene.redis.hexists(unsettled, job.job.id)
    await scene.served(key, 1)
    await scene.charged(key, 300)
    # Many at once, and again: no more than what one charges.
    settled = [counts.settle(key.id, [(job.job.id, 300)]) for _ in range(5)]
    assert await asyncio.gather(*settled) == [0] * 5


async def test_openais_sdk_reads_the_headers(scene: Scene) -> None:
    key = await scene.key(requests_per_minute=2, tokens_per_minute=1000)
    free = await scene.key()
    url, messages = f"{scene.gateways[0].url}/v1", [{"role": "user", "content": "x"}]
    body: Any = {"model": "tiny", "messages": messages}

    async def ask(secret: str, **more: Any) -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key=secret, max_retries=0) as client:
            raw = await client.chat.completions.with_raw_response.create(**body, **more)
            return raw.headers

    asked = asyncio.ensure_future(ask(key.secret))
    await (await scene.worker.take()).whole(b"{}")
    headers = await asked
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-reset-requests"].startswith(("1m", "60"))
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert headers["x-ratelimit-remaining-tokens"] == "1000"
    assert headers["x-ratelimit-reset-tokens"] == "0s"
    asked = asyncio.ensure_future(ask(key.secret, stream=True))
    await (await scene.worker.take()).stream(b"{}")
    assert (await asked)["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(openai.RateLimitError, match="2 requests within a minute") as caught:
        await ask(key.secret)
    refused = caught.value.response.headers
    assert refused["x-ratelimit-remaining-requests"] == "0"
    assert 1000 <= int(refused["retry-after-ms"]) <= 60_000
    assert int(refused["retry-after"]) * 1000 >= int(refused["retry-after-ms"])
    asked = asyncio.ensure_future(ask(free.secret))
    await (await scene.worker.take()).whole(b"{}")
    assert [name for name in await asked if name.startswith("x-ratelimit")] == []


async def test_anthropics_form(scene: Scene) -> None:
    key = await scene.key(requests_per_minute=1)
    await scene.served(key)
    path = f"{scene.gateways[0].url}/v1/messages"
    response, text = await sse.fetch(path, WHOLE, headers=key.headers)
    assert (response.status, json.loads(text)["error"]["type"]) == (429, "rate_limit_error")
    assert response.headers[f"{LEFT}requests"] == "0"


async def test_one_request_above_the_whole_limit_is_refused_for_good(scene: Scene) -> None:
    key = await scene.key(tokens_per_minute=100, requests_per_minute=5)
    for body, param in (
        ({**WHOLE, "max_tokens": 101}, "max_tokens"),
        ({**WHOLE, "max_completion_tokens": 51, "n": 2}, "max_completion_tokens"),
    ):
        response, told = await scene.ask(key, body=body)
        assert (response.status, told["error"]["code"]) == (400, "tokens_above_limit")
        assert told["error"]["param"] == param
        assert response.headers["x-should-retry"] == "false"
    assert not await scene.redis.exists(scene.keys.requests(key.id))


async def test_a_changed_limit_holds_within_the_settings_time(scene: Scene) -> None:
    key = await scene.key(requests_per_minute=1)
    await scene.served(key)
    await scene.refused(key, "requests")
    await key.change(requests_per_minute=3)
    await asyncio.sleep(0.3)
    assert (await scene.served(key))[f"{LEFT}requests"] == "1"
    await key.change(requests_per_minute=0)
    await asyncio.sleep(0.3)
    assert f"{LEFT}requests" not in await scene.served(key)


async def test_while_the_queue_is_away_nothing_is_admitted(valkey: ValkeyServer) -> None:
    prefix = f"rates{secrets.token_hex(4)}"
    own: dict[str, Any] = {"key_prefix": prefix, "auth": "keys", "submit_timeout_s": 0.3}
    async with (
        TcpProxy.to(valkey.url) as way,
        FakeWorker(valkey.url, key_prefix=prefix) as worker,
        RunningGateway(way.url, **own) as gateway,
    ):
        scene = Scene(worker, [gateway])
        key = await scene.key(requests_per_minute=5, tokens_per_minute=100)
        await scene.served(key)
        way.swallow()
        response, told = await scene.ask(key)
        assert (response.status, told["error"]["code"]) == (503, "queue_unavailable")
        assert response.headers["retry-after-ms"] == "2000"


async def test_the_limit_holds_over_processes(valkey: ValkeyServer) -> None:
    prefix = f"rates{secrets.token_hex(4)}"
    both = {"key_prefix": prefix}
    own = {**both, "auth": "keys", "processes": 2}
    async with (
        FakeWorker(valkey.url, key_prefix=prefix, pool="unused") as keeper,
        Pool(valkey.url, gateway=own, worker=both, simulated={"tpot_ms": 1}) as pool,
    ):
        scene = Scene(keeper, [])
        key = await scene.key(requests_per_minute=7, tokens_per_minute=100_000)
        body = {
            "model": "simulated",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "x"}],
        }
        chat = f"{pool.gateways[0].url}/v1/chat/completions"
        told = await asyncio.gather(
            *(sse.fetch(chat, body, headers=key.headers) for _ in range(30))
        )
        assert Counter(response.status for response, _ in told) == {200: 7, 429: 23}
        usages = [json.loads(text)["usage"] for response, text in told if response.status == 200]
        await scene.charged(key, sum(one["total_tokens"] for one in usages))
