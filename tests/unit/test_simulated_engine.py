"""The simulated engine: what it answers, how it paces, how it breaks, and what it leaves behind."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.support.asgi import AppCall, request
from worker.engine.interface import Call, EngineStartError, Load
from worker.engine.simulated import SimulatedEngine, SimulatedSettings, expected_text
from worker.engine.simulated_faults import Faults, FaultSyntaxError, read_faults
from worker.engine.simulated_text import (
    JSON_PIECES,
    chat_prompt,
    detokenize,
    expected_embedding,
    expected_tokens,
    tokenize,
)

CHAT = "/v1/chat/completions"
IDLE = Load(running=0, waiting=0, kv_usage=0.0)
Start = Callable[..., Awaitable[SimulatedEngine]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start engines with the settings given; fast, and with faults on, unless told otherwise."""
    engines: list[SimulatedEngine] = []

    async def start_engine(
        *, default: int | None = 16, ceiling: int | None = None, **settings: Any
    ) -> SimulatedEngine:
        fast = {"ttft_ms": 0, "tpot_ms": 0, "faults": True, "created": 1}
        engine = SimulatedEngine(
            SimulatedSettings(**{**fast, **settings}),
            default_max_tokens=default,
            max_tokens_ceiling=ceiling,
        )
        engines.append(engine)
        await engine.start()
        return engine

    yield start_engine
    for engine in engines:
        await engine.stop()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def stream(text: str, **fields: Any) -> dict[str, Any]:
    return chat(text, stream=True, **fields)


def parsed(call: AppCall) -> list[dict[str, Any]]:
    """Return a complete stream's events, `[DONE]` checked and left out."""
    assert call.events[-1] == b"[DONE]"
    return [json.loads(event) for event in call.events[:-1]]


def contents(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["delta"]["content"] for c in choices if c["index"] == index)


# --- the bytes ---


async def test_a_chat_stream_has_vllms_bytes(start: Start) -> None:
    engine = await start(models="m")
    call = Call("J")
    headers = {"content-type": "application/json", "x-request-id": "J"}
    answer = await request(
        engine.app, CHAT, stream("hello", max_tokens=2), headers=headers, call=call
    )
    first, second = expected_tokens("hello", 2)
    head = b'{"id":"chatcmpl-J","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    assert answer.status == 200
    assert answer.headers == {"content-type": "text/event-stream; charset=utf-8"}
    assert answer.events == [
        head + b'[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        b'"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}',
        head + b'[{"index":0,"delta":{"content":' + JSON_PIECES[first] + b'},"logprobs":null,'
        b'"finish_reason":null,"token_ids":null}]}',
        head + b'[{"index":0,"delta":{"content":' + JSON_PIECES[second] + b'},"logprobs":null,'
        b'"finish_reason":"length","stop_reason":null,"token_ids":null}],'
        b'"system_fingerprint":"simulated-1"}',
        b"[DONE]",
    ]
    assert answer.finished
    assert [len(message["body"]) > 0 for message in answer.messages[1:]] == [True] * 4 + [False]
    assert call.usage.prompt_tokens == 5
    assert call.usage.completion_tokens == 2
    assert call.tokens == [[first, second]]
    assert engine.load() == IDLE


