"""vLLM as the worker's engine: real vLLM and a real model, called as an application.

One engine serves all tests of this module, in the order written; the last ones destroy it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support import vllm as real
from tests.support.asgi import AppCall
from tests.support.vllm import PATIENCE, chat, chunks, done, job
from tests.support.waiting import until
from worker.engine.interface import EngineStartError, Model, Usage
from worker.engine.vllm import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    # vLLM and what it imports warn of many deprecations, none of them ours.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed"),
    pytest.mark.skipif(not real.MODEL.exists(), reason="no model: python compose/model.py"),
]

PARIS = "What is the capital of France?"
ENDLESS = {"ignore_eos": True, "max_tokens": real.MAX_TOKENS_CEILING}

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
    async with real.running_engine(*real.ARGS, *tools) as started:
        yield started


def content(call: AppCall, choice: int = 0) -> str:
    """Return a choice's text, whole or put together from its deltas."""
    if not call.headers["content-type"].startswith("text/event-stream"):
        return str(call.json()["choices"][choice]["message"]["content"])
    deltas = [c["delta"] for e in chunks(call) for c in e["choices"] if c["index"] == choice]
    return "".join(delta.get("content") or "" for delta in deltas)


def usage_said(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


def usage_counted(usage: Usage) -> tuple[int, int]:
    return usage.prompt_tokens, usage.completion_tokens


async def until_idle(engine: VllmEngine) -> None:
    """Wait for the engine to run nothing and to remember nothing."""
    processor = engine._llm.output_processor
    await until(
        lambda: engine.load().running == 0 and not processor.request_states,
        "an idle engine",
        timeout=2,
        every=0.005,
    )
    assert not processor.parent_requests
    assert not processor.external_req_ids
    assert engine._proxy is not None
    assert not engine._proxy._running


# --- answers ---


async def test_it_starts_warm_and_knows_itself(engine: VllmEngine) -> None:
    assert engine.version.startswith("vllm 0.")
    assert engine.seats == 8
    assert list(engine.models) == [Model(real.NAME, 2048)]
    assert engine.progress() > 0
    assert engine.load().running == 0
    assert real.generated() >= 1
    assert os.getpgid(real.cores()[0].pid or 0) == real.cores()[0].pid


async def test_the_answer_is_the_models(engine: VllmEngine) -> None:
    call = await done(chat(engine, PARIS))
    assert call.status == 200
    assert content(call) == "The capital of France is Paris."
    assert call.call is not None
    assert call.json()["id"] == f"chatcmpl-{call.call.job_id}"


async def test_a_stream_says_the_same_and_its_usage_is_counted(engine: VllmEngine) -> None:
    before, steps = real.generated(), engine.progress()
    call = await done(chat(engine, PARIS, stream=True, stream_options={"include_usage": True}))
    assert call.call is not None
    assert call.events[-1] == b"[DONE]"
    assert content(call) == "The capital of France is Paris."
    assert usage_said(chunks(call)[-1]["usage"]) == usage_counted(call.call.usage) == (37, 8)
    assert [len(tokens) for tokens in call.call.tokens] == [8]
    assert real.generated() - before == 8
    assert engine.progress() - steps >= 8
    assert call.call.fault is None


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_share_the_prompt_and_add_up(engine: VllmEngine, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body: dict[str, Any] = {"n": 2, "temperature": 1, "max_tokens": 5, "ignore_eos": True}
    call = await done(chat(engine, PARIS, stream=stream, **body, **options))
    assert call.call is not None
    said = chunks(call)[-1]["usage"] if stream else call.json()["usage"]
    assert usage_said(said) == usage_counted(call.call.usage) == (37, 10)
    assert [len(tokens) for tokens in call.call.tokens] == [5, 5]


async def test_prompts_of_one_request_add_up(engine: VllmEngine) -> None:
    prompts = ["Hello there", "The quick brown fox"]
    call = await done(job(engine, "/v1/completions", prompt=prompts, max_tokens=4))
    assert call.call is not None
    assert usage_said(call.json()["usage"]) == usage_counted(call.call.usage) == (6, 8)
    assert [choice["index"] for choice in call.json()["choices"]] == [0, 1]


async def test_cached_tokens_are_counted(engine: VllmEngine) -> None:
    prompt = [7] * 300
    for _ in range(2):
        call = await done(job(engine, "/v1/completions", prompt=prompt, max_tokens=1))
    assert call.call is not None
    assert 128 <= call.call.usage.cached_tokens < 300
    assert call.call.usage.prompt_tokens == 300


async def test_logprobs(engine: VllmEngine) -> None:
    call = await done(chat(engine, PARIS, max_tokens=2, logprobs=True, top_logprobs=2))
    entries = call.json()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2, 2]


async def test_json_schema(engine: VllmEngine) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    call = await done(chat(engine, "Paris, as JSON.", max_tokens=40, response_format=wanted))
    assert list(json.loads(content(call))) == ["city"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_tool_is_called(engine: VllmEngine, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "max_tokens": 48}
    body |= {"parallel_tool_calls": False, "stream": stream}
    call = await done(chat(engine, "How is the weather in Paris?", **body))
    if stream:
        deltas = [c["delta"] for event in chunks(call) for c in event["choices"]]
        made = [tool["function"] for delta in deltas for tool in delta.get("tool_calls") or ()]
        name, arguments = made[0]["name"], "".join(f.get("arguments") or "" for f in made)
    else:
        (function,) = (t["function"] for t in call.json()["choices"][0]["message"]["tool_calls"])
        name, arguments = function["name"], function["arguments"]
    assert name == "weather"
    assert list(json.loads(arguments)) == ["city"]


async def test_responses_and_messages_are_vllms(engine: VllmEngine) -> None:
    call = await done(job(engine, "/v1/responses", input=PARIS, temperature=0))
    assert call.json()["output"][-1]["content"][0]["text"] == "The capital of France is Paris."
    assert call.call is not None
    assert usage_counted(call.call.usage) == (37, 8)
    message = [{"role": "user", "content": PARIS}]
    call = await done(job(engine, "/v1/messages", messages=message, max_tokens=3))
    assert call.json()["usage"]["output_tokens"] == 3


# --- limits ---


@pytest.mark.parametrize(
    ("asked", "status"),
    [(0, 400), (-1, 400), ("5", 200), (1.0, 200), (1.5, 400), (10**9, 400), (2048, 200)],
)
async def test_max_tokens_is_taken_or_refused_as_vllm_does(
    engine: VllmEngine, asked: object, status: int
) -> None:
    call = await done(chat(engine, PARIS, max_tokens=asked))
    assert call.status == status, call.body
    if status == 400:
        assert call.json()["error"]["param"] in ("max_tokens", "body.max_tokens")


@pytest.mark.parametrize("body", [{}, {"max_tokens": None}, {"max_completion_tokens": None}])
async def test_without_max_tokens_the_default_holds(
    engine: VllmEngine, body: dict[str, Any]
) -> None:
    call = await done(chat(engine, PARIS, ignore_eos=True, max_tokens_given=False, **body))
    assert call.json()["usage"]["completion_tokens"] == real.DEFAULT_MAX_TOKENS
    assert call.json()["choices"][0]["finish_reason"] == "length"


async def test_above_the_ceiling_the_answer_ends_at_it(engine: VllmEngine) -> None:
    call = await done(chat(engine, PARIS, ignore_eos=True, max_tokens=400, min_tokens=300))
    assert call.json()["usage"]["completion_tokens"] == real.MAX_TOKENS_CEILING
    assert call.json()["choices"][0]["finish_reason"] == "length"


async def test_a_beam_search_ends_at_the_ceiling(engine: VllmEngine) -> None:
    body: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens_given": False}
    call = await done(job(engine, "/v1/completions", prompt="One two three", **body))
    assert call.call is not None
    said = usage_said(call.json()["usage"])
    assert said == (3, 2 * real.DEFAULT_MAX_TOKENS)
    assert call.call.usage.prompt_tokens == 3
    assert said[1] - 1 <= call.call.usage.completion_tokens <= said[1]


async def test_what_is_the_workers_to_decide_is_ignored(engine: VllmEngine) -> None:
    body = {"priority": -5, "vllm_xargs": {"x": 1}, "kv_transfer_params": {"do_remote_decode": 1}}
    call = await done(chat(engine, PARIS, max_tokens=1, **body))
    assert call.status == 200
    assert call.json()["kv_transfer_params"] is None


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5] * 2049},
        {"prompt": [5] * 2048},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [10**6]},
        {"prompt": "a", "logit_bias": {"999999": 1}},
        {"prompt": "a", "stop_token_ids": [10**11]},
        {"prompt": "a", "structured_outputs": {"regex": "((("}},
    ],
    ids=str,
)
async def test_a_bad_request_is_refused_and_the_engine_lives(
    engine: VllmEngine, body: dict[str, Any]
) -> None:
    call = await done(job(engine, "/v1/completions", max_tokens=1, **body))
    assert call.status == 400
    assert set(call.json()["error"]) == {"message", "type", "param", "code"}
    assert call.call is not None
    assert call.call.usage == Usage()
    assert (await done(chat(engine, PARIS, max_tokens=1))).status == 200


