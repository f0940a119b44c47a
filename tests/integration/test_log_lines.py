"""What gateways and workers log of requests: enough to find them, and never what they say."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from tests.support import sse
from tests.support.processes import Pool, Process
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until

SECRET = "xylophone"
MINE = {"X-Request-Id": "mine-7"}


def lines(process: Process) -> list[dict[str, Any]]:
    """Return a process's log; every line of it is JSON."""
    return [json.loads(line) for line in process.log.rpartition("\n")[0].splitlines()]


def of(process: Process, **fields: object) -> list[dict[str, Any]]:
    """Return the lines with these fields."""
    return [line for line in lines(process) if fields.items() <= line.items()]


def ended(gateway: Process, worker: Process, job: str) -> bool:
    return bool(of(gateway, job=job) and of(worker, job=job, event="job.ended"))


def chat(tokens: int, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": SECRET}]
    return {"model": "simulated", "messages": messages, "max_tokens": tokens, **fields}


async def test_each_request_has_its_lines_on_both_sides(valkey: ValkeyServer) -> None:
    shared = {"log_format": "json", "key_prefix": "log-lines"}
    async with Pool(valkey.url, gateway=shared, worker=shared) as pool:
        (gateway,), (worker,) = pool.gateways, pool.workers
        url = f"{pool.url}/v1/chat/completions"
        for tokens in (2, 200):
            response, raw = await sse.fetch(url, chat(tokens, stream=True), headers=MINE)
            assert raw.endswith(b"[DONE]\n\n")
            job = response.headers["x-job-id"]
            await until(partial(ended, gateway, worker, job), "it is logged")
            about = {"job": job, "request": "mine-7", "model": "simulated"}
            # As many lines for a long answer as for a short one.
            (line,) = of(gateway, job=job)
            assert about.items() <= line.items()
            assert (line["event"], line["status"], line["outcome"]) == (
                "request.finished",
                200,
                "completed",
            )
            assert (line["method"], line["endpoint"]) == ("POST", "/v1/chat/completions")
            assert line["completion_tokens"] == tokens
            assert line["prompt_tokens"] > 0
            assert 0 < line["ttft_s"] <= line["duration_s"]
            told = of(worker, job=job)
            assert [one["event"] for one in told] == ["job.adopted", "job.ended"]
            assert all(about.items() <= one.items() for one in told)
        async with sse.open_response(
            url, chat(10_000, stream=True), headers={"X-Request-Id": "left-1"}
        ) as response:
            await response.part()
        await until(lambda: of(gateway, request="left-1", outcome="disconnected"), "it is told")
        await until(lambda: of(worker, request="left-1", event="job.ended"), "it is told")
        await _check_the_rest(pool.url, gateway)
        for process in pool.processes:
            assert SECRET not in process.log


async def _check_the_rest(url: str, gateway: Process) -> None:
    before = len(lines(gateway))
    for path in ("/healthz", "/readyz", "/metrics"):
        await sse.fetch(url + path)
    await sse.fetch(f"{url}/v1/models", headers={"X-Request-Id": "models-1"})
    await sse.fetch(f"{url}/v1/no\u00b7{'x' * 300}?key={SECRET}", headers={"X-Request-Id": "no-1"})
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write(b"\x16\x03\x01garbage\r\n\r\n")
    assert b" 400 " in await reader.read()
    writer.close()
    await until(lambda: len(lines(gateway)) >= before + 3, "all is logged")
    after = [(one["event"], one.get("request"), one["status"]) for one in lines(gateway)[before:]]
    assert after[0] == ("request.finished", "models-1", 200)
    assert [(event, status) for event, _, status in after[1:]] == [
        ("request.unreadable", 400),
        ("request.unreadable", 400),
    ]


async def test_a_gateway_that_is_not_ready_does_not_say_so_with_every_probe(
    valkey: ValkeyServer,
) -> None:
    shared = {"log_format": "json", "key_prefix": "log-probes"}
    async with Pool(valkey.url, workers=0, gateway=shared) as pool:
        (gateway,) = pool.gateways
        for probe in ("readyz", "health"):
            response, _ = await sse.fetch(f"{pool.url}/{probe}")
            assert response.status == 503
        await sse.fetch(f"{pool.url}/v1/{'x' * 300}?key={SECRET}")
        await until(lambda: bool(of(gateway, event="request.finished")), "it is logged")
        told = of(gateway, event="request.finished")
        assert [(one["status"], one["path"]) for one in told] == [(404, "/v1/" + "x" * 96)]
        assert SECRET not in gateway.log
