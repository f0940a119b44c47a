"""A whole pool with real vLLM, as its clients see it: openai-python, raw sockets, `/metrics`.

One pool serves all tests of this module, in the order written; the last ones stop its workers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from tests.support import vllm as real
from tests.support.processes import WorkerProcess
from tests.support.sse import fetch, open_response, read_head
from tests.support.vllm_pool import CEILING, CHAT, ENDLESS, SEATS, Stage, running_stage, totals
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed"),
    pytest.mark.skipif(not real.MODEL.exists(), reason="no model: python compose/model.py"),
]

PARIS = "What is the capital of France?"
SAID = "The capital of France is Paris."
SAID_TOKENS = (37, 8)
MODEL = real.NAME
EMBEDDER = "smollm2-embed"

Client = openai.AsyncOpenAI


class City(BaseModel):
    city: str = Field(max_length=9)


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {**City.model_json_schema(), "additionalProperties": False},
    },
}


def ask(text: str = PARIS) -> Any:
    return [{"role": "user", "content": text}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    async with running_stage() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def client(stage: Stage) -> AsyncIterator[Client]:
    async with stage.client() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(stage: Stage) -> WorkerProcess:
    """Another model's worker, beside the one that chats."""
    args = [str(real.MODEL), "--served-model-name", EMBEDDER, "--max-model-len", "512"]
    args += ["--runner", "pooling", "--convert", "embed", "--enforce-eager", "--dtype", "float32"]
    worker = stage.pool.add_worker(args=args, metrics_port=0)
    await stage.pool.wait_ready()
    return worker


# --- answers ---


@pytest.mark.parametrize("gateway", [0, 1])
async def test_a_chat_is_answered_by_either_gateway(stage: Stage, gateway: int) -> None:
    async with stage.client(gateway) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=ask(), temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == SAID
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == SAID_TOKENS
    assert answer.model == MODEL


@pytest.mark.parametrize("gateway", [0, 1])
async def test_a_stream_has_one_id_one_role_and_one_finish(stage: Stage, gateway: int) -> None:
    async with stage.client(gateway) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ask(), temperature=0, stream=True
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert deltas[0].role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    # Nobody asked for it, so there is neither a chunk nor a field of it.
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


async def test_usage_comes_once_in_a_last_chunk_without_choices(client: Client) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=ask(),
        n=2,
        temperature=0.7,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *chunks, last = [chunk async for chunk in stream]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (37, 12)
    assert len({(chunk.id, chunk.created) for chunk in [*chunks, last]}) == 1
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for index in (0, 1):
        mine = [choice for choice in choices if choice.index == index]
        assert [bool(choice.delta.role) for choice in mine] == [True] + [False] * (len(mine) - 1)
        finishes = [choice.finish_reason for choice in mine]
        assert finishes == [None] * (len(mine) - 1) + ["length"]


async def test_two_choices_in_one_piece(client: Client) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=ask(), n=2, temperature=0.7, max_tokens=5
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.content for choice in answer.choices)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(client: Client, stream: bool) -> None:
    options: Any = {"temperature": 0, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    answer: Any = await client.chat.completions.create(
        model=MODEL, messages=ask(), stream=stream, **options
    )
    chunks = [chunk async for chunk in answer] if stream else [answer]
    logprobs = [choice.logprobs for chunk in chunks for choice in chunk.choices]
    tokens = [token for one in logprobs if one for token in one.content]
    assert "".join(token.token for token in tokens) == "The capital of"
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in tokens)