async def test_usage_comes_in_the_last_event_only(start: Start) -> None:
    engine = await start()
    options = {"include_usage": True}
    answer = await request(engine.app, CHAT, stream("hey", max_tokens=3, stream_options=options))
    events = parsed(answer)
    assert all("usage" not in event for event in events[:-1])
    assert "system_fingerprint" not in events[-2]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}

    options["continuous_usage_stats"] = True
    answer = await request(engine.app, CHAT, stream("hey", max_tokens=3, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in parsed(answer)]
    assert counts == [0, 1, 2, 3, 3]


async def test_a_chat_in_one_piece(start: Start) -> None:
    engine = await start(models="m")
    answer = await request(engine.app, CHAT, chat("hello", max_tokens=40))
    body = answer.json()
    assert answer.headers["content-length"] == str(len(answer.body))
    assert body["choices"][0]["message"]["content"] == expected_text("hello", 40)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 45


async def test_completions_take_several_prompts_and_choices(start: Start) -> None:
    engine = await start()
    call = Call("J")
    body = {"prompt": ["left", "right"], "n": 2, "max_tokens": 4, "seed": 7}
    answer = await request(engine.app, "/v1/completions", body, call=call)
    assert answer.json()["id"] == "cmpl-J"
    assert [choice["text"] for choice in answer.json()["choices"]] == [
        expected_text("left", 4, 0, seed=7),
        expected_text("left", 4, 1, seed=7),
        expected_text("right", 4, 0, seed=7),
        expected_text("right", 4, 1, seed=7),
    ]
    assert answer.json()["usage"]["prompt_tokens"] == 9
    assert call.usage.completion_tokens == 16
    assert [len(tokens) for tokens in call.tokens] == [4] * 4


async def test_each_choice_of_a_stream_has_one_role_and_one_finish(start: Start) -> None:
    engine = await start()
    answer = await request(engine.app, CHAT, stream("hello", n=3, max_tokens=5))
    events = parsed(answer)
    for index in range(3):
        own = [c for e in events for c in e["choices"] if c["index"] == index]
        assert ["role" in choice["delta"] for choice in own] == [True] + [False] * 5
        assert [choice["finish_reason"] for choice in own] == [None] * 5 + ["length"]
        assert contents(events, index) == expected_text("hello", 5, index)


async def test_logprobs(start: Start) -> None:
    engine = await start()
    answer = await request(
        engine.app, CHAT, stream("hello", max_tokens=2, logprobs=True, top_logprobs=3)
    )
    told = parsed(answer)[1]["choices"][0]["logprobs"]["content"][0]
    assert told["token"] == expected_text("hello", 1)
    assert told["bytes"] == list(told["token"].encode())
    assert len({top["token"] for top in told["top_logprobs"]}) == 3

    body = {"prompt": "hello", "max_tokens": 2, "logprobs": 1}
    whole = (await request(engine.app, "/v1/completions", body)).json()
    streamed = await request(engine.app, "/v1/completions", {**body, "stream": True})
    logprobs = [event["choices"][0]["logprobs"] for event in parsed(streamed)]
    offsets = [offset for each in logprobs for offset in each["text_offset"]]
    assert offsets == whole["choices"][0]["logprobs"]["text_offset"]
    assert whole["choices"][0]["logprobs"]["tokens"] == [
        expected_text("hello", 1),
        expected_text("hello", 2).removeprefix(expected_text("hello", 1)),
    ]


@pytest.mark.vllm
async def test_events_pass_through_vllms_own_models_unchanged(start: Start) -> None:
    chats = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    completions = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    engine = await start()
    variants: list[dict[str, Any]] = [
        {},
        {"n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"logprobs": 1, "stream_options": {"include_usage": True}},
    ]
    for variant in variants:
        body = {"prompt": "hello", "stream": True, "max_tokens": 60, **variant}
        for event in (await request(engine.app, "/v1/completions", body)).events[:-1]:
            model = completions.CompletionStreamResponse.model_validate_json(event)
            assert model.model_dump_json(exclude_unset=True).encode() == event
        body = stream("hello", max_tokens=60, **variant, top_logprobs=2)
        for event in (await request(engine.app, CHAT, body)).events[:-1]:
            model = chats.ChatCompletionStreamResponse.model_validate_json(event)
            assert model.model_dump_json(exclude_unset=True).encode() == event
    whole = (await request(engine.app, CHAT, chat("hello"))).json()
    assert chats.ChatCompletionResponse.model_validate(whole).model_dump() == whole
    whole = (await request(engine.app, "/v1/completions", {"prompt": "hello"})).json()
    assert completions.CompletionResponse.model_validate(whole).model_dump() == whole


# --- the text ---


def test_text_survives_the_tokenizer() -> None:
    text = "The river, 水車 and\n\tnaïve 🙂🌊 \u2028 x" + expected_text("p", 300)
    assert detokenize(tokenize(text)) == text
    assert tokenize(expected_text("p", 300)) == expected_tokens("p", 300)
    assert len(tokenize("x" * 100)) == 100


def test_text_depends_on_prompt_seed_and_choice() -> None:
    texts = {expected_text("p", 20), expected_text("q", 20), expected_text("p", 20, 1)}
    texts.add(expected_text("p", 20, seed=1))
    assert len(texts) == 4
    assert expected_text("p", 30).startswith(expected_text("p", 20))
    assert any(len(piece) < len(piece.encode()) for piece in expected_text("p", 200).split())


async def test_a_chats_prompt_is_its_messages(start: Start) -> None:
    engine = await start()
    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": " parts"}]
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": parts},
    ]
    answer = await request(engine.app, CHAT, {"messages": messages, "max_tokens": 9})
    assert chat_prompt(messages) == "one\ntwo parts"
    content = answer.json()["choices"][0]["message"]["content"]
    assert content == expected_text("one\ntwo parts", 9)


async def test_tokenize_and_detokenize(start: Start) -> None:
    engine = await start()
    body = {"prompt": "a river", "return_token_strs": True}
    told = (await request(engine.app, "/tokenize", body)).json()
    assert told["count"] == 2
    assert told["token_strs"] == ["a", " river"]
    back = await request(engine.app, "/detokenize", {"tokens": told["tokens"]})
    assert back.json() == {"prompt": "a river"}
    assert (await request(engine.app, "/detokenize", {"tokens": [10**6]})).status == 400


async def test_embeddings(start: Start) -> None:
    engine = await start(embedding_size=8)
    call = Call("J")
    body: dict[str, Any] = {"input": ["one", "two"]}
    answer = (await request(engine.app, "/v1/embeddings", body, call=call)).json()
    assert [item["embedding"] for item in answer["data"]] == [
        expected_embedding("one", 8),
        expected_embedding("two", 8),
    ]
    assert answer["id"] == "embd-J"
    assert answer["usage"]["prompt_tokens"] == call.usage.prompt_tokens == 6
    assert call.usage.completion_tokens == 0

    body["encoding_format"] = "base64"
    answer = (await request(engine.app, "/v1/embeddings", body)).json()
    packed = base64.b64decode(answer["data"][0]["embedding"])
    assert list(struct.unpack("<8f", packed)) == expected_embedding("one", 8)


async def test_models(start: Start) -> None:
    engine = await start(models="first, second", max_model_len=99)
    answer = await request(engine.app, "/v1/models", method="GET")
    assert [card["id"] for card in answer.json()["data"]] == ["first", "second"]
    assert answer.json()["data"][0]["max_model_len"] == 99
    assert [model.name for model in engine.models] == ["first", "second"]


# --- limits and refusals ---


async def test_limits(start: Start) -> None:
    engine = await start(default=5, ceiling=8, max_model_len=20)

    async def finish(text: str, **fields: Any) -> tuple[int, str]:
        body = (await request(engine.app, CHAT, chat(text, **fields))).json()
        return body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]

    assert await finish("x") == (5, "length")
    assert await finish("x", max_tokens=None) == (5, "length")
    assert await finish("x", max_tokens=3) == (3, "length")
    assert await finish("x", max_tokens="3") == (3, "length")
    assert await finish("x", max_tokens=3.0) == (3, "length")
    assert await finish("x", max_tokens=3, max_completion_tokens=4) == (4, "length")
    assert await finish("x", max_tokens=19) == (8, "length")
    assert await finish("x" * 19, max_tokens=19) == (1, "length")