async def test_an_unknown_model_is_not_found(engine: VllmEngine) -> None:
    call = await done(chat(engine, PARIS, model="gpt-4"))
    assert call.status == 404


# --- leaving ---


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(
    engine: VllmEngine, stream: bool, n: int
) -> None:
    before = real.generated()
    async with chat(engine, PARIS, stream=stream, n=n, temperature=1, **ENDLESS) as call:
        await until(lambda: real.generated() >= before + 3 * n, "some tokens", timeout=PATIENCE)
        call.disconnect()
        left = time.monotonic()
        await call.wait(PATIENCE)
        assert time.monotonic() - left < 0.5
    assert call.call is not None
    await engine.abort(call.call.job_id)
    settled = usage_counted(call.call.usage)
    await until_idle(engine)
    assert call.call.fault is None
    # Exactly what the engine made, read or not.
    assert usage_counted(call.call.usage) == settled == (37, real.generated() - before)
    assert call.call.usage.completion_tokens < n * real.MAX_TOKENS_CEILING
    assert b"[DONE]" not in call.events


async def test_a_client_that_leaves_before_the_first_token_frees_the_engine(
    engine: VllmEngine,
) -> None:
    before = real.generated()
    prompt = random.Random(1).choices(range(100, 40_000), k=500)
    body: dict[str, Any] = {"prompt": prompt, "stream": True, **ENDLESS}
    async with job(engine, "/v1/completions", **body) as call:
        await until(lambda: engine._llm.output_processor.request_states, "the request")
        call.disconnect()
        left = time.monotonic()
        await call.wait(PATIENCE)
        assert time.monotonic() - left < 0.5
    # The step that had begun is not interrupted.
    await until(lambda: engine.load().running == 0, "an idle engine", timeout=10)
    await until_idle(engine)
    assert real.generated() == before
    assert call.call is not None
    assert usage_counted(call.call.usage) == (500, 0)


