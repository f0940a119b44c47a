"""Gateways that are killed, with real processes: their streams go on elsewhere, or end in time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from shared.keys import Keys
from tests.support import sse
from tests.support.processes import GatewayProcess, Pool, WorkerProcess
from tests.support.sse import fetch
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until
from worker.engine.simulated_text import expected_text

IDS = {"X-Stream-Resumable": "true"}
LEASE_S = 1.0
GATEWAY = {"gateway_lease_s": LEASE_S, "registry_refresh_s": 0.1}
WORKER = {"lease_s": 1, "beat_s": 0.25}
PROMPT = "tell me of the river"


def body(tokens: int, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"messages": messages, "max_tokens": tokens, "stream": True, **fields}


def chat(gateway: GatewayProcess) -> str:
    return f"{gateway.url}/v1/chat/completions"


async def state(gateway: GatewayProcess, job_id: str) -> Any:
    _, answered = await fetch(f"{gateway.url}/v1/jobs/{job_id}")
    return json.loads(answered)


async def read(response: sse.Response, events: list[sse.Event]) -> None:
    async for event in response.events():
        if event.data is not None:
            events.append(event)


async def test_killed_gateways_stream_is_resumed_exactly(own_valkey: ValkeyServer) -> None:
    """Killed and resumed twice on the way, and a worker is killed as well."""
    tokens = 200
    async with Pool(
        own_valkey.url,
        gateways=3,
        workers=2,
        gateway=GATEWAY,
        worker=WORKER,
        simulated={"tpot_ms": 15},
    ) as pool:
        events: list[sse.Event] = []
        url, job_id, headers = chat(pool.gateways[0]), "", dict(IDS)
        for at, gateway in enumerate(pool.gateways):
            request = body(tokens) if at == 0 else None
            async with sse.open_response(url, request, headers=headers) as response:
                assert response.status == 200
                job_id = response.headers["x-job-id"]
                reading = asyncio.ensure_future(read(response, events))
                if gateway is not pool.gateways[-1]:
                    wanted = 50 * (at + 1)
                    await _until_length(events, wanted)
                    gateway.kill()
                    if at == 1:
                        running = await state(pool.gateways[-1], job_id)
                        assert running["state"] == "running"
                        _worker_of(pool, own_valkey, job_id).kill()
                await reading
            if gateway is pool.gateways[-1]:
                assert response.ending == "complete"
            else:
                assert response.ending in ("cut", "reset")
                following = pool.gateways[at + 1]
                last = events[-1].id
                url = f"{following.url}/v1/jobs/{job_id}/stream?after={last}"
        assert [event.id for event in events] == [str(n + 1) for n in range(len(events))]
        assert events[-1].done
        chunks = [event.json() for event in events[:-1]]
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        assert text == expected_text(PROMPT, tokens)
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        _, whole = await fetch(f"{pool.gateways[-1].url}/v1/jobs/{job_id}/stream", headers=IDS)
        again = whole.decode().split("\n\n")[:-1]
        assert again == [f"id: {event.id}\ndata: {event.data}" for event in events]


async def _until_length(events: list[sse.Event], count: int) -> None:
    await until(lambda: len(events) >= count, f"{count} events", timeout=15)


def _worker_of(pool: Pool, server: ValkeyServer, job_id: str) -> WorkerProcess:
    name = server.command("HGET", Keys().job(job_id), "worker").decode()
    return next(one for one in pool.workers if one.name == name)


async def test_killed_gateways_jobs_go_by_their_policy(own_valkey: ValkeyServer) -> None:
    tokens = 220
    async with Pool(
        own_valkey.url, gateways=2, gateway=GATEWAY, worker=WORKER, simulated={"tpot_ms": 20}
    ) as pool:
        victim, other = pool.gateways
        policies = ("cancel", "grace=1", "continue", "cancel")
        wires = [
            await _send(victim, body(tokens), {"X-On-Disconnect": policy}) for policy in policies
        ]
        heads = [await sse.read_head(wire) for wire in wires]
        cancelled, graced, kept, shared = (head.headers["x-job-id"] for head in heads)
        elsewhere = asyncio.ensure_future(fetch(chat(other), body(tokens)))
        reading = asyncio.ensure_future(fetch(f"{other.url}/v1/jobs/{shared}/stream"))
        await asyncio.sleep(0.6)
        victim.kill()
        begun = time.monotonic()
        took: dict[str, float] = {}
        while len(took) < 3 and time.monotonic() < begun + 12:
            for job_id in {cancelled, graced, kept} - took.keys():
                if (await state(other, job_id))["state"] == "done":
                    took[job_id] = time.monotonic() - begun
            await asyncio.sleep(0.05)
        ended = [(await state(other, job_id))["outcome"] for job_id in (cancelled, graced, kept)]
        assert ended == ["cancelled", "cancelled", "completed"]
        assert LEASE_S * 0.5 < took[cancelled] < LEASE_S * 2 + 0.8
        assert LEASE_S * 0.5 < took[graced] - 1 < LEASE_S * 2 + 0.8
        # Whose reader is at a gateway that lives is untouched.
        for answered in (await elsewhere, await reading):
            assert answered[0].ending == "complete"
            assert answered[1].endswith(b"data: [DONE]\n\n")
        for wire in wires:
            wire.close()


async def test_frozen_gateway_is_not_taken_for_dead(own_valkey: ValkeyServer) -> None:
    async with Pool(
        own_valkey.url, gateways=1, gateway=GATEWAY, worker=WORKER, simulated={"tpot_ms": 20}
    ) as pool:
        (gateway,) = pool.gateways
        streaming = asyncio.ensure_future(fetch(chat(gateway), body(200)))
        await asyncio.sleep(0.6)
        gateway.pause()
        await asyncio.sleep(3.5 * LEASE_S)
        gateway.resume()
        response, answered = await streaming
        assert response.ending == "complete"
        assert answered.endswith(b"data: [DONE]\n\n")


async def test_dead_gateways_queued_jobs_are_not_begun(own_valkey: ValkeyServer) -> None:
    async with Pool(
        own_valkey.url, gateways=2, gateway=GATEWAY, worker=WORKER, simulated={"seats": 1}
    ) as pool:
        victim, other = pool.gateways
        (worker,) = pool.workers
        worker.pause()
        waiting = [await _send(victim, body(50)) for _ in range(3)]
        from_other = [await _send(other, body(5))]
        await until(lambda: _depth(own_valkey) == 4, "all are queued")
        victim.kill()
        await asyncio.sleep(LEASE_S + 0.3)
        worker.resume()
        await until(lambda: _depth(own_valkey) == 0, "the queue is empty", timeout=10)
        response = await sse.read_head(from_other[0])
        assert (await response.body()).endswith(b"data: [DONE]\n\n")
        outcomes = [
            own_valkey.command("HGET", key, "outcome")
            for key in own_valkey.command("KEYS", "*:job:*")
        ]
        assert sorted(outcomes) == [b"cancelled"] * 3 + [b"completed"]
        for wire in waiting + from_other:
            wire.close()


def _depth(server: ValkeyServer) -> int:
    keys = server.command("KEYS", "*:lane:*")
    lanes = [key for key in keys if server.command("TYPE", key) == b"stream"]
    return sum(server.command("XLEN", lane) for lane in lanes)


async def _send(
    gateway: GatewayProcess, request: object, headers: Mapping[str, str] | None = None
) -> sse.Wire:
    wire = await sse.connect(gateway.url)
    await wire.send(sse.request_bytes(chat(gateway), request, headers=headers))
    return wire


@pytest.mark.parametrize("failover", ["continue", "error"])
async def test_failover_is_the_requests_choice(own_valkey: ValkeyServer, failover: str) -> None:
    async with Pool(
        own_valkey.url, workers=2, gateway=GATEWAY, worker=WORKER, simulated={"tpot_ms": 20}
    ) as pool:
        (gateway,) = pool.gateways
        async with sse.open_response(
            chat(gateway), body(100), headers={"X-Failover": failover}
        ) as response:
            events: list[sse.Event] = []
            reading = asyncio.ensure_future(read(response, events))
            await until(lambda: len(events) > 20, "it streams")
            _worker_of(pool, own_valkey, response.headers["x-job-id"]).kill()
            await reading
        if failover == "continue":
            assert events[-1].done
        else:
            assert events[-1].json()["error"]["code"] == "worker_lost"
            assert response.ending == "cut"
