"""What one request may ask for: beyond it the parameter is named, within it nothing is touched."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gateway import body, limits
from gateway.errors import AboveLimit
from gateway.settings import GatewaySettings
from shared.errors import InvalidRequest

SETTINGS = GatewaySettings()
MESSAGE = {"role": "user", "content": "Hi"}


def _deep(name: str, depth: int) -> bytes:
    return b'{"model": "m", "%s": ' % name.encode() + b"[" * depth + b"]" * depth + b"}"


COSTLY: dict[str, tuple[str, dict[str, Any] | bytes]] = {
    "choices": ("n", {"n": 10**6}),
    "choices as a text": ("n", {"n": "1000000"}),
    "choices as a fraction": ("n", {"n": 1e6}),
    "choices beyond floats": ("n", {"n": 10**400}),
    "best of": ("best_of", {"best_of": 129}),
    "choices of many prompts": ("n", {"n": 100, "prompt": ["x"] * 100}),
    "logprobs": ("logprobs", {"logprobs": 10**5}),
    "top logprobs": ("top_logprobs", {"logprobs": True, "top_logprobs": 10**5}),
    "the prompt's logprobs": ("prompt_logprobs", {"prompt_logprobs": 10**5}),
    "stop": ("stop", {"stop": ["x"] * 10_000}),
    "Anthropic's stop": ("stop_sequences", {"stop_sequences": ["x"] * 10_000}),
    "stop tokens": ("stop_token_ids", {"stop_token_ids": [1] * 10_000}),
    "bad words": ("bad_words", {"bad_words": ["x"] * 10_000}),
    "biases": ("logit_bias", {"logit_bias": {str(i): 1 for i in range(100_000)}}),
    "messages": ("messages", {"messages": [MESSAGE] * 5000}),
    "parts": ("messages", {"messages": [{"content": [{"type": "text", "text": "x"}] * 5000}]}),
    "tools": ("tools", {"tools": [{}] * 5000}),
    "a tool": ("tools", {"tools": [{"parameters": {"description": "x" * 300_000}}]}),
    "prompts": ("prompt", {"prompt": ["x"] * 5000}),
    "prompts in tokens": ("prompt", {"prompt": [[1, 2]] * 5000}),
    "inputs": ("input", {"input": ["x"] * 5000}),
    "documents": ("documents", {"documents": ["x"] * 5000}),
    "pairs": ("text_2", {"text_2": ["x"] * 5000}),
    "a schema": ("response_format", {"response_format": {"x": "y" * 300_000}}),
    "a regex": ("structured_outputs", {"structured_outputs": {"regex": "(a+)+" * 60_000}}),
    "a grammar": ("guided_grammar", {"guided_grammar": "x" * 300_000}),
    "a deep schema": ("response_format", _deep("response_format", 101)),
    "far too deep": ("tools", _deep("tools", 10_000)),
    "a deep field of no name": ("other", _deep("other", 500)),
    "values": ("prompt", b'{"prompt": [' + b"1," * 1_000_000 + b"1]}"),
    "a number beyond floats": ("temperature", b'{"x": "1e400", "temperature": 1e400}'),
    "the same, nested": ("logit_bias", b'{"logit_bias": {"5": -1.5E+0400}}'),
    "5,000 digits": ("seed", b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}"),
    "said twice": ("n", b'{"n": 1, "n": 1000000}'),
    "said in escapes": ("n", rb'{"\u006e": 1000000}'),
}


def _raw(made: dict[str, Any] | bytes) -> bytes:
    return made if isinstance(made, bytes) else json.dumps({"model": "m", **made}).encode()


@pytest.mark.parametrize("name", COSTLY)
async def test_costly_requests_are_refused_by_name(name: str) -> None:
    param, made = COSTLY[name]
    with pytest.raises(InvalidRequest) as caught:
        await body.checked(_raw(made), SETTINGS)
    assert (caught.value.status, caught.value.param) == (400, param)


HONEST: dict[str, dict[str, Any] | bytes] = {
    "a chat": {"messages": [MESSAGE] * 4096, "n": 128, "stop": ["x"] * 256, "top_logprobs": 20},
    "a long prompt in tokens": {"prompt": [1] * 200_000, "n": 128},
    "a batch": {"input": [[1] * 100] * 2048},
    "a picture": {"messages": [{"content": [{"image_url": {"url": "data:," + "9e999" * 50_000}}]}]},
    "brackets in a text": {"messages": [{"content": '[{"\\' * 50_000}]},
    "commas in a text": {"prompt": "," * 1_500_000},
    "of wrong types": {
        **{"n": [1], "stop": 5, "messages": "x", "prompt": None, "tools": {}, "logit_bias": "x"},
        **{"top_logprobs": {}, "text": 1, "input": {"a": 1}, "logprobs": "all"},
    },
    "messages that are none": {"messages": [1] * 4096},
    "null": {"n": None, "messages": None, "response_format": None},
    "less than none": {"n": -1, "top_logprobs": -1, "prompt_logprobs": -1},
    "as deep as may be": _deep("response_format", 99),
    "numbers that are large": b'{"temperature": 1e308, "seed": -12345678901234567890, "x": 1e-999}',
    "a long number": b'{"seed": ' + b"1" * 4300 + b"}",
}


@pytest.mark.parametrize("name", HONEST)
async def test_within_the_limits_nothing_is_judged(name: str) -> None:
    await body.checked(_raw(HONEST[name]), SETTINGS)


def test_limits_are_settings() -> None:
    raw = _raw({"n": 5})
    limits.check(raw, GatewaySettings(max_choices=5))
    with pytest.raises(AboveLimit):
        limits.check(raw, GatewaySettings(max_choices=4))


HOSTILE = {
    "long numbers": b'{"a": [' + (b"1" * 4290 + b",") * 2000 + b"0]}",
    "long numbers in a text": b'{"a": "' + (b"1" * 4299 + b" ") * 2000 + b'"}',
    "fractions": b'{"a": [' + b"0.25," * 900_000 + b"0]}",
    "empty lists": b'{"a": [' + b"[]," * 3_000_000 + b"[]]}",
    "towers": b'{"a": [' + (b"[" * 90 + b"]" * 90 + b",") * 10_000 + b"[]]}",
    "quotes": b'{"a": "' + rb"\"\\" * 2_000_000 + b'"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_looking_takes_time_by_the_size_alone(name: str) -> None:
    """Made to be quadratic, each of these would take minutes."""
    start = time.process_time()
    try:
        body.decode(HOSTILE[name])
        limits.check(HOSTILE[name], SETTINGS)
    except AboveLimit:
        pass
    assert time.process_time() - start < 5