async def test_a_hundred_clients_that_leave_leave_nothing(engine: VllmEngine) -> None:
    moments = random.Random(2)

    async def leave(number: int) -> None:
        body = {"stream": number % 2 == 0, "n": 1 + number % 3, "temperature": 1, **ENDLESS}
        async with chat(engine, f"Count to {number}.", **body) as call:
            await asyncio.sleep(moments.uniform(0, 0.4))
            call.disconnect()
            await call.wait(PATIENCE)

    for batch in range(20):
        await asyncio.gather(*(leave(batch * 5 + i) for i in range(5)))
    await until_idle(engine)
    call = await done(chat(engine, PARIS))
    assert content(call) == "The capital of France is Paris."


async def test_an_abort_of_the_workers_is_no_fault(engine: VllmEngine) -> None:
    before = real.generated()
    async with chat(engine, PARIS, stream=True, n=2, temperature=1, **ENDLESS) as call:
        await call.wait_events(6, timeout=PATIENCE)
        assert call.call is not None
        await engine.abort(call.call.job_id)
        await call.wait(PATIENCE)
    await until_idle(engine)
    assert call.call.fault is None
    assert call.call.usage.completion_tokens == real.generated() - before
    await engine.abort(call.call.job_id)


# --- faults ---


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_that_nobody_asked_for_is_a_fault(engine: VllmEngine, stream: bool) -> None:
    before = real.generated()
    async with chat(engine, PARIS, stream=stream, **ENDLESS) as call:
        await until(lambda: real.generated() >= before + 3, "some tokens", timeout=PATIENCE)
        assert call.call is not None
        await engine._llm.abort(f"chatcmpl-{call.call.job_id}")
        await call.wait(PATIENCE)
    assert call.call.fault == "the engine ended the request: abort"
    if not stream:
        assert call.status == 500
    await until_idle(engine)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["--headless"], "headless"),
        (["--api-server-count", "2"], "start more workers"),
        (["--max-num-seqs", "many"], "many"),
        (["--max-model-len", "999999"], "max_model_len"),
    ],
)
async def test_a_start_that_fails_says_why(engine: VllmEngine, args: list[str], said: str) -> None:
    with pytest.raises(EngineStartError, match=said):
        await real.make_engine(str(real.MODEL), *args).start()
    assert len(real.cores()) == 1


