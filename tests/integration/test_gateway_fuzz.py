"""Requests made up at random, well and badly formed: no 500, no hang, always an error of the API.

The seed is fixed, so that a run is the same each time; a failure names the request's number, and
`Made(number)` makes the same request again.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.endpoints import ENDPOINTS
from tests.faults.aftermath import Inspector
from tests.support import sse
from tests.support.processes import Pool, brief_pool
from tests.support.valkey import ValkeyServer
from tests.unit.test_gateway_form import upload

REQUESTS = 2000
AT_ONCE = 12
PATIENCE_S = 30.0
"""No answer may take so long, on a busy machine either: the slowest takes the engine 16 steps."""

MODEL = "simulated"
OWN = [
    *("/v1/models", "/v1/models/x", "/version", "/health", "/healthz", "/readyz", "/metrics"),
    *(f"/v1/jobs/{'0' * 32}", f"/v1/jobs/{'0' * 32}/stream?after=x", "/v1/responses/resp_1"),
]
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "QUERY", "post")
TAILS = (
    "/",
    "//",
    "/..",
    "/%00",
    "/%ff",
    "?x=" + "y" * 500,
    "?%",
    "/\u00e9",
    "#x",
    "/" + "z" * 9000,
)

CHAT = "/v1/chat/completions"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "One two", "max_tokens": 3},
    "/v1/embeddings": {"input": ["One", "two"]},
    "/tokenize": {"prompt": "One two"},
    "/detokenize": {"tokens": [72, 105]},
}
"""What the simulated engine answers."""
FIELDS = (
    "model messages prompt input tokens stream stream_options n best_of max_tokens "
    "max_completion_tokens max_output_tokens temperature top_p stop seed logprobs top_logprobs "
    "logit_bias echo tools tool_choice response_format service_tier user background store "
    "previous_response_id conversation encoding_format dimensions return_token_strs metadata "
    "priority ignore_eos min_tokens documents query text_1 text_2"
).split()
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, 1e308, -1e-308),
    *(float("nan"), float("inf"), "", "x", "true", "5", "\0", "\ud800", "\U0001f600", "e\u0301"),
    *("x" * 20_000, [], {}, [[]], [None], [1, "x", None], {"": {}}, {"x": {"y": [1]}}, [0] * 3000),
    *(["a"] * 300, [{"role": "user"}], [{"role": 7, "content": {}}], {"include_usage": "x"}),
    *("flex", "batch", MODEL, "no-such-model", {"type": "json_schema"}, [{"type": "function"}]),
]
HEADERS = {
    "content-type": ["text/plain", "application/json;charset=x", "application/x+json", ";", "\xff"],
    "content-encoding": ["gzip", "x"],
    "accept": ["text/event-stream", "application/xml", "*/*;q=0"],
    "accept-encoding": ["gzip, br", "identity;q=0"],
    "x-request-timeout": ["5", "0", "-1", "nan", "inf", "1e400", "x", "0.000001"],
    "x-stream-resumable": ["true", "TRUE", "x", ""],
    "x-on-disconnect": ["cancel", "continue", "grace=1", "grace=x", "grace=", "=", "grace=1e999"],
    "x-failover": ["error", "continue", "x"],
    "idempotency-key": ["a", "b", "", "x" * 256, "with space", "\xe9"],
    "x-request-id": ["mine", "", "x" * 300, "a b", "\xff"],
    "last-event-id": ["3", "x", "-1", "9" * 30],
    "authorization": ["Bearer x", "Bearer", "Basic \xff", ""],
    "origin": ["http://x", "null", "\xff"],
    "expect": ["100-continue", "x"],
    "connection": ["close", "keep-alive, x"],
    "cookie": ["a=b", "x" * 3000],
    "x-forwarded-for": ["1.1.1.1, x", ""],
    "traceparent": ["x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"],
    "x-long": ["y" * 8000, "y" * 70_000],
}


class Made:
    """A request, the same for the same number."""

    def __init__(self, number: int) -> None:
        dice = random.Random(number)
        self.method = "POST" if dice.random() < 0.9 else dice.choice(METHODS)
        self.path = _path(dice)
        if dice.random() < 0.06:
            self.path += dice.choice(TAILS)
        self.headers: dict[str, str] = {}
        self.body: bytes | None = _body(dice, self.path)
        if "audio" in self.path and dice.random() < 0.9:
            self.body, self.headers["content-type"] = _form(dice)
        if self.method not in ("POST", "PUT", "PATCH", "post"):
            self.body = None
        for name in dice.sample(sorted(HEADERS), dice.choice((0, 0, 1, 2, 4))):
            self.headers[name] = dice.choice(HEADERS[name])

    def __repr__(self) -> str:
        body = self.body or b""
        return f"{self.method} {self.path[:80]} {str(self.headers)[:300]} {body[:300]!r}"


def _path(dice: random.Random) -> str:
    sort = dice.random()
    if sort < 0.6:
        return dice.choice(sorted(BASES))
    return dice.choice(OWN) if sort > 0.9 else dice.choice(ENDPOINTS).path


def _body(dice: random.Random, path: str) -> bytes:
    fields = {"model": MODEL, **BASES.get(path, BASES[CHAT])}
    if dice.random() < 0.4:
        fields["stream"] = True
    for name in dice.sample(FIELDS, dice.choice((0, 1, 1, 2, 4))):
        fields[name] = dice.choice(VALUES)
    body = bytearray(json.dumps(fields, ensure_ascii=dice.random() < 0.5).encode(errors="replace"))
    if dice.random() < 0.2:
        _spoil(dice, body)
    return bytes(body)


def _form(dice: random.Random) -> tuple[bytes, str]:
    names = dice.sample(FIELDS, 2)
    fields = {"model": MODEL, **{name: str(dice.choice(VALUES))[:5000] for name in names}}
    fields = {name: text.encode(errors="replace").decode() for name, text in fields.items()}
    content, sent = upload(fields, dice.randbytes(100))
    body = bytearray(content)
    if dice.random() < 0.5:
        _spoil(dice, body)
    return bytes(body), sent


def _spoil(dice: random.Random, body: bytearray) -> None:
    """Cut, overwrite or add bytes."""
    at = dice.randrange(len(body))
    how = dice.randrange(4)
    if how == 0:
        del body[at:]
    elif how == 1:
        body[at] = dice.randrange(256)
    elif how == 2:
        body[at:at] = dice.randbytes(dice.choice((1, 50)))
    else:
        body[at:at] = b'{"x":[' * dice.choice((1, 2000))


@pytest.fixture
async def pool(own_valkey: ValkeyServer) -> AsyncIterator[Pool]:
    async with brief_pool(own_valkey.url, MODEL) as started:
        yield started


async def test_whatever_is_asked_there_is_a_fitting_answer(
    pool: Pool, own_valkey: ValkeyServer
) -> None:
    numbers = iter(range(REQUESTS))
    told: Counter[int] = Counter()

    async def ask() -> None:
        for number in numbers:
            made = Made(number)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    told[await _asked(pool.url, made)] += 1
            except BaseException as error:
                error.add_note(f"request {number}: {made}")
                raise

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask())

    # They were neither all refused for one reason nor all let through.
    assert told[200] > REQUESTS / 10
    assert {200, 400, 404, 405, 409, 415, 431} <= set(told)
    await _check_sound(pool, own_valkey)


async def _asked(url: str, made: Made) -> int:
    """Make a request; check its answer's form and return its status."""
    request = sse.request_bytes(
        f"{url}/", made.body, method=made.method, headers=made.headers
    ).replace(b" / ", b" " + made.path.encode() + b" ", 1)
    wire = await sse.connect(url)
    try:
        await wire.send(request)
        answer = await sse.read_head(wire)
        content_type = answer.headers.get("content-type", "")
        if content_type.startswith("text/event-stream"):
            _check_events([event async for event in answer.events()], answer)
            return answer.status
        raw = await answer.body()
        assert answer.ending == "complete"
    finally:
        wire.close()
    if answer.status >= 400:
        _check_refusal(answer.status, json.loads(raw), made)
    elif "json" in content_type:
        json.loads(raw)
    return answer.status


