"""Joining a continued answer to what was sent: nothing twice, nothing changed, or an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.errors import Diverged
from worker.resume import Past, Splice


def event(content: str, *, created: int = 100, **fields: Any) -> bytes:
    told = {"id": "chatcmpl-j1", "created": created, "choices": [{"delta": {"content": content}}]}
    return sse(told | fields)


def tool(call_id: str, created: int, arguments: str = "{", **fields: Any) -> bytes:
    call = {"id": call_id, "index": 0, "function": {"name": "f", "arguments": arguments}}
    return sse({"created": created, "choices": [{"delta": {"tool_calls": [call]}}]} | fields)


def sse(fields: object) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def splice(*events: bytes) -> Splice:
    past = Past()
    past.events = list(events)
    return Splice(past)


def test_what_was_sent_is_left_out_and_the_rest_has_the_first_attempts_time() -> None:
    joined = splice(event("a"), event("b"))
    assert joined.pass_on(event("a", created=107)) is None
    assert joined.pass_on(event("b", created=107)) is None
    assert joined.pass_on(event("c", created=107)) == event("c")
    assert joined.pass_on(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


def test_a_text_that_looks_like_a_field_stays_as_it_is() -> None:
    joined = splice(event("a"))
    assert joined.pass_on(event("a", created=107)) is None
    text = '"created":107'
    assert joined.pass_on(event(text, created=107)) == event(text)


@pytest.mark.parametrize("own", ["chatcmpl-tool-9", "call_0_ab", "Ab3Ab3Ab3"])
def test_a_tool_calls_id_is_the_first_attempts_wherever_it_is_said(own: str) -> None:
    joined = splice(tool("known", 100))
    assert joined.pass_on(tool(own, 107)) is None
    assert joined.pass_on(tool(own, 107, "}")) == tool("known", 100, "}")


def test_a_tool_call_that_had_not_begun_has_its_own_id() -> None:
    joined = splice(event(""))
    assert joined.pass_on(event("", created=107)) is None
    assert joined.pass_on(tool("new", 107)) == tool("new", 100)


def test_the_fingerprint_is_the_first_attempts() -> None:
    joined = splice(event("a", system_fingerprint="one"))
    assert joined.pass_on(event("a", system_fingerprint="two")) is None
    assert joined.pass_on(event("b", system_fingerprint="two")) == event(
        "b", system_fingerprint="one"
    )


def test_how_an_attempt_went_is_no_difference() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    joined = splice(sse({"usage": usage | {"prompt_tokens_details": {"cached_tokens": 4}}}))
    assert joined.pass_on(sse({"usage": usage, "metrics": {"ttft": 1}})) is None
    assert joined.pass_on(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "other",
    [
        event("b"),
        event("a", id="chatcmpl-j2"),
        event("a", usage={"prompt_tokens": 1}),
        sse({"created": 100}),
        sse([]),
        b"data: [DONE]\n\n",
        b"data: {",
    ],
)
def test_anything_else_that_differs_ends_it(other: bytes) -> None:
    with pytest.raises(Diverged):
        splice(event("a")).pass_on(other)


def test_a_part_that_is_no_event_must_be_the_same() -> None:
    joined = splice(b": ping\n\n", b"data: [DONE]\n\n")
    assert joined.pass_on(b": ping\n\n") is None
    with pytest.raises(Diverged):
        joined.pass_on(event("a"))