async def test_a_killed_engine_is_a_fault_and_ends_the_worker(engine: VllmEngine) -> None:
    failed = asyncio.create_task(engine.wait_failed())
    (core,) = real.cores()
    assert core.pid is not None
    processes = [core.pid, *real.descendants(core.pid)]
    assert len(processes) >= 2
    async with (
        chat(engine, PARIS, stream=True, **ENDLESS) as streaming,
        chat(engine, PARIS, **ENDLESS) as waiting,
    ):
        await streaming.wait_events(4, timeout=PATIENCE)
        os.kill(core.pid, signal.SIGKILL)
        killed = time.monotonic()
        assert await failed == "the engine's process ended: EngineCore with exit code -9"
        assert time.monotonic() - killed < 3
        await streaming.wait(PATIENCE)
        await waiting.wait(PATIENCE)
    for call in (streaming, waiting):
        assert call.call is not None
        assert call.call.fault is not None
        assert call.call.usage.completion_tokens > 0
    assert b'"error"' in streaming.body
    assert waiting.status == 500
    alive = set(processes) & set(real.descendants(os.getpid()))
    assert not alive
    late = await done(chat(engine, PARIS))
    assert late.status == 500
    assert late.call is not None
    assert late.call.fault is not None
    await engine.stop()
    await engine.stop()


async def test_a_start_can_be_given_up(engine: VllmEngine) -> None:
    another = real.make_engine()
    starting = asyncio.create_task(another.start())
    await until(real.cores, "the engine core's process", timeout=60)
    await another.stop()
    with pytest.raises(EngineStartError):
        await starting
    assert not real.cores()


EMBEDDER = """
import asyncio, sys
from tests.support import vllm as real

async def main():
    engine = real.make_engine(*real.ARGS, "--runner", "pooling", "--convert", "embed")
    await engine.start()
    call = await real.done(real.job(engine, "/v1/embeddings", input=["Hello there", "Hi"]))
    print(len(call.json()["data"][0]["embedding"]), call.call.usage.prompt_tokens, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.timeout(600)
async def test_embeddings_are_served_and_a_killed_worker_leaves_no_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    script = tmp_path / "embedder.py"
    script.write_text(EMBEDDER)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    for name, value in real.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", script, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        async for line in worker.stdout:
            if line[:1].isdigit():
                break
        else:
            pytest.fail("the worker ended before it answered")
        assert line == b"576 3\n"
        children = real.descendants(worker.pid)
        assert len(children) >= 3
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()

    def left() -> list[int]:
        return [pid for pid in children if os.path.exists(f"/proc/{pid}")]

    await until(lambda: not left(), "the engine's end", timeout=5)
