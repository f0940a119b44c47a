"""API keys at a real gateway: who is served, and with what rights."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from shared.connection import clients_of, connect
from shared.keys import Keys
from shared.settings import RedisSettings
from tests.support import sse
from tests.support.apikeys import MadeKey, make_key
from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, pool
from tests.support.processes import Pool
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

WHOLE = {"model": "tiny", "messages": []}

Pair = tuple[RunningGateway, FakeWorker]


@pytest.fixture
async def pair(valkey: ValkeyServer) -> AsyncIterator[Pair]:
    async with pool(valkey.url, auth="keys") as both:
        yield both


async def key_for(worker: FakeWorker, tenant: str = "acme", **fields: Any) -> MadeKey:
    return await make_key(clients_of(worker.redis), worker.keys, tenant, **fields)


async def ask(url: str, body: object = None, **options: Any) -> tuple[int, Any]:
    """Return status and document of an answer."""
    response, text = await sse.fetch(url, body, **options)
    return response.status, json.loads(text)


async def refused(url: str, body: object = None, **options: Any) -> tuple[int, str]:
    """Return status and code of an error."""
    status, document = await ask(url, body, **options)
    return status, document["error"]["code"]


async def test_every_route_asks_for_a_key_but_the_probes(pair: Pair) -> None:
    gateway, worker = pair
    routes: list[tuple[str, object]] = [
        ("/v1/chat/completions", WHOLE),
        ("/v1/messages", WHOLE),
        ("/tokenize", {"model": "tiny", "prompt": "x"}),
        ("/v1/models", None),
        ("/v1/models/tiny", None),
        (f"/v1/jobs/{'0' * 32}", None),
        (f"/v1/jobs/{'0' * 32}/stream", None),
        (f"/v1/jobs/{'0' * 32}/cancel", {}),
    ]
    for path, body in routes:
        response, text = await sse.fetch(gateway.url + path, body)
        assert response.status == 401, path
        error = json.loads(text)["error"]
        if path == "/v1/messages":
            assert error["type"] == "authentication_error"
        else:
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-should-retry"] == "false"
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await sse.fetch(gateway.url + path))[0].status == 200
    assert await worker.job_ids() == []


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_a_key_opens(pair: Pair, header: str) -> None:
    gateway, worker = pair
    key = await key_for(worker, lane="batch", on_disconnect="grace=7")
    value = f"Bearer {key.secret}" if header == "Authorization" else key.secret
    path = f"{gateway.url}/v1/messages"
    asked = asyncio.ensure_future(sse.fetch(path, WHOLE, headers={header: value}))
    job = await worker.take()
    assert (job.job.tenant, job.job.lane, job.job.patience_s) == ("acme", "batch", 7)
    await job.whole(b"{}")
    assert (await asked)[0].status == 200


async def test_a_keys_weight_goes_with_its_jobs(pair: Pair) -> None:
    gateway, worker = pair
    key = await key_for(worker, weight=2.5)
    asked = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE, headers=key.headers))
    job = await worker.take()
    assert job.job.weight == 2.5
    await job.whole(b"{}")
    assert (await asked)[0].status == 200


async def test_a_tenant_with_too_much_waiting_is_refused_and_others_are_not(
    valkey: ValkeyServer,
) -> None:
    async with pool(valkey.url, auth="keys", tenant_queue_limit=2) as (gateway, worker):
        keys = [await key_for(worker, tenant, max_in_flight=9) for tenant in ("a", "a", "b")]
        asked = []
        for key in keys[:2]:
            asked.append(asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE, headers=key.headers)))
        await until(lambda: gateway.gateway.submitter.open_streams == 2, "two are open")

        async def two_wait() -> bool:
            return len(await worker.job_ids()) == 2

        await until(two_wait, "two wait")
        response, text = await sse.fetch(gateway.chat, WHOLE, headers=keys[0].headers)
        error = json.loads(text)["error"]
        assert (response.status, error["code"]) == (429, "rate_limit_exceeded")
        assert error["type"] == "rate_limit_error"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert gateway.gateway.submitter.open_streams == 2
        once = {**keys[0].headers, "Idempotency-Key": "once"}
        assert await refused(gateway.chat, WHOLE, headers=once) == (429, "rate_limit_exceeded")
        asked.append(asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE, headers=keys[2].headers)))
        for _ in range(3):
            await (await worker.take()).whole(b"{}")
        assert [response.status for response, _ in await asyncio.gather(*asked)] == [200] * 3
        counted = [worker.keys.in_flight(key.id) for key in keys]

        async def none_counted() -> bool:
            return not await worker.redis.exists(*counted)

        await until(none_counted, "what was refused isn't counted")


async def test_what_a_key_may_not_is_refused(pair: Pair) -> None:
    gateway, worker = pair
    key = await key_for(worker, models=["tiny"], lane="batch", highest_lane="batch")
    for name in ("tiny-2", "there-is-none"):
        other = {**WHOLE, "model": name}
        assert await refused(gateway.chat, other, headers=key.headers) == (403, "permission_denied")
    urgent = {**WHOLE, "service_tier": "priority"}
    assert await refused(gateway.chat, urgent, headers=key.headers) == (403, "permission_denied")
    without = await key_for(worker, models=["tiny-2"])
    nameless: dict[str, Any] = {"messages": []}
    assert await refused(gateway.chat, nameless, headers=without.headers) == (
        403,
        "permission_denied",
    )
    assert await worker.job_ids() == []


async def test_a_disabled_key_is_refused_within_the_settings_time(valkey: ValkeyServer) -> None:
    async with pool(valkey.url, auth="keys", auth_cache_s=0.3) as (gateway, worker):
        key = await key_for(worker)
        models = f"{gateway.url}/v1/models"
        assert (await sse.fetch(models, headers=key.headers))[0].status == 200
        await key.change(disabled=True)
        await asyncio.sleep(0.3)
        assert await refused(models, headers=key.headers) == (401, "invalid_api_key")
        await key.change(disabled=False)
        await asyncio.sleep(0.3)
        assert (await sse.fetch(models, headers=key.headers))[0].status == 200


async def test_a_key_that_is_not_known_while_the_queue_is_away(valkey: ValkeyServer) -> None:
    async with TcpProxy.to(valkey.url) as way:
        async with pool(valkey.url, gateway_url=way.url, auth="keys", auth_cache_s=60) as (
            gateway,
            worker,
        ):
            known, other = await key_for(worker), await key_for(worker)
            models = f"{gateway.url}/v1/models"
            assert (await sse.fetch(models, headers=known.headers))[0].status == 200
            way.swallow()
            assert (await sse.fetch(models, headers=known.headers))[0].status == 200
            async with asyncio.timeout(2):
                told = await refused(models, headers=other.headers)
            assert told == (503, "queue_unavailable")


async def test_a_body_is_not_read_for_a_stranger(pair: Pair) -> None:
    gateway, _ = pair
    wire = await sse.connect(gateway.url)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n{"
    await wire.send(head.encode())
    response = await sse.read_head(wire)
    assert (response.status, response.headers["connection"]) == (401, "close")
    assert json.loads(await response.body())["error"]["code"] == "invalid_api_key"
    assert gateway.gateway.bodies.taken == 0
    wire.close()


def start(url: str, prefix: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "gateway"],
        env={
            **os.environ,
            "HEADRACE_REDIS_URL": url,
            "HEADRACE_KEY_PREFIX": prefix,
            "HEADRACE_HOST": "0.0.0.0",
            "HEADRACE_PORT": "0",
            **variables,
        },
        capture_output=True,
        timeout=20,
    )


async def test_without_keys_no_gateway_listens_to_the_world(valkey: ValkeyServer) -> None:
    done = await asyncio.to_thread(start, valkey.url, "keyless")
    assert done.returncode == 2
    assert b"there are no API keys" in done.stderr
    assert b"HEADRACE_AUTH" in done.stderr
    assert b"Traceback" not in done.stderr


async def test_what_a_tenant_makes_is_there_for_nobody_else(pair: Pair) -> None:
    gateway, worker = pair
    ours, same = await key_for(worker, "acme"), await key_for(worker, "acme")
    other = await key_for(worker, "rival")
    stream = {**WHOLE, "stream": True}
    asked = asyncio.ensure_future(sse.fetch(gateway.chat, stream, headers=ours.headers))
    job = await worker.take()
    url, none = (f"{gateway.url}/v1/jobs/{one}" for one in (job.job.id, job.job.id[::-1]))
    for path, body in (("", None), ("/stream", None), ("/cancel", {})):
        told = [await sse.fetch(one + path, body, headers=other.headers) for one in (url, none)]
        assert [response.status for response, _ in told] == [404, 404]
        assert told[0][1] == told[1][1]
        unlike = ("x-request-id", "date")
        heads = [{k: v for k, v in r.headers.items() if k not in unlike} for r, _ in told]
        assert heads[0] == heads[1]
    status, known = await ask(url, headers=same.headers)
    assert (status, known["state"]) == (200, "running")
    assert "tenant" not in known
    state = await job.state()
    assert (state["tenant"], state["readers"].count("/")) == ("acme", 1)
    resumed = asyncio.ensure_future(sse.fetch(f"{url}/stream", headers=same.headers))
    await job.stream(b"1")
    assert (await asked)[1] == (await resumed)[1]
    assert (await ask(f"{url}/cancel", {}, headers=same.headers))[0] == 200
    # Also when it has ended.
    for path, body in (("", None), ("/stream", None), ("/cancel", {})):
        assert await refused(url + path, body, headers=other.headers) == (404, "job_not_found")


async def test_an_idempotency_key_is_its_tenants_own(pair: Pair) -> None:
    gateway, worker = pair
    once = {"Idempotency-Key": "once"}
    keys = [await key_for(worker, tenant) for tenant in ("acme", "acme", "rival")]
    asked = [
        asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE, headers={**key.headers, **once}))
        for key in keys
    ]
    jobs = [await worker.take() for _ in range(2)]
    assert sorted(job.job.tenant for job in jobs) == ["acme", "rival"]
    for job in jobs:
        await job.whole(json.dumps({"for": job.job.tenant}).encode())
    told = [json.loads((await one)[1])["for"] for one in asked]
    assert told == ["acme", "acme", "rival"]
    assert len(await worker.job_ids()) == 2


async def test_models_are_those_that_a_key_may_use(valkey: ValkeyServer) -> None:
    prefix = "keyedmodels"
    async with (
        FakeWorker(valkey.url, key_prefix=prefix, models=["adapter", "other"]) as worker,
        RunningGateway(valkey.url, key_prefix=prefix, auth="keys") as gateway,
    ):
        key = await key_for(worker, models=["adapter", "not-there"])
        anything = await key_for(worker)
        models = f"{gateway.url}/v1/models"
        _, told = await ask(models, headers=key.headers)
        assert [card["id"] for card in told["data"]] == ["adapter"]
        _, told = await ask(models, headers=anything.headers)
        assert [card["id"] for card in told["data"]] == ["adapter", "other", "tiny"]
        assert (await ask(f"{models}/adapter", headers=key.headers))[0] == 200
        for name in ("tiny", "not-there"):
            assert await refused(f"{models}/{name}", headers=key.headers) == (
                404,
                "model_not_found",
            )


async def test_jobs_of_nobody_in_particular_are_no_tenants(valkey: ValkeyServer) -> None:
    prefix = "opened"
    async with (
        FakeWorker(valkey.url, key_prefix=prefix) as worker,
        RunningGateway(valkey.url, key_prefix=prefix, auth="open") as opened,
        RunningGateway(valkey.url, key_prefix=prefix, auth="keys") as gateway,
    ):
        key = await key_for(worker)
        asked = asyncio.ensure_future(sse.fetch(opened.chat, WHOLE))
        theirs = await worker.take()
        kept = asyncio.ensure_future(sse.fetch(gateway.chat, WHOLE, headers=key.headers))
        ours = await worker.take()
        path = f"/v1/jobs/{theirs.job.id}"
        assert (await ask(opened.url + path))[0] == 200
        assert await refused(gateway.url + path, headers=key.headers) == (404, "job_not_found")
        assert await refused(f"{opened.url}/v1/jobs/{ours.job.id}") == (404, "job_not_found")
        for job in (theirs, ours):
            await job.whole(b"{}")
        await asyncio.gather(asked, kept)


async def test_a_keys_own_limits_reach_the_worker_and_the_body(pair: Pair) -> None:
    gateway, worker = pair
    key = await key_for(worker, max_tokens=50, max_body_bytes=1000)
    large = {**WHOLE, "user": "x" * 1000}
    assert await refused(gateway.chat, large, headers=key.headers) == (413, "body_too_large")
    free = await key_for(worker)
    for one, body, most in ((key, WHOLE, 50), (free, large, 0)):
        asked = asyncio.ensure_future(sse.fetch(gateway.chat, body, headers=one.headers))
        job = await worker.take()
        assert job.job.max_tokens == most
        await job.whole(b"{}")
        assert (await asked)[0].status == 200


async def test_openais_sdk_knows_these_refusals(pair: Pair) -> None:
    gateway, worker = pair
    key = await key_for(worker, models=["tiny"], max_in_flight=1)
    url = f"{gateway.url}/v1"
    messages: Any = [{"role": "user", "content": "hello"}]

    async def ask_as(secret: str, model: str = "tiny") -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=model, messages=messages)

    with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided"):
        await ask_as("none")
    with pytest.raises(openai.PermissionDeniedError):
        await ask_as(key.secret, "other")
    asked = asyncio.ensure_future(ask_as(key.secret))
    job = await worker.take()
    with pytest.raises(openai.RateLimitError, match="in flight"):
        await ask_as(key.secret)
    await job.end("failed", code="engine_error")
    with pytest.raises(openai.InternalServerError):
        await asked


async def test_a_gateway_that_others_reach_asks_for_keys(valkey: ValkeyServer) -> None:
    async with Pool(valkey.url, workers=0, gateway={"key_prefix": "abroad"}) as pool:
        redis = connect(RedisSettings(redis_url=SecretStr(valkey.url)), name="test")
        key = await make_key(clients_of(redis), Keys("abroad"))
        await redis.aclose()
        gateway = pool.add_gateway(host="0.0.0.0")
        await gateway.wait_ready()
        models = f"{gateway.url}/v1/models"
        assert await refused(models) == (401, "invalid_api_key")
        assert (await ask(models, headers=key.headers))[0] == 200
        assert "auth.open" in pool.gateways[0].log
        assert "auth.open" not in gateway.log
