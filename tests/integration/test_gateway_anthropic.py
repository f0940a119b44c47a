"""Errors in the form that Anthropic's clients read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from gateway.error_forms import ANTHROPIC
from shared.errors import BY_CODE
from tests.support import sse
from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, pool
from tests.support.valkey import ValkeyServer

WHOLE = {"model": "tiny", "max_tokens": 5, "messages": []}
STREAM = {**WHOLE, "stream": True}

Pair = tuple[RunningGateway, FakeWorker]


@pytest.fixture
async def pair(valkey: ValkeyServer) -> AsyncIterator[Pair]:
    async with pool(valkey.url, root_path="/llm", first_byte_grace_s=0.2) as both:
        yield both


def check_error(raw: bytes, kind: str) -> None:
    """Check an error's whole form."""
    answer = json.loads(raw)
    assert answer["type"] == "error"
    assert set(answer) == {"type", "error"}
    assert set(answer["error"]) == {"type", "message"}
    assert answer["error"]["type"] == kind
    assert answer["error"]["message"]


async def test_refusals(pair: Pair) -> None:
    gateway, _ = pair
    refused = [
        (400, "invalid_request_error", b"[]", {}),
        (404, "not_found_error", {**WHOLE, "model": "other"}, {}),
        (413, "request_too_large", b"", {"content-length": "99999999999"}),
        (415, "invalid_request_error", b"x", {"content-type": "text/plain"}),
        (400, "invalid_request_error", WHOLE, {"X-Request-Timeout": "soon"}),
    ]
    for path in ("/v1/messages", "/llm/v1/messages/", "/v1/messages/count_tokens"):
        for status, kind, body, headers in refused:
            response, raw = await sse.fetch(gateway.url + path, body, headers=headers)
            assert response.status == status
            assert response.headers["x-should-retry"] == "false"
            check_error(raw, kind)
        response, raw = await sse.fetch(gateway.url + path)
        assert response.status == 405
        check_error(raw, "invalid_request_error")
    gateway.gateway.submitter.draining = True
    response, raw = await sse.fetch(f"{gateway.url}/v1/messages", WHOLE)
    assert (response.status, response.headers["retry-after"]) == (503, "1")
    check_error(raw, "overloaded_error")
    _, raw = await sse.fetch(gateway.chat, WHOLE)
    assert json.loads(raw)["error"]["code"] == "draining"


async def test_what_fails_before_the_first_byte(pair: Pair) -> None:
    gateway, worker = pair
    answering = asyncio.ensure_future(sse.fetch(f"{gateway.url}/v1/messages", WHOLE))
    await (await worker.take()).end("failed", code="engine_error")
    response, raw = await answering
    assert response.status == 500
    check_error(raw, "api_error")


@pytest.mark.parametrize("how", ["failed", "refused"])
async def test_what_fails_in_a_stream(pair: Pair, how: str) -> None:
    gateway, worker = pair
    async with sse.open_response(f"{gateway.url}/v1/messages", STREAM) as response:
        assert response.status == 200  # After the grace: nobody has claimed it.
        job = await worker.take()
        if how == "failed":
            await job.head()
            await job.items((b'event: message_start\ndata: {"type":"message_start"}\n\n',))
            await job.end("failed", code="engine_error")
        else:
            error = {"type": "invalid_request_error", "message": "no"}
            await job.whole(json.dumps({"type": "error", "error": error}).encode(), 400)
        events = [one for one in await response.all_events() if one.comment is None]
        assert response.ending == "cut"
    assert events[-1].event == "error"
    assert events[-1].data is not None
    check_error(
        events[-1].data.encode(), "api_error" if how == "failed" else "invalid_request_error"
    )


def test_every_error_has_one_of_anthropics_types() -> None:
    known = {
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "timeout_error",
        "overloaded_error",
    }
    for kind in BY_CODE.values():
        body = ANTHROPIC.body(kind("said"))
        assert body["error"]["message"] == "said"
        assert body["error"]["type"] in known
