"""A pool answers what `vllm serve` answers: status, type, body and events, byte for byte.

Ids and times aside, for which anything of the same form will do. Where the gateway answers by
itself, the request says so and why (`BY_DESIGN`); `docs/api.md` lists these too.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from tests.e2e.parity_requests import (
    ANSWERED,
    BY_DESIGN,
    CLASSIFYING,
    EMBEDDING,
    REFUSED,
    Asked,
)
from tests.support import sse
from tests.support import vllm as real
from tests.support.side_by_side import Sides, running_sides
from tests.support.valkey import ValkeyServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed"),
    pytest.mark.skipif(not real.MODEL.exists(), reason="no model: python compose/model.py"),
]

# What was computed for one side must not spare the other the same work: sums would differ.
ARGS = [*real.ARGS, "--no-enable-prefix-caching"]
CHATS = [*ARGS, "--enable-auto-tool-choice", "--tool-call-parser", "pythonic"]
POOLS = [*ARGS, "--runner", "pooling", "--convert"]

_IDS = re.compile(rb'("\w*id":\s*"(?:[a-z]+[-_])*)[0-9A-Za-z-]{8,}(?:_\d+)?"')
_TIMES = re.compile(rb'("(?:created|created_at|completed_at)":\s*)\d+(?:\.\d+)?')
_CHOICE = re.compile(rb'"index":\s*(\d+)')
_TRIES = 3
"""vLLM joins what two steps made into one event where its reader is late, on either side."""


WITH_MARKS = [one if one.quick else pytest.param(one, marks=pytest.mark.slow) for one in ANSWERED]


class Answer(NamedTuple):
    """What must be the same."""

    status: int
    content_type: str | None
    ending: str | None
    said: list[bytes]
    """The body, or a stream's events."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sides(valkey: ValkeyServer) -> AsyncIterator[Sides]:
    async with running_sides(valkey.url, *CHATS) as started:
        yield started


async def answer(url: str, asked: Asked) -> Answer:
    """Ask one of the sides."""
    options: dict[str, Any] = {"method": asked.method, "headers": asked.headers}
    async with sse.open_response(url + asked.path, asked.body, **options) as response:
        body = await response.body()
    content_type = response.headers.get("content-type")
    events = (content_type or "").startswith("text/event-stream")
    parts = body.split(b"\n\n") if events else [body]
    if asked.interleaved:
        parts.sort(key=_choice)
    said = [_TIMES.sub(rb"\g<1>0", _IDS.sub(rb'\1_"', part)) for part in parts]
    return Answer(response.status, content_type, response.ending, said)


def _choice(event: bytes) -> int:
    """Return which choice an event is of; the last events are of none."""
    found = _CHOICE.search(event)
    return int(found[1]) if found else 1 << 30


async def compare(sides: Sides, asked: Asked) -> None:
    """Check that both sides answer the same, and as expected."""
    for left in reversed(range(_TRIES)):
        theirs, ours = await answer(sides.vllm, asked), await answer(sides.pool, asked)
        if theirs == ours or len(theirs.said) == 1 or left == 0:
            break
    assert theirs.status == asked.status, theirs
    assert ours == theirs
    if asked.streamed and ours.status == 200:
        assert ours.content_type == "text/event-stream; charset=utf-8"
        assert len(ours.said) > 2


async def test_there_are_enough_of_them() -> None:
    everything = [*ANSWERED, *REFUSED, *BY_DESIGN, *EMBEDDING, *CLASSIFYING]
    assert len(everything) > 120
    assert len(set(map(str, [*ANSWERED, *REFUSED, *BY_DESIGN]))) >= 100


@pytest.mark.parametrize("asked", WITH_MARKS, ids=str)
async def test_answers_are_the_same(sides: Sides, asked: Asked) -> None:
    await compare(sides, asked)


@pytest.mark.parametrize("asked", REFUSED, ids=str)
async def test_refusals_are_the_same(sides: Sides, asked: Asked) -> None:
    await compare(sides, asked)


@pytest.mark.parametrize("asked", BY_DESIGN, ids=str)
async def test_what_differs_by_design_is_said_in_openais_form(sides: Sides, asked: Asked) -> None:
    theirs, ours = await answer(sides.vllm, asked), await answer(sides.pool, asked)
    assert (theirs.status, ours.status) == (asked.status, asked.ours)
    assert asked.why
    if ours.status < 400:
        return
    assert ours.content_type == "application/json"
    (error,) = json.loads(ours.said[0]).values()
    assert set(error) == {"message", "type", "param", "code"}


async def test_models_are_the_same_but_for_what_is_the_servers_own(sides: Sides) -> None:
    asked = Asked("models", "/v1/models", None, method="GET")
    cards = [
        json.loads((await answer(url, asked)).said[0])["data"] for url in (sides.vllm, sides.pool)
    ]
    for told in cards:
        (card,) = told
        for name in ("owned_by", "root", "permission", "created"):
            card.pop(name, None)
    assert cards[0] == cards[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "requests"),
    [("embed", EMBEDDING), ("classify", CLASSIFYING)],
    ids=("embed", "classify"),
)
async def test_pooling_models_are_the_same(
    valkey: ValkeyServer, kind: str, requests: list[Asked]
) -> None:
    args = [*POOLS, kind]
    if kind == "classify":  # Its head was never trained: any numbers will do.
        args += ["--hf-overrides", '{"num_labels": 3}', "--load-format", "dummy"]
    failed = []
    async with running_sides(valkey.url, *args) as sides:
        for asked in requests:
            try:
                await compare(sides, asked)
            except AssertionError as error:
                failed.append(f"{asked}: {error}")
    assert not failed, "\n".join(failed)