@pytest.mark.parametrize(
    ("own", "asked", "allowed"), [(3, {"max_tokens": 7}, 3), (3, {}, 3), (30, {"max_tokens": 9}, 8)]
)
async def test_a_callers_own_limit_is_held(
    start: Start, own: int, asked: dict[str, int], allowed: int
) -> None:
    engine = await start(default=5, ceiling=8)
    answer = await request(engine.app, CHAT, chat("x", **asked), call=Call("J", max_tokens=own))
    assert answer.json()["usage"]["completion_tokens"] == allowed


async def test_answers_that_end_by_themselves(start: Start) -> None:
    engine = await start(answer_tokens=4)
    body = (await request(engine.app, CHAT, chat("x", max_tokens=9))).json()
    assert body["usage"]["completion_tokens"] == 4
    assert body["choices"][0]["finish_reason"] == "stop"
    body = (await request(engine.app, CHAT, chat("x", max_tokens=3))).json()
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (chat("x", max_tokens=0), 400, "max_tokens must be at least 1, got 0."),
        (chat("x", max_tokens=-1), 400, "max_tokens must be at least 1, got -1."),
        (chat("x", max_tokens=10**9), 400, "cannot be greater than max_model_len=20"),
        (chat("x", max_tokens=1.5), 400, "validation error"),
        (chat("x" * 20), 400, "max_tokens must be at least 1, got 0."),
        (chat("x" * 21), 400, "maximum context length is 20 tokens. However, your prompt "),
        (chat(""), 400, "cannot be empty"),
        (chat("x", n=0), 400, "validation error"),
        (chat("x", model="other"), 404, "The model `other` does not exist."),
        (chat("x", stream_options={"include_usage": True}), 400, "Stream options"),
        (stream("x" * 21), 400, "maximum context length"),
        (chat("[[fault:explode@1]]"), 400, "explode"),
        ({}, 400, "messages"),
        ({"messages": "x"}, 400, "validation error"),
        (b"", 400, "JSON"),
        (b"[]", 400, "validation error"),
        (b"null", 400, "validation error"),
        (b'{"messages"', 400, "JSON"),
        (b'{"messages": "\xff"}', 400, "JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", 400, ""),
        (b"[" * 100_000, 400, "JSON"),
    ],
)
async def test_refusals(start: Start, body: Any, status: int, says: str) -> None:
    engine = await start(max_model_len=20)
    answer = await request(engine.app, CHAT, body)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}
    assert engine.progress() == 0


