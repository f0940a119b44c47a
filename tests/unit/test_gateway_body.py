"""What the gateway reads of a body, and what it refuses."""

from __future__ import annotations

import json
import time

import pytest

from gateway import body
from shared.errors import InvalidRequest

BAD = {
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "text": b'"x"',
    "number": b"5",
    "truncated": b'{"model": "tiny"',
    "trailing": b'{"model": "tiny"} x',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "invalid UTF-8 key": b'{"\xff": 1}',
    "UTF-16": '{"model": "tiny"}'.encode("utf-16"),
    "5,000 digits": b'{"seed": ' + b"1" * 5000 + b"}",
    "5,000 digits as model": b'{"model": ' + b"1" * 5000 + b"}",
    "100,000 lists": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "100,000 objects": b'{"x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "NaN": b'{"temperature": NaN}',
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies_are_refused_in_plain_words(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body.decode(BAD[name])
    assert caught.value.status == 400
    assert not any(word in caught.value.message for word in ("Traceback", "<class", "b'", "0x"))


def test_digits_in_a_text_are_no_number() -> None:
    fields = body.decode(json.dumps({"model": "tiny", "prompt": "3" * 20_000}).encode())
    assert fields.model == "tiny"


@pytest.mark.parametrize("digits", [4300, 4301])
@pytest.mark.parametrize("offset", [0, 1, 17, 4299, 4300, 4301])
def test_numbers_are_refused_as_the_worker_would(digits: int, offset: int) -> None:
    raw = b'{"p": "' + b"x" * offset + b'", "seed": ' + b"7" * digits + b"}"
    try:
        json.loads(raw)
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == (digits == 4300)
    if accepted:
        body.decode(raw)
    else:
        with pytest.raises(InvalidRequest):
            body.decode(raw)


def test_large_bodies_are_decoded_fast() -> None:
    raw = json.dumps({"model": "tiny", "prompt": "1234567 " * 500_000}).encode()
    start = time.process_time()
    body.decode(raw)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("tier", "lane"),
    [
        ("flex", "batch"),
        ("batch", "batch"),
        ("default", "interactive"),
        ("priority", "interactive"),
        ("auto", None),
        (None, None),
        (7, None),
        (["flex"], None),
    ],
)
def test_service_tier_chooses_the_lane(tier: object, lane: str | None) -> None:
    assert body.decode(json.dumps({"service_tier": tier}).encode()).lane == lane


@pytest.mark.parametrize(
    ("value", "asks"),
    [
        (True, True),
        ("true", True),
        (1, True),
        (False, False),
        (None, False),
        ("no", False),
        ([1], False),
        ({}, False),
    ],
)
def test_stream_is_understood_as_the_worker_does(value: object, asks: bool) -> None:
    assert body.decode(json.dumps({"stream": value}).encode()).asks_stream is asks


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({}, False),
        ({"max_tokens": None}, False),
        ({"max_tokens": 5}, True),
        ({"max_completion_tokens": 5}, True),
        ({"max_output_tokens": "x"}, True),
    ],
)
def test_null_is_absent(fields: dict[str, object], given: bool) -> None:
    assert body.decode(json.dumps(fields).encode()).max_tokens_given is given


@pytest.mark.parametrize(
    ("n", "sequences"), [(None, 1), (3, 3), (0, 1), (-1, 1), ("3", 1), (True, 1), (1e9, 1)]
)
def test_sequences(n: object, sequences: int) -> None:
    assert body.decode(json.dumps({"n": n}).encode()).sequences == sequences


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"background": "true"},
        {"previous_response_id": "resp_1"},
        {"conversation": {"id": "conv_1"}},
    ],
)
def test_stored_state_is_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body.refuse_stored_state(body.decode(json.dumps(fields).encode()))
    assert caught.value.param == next(iter(fields))