def _check_events(events: list[sse.Event], answer: sse.Response) -> None:
    assert answer.status == 200
    assert answer.ending == "complete"
    *chunks, last = [event for event in events if event.data is not None]
    assert last.done, last
    assert all("choices" in chunk.json() for chunk in chunks)


def _check_refusal(status: int, body: Any, made: Made) -> None:
    """Check that an error is OpenAI's or Anthropic's, and one that the request has earned."""
    if made.path == "/readyz":
        return
    error = body["error"]
    assert isinstance(error["message"], str), error
    assert error["message"], error
    if made.path.startswith("/v1/messages") and "type" in body:
        assert body == {"type": "error", "error": {"type": error["type"], **error}}, body
    else:
        assert list(body) == ["error"], body
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["param"] is None or isinstance(error["param"], str), error
        assert error["code"], error
    hurried = "x-request-timeout" in made.headers and status == 504
    assert 400 <= status < 500 or hurried, (status, error)


async def _check_sound(pool: Pool, server: ValkeyServer) -> None:
    """Check that nothing of it runs on, and that the pool serves as before."""
    for process in pool.processes:
        process.check_running()
    inspector = Inspector(server.url)
    await inspector.wait_idle([worker.name for worker in pool.workers], timeout=20)
    await inspector.close()
    _, raw = await sse.fetch(f"{pool.url}/metrics")
    assert b"\nheadrace_gateway_open_streams 0.0\n" in raw
    assert "Traceback" not in pool.gateways[0].log
    response, _ = await sse.fetch(pool.url + CHAT, {"model": MODEL, **BASES[CHAT]})
    assert response.status == 200