async def test_unknown_paths_methods_and_types(start: Start) -> None:
    engine = await start()
    assert (await request(engine.app, "/v1/other", {})).status == 404
    assert (await request(engine.app, CHAT, method="GET")).status == 405
    assert (await request(engine.app, CHAT, chat("x"), headers={})).status == 400


# --- the batch ---


async def test_running_requests_share_the_steps(start: Start) -> None:
    engine = await start(tpot_ms=20)
    began = time.monotonic()
    calls = [request(engine.app, CHAT, stream(f"{i}", max_tokens=10)) for i in range(50)]
    answers = await asyncio.gather(*calls)
    took = time.monotonic() - began
    assert engine.progress() <= 12
    assert 0.17 <= took < 5
    for i, answer in enumerate(answers):
        assert contents(parsed(answer)) == expected_text(f"{i}", 10)


async def test_time_to_the_first_token_counts_the_prompt(start: Start) -> None:
    engine = await start(ttft_ms=40, prefill_ms_per_1k_tokens=100)
    async with AppCall(engine.app, CHAT, stream("x" * 1000, max_tokens=1)) as call:
        await call.wait()
    assert call.status == 200
    assert 0.13 <= call.times[1] - call.times[0] < 2


async def test_seats_and_waiting(start: Start) -> None:
    engine = await start(seats=2, tpot_ms=5)
    calls = [AppCall(engine.app, CHAT, stream(f"{i}", n=2, max_tokens=20)) for i in range(3)]
    async with calls[0], calls[1], calls[2]:
        await calls[0].wait_events(3)
        assert engine.load().running == 2
        assert engine.load().waiting == 4
        assert engine.load().kv_usage > 0
        assert calls[1].status == 200
        assert calls[1].events == []
        for call in calls:
            await call.wait()
    assert engine.load() == IDLE


async def test_a_full_cache_takes_the_newest_back_and_nothing_shows(start: Start) -> None:
    engine = await start(max_model_len=60, kv_tokens=60, seats=8)
    calls = [request(engine.app, CHAT, stream(f"{i}", max_tokens=50)) for i in range(4)]
    for i, answer in enumerate(await asyncio.gather(*calls)):
        assert contents(parsed(answer)) == expected_text(f"{i}", 50)
    assert engine.progress() > 100, "nothing was preempted"
    assert engine.load() == IDLE


async def test_one_reader_that_stops_holds_up_nobody(start: Start) -> None:
    engine = await start()
    async with AppCall(engine.app, CHAT, stream("slow", max_tokens=50)) as slow:
        slow.hold()
        await request(engine.app, CHAT, stream("quick", max_tokens=50))
        slow.release()
        await slow.wait()
    assert contents(parsed(slow)) == expected_text("slow", 50)


