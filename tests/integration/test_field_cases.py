"""Failures that users of such systems reported in public, as tests of whole pools.

Named after their numbers in the list of cases. What other tests show is not shown again here:

 1  test_workers.py::test_killed ::test_frozen_beyond_its_lease
 2  test_vllm_engine.py::test_an_abort_that_nobody_asked_for_is_a_fault
    test_worker.py::test_a_drain_that_takes_too_long_ends_with_an_error
 3  test_pool_vllm.py::test_refusals_are_the_sdks_own_types
 4  test_gateway_streams.py::test_failure_in_mid_stream_is_an_event_and_a_broken_body
    test_gateway_clients.py::test_openai_raises_when_a_stream_fails
 5  test_gateway_clients.py::test_silence_is_filled_with_comments
    test_gateway_clients.py::test_whole_answers_are_not_begun_early
    test_proxies.py::test_comments_bridge_a_silence
    test_gateway_cancel.py::test_deadline_of_a_queued_job_needs_no_worker
 7  test_proxies.py::test_tokens_come_one_by_one ::test_curl_prints_tokens_as_they_come
    test_gateway_clients.py::test_http_1_0_gets_tokens_one_by_one_without_chunks
 8  test_pool_vllm.py::test_usage_comes_once_in_a_last_chunk_without_choices
    test_pool_vllm.py::test_leaving_while_tokens_come
 9  test_pool_vllm.py::test_a_stream_has_one_id_one_role_and_one_finish
    and every stream of the fault suite, failovers included (tests/faults/clients.py)
10  test_pool_vllm.py::test_a_required_tool_is_called
12  test_vllm_engine.py::test_a_hundred_clients_that_leave_leave_nothing
    test_pool_vllm.py::test_leaving_while_tokens_come
    test_pool_vllm.py::test_fifty_clients_that_leave_leave_nothing
    test_proxies.py::test_a_client_that_leaves_stops_the_engine
13  test_pool_vllm.py::test_leaving_in_prefill ::test_leaving_while_queued
    test_gateway_cancel.py::test_client_leaves_before_the_first_token
14  test_gateway_cancel.py
    ::test_five_hundred_disconnects_over_a_slow_link_are_five_hundred_cancels
    test_cancels.py::test_500_disconnects_on_a_slow_link
15  test_cancels.py::test_at_all_moments
16  test_cancels.py::test_clients_gone_before_a_worker_comes
    test_gateway_cancel.py::test_deadline_in_mid_stream_is_an_error_event
20  test_load.py::test_one_token_at_once
    test_gateway_streams.py::test_zero_milliseconds_to_the_first_token_loses_none
22  test_links.py::test_half_open test_gateways.py::test_half_open_link
23  test_load.py::test_connections_to_the_queue test_worker.py::test_no_connections_pile_up
    test_gateway_errors.py::test_too_many_streams
24  test_gateway_cancel.py::test_submission_of_unknown_outcome_is_cancelled
    test_transitions_server.py::test_a_lost_reply_makes_no_second_job
    test_gateways.py::test_replies_to_submissions_lost test_links.py::test_replies_lost
25  test_transitions_server.py::test_a_cancelled_call_gives_its_reply_to_nobody_else
    test_transitions_server.py::test_a_cancel_is_never_swallowed
    test_transitions.py::test_pending_finds_claims_whose_reply_was_lost
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.faults.aftermath import Inspector
from tests.support.asgi import AppCall
from tests.support.processes import Pool
from tests.support.sse import connect, fetch, open_response, request_bytes
from tests.support.valkey import ValkeyServer
from tests.support.waiting import until
from worker.engine.interface import Call
from worker.engine.simulated import SimulatedEngine, SimulatedSettings, expected_text

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
CREATED = 1_700_000_000
MODEL = "simulated"


@pytest.fixture(scope="module")
def server() -> Any:
    with ValkeyServer() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(server: ValkeyServer) -> AsyncIterator[Pool]:
    gateway = {"first_byte_grace_s": 0.5, "keepalive_s": 0.2}
    paces = {"ttft_ms": 10, "tpot_ms": 10, "created": CREATED, "max_model_len": 1000, "seats": 4}
    async with Pool(server.url, gateway=gateway, simulated=paces) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def inspector(server: ValkeyServer) -> AsyncIterator[Inspector]:
    made = Inspector(server.url)
    yield made
    await made.close()


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def sdk(pool: Pool, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{pool.url}/v1", api_key="none", max_retries=0, timeout=20, **options
    )


async def test_what_is_shown_elsewhere_is_there() -> None:
    assert __doc__ is not None
    tests, named = Path(__file__).parents[1], 0
    for file, names in re.findall(r"(\w+\.py)((?:\s*::\w+)+)", __doc__):
        (path,) = tests.glob(f"*/{file}")
        for name in re.findall(r"\w+", names):
            named += 1
            assert f"def {name}(" in path.read_text(), f"{file} has no {name}"
    assert named > 30


# --- 1 ---


class Reader:
    """Reads one stream, strictly or as the SDK does, and says how it ended."""

    def __init__(self, pool: Pool, text: str, headers: dict[str, str]) -> None:
        self.text = text
        self.words: list[str] = []
        self._pool = pool
        self._headers = headers
        self._asked = ask(text, stream=True, max_tokens=100)

    async def strictly(self) -> tuple[str, str]:
        url = self._pool.url + CHAT
        last = ""
        async with open_response(url, self._asked, headers=self._headers) as response:
            async for event in response.events():
                if event.data and not event.done:
                    body = event.json()
                    last = body["error"]["code"] if "error" in body else self._take(body)
                elif event.done:
                    last = "[DONE]"
        return str(response.ending), last

    async def with_sdk(self) -> tuple[str, str]:
        async with sdk(self._pool, default_headers=self._headers) as client:
            stream = await client.chat.completions.create(**self._asked)
            try:
                async for chunk in stream:
                    self._take(chunk.model_dump())
            except openai.APIError as error:
                return "raised", str(error.code)
        return "complete", "[DONE]"

    def _take(self, chunk: Any) -> str:
        self.words += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        return ""


@pytest.mark.parametrize("then", ["another continues", "an error is wanted", "nobody is left"])
async def test_case_1_a_worker_that_dies_is_never_a_normal_end(then: str) -> None:
    """Killed 5 tokens into two answers, one of them read by openai-python."""
    headers = {
        "another continues": {},
        "an error is wanted": {"x-failover": "error"},
        "nobody is left": {},
    }[then]
    with ValkeyServer() as server:
        gateway = {"no_worker_wait_s": 1}
        async with Pool(server.url, gateway=gateway, simulated={"tpot_ms": 30}) as pool:
            raw, via_sdk = Reader(pool, "raw", headers), Reader(pool, "sdk", headers)
            reading = asyncio.gather(raw.strictly(), via_sdk.with_sdk())
            readers = (raw, via_sdk)
            await until(lambda: all(len(one.words) > 5 for one in readers), "5 tokens of each")
            pool.workers[0].kill()
            if then != "nobody is left":
                pool.add_worker()
            ends = list(await asyncio.wait_for(reading, 15))
        if then == "another continues":
            assert ends == [("complete", "[DONE]")] * 2
        else:
            assert ends == [("cut", "worker_lost"), ("raised", "worker_lost")]
        for reader in readers:
            whole = expected_text(reader.text, 100)
            said = "".join(reader.words)
            assert said == whole if then == "another continues" else whole.startswith(said)


# --- 2 ---


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_case_2_an_aborted_answer_is_an_error_everywhere(pool: Pool, stream: bool) -> None:
    body = ask(f"[[fault:abort@5]] {stream}", stream=stream, max_tokens=50)
    before = await counted(pool, "engine_error")
    response, raw = await fetch(pool.url + CHAT, body)
    assert b'"abort"' not in raw
    assert b"[DONE]" not in raw
    assert b'"engine_error"' in raw
    assert (response.status, response.ending) == ((200, "cut") if stream else (500, "complete"))

    async def was_counted() -> bool:
        return await counted(pool, "engine_error") == before + 1

    await until(was_counted, "it is counted as a failure", timeout=1)
    job = await job_told(pool, response.headers["x-job-id"])
    assert job["outcome"] == "failed"
    async with sdk(pool) as client:

        async def answer() -> None:
            async for _ in await client.chat.completions.create(**body):
                pass

        with pytest.raises(openai.APIError, match="engine"):
            await answer()


async def counted(pool: Pool, outcome: str) -> float:
    """Return how many requests the gateway says to have answered so."""
    _, raw = await fetch(f"{pool.url}/metrics")
    lines = [line for line in raw.decode().splitlines() if f'outcome="{outcome}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines if "requests_total" in line)


async def job_told(pool: Pool, job_id: str) -> dict[str, Any]:
    _, raw = await fetch(f"{pool.url}/v1/jobs/{job_id}")
    told: dict[str, Any] = json.loads(raw)
    return told


# --- 3 ---


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_case_3_a_failure_before_the_first_token_has_its_status(stream: bool) -> None:
    with ValkeyServer() as server:
        limits = {"max_queue_depth": 1, "no_worker_wait_s": 0}
        paces = {"max_model_len": 100, "seats": 1, "ttft_ms": 0, "tpot_ms": 20}
        async with Pool(server.url, gateway=limits, simulated=paces) as pool:

            async def refused(body: dict[str, Any]) -> tuple[int, str | None]:
                response, raw = await fetch(pool.url + CHAT, {**body, "stream": stream})
                assert response.headers["content-type"] == "application/json"
                assert response.ending == "complete"
                assert ("retry-after" in response.headers) == (response.status == 503)
                error = json.loads(raw)["error"]
                assert set(error) == {"message", "type", "param", "code"}
                return response.status, error["code"]

            assert (await refused(ask("word " * 200)))[0] == 400
            assert await refused({**ask("x"), "model": "nope"}) == (404, "model_not_found")
            assert await refused(ask("[[fault:raise@0]]")) == (500, "engine_error")
            # One that runs, and one that waits.
            full = [asyncio.ensure_future(fetch(pool.url + CHAT, ask("y"))) for _ in range(2)]
            await asyncio.sleep(0.3)
            assert await refused(ask("x")) == (503, "queue_full")
            assert [response.status for response, _ in await asyncio.gather(*full)] == [200, 200]
            pool.workers[0].terminate()
            assert await pool.workers[0].wait() == 0

            async def none_left() -> bool:
                return (await pool.gateways[0].readiness())[0] == 503

            await until(none_left, "the gateway knows that no worker is left")
            assert await refused(ask("x")) == (503, "no_worker")


# --- 6 ---


async def test_case_6_comments_are_plain_and_sdks_read_past_them(pool: Pool) -> None:
    body = ask("[[fault:slow:ttft_ms=900,tpot_ms=900]]", stream=True, max_tokens=3)
    response, raw = await fetch(pool.url + CHAT, body)
    assert response.ending == "complete"
    blocks = raw.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    kinds = [block.partition(":")[0] for block in blocks[:-1]]
    assert set(kinds) == {"data", ""}
    assert {block for block in blocks if block.startswith(":")} == {": keep-alive"}
    # Before the first token, and between tokens.
    assert kinds[0] == ""
    assert "" in kinds[3:-1]
    async with sdk(pool) as client:
        stream = await client.chat.completions.create(**body)
        words = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(words) == expected_text(body["messages"][0]["content"], 3)


# --- 8 ---


async def test_case_8_usage_adds_up_and_is_counted_for_those_who_leave(pool: Pool) -> None:
    body = ask("count", stream=True, max_tokens=7, n=3)
    _, raw = await fetch(pool.url + CHAT, body)
    assert b'"usage"' not in raw
    _, raw = await fetch(pool.url + CHAT, {**body, "stream_options": {"include_usage": True}})
    *events, last = [json.loads(part[6:]) for part in raw.split(b"\n\n")[:-2]]
    assert all(event["choices"] and not event.get("usage") for event in events)
    assert last["choices"] == []
    prompt = last["usage"]["prompt_tokens"]
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 21,
        "total_tokens": prompt + 21,
    }
    async with open_response(pool.url + CHAT, ask("leave", stream=True, max_tokens=500)) as left:
        heard = 0
        async for event in left.events():
            heard += event.data is not None
            if heard == 10:
                break
    job_id = left.headers["x-job-id"]

    async def settled() -> dict[str, Any]:
        job = await job_told(pool, job_id)
        assert job["outcome"] == "cancelled", job
        return job

    usage = (await until(settled, "the job's end", timeout=1))["usage"]
    assert 9 <= usage["completion_tokens"] < 100
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


# --- 9 ---


async def test_case_9_choices_are_not_mixed(pool: Pool) -> None:
    body = ask("many", stream=True, max_tokens=12, n=4)

    async def one() -> None:
        async with open_response(pool.url + CHAT, body) as response:
            events = [e.json() for e in await response.all_events() if e.data and not e.done]
        assert {(event["id"], event["created"]) for event in events} == {
            (f"chatcmpl-{response.headers['x-job-id']}", CREATED)
        }
        choices = [choice for event in events for choice in event["choices"]]
        for index in range(4):
            mine = [choice for choice in choices if choice["index"] == index]
            roles = ["role" in choice["delta"] for choice in mine]
            assert roles == [True] + [False] * (len(mine) - 1)
            finishes = [choice["finish_reason"] for choice in mine]
            assert finishes == [None] * (len(mine) - 1) + ["length"]
            said = "".join(choice["delta"].get("content") or "" for choice in mine)
            assert said == expected_text("many", 12, index)

    await asyncio.gather(*(one() for _ in range(8)))


# --- 10 ---

ALIKE = {
    "stream": (CHAT, ask("alike", stream=True, max_tokens=20)),
    "usage": (
        CHAT,
        ask("alike", stream=True, max_tokens=5, stream_options={"include_usage": True}),
    ),
    "choices": (CHAT, ask("alike", stream=True, max_tokens=9, n=3)),
    "logprobs": (CHAT, ask("alike", stream=True, max_tokens=9, logprobs=True, top_logprobs=3)),
    "whole": (CHAT, ask("alike", max_tokens=20, n=2)),
    "completions": (
        "/v1/completions",
        {"model": MODEL, "prompt": ["a", "b"], "stream": True, "max_tokens": 6},
    ),
    "embeddings": ("/v1/embeddings", {"model": MODEL, "input": ["caf\u00e9", "x"]}),
    "error": (CHAT, ask("alike", max_tokens=0)),
}


@pytest.mark.parametrize("name", ALIKE)
async def test_case_10_bytes_are_the_engines_own(pool: Pool, name: str) -> None:
    """What comes through the pool is, byte for byte, what the same engine says when called here."""
    path, body = ALIKE[name]
    response, raw = await fetch(pool.url + path, body)
    job_id = response.headers["x-job-id"]
    settings = SimulatedSettings(
        created=CREATED, tpot_ms=1, max_model_len=1000, faults=True, seats=4
    )
    engine = SimulatedEngine(settings, default_max_tokens=4096, max_tokens_ceiling=32768)
    await engine.start()
    try:
        headers = {"content-type": "application/json", "x-request-id": job_id}
        async with AppCall(engine.app, path, body, headers=headers, call=Call(job_id)) as call:
            await call.wait()
    finally:
        await engine.stop()
    assert (response.status, raw) == (call.status, call.body)
    assert response.headers["content-type"] == call.headers["content-type"]


# --- 13 ---


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_case_13_clients_leave_in_every_phase_at_once(
    pool: Pool, inspector: Inspector, stream: bool, reset: bool
) -> None:
    """Two that are answered, two that wait for their first token, four that wait for a seat."""
    before = set(await inspector.job_ids())
    texts = ["decode"] * 2 + ["[[fault:slow:ttft_ms=30000]]"] * 2 + ["queued"] * 4
    wires = []
    for text in texts:
        wire = await connect(pool.url)
        body = ask(text, stream=stream, max_tokens=900)
        await wire.send(request_bytes(pool.url + CHAT, body))
        wires.append(wire)
    await asyncio.sleep(0.5)
    jobs = await inspector.jobs(set(await inspector.job_ids()) - before)
    assert sorted(job.fields["state"] for job in jobs.values()) == ["queued"] * 4 + ["running"] * 4
    for wire in wires:
        wire.close(reset=reset)

    async def ended() -> bool:
        now = await inspector.jobs(jobs)
        assert [job.outcome for job in now.values()] == ["cancelled"] * 8
        return True

    await until(ended, "all are cancelled", timeout=1)
    await inspector.wait_idle([pool.workers[0].name], timeout=2)


# --- 16 ---


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_case_16_expiry_is_an_error_and_never_length(
    pool: Pool, inspector: Inspector, stream: bool
) -> None:
    body = ask("expire", stream=stream, max_tokens=900)
    headers = {"x-request-timeout": "1"}
    response, raw = await fetch(pool.url + CHAT, body, headers=headers)
    assert b"request_timeout" in raw
    assert b'"length"' not in raw
    assert b"[DONE]" not in raw
    assert (response.status, response.ending) == ((200, "cut") if stream else (504, "complete"))
    await inspector.wait_idle([pool.workers[0].name], timeout=3)
    assert (await job_told(pool, response.headers["x-job-id"]))["outcome"] == "expired"


# --- 22 ---


async def test_case_22_an_idle_pool_is_quiet_and_starts_at_once(
    pool: Pool, server: ValkeyServer
) -> None:
    """Idle for longer than any reply is waited for, which is what ended idle reads elsewhere."""

    def links() -> set[bytes]:
        """Return the connections' numbers, without this one's own."""
        clients = server.command("CLIENT", "LIST").splitlines()
        return {line.split()[0] for line in clients if b"cmd=client" not in line}

    await fetch(pool.url + CHAT, ask("before", max_tokens=1))
    await asyncio.sleep(1)
    logs = {process.name: process.log for process in pool.processes}
    before = links()
    await asyncio.sleep(7)
    assert {process.name: process.log for process in pool.processes} == logs
    assert links() == before
    begun = time.monotonic()
    response, raw = await fetch(pool.url + CHAT, ask("after", max_tokens=1))
    assert time.monotonic() - begun < 0.3
    assert response.status == 200
    assert json.loads(raw)["choices"][0]["message"]["content"] == expected_text("after", 1)
