"""Which requests can be continued, by what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.continuation import ROWS
from worker.engine.vllm_resume_requests import continuable

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES, "stream": True, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "Hi", "stream": True, **fields}).encode()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_tested_kind_can_be(row: Any) -> None:
    assert continuable(row.path, json.dumps(row.body).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"n": None},
        {"logprobs": False, "top_logprobs": 0},
        {"prompt_logprobs": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "tool", "content": "4", "tool_call_id": "c"},
            ]
        },
        {"user": "u", "service_tier": "flex", "metadata": {"a": "b"}, "seed": 3},
    ],
)
def test_chats_that_can_be(fields: dict[str, Any]) -> None:
    assert continuable(CHAT, chat(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"stream": None},
        {"stream": 1},
        {"n": 2},
        {"logprobs": True},
        {"top_logprobs": 2},
        {"prompt_logprobs": 0},
        {"use_beam_search": True},
        {"echo": True},
        {"thinking_token_budget": 9},
        {"vllm_xargs": {"a": 1}},
        {"kv_transfer_params": {}},
        {"repetition_detection": {"max_pattern_size": 3}},
        {"a_field_of_tomorrow": 1},
        {"messages": None},
        {"messages": "Hi"},
        {"messages": ["Hi"]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": ["Hi"]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}
            ]
        },
    ],
)
def test_chats_that_can_not(fields: dict[str, Any]) -> None:
    assert not continuable(CHAT, chat(**fields))


@pytest.mark.parametrize("prompt", ["Hi", [1, 2], ["Hi"], [[1, 2]]])
def test_completions_of_one_prompt_can_be(prompt: Any) -> None:
    assert continuable(COMPLETIONS, completion(prompt=prompt))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["Hi", "Ho"]},
        {"prompt": [[1], [2]]},
        {"prompt": None},
        {"prompt": None, "prompt_embeds": "AAAA"},
        {"logprobs": 0},
        {"logprobs": 3},
        {"echo": True},
        {"suffix": "!"},
        {"best_of": 2},
    ],
)
def test_completions_that_can_not(fields: dict[str, Any]) -> None:
    assert not continuable(COMPLETIONS, completion(**fields))


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings", "/", ""])
def test_other_endpoints_can_not(path: str) -> None:
    assert not continuable(path, chat())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"stream"', b"\xff", b"\x80{}"])
def test_what_is_no_request_can_not(body: bytes) -> None:
    assert not continuable(CHAT, body)


def test_the_documentation_lists_the_tested_kinds() -> None:
    page = (Path(__file__).parents[2] / "docs/continuation.md").read_text()
    lines = page.split("| What |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == [row.name for row in ROWS]