async def test_stamps_are_the_moments_of_the_steps(start: Start) -> None:
    engine = await start(stamps=True, tpot_ms=10)
    began = time.monotonic_ns()
    answer = await request(engine.app, CHAT, stream("x", max_tokens=5))
    texts = [event["choices"][0]["delta"]["content"] for event in parsed(answer)[1:-1]]
    moments = [int(text.removeprefix(" @")) for text in texts]
    assert len(moments) == 4
    assert began < moments[0] < moments[-1] < time.monotonic_ns()
    assert moments[-1] - moments[0] > 20_000_000


async def test_512_requests_in_steps(start: Start) -> None:
    engine = await start(seats=512)
    calls = [request(engine.app, CHAT, stream(f"{i}", max_tokens=20)) for i in range(512)]
    answers = await asyncio.gather(*calls)
    assert all(len(answer.events) == 22 for answer in answers)
    assert engine.progress() <= 25


# --- clients that leave ---


@pytest.mark.parametrize("where", ["streaming", "prefill", "waiting", "reading nothing"])
async def test_a_stream_ends_with_its_client(start: Start, where: str) -> None:
    slow = {"tpot_ms": 10} if where != "prefill" else {"ttft_ms": 60_000}
    engine = await start(seats=1, **slow)
    call = Call("J")
    other = AppCall(engine.app, CHAT, stream("other", max_tokens=1000))
    left = AppCall(engine.app, CHAT, stream("left", max_tokens=1000, n=1), call=call)
    if where == "waiting":
        async with other:
            await other.wait_events(1)
            async with left:
                await asyncio.sleep(0.02)
                assert engine.load().waiting == 1
                left.disconnect()
                await left.wait(2)
            assert engine.load().waiting == 0
    else:
        async with left:
            await left.wait_events(0 if where == "prefill" else 5)
            await asyncio.sleep(0.01)
            if where == "reading nothing":
                left.hold()
                await asyncio.sleep(0.03)
            left.disconnect()
            await left.wait(2)
    assert not left.finished
    assert b"[DONE]" not in left.body
    tokens = call.usage.completion_tokens
    assert tokens >= 4 if where in ("streaming", "reading nothing") else tokens == 0
    if where != "waiting":
        assert engine.load() == IDLE


async def test_a_request_in_one_piece_whose_client_left_is_answered_null(start: Start) -> None:
    engine = await start(tpot_ms=10)
    call = Call("J")
    async with AppCall(engine.app, CHAT, chat("x", max_tokens=1000, n=2), call=call) as left:
        await asyncio.sleep(0.05)
        left.disconnect()
        await left.wait(2)
    assert (left.status, left.body) == (200, b"null")
    assert engine.load() == IDLE
    assert 2 <= call.usage.completion_tokens < 40


async def test_cancelling_the_application_leaves_nothing(start: Start) -> None:
    engine = await start(tpot_ms=10)
    async with AppCall(engine.app, CHAT, stream("x", max_tokens=1000)) as call:
        await call.wait_events(2)
    assert engine.load() == IDLE


async def test_abort_ends_a_job_by_its_id(start: Start) -> None:
    engine = await start(tpot_ms=10)
    call = Call("J")
    async with AppCall(engine.app, CHAT, stream("x", max_tokens=1000, n=2), call=call) as left:
        await left.wait_events(4)
        await engine.abort("other")
        await engine.abort("J")
        await left.wait(2)
    finishes = [c["finish_reason"] for e in parsed(left) for c in e["choices"]]
    assert finishes.count("abort") == 2
    assert call.fault is None
    assert engine.load() == IDLE


# --- faults ---


def test_fault_markers_and_fields_say_the_same() -> None:
    text = "a [[fault:raise@5]] b [[fault:tokens=9]] [[fault:slow:ttft_ms=1.5,tpot_ms=2]]"
    field = {"raise": 5, "tokens": 9, "slow": {"ttft_ms": 1.5, "tpot_ms": 2}}
    wanted = Faults(kind="raise", at=5, tokens=9, ttft_ms=1.5, tpot_ms=2)
    assert read_faults(text) == read_faults("", field) == wanted
    assert read_faults("[[fault:exit@1]]", {"exit": 2}).at == 2


