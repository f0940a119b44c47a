"""Answers that are cut and continued: what is asked, and how one engine plays both workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.protocol import Delta
from tests.support.asgi import AppCall
from tests.support.vllm import NAME
from worker.engine.interface import Call, Message
from worker.engine.vllm import VllmEngine
from worker.resume import Past, Splice

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
STORY = "Tell me a short story about a fox."


@dataclass(frozen=True)
class Row:
    """A kind of request whose answer can be continued."""

    name: str
    """As the table in docs/continuation.md calls it."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    says: str = STORY
    path: str = CHAT
    tokens: int = 20

    @property
    def body(self) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt": self.says}
        if self.path == CHAT:
            asked = {"messages": [{"role": "user", "content": self.says}]}
        given = {"model": NAME, "stream": True, "temperature": 0, "max_tokens": self.tokens}
        return {**given, **asked, **self.fields}


ROWS = [
    Row("chat"),
    Row(
        "tool call, `tool_choice: required`",
        {"tools": [WEATHER], "tool_choice": "required"},
        tokens=32,
    ),
    Row(
        "tool call, a named function",
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    Row(
        "tool call, `tool_choice: auto`, found by a parser",
        {"tools": [WEATHER], "structured_outputs": {"regex": "\\[weather\\(city='[a-z]{9}'\\)\\]"}},
    ),
    Row(
        "`response_format: json_schema`",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": PERSON, "strict": True},
            }
        },
    ),
    Row("`structured_outputs` (regex)", {"structured_outputs": {"regex": "(ab?c){9}"}}),
    Row("presence and frequency penalties", {"presence_penalty": 1, "frequency_penalty": 1.5}),
    Row("repetition penalty", {"repetition_penalty": 1.4}),
    Row("a stop string", {"stop": ["fox"], "include_stop_str_in_output": False}),
    Row("a stop string that is said", {"stop": ["fox"], "include_stop_str_in_output": True}),
    Row("stop tokens", {"stop_token_ids": [30, 6450]}, tokens=24),
    Row(
        "characters of several tokens",
        {},
        "Repeat: \U0001f98a\U0001f525\U0001f409 \u65e5\u672c\u8a9e \u0e20\u0e32\u0e29\u0e32",
    ),
    Row("`min_tokens`", {"min_tokens": 14}, "What is the capital of France?"),
    Row("`bad_words`", {"bad_words": ["fox", "the", "a"]}),
    Row(
        "`logit_bias` and `allowed_token_ids`",
        {"allowed_token_ids": [*range(200, 900)], "logit_bias": {"253": -5}},
    ),
    Row("`ignore_eos`", {"ignore_eos": True}, "What is the capital of France?"),
    Row("the model's own end", {}, "What is the capital of France?"),
    Row("`max_tokens`", {}, tokens=9),
    Row("usage at the end", {"stream_options": {"include_usage": True}}),
    Row(
        "usage throughout",
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    Row("`return_token_ids`", {"return_token_ids": True}),
    Row("several tokens an event (`stream_interval`)", {"stream_interval": 4}),
    Row(
        "completions, a text",
        {"stream_options": {"include_usage": True}},
        "Once upon a time, there was a",
        path=COMPLETIONS,
    ),
    Row("completions, tokens", {"prompt": [504, 3575, 282, 4649, 314]}, path=COMPLETIONS),
]


@dataclass
class Told:
    """What an application said, event by event, and what of the engine it had seen by then."""

    events: list[bytes] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    """Steps seen when each event was sent."""
    steps: list[Delta] = field(default_factory=list)
    call: Call | None = None

    def upto(self, events: int) -> Past:
        """Return what the log holds if the worker is lost after so many events."""
        past = Past()
        past.events = self.events[:events]
        past.tokens = self.steps[: self.seen[events - 1]]
        return past

    def cuts(self) -> list[int]:
        """Choose ten moments for a loss: near the beginning and the end, and between."""
        last = len(self.events)
        wanted = {1, 2, 3, last // 4, last // 2, last * 3 // 4, last - 3, last - 2, last - 1, last}
        return sorted(cut for cut in wanted if 0 < cut <= last)


class Telling(AppCall):
    """A request whose events are kept as the worker would."""

    def __init__(self, engine: VllmEngine, row: Row, job_id: str, past: Past | None) -> None:
        call = Call(job_id, resume=past.tokens if past else None)
        headers = {"content-type": "application/json", "x-request-id": job_id}
        super().__init__(engine.app, row.path, row.body, headers=headers, call=call)
        self.told = Told(call=call)
        self._splice = Splice(past) if past else None

    async def _send(self, message: Message) -> None:
        await super()._send(message)
        if (event := message.get("body")) and self.call is not None:
            new = self._splice.pass_on(event) if self._splice else event
            if new is not None:
                self.told.events.append(new)
                self.told.seen.append(len(self.call.deltas))
            self.told.steps = self.call.deltas


async def tell(
    engine: VllmEngine, row: Row, job_id: str, past: Past | None = None, patience: float = 100
) -> Told:
    """Make a row's request, from the beginning or from where an earlier attempt was cut."""
    async with Telling(engine, row, job_id, past) as telling:
        await telling.wait(patience)
    assert telling.status == 200, telling.body
    assert telling.call is not None
    assert telling.call.fault is None, telling.call.fault
    return telling.told


async def continued(engine: VllmEngine, row: Row, whole: Told, cut: int) -> Told:
    """Return the whole answer as a client has it that saw its worker lost after `cut` events."""
    assert whole.call is not None
    past = whole.upto(cut)
    rest = await tell(engine, row, whole.call.job_id, past)
    known = Told(whole.events[:cut], whole.seen[:cut], list(past.tokens), rest.call)
    known.events += rest.events
    known.steps += rest.steps
    known.seen += [len(past.tokens) + seen for seen in rest.seen]
    return known


def text_of(events: list[bytes]) -> str:
    """Return what a chat's or a completion's events say, tool calls included."""
    said = []
    for event in events:
        content = event.removeprefix(b"data: ").strip()
        if content == b"[DONE]":
            continue
        for choice in json.loads(content)["choices"]:
            delta = choice.get("delta", choice)
            said.append(delta.get("content") or delta.get("text") or "")
            for call in delta.get("tool_calls") or []:
                said.append(call["function"].get("arguments") or "")
    return "".join(said)


async def at_once(*tellings: Any, limit: int = 16) -> list[Any]:
    """Await several, a few at a time."""
    room = asyncio.Semaphore(limit)

    async def one(telling: Any) -> Any:
        async with room:
            return await telling

    return await asyncio.gather(*(one(telling) for telling in tellings))