async def test_an_answer_is_parsed_by_its_schema(client: Client) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL, messages=ask("Paris, as JSON."), max_tokens=60, response_format=City
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City)
    assert parsed.city


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_tool_is_called(client: Client, stream: bool) -> None:
    asked: Any = {"model": MODEL, "messages": ask("How is the weather in Paris?")}
    asked |= {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    asked |= {"temperature": 0, "max_tokens": 60}
    if stream:
        # The SDK's own accumulator puts the deltas together.
        async with client.chat.completions.stream(**asked) as events:
            answer: Any = await events.get_final_completion()
    else:
        answer = await client.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert City.model_validate_json(call.function.arguments).city


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(client: Client, stream: bool) -> None:
    answer: Any = await client.completions.create(
        model=MODEL, prompt="One two three", temperature=0, max_tokens=6, stream=stream
    )
    chunks = [chunk async for chunk in answer] if stream else [answer]
    again = await client.completions.create(
        model=MODEL, prompt="One two three", temperature=0, max_tokens=6
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == again.choices[0].text
    assert chunks[-1].choices[0].finish_reason == again.choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("asked", "tokens"), [({}, real.DEFAULT_MAX_TOKENS), ({"max_tokens": 2000}, CEILING)]
)
async def test_default_and_ceiling_of_max_tokens(
    client: Client, asked: dict[str, int], tokens: int
) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=ask(), extra_body={"ignore_eos": True, **asked}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens
    assert answer.choices[0].finish_reason == "length"


async def test_sixteen_chats_at_once_are_all_right(stage: Stage) -> None:
    questions = [PARIS, "What is 2 + 2?", "Say hello.", "Name a colour."]

    async def answer(client: Client, question: str) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ask(question), temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with stage.client(0) as first, stage.client(1) as second:
        alone = [await answer(first, question) for question in questions]
        assert alone[0] == SAID
        asked = [(client, one) for one in questions for client in (first, second) * 2]
        answers = await asyncio.gather(*(answer(client, one) for client, one in asked))
    assert answers == [text for text in alone for _ in range(4)]


# --- refusals ---


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_are_the_sdks_own_types(client: Client, stream: bool) -> None:
    async def refused(**body: Any) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(
                **{"model": MODEL, "messages": ask(), "stream": stream, **body}
            )
        return caught.value

    too_long = await refused(messages=ask("one " * 2100))
    assert isinstance(too_long, openai.BadRequestError)
    assert "2048" in too_long.message
    for wrong in (0, -1, 10**9):
        error = await refused(max_tokens=wrong)
        assert isinstance(error, openai.BadRequestError)
        assert error.param == "max_tokens"
    unknown = await refused(model="gpt-4")
    assert isinstance(unknown, openai.NotFoundError)
    assert unknown.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as nowhere:
        await client.post("/nowhere", cast_to=object, body={"model": MODEL})
    assert nowhere.value.code == "unknown_url"


# --- leaving ---


async def left(stage: Stage, ids: set[str], *, made: float = CEILING) -> None:
    """Check that jobs whose clients have just left are cancelled and that nothing of them runs."""
    await stage.until_idle()
    jobs = await stage.ended(ids)
    assert {job.outcome for job in jobs.values()} == {"cancelled"}
    for job in jobs.values():
        assert job.usage is None or job.usage.completion_tokens < made


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_leaving_while_tokens_come(stage: Stage, stream: bool, reset: bool) -> None:
    before, load = await stage.job_ids(), await stage.load()
    wire = await stage.send({"messages": ask(), "stream": stream, **ENDLESS})
    ids = await stage.new_jobs(before, 1)
    await stage.until_generated(load.generated + 5)
    assert (await stage.load()).kv > stage.baseline
    wire.close(reset=reset)
    await left(stage, ids)
    (job,) = (await stage.ended(ids)).values()
    made = (await stage.load()).generated - load.generated
    # What was made before the client left is counted, read or not.
    assert job.usage is not None
    assert (job.usage.prompt_tokens, job.usage.completion_tokens) == (37, made)


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_leaving_in_prefill(stage: Stage, stream: bool, reset: bool) -> None:
    before, load = await stage.job_ids(), await stage.load()
    prompt = random.Random(repr((stream, reset))).choices(range(100, 40_000), k=1800)
    body = {"prompt": prompt, "stream": stream, **ENDLESS}
    wire = await stage.send(body, "/v1/completions")
    ids = await stage.new_jobs(before, 1)
    await stage.until_running(1)
    wire.close(reset=reset)
    await left(stage, ids, made=1)
    assert (await stage.load()).generated == load.generated


async def test_leaving_while_queued(stage: Stage) -> None:
    before = await stage.job_ids()
    body = {"messages": ask("Tell me a long story."), **ENDLESS}
    seated = [await stage.send({**body, "stream": True}) for _ in range(SEATS)]
    running = await stage.new_jobs(before, SEATS)
    await stage.until_running(SEATS)
    ways = [(stream, reset) for stream in (True, False) for reset in (True, False)]
    queued = [await stage.send({**body, "stream": stream}, gateway=1) for stream, _ in ways]
    ids = await stage.new_jobs(before | running, len(ways))
    for wire, (_, reset) in zip(queued, ways, strict=True):
        wire.close(reset=reset)
    jobs = await stage.ended(ids)
    assert [(job.outcome, job.attempts) for job in jobs.values()] == [("cancelled", 0)] * len(ways)
    assert (await stage.load()).running == SEATS
    for at, wire in enumerate(seated):
        wire.close(reset=at % 2 == 0)
    await left(stage, running)


async def test_fifty_clients_that_leave_leave_nothing(stage: Stage, client: Client) -> None:
    moments = random.Random(3)
    await stage.until_idle()
    connections = len(stage.server.command("CLIENT", "LIST").splitlines())
    before = await stage.job_ids()
    for number in range(50):
        body = {"messages": ask(f"Count to {number}."), "stream": number % 2 == 0, **ENDLESS}
        wire = await stage.send(body, gateway=number % 3 % 2)
        await asyncio.sleep(moments.uniform(0, 0.25))
        wire.close(reset=number % 5 == 0)
    await stage.until_idle()
    jobs = await stage.ended(await stage.job_ids() - before)
    assert Counter(job.outcome for job in jobs.values()).keys() == {"cancelled"}
    # What is reset at once may never have reached a gateway.
    assert len(jobs) >= 45
    await stage.inspector.check_ended_once(jobs)
    await stage.inspector.wait_idle([worker.name for worker in stage.pool.workers], timeout=3)
    for gateway in stage.pool.gateways:
        told = totals((await fetch(f"{gateway.url}/metrics"))[1].decode())
        assert told["headrace_gateway_open_streams"] == 0
        assert told["headrace_gateway_pending_cancels"] == 0
    assert len(stage.server.command("CLIENT", "LIST").splitlines()) <= connections + 8
    answer = await client.chat.completions.create(model=MODEL, messages=ask(), temperature=0)
    assert answer.choices[0].message.content == SAID


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_cancel_through_the_other_gateway(stage: Stage, stream: bool) -> None:
    before, load = await stage.job_ids(), await stage.load()
    wire = await stage.send({"messages": ask(), "stream": stream, **ENDLESS})
    (job_id,) = await stage.new_jobs(before, 1)
    await stage.until_generated(load.generated + 5)
    route = f"{stage.pool.gateways[1].url}/v1/jobs/{job_id}/cancel"
    response, raw = await fetch(route, b"")
    assert response.status == 200
    told = json.loads(raw)
    made = (await stage.load()).generated - load.generated
    assert told == {
        "id": job_id,
        "object": "job",
        "outcome": "cancelled_running",
        "ended": "cancelled",
        "usage": {"prompt_tokens": 37, "completion_tokens": made, "total_tokens": 37 + made},
    }
    assert 5 <= made < CEILING
    await stage.until_idle()
    again = json.loads((await fetch(route, b""))[1])
    assert again == {**told, "outcome": "already_finished"}
    answer = await read_head(wire)
    assert answer.status == (200 if stream else 499)
    if stream:
        events = await answer.all_events()
        assert events[-1].json()["error"]["code"] == "cancelled"
        assert answer.ending == "cut"
    wire.close()


async def test_a_deadline_frees_the_engine(stage: Stage, client: Client) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(
            model=MODEL,
            messages=ask("Tell me a long story."),
            extra_body=ENDLESS,
            extra_headers={"X-Request-Timeout": "1"},
        )
    assert caught.value.status_code == 504
    assert caught.value.code == "request_timeout"
    await stage.until_idle()


# --- metrics ---

GATEWAY_SERIES = [
    "headrace_gateway_requests_total",
    "headrace_gateway_time_to_first_token_seconds_count",
    "headrace_gateway_time_per_output_token_seconds_count",
    "headrace_gateway_request_duration_seconds_count",
    "headrace_gateway_open_streams",
    "headrace_gateway_ready_workers",
    "headrace_queue_depth",
]
WORKER_SERIES = [
    "headrace_worker_queue_wait_seconds_count",
    "headrace_worker_jobs_total",
    "headrace_worker_cancels_total",
    "headrace_worker_tokens_total",
    "headrace_worker_running_jobs",
    "headrace_worker_waiting_sequences",
    "headrace_worker_seats",
    "headrace_worker_kv_usage_ratio",
    "headrace_worker_frames_total",
    "headrace_worker_ready",
    "vllm:time_to_first_token_seconds_count",
]


async def test_metrics_tell_what_was_done(stage: Stage) -> None:
    _, raw = await fetch(f"{stage.pool.url}/metrics")
    told = totals(raw.decode())
    assert set(GATEWAY_SERIES) <= set(told)
    assert told["headrace_gateway_time_to_first_token_seconds_count"] > 0
    worker = await stage.samples()
    assert set(WORKER_SERIES) <= set(worker)
    assert worker["headrace_worker_seats"] == SEATS
    assert worker["headrace_worker_ready"] == 1
    assert worker["headrace_worker_cancels_total"] > 50
    # No label can be made up by a client, and none is as long as there are jobs.
    assert not [job_id for job_id in await stage.job_ids() if job_id in raw.decode()]
    assert "gpt-4" not in raw.decode()


# --- two models ---


async def test_both_models_are_listed_and_each_has_its_worker(
    stage: Stage, embedder: WorkerProcess, client: Client
) -> None:
    assert {model.id async for model in await client.models.list()} == {MODEL, EMBEDDER}
    answer, made = await asyncio.gather(
        client.chat.completions.create(model=MODEL, messages=ask(), temperature=0),
        client.embeddings.create(model=EMBEDDER, input=["Hello there", "Hi"]),
    )
    assert answer.choices[0].message.content == SAID
    assert [len(one.embedding) for one in made.data] == [576, 576]
    assert [one.index for one in made.data] == [0, 1]
    assert made.usage.prompt_tokens == 3


async def test_embeddings_are_the_same_as_floats_and_as_bytes(
    embedder: WorkerProcess, client: Client
) -> None:
    # The SDK asks for base64 unless told otherwise, and decodes it.
    texts = ["The cat sat.", "A cat was sitting.", "Quarterly tax forms"]
    packed = await client.embeddings.create(model=EMBEDDER, input=texts)
    plain = await client.embeddings.create(model=EMBEDDER, input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
        assert sum(number**2 for number in one.embedding) == pytest.approx(1, abs=1e-3)


async def test_a_model_that_does_not_chat_says_so(embedder: WorkerProcess, client: Client) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model=EMBEDDER, messages=ask())
    assert caught.value.status_code in (400, 404)
    with pytest.raises(openai.BadRequestError):
        await client.embeddings.create(model=EMBEDDER, input="one " * 600)


async def test_the_embedding_worker_leaves(stage: Stage, embedder: WorkerProcess) -> None:
    embedder.terminate()
    assert await embedder.wait(timeout=20) == 0
    await until(lambda: not embedder.family(), "no process left", timeout=2)


# --- the end ---


async def test_sigterm_lets_running_answers_finish(stage: Stage) -> None:
    (worker, *_) = stage.pool.workers
    load = await stage.load()
    body = {"model": MODEL, "messages": ask(), "ignore_eos": True, "max_tokens": 60}

    async def whole() -> tuple[str, int]:
        _, raw = await fetch(stage.pool.url + CHAT, body)
        answer = json.loads(raw)
        return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    async def streamed() -> tuple[str, int]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with open_response(stage.pool.url + CHAT, {**body, **options}) as response:
            events = await response.all_events()
        assert response.ending == "complete"
        assert events[-1].done
        *_, last, usage = (event.json() for event in events[:-1])
        return last["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]

    running = [asyncio.ensure_future(one) for one in (whole(), streamed(), streamed())]
    await stage.until_running(3)
    await stage.until_generated(load.generated + 9)
    assert len(worker.family()) >= 3
    worker.terminate()
    assert await asyncio.gather(*running) == [("length", 60)] * 3
    assert await worker.wait(timeout=20) == 0
    await until(lambda: not worker.family(), "no process left", timeout=2)


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_worker_there_is_a_503(stage: Stage, stream: bool) -> None:
    assert not [worker for worker in stage.pool.workers if worker.running]
    gateway = stage.pool.add_gateway(no_worker_wait_s=0)
    await gateway.wait_ready()
    async with stage.client(-1) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model=MODEL, messages=ask(), stream=stream)
    assert caught.value.status_code == 503
    assert caught.value.code == "no_worker"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