@pytest.mark.parametrize(
    "marker", ["", "raise", "raise@", "raise@x", "raise@-1", "slow:speed=1", "tokens=0", "tokens=x"]
)
def test_a_fault_that_cannot_be_read_is_refused(marker: str) -> None:
    with pytest.raises(FaultSyntaxError):
        read_faults(f"[[fault:{marker}]]")


async def test_faults_are_text_unless_switched_on(start: Start) -> None:
    engine = await start(faults=False)
    text = "[[fault:die@0]]"
    answer = await request(engine.app, CHAT, stream(text, headrace_fault={"die": 0}))
    assert contents(parsed(answer)) == expected_text(text, 16)


async def test_fault_raise(start: Start) -> None:
    engine = await start()
    async with AppCall(engine.app, CHAT, stream("x", headrace_fault={"raise": 3})) as call:
        with pytest.raises(Exception, match="simulated exception, asked for at token 3"):
            await call.wait()
    assert len(call.events) == 4
    assert not call.finished
    assert engine.load() == IDLE


async def test_fault_error(start: Start) -> None:
    engine = await start()
    call = Call("J")
    answer = await request(engine.app, CHAT, stream("x [[fault:error@3]]"), call=call)
    assert call.fault == "simulated error, asked for at token 3"
    assert answer.events[4:] == [
        b'{"error": {"message": "Internal server error", "type": "InternalServerError", '
        b'"param": null, "code": 500}}',
        b"[DONE]",
    ]
    answer = await request(engine.app, CHAT, chat("x [[fault:error@3]]"))
    assert answer.status == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert engine.load() == IDLE


async def test_fault_abort(start: Start) -> None:
    engine = await start()
    call = Call("J")
    answer = await request(engine.app, CHAT, stream("x [[fault:abort@2]]"), call=call)
    assert call.fault == "simulated abort, asked for at token 2"
    last = parsed(answer)[-1]["choices"][0]
    assert (last["finish_reason"], last["delta"]) == ("abort", {"content": ""})
    body = (await request(engine.app, CHAT, chat("x [[fault:abort@2]]"))).json()
    assert body["choices"][0]["finish_reason"] == "abort"


async def test_fault_exit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exited(Exception):
        pass

    def leave(status: int) -> None:
        raise Exited(status)

    monkeypatch.setattr("os._exit", leave)
    engine = await start()
    call = Call("J")
    await request(engine.app, CHAT, chat("x [[fault:exit@2]]"), call=call)
    assert call.usage.completion_tokens == 2
    # The stand-in's exception, instead of the exit, is a crash of the loop: that is told, too.
    assert "the step loop crashed: Exited(1)" in await engine.wait_failed()


async def test_fault_hang(start: Start) -> None:
    engine = await start(tpot_ms=1)
    other = AppCall(engine.app, CHAT, stream("other", max_tokens=1000))
    hangs = AppCall(engine.app, CHAT, stream("x [[fault:hang@3]]", max_tokens=1000))
    async with other, hangs:
        await hangs.wait_events(4)
        await asyncio.sleep(0.02)
        steps = engine.progress()
        tokens = len(other.events)
        await asyncio.sleep(0.03)
        assert engine.progress() == steps
        assert len(other.events) == tokens
        assert engine.load().running == 2
        other.disconnect()
        await other.wait(2)
    assert engine.load() == IDLE


async def test_fault_die(start: Start) -> None:
    engine = await start(tpot_ms=1)
    calls = [Call("other"), Call("J"), Call("late")]
    failed = asyncio.ensure_future(engine.wait_failed())
    other = AppCall(engine.app, CHAT, stream("other", max_tokens=1000), call=calls[0])
    dies = AppCall(engine.app, CHAT, chat("x [[fault:die@3]]", max_tokens=1000), call=calls[1])
    async with other, dies:
        await asyncio.sleep(0)
        assert not failed.done()
        await other.wait()
        await dies.wait()
    assert await asyncio.wait_for(failed, 1) == "simulated engine death, asked for at token 3"
    late = await request(engine.app, CHAT, stream("late"), call=calls[2])
    assert [call.fault for call in calls] == [await engine.wait_failed()] * 3
    for streamed in (other, late):
        assert json.loads(streamed.events[-2])["error"]["code"] == 500
        assert streamed.events[-1] == b"[DONE]"
    assert dies.status == 500


