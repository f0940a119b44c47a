"""Jobs by their id with no more rights than the documented ones of a gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pydantic import SecretStr

from shared.connection import clients_of, connect
from shared.protocol import Usage
from shared.settings import RedisSettings
from tests.integration.test_acl import denied, guarded, login
from tests.support import sse
from tests.support.apikeys import make_key
from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway
from tests.support.waiting import until

LIMITS: dict[str, Any] = {"max_in_flight": 1, "requests_per_minute": 9, "tokens_per_minute": 9}


async def test_states_resumption_and_policies() -> None:
    with guarded("server") as (servers, url):
        async with (
            FakeWorker(login(url, "worker")) as worker,
            RunningGateway(login(url, "gateway")) as gateway,
        ):
            wire = await sse.connect(gateway.url)
            await wire.send(sse.request_bytes(gateway.chat, {"model": "tiny", "stream": True}))
            (key,) = await until(lambda: servers[0].command("KEYS", "*:job:*"), "it is queued")
            job_id = key.decode().rpartition(":")[2]
            job_url = f"{gateway.url}/v1/jobs/{job_id}"
            response, body = await sse.fetch(job_url)
            assert (response.status, json.loads(body)["position"]) == (200, 1)
            reader = await sse.connect(gateway.url)
            await reader.send(sse.request_bytes(f"{job_url}/stream"))
            await until(lambda: gateway.gateway.submitter.open_streams == 2, "two are reading")
            wire.close()
            reader.close()
            assert await worker.wait_outcome(job_id) == "cancelled"
        assert denied(servers) == set()


async def test_api_keys_and_their_limits() -> None:
    with guarded("server") as (servers, url):
        admin = connect(RedisSettings(redis_url=SecretStr(login(url, "admin"))), name="admin")
        async with (
            FakeWorker(login(url, "worker")) as worker,
            RunningGateway(login(url, "gateway"), auth="keys") as gateway,
        ):
            key = await make_key(clients_of(admin), worker.keys, **LIMITS)
            body = {"model": "tiny", "messages": []}
            asked = asyncio.ensure_future(sse.fetch(gateway.chat, body, headers=key.headers))
            job = await worker.take()
            assert (await sse.fetch(gateway.chat, body, headers=key.headers))[0].status == 429
            await job.whole(b"{}", usage=Usage(2, 1))
            assert (await asked)[0].status == 200
            counted = worker.keys.in_flight(key.id)
            await until(lambda: not servers[0].command("EXISTS", counted), "it has ended")
            spent = worker.keys.tokens(key.id)
            await until(lambda: servers[0].command("HGET", spent, "used") == b"3", "it is charged")
            await key.change(disabled=True)
        await admin.aclose()
        assert denied(servers) == set()