async def test_fault_slow_and_tokens(start: Start) -> None:
    engine = await start(ceiling=4)
    text = "x [[fault:slow:ttft_ms=50,tpot_ms=10]] [[fault:tokens=6]]"
    async with AppCall(engine.app, CHAT, stream(text, max_tokens=2)) as call:
        quick = await request(engine.app, CHAT, stream("quick"))
        assert quick.finished
        assert call.events == []
        await call.wait()
    events = parsed(call)
    assert contents(events) == expected_text(text, 6)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert 0.095 <= call.times[-1] - call.times[0] < 2


# --- continuing what another worker began ---


@pytest.mark.parametrize("at", [0, 1, 7, 19, 20])
async def test_a_resumed_stream_says_the_same_again_and_goes_on(start: Start, at: int) -> None:
    engine = await start()
    body = stream("hello", max_tokens=20, stream_options={"include_usage": True})
    headers = {"content-type": "application/json", "x-request-id": "J"}
    first = Call("J")
    whole = await request(engine.app, CHAT, body, headers=headers, call=first)
    assert [tokens for tokens, _, _ in first.deltas] == [[t] for t in first.tokens[0]]
    assert [finish for _, finish, _ in first.deltas] == [None] * 19 + ["length"]

    steps = engine.progress()
    second = Call("J", resume=first.deltas[:at])
    again = await request(engine.app, CHAT, body, headers=headers, call=second)
    assert again.events == whole.events
    assert second.deltas == first.deltas[at:]
    assert second.usage == first.usage
    assert second.tokens == first.tokens
    assert engine.progress() - steps == 20 - at
    assert engine.load() == IDLE


async def test_deltas_come_with_their_events(start: Start) -> None:
    engine = await start(tpot_ms=5)
    call = Call("J")
    async with AppCall(engine.app, CHAT, stream("x", max_tokens=100), call=call) as running:
        running.hold()
        await asyncio.sleep(0.05)
        assert call.usage.completion_tokens > 1
        assert call.deltas == []
        running.release()
        await running.wait_events(10)
        assert len(call.deltas) <= len(running.events)


async def test_what_can_be_resumed(start: Start) -> None:
    engine = await start()

    def resumable(path: str, **body: Any) -> bool:
        return engine.resumable(path, json.dumps(body).encode())

    assert resumable(CHAT, **chat("x"))
    assert resumable(CHAT, **chat("x", n=1))
    assert not resumable(CHAT, **chat("x", n=2))
    assert resumable("/v1/completions", prompt="x")
    assert resumable("/v1/completions", prompt=[1, 2])
    assert not resumable("/v1/completions", prompt=["x", "y"])
    assert not resumable("/v1/embeddings", input="x")
    assert not engine.resumable(CHAT, b"{")


# --- start and end ---


async def test_a_cache_too_small_stops_the_start() -> None:
    settings = SimulatedSettings(max_model_len=100, kv_tokens=50)
    engine = SimulatedEngine(settings, default_max_tokens=1, max_tokens_ceiling=None)
    with pytest.raises(EngineStartError, match="HEADRACE_SIMULATED_KV_TOKENS"):
        await engine.start()


async def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_MODELS", "a,b")
    monkeypatch.setenv("HEADRACE_SIMULATED_TPOT_MS", "7.5")
    monkeypatch.setenv("HEADRACE_SIMULATED_FAULTS", "true")
    settings = SimulatedSettings()
    assert (settings.models, settings.tpot_ms, settings.faults) == (("a", "b"), 7.5, True)
    monkeypatch.setenv("HEADRACE_SIMULATED_SEATS", "none")
    with pytest.raises(ValueError, match="seats"):
        SimulatedSettings()


async def test_stop_ends_what_runs_and_may_be_called_twice(start: Start) -> None:
    engine = await start(tpot_ms=5)
    call = Call("J")
    async with AppCall(engine.app, CHAT, stream("x", max_tokens=1000), call=call) as running:
        await running.wait_events(2)
        await engine.stop()
        await engine.stop()
        await running.wait(2)
    assert call.fault == "the engine was stopped"
    assert engine.load() == IDLE
