"""Clients whose answers are known beforehand, and the judgement on what each of them got."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.sse import Ending, Event, open_response
from worker.engine.simulated_text import expected_tokens, tokenize, word

Kind = Literal["chat", "completion", "whole"]
"""A streamed chat, a streamed completion, a chat in one piece."""

EXACT = "exact"
CUT = "cut"
"""The connection broke, and no client can have taken that for an end."""


@dataclass(eq=False)
class Client:
    """One request to the simulated engine, and everything that came back."""

    url: str
    prompt: str
    tokens: int
    kind: Kind = "chat"
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    """More fields of the body."""

    job_id: str = ""
    status: int = 0
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    """What each event added."""
    ids: set[str] = field(default_factory=set)
    created: set[int] = field(default_factory=set)
    roles: int = 0
    finishes: list[str] = field(default_factory=list)
    usages: list[Mapping[str, int]] = field(default_factory=list)
    errors: list[Mapping[str, Any]] = field(default_factory=list)
    dones: int = 0
    late: int = 0
    """Events behind what should have been the last."""
    ending: Ending | None = None
    stall_s: float = 0.0
    """The longest time without anything new, from the request on."""
    heard_at: float = 0.0

    @property
    def streams(self) -> bool:
        return self.kind != "whole"

    @property
    def body(self) -> dict[str, object]:
        """Return the request's body."""
        fields: dict[str, object] = {"max_tokens": self.tokens, **self.extra}
        if self.streams:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.kind == "completion":
            return {"prompt": self.prompt, **fields}
        return {"messages": [{"role": "user", "content": self.prompt}], **fields}

    @property
    def endpoint(self) -> str:
        path = "completions" if self.kind == "completion" else "chat/completions"
        return f"{self.url}/v1/{path}"

    async def run(self) -> None:
        """Make the request and read the answer to its end, whatever that is."""
        self.heard_at = time.monotonic()
        try:
            async with open_response(self.endpoint, self.body, headers=self.headers) as response:
                self.status = response.status
                self.answer_headers = response.headers
                self.job_id = response.headers.get("x-job-id", "")
                if response.status == 200 and self.streams:
                    async for event in response.events():
                        self._take(event)
                else:
                    self._take_whole(await response.body())
                self.ending = response.ending
        except ConnectionError:
            self.ending = "reset"

    def _take(self, event: Event) -> None:
        if event.data is None:
            return
        self._hear(event.at)
        self.late += bool(self.dones or self.errors)
        if event.done:
            self.dones += 1
            return
        chunk = event.json()
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self._note(chunk)
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            self.roles += "role" in delta
            if text := choice["text"] if "text" in choice else delta.get("content"):
                self.words.append(text)

    def _take_whole(self, body: bytes) -> None:
        self._hear(time.monotonic())
        if self.status != 200:
            self.errors.append(json.loads(body)["error"] if body else {})
        elif body:
            answer = json.loads(body)
            self._note(answer)
            self.words = [choice["message"]["content"] for choice in answer["choices"]]

    def _note(self, answer: Mapping[str, Any]) -> None:
        self.ids.add(answer["id"])
        self.created.add(answer["created"])
        if answer.get("usage"):
            self.usages.append(answer["usage"])
        self.finishes += [c["finish_reason"] for c in answer["choices"] if c["finish_reason"]]

    def _hear(self, at: float) -> None:
        self.stall_s = max(self.stall_s, at - self.heard_at)
        self.heard_at = at

    # --- the judgement ---

    @property
    def expected(self) -> list[str]:
        """Return what an undisturbed run adds with each event."""
        words = [word(token) for token in expected_tokens(self.prompt, self.tokens)]
        return words if self.streams else ["".join(words)]

    def outcome(self) -> str:
        """Return `exact`, the code of the explicit error, or `cut`. All else breaks a promise."""
        told = f"{self.kind} {self.job_id}: "
        expected = self.expected
        same = self.words == expected[: len(self.words)]
        assert same, told + difference(self.words, expected)
        assert self.late == 0, told + "events behind the end"
        assert len(self.ids) <= 1, told + f"ids {self.ids}"
        assert len(self.created) <= 1, told + f"created {self.created}"
        assert all(
            one.removeprefix("chatcmpl-").removeprefix("cmpl-") == self.job_id for one in self.ids
        ), told + f"ids {self.ids}"
        clean = self.ending in ("complete", "closed")
        if self.errors:
            broken = self.status != 200 or not clean
            assert broken, told + "an error, and then an end as of a whole answer"
            assert not self.dones, told + "an error and [DONE]"
            code = self.errors[0].get("code")
            assert code, told + f"an error without a code: {self.errors[0]}"
            return str(code)
        if not clean:
            assert not self.dones, told + f"[DONE], and then {self.ending}"
            return CUT
        assert self.words == expected, told + f"ended cleanly after {len(self.words)} words"
        assert len(self.finishes) == 1, told + f"finish reasons {self.finishes}"
        assert self.dones == int(self.streams), told + f"{self.dones} [DONE]"
        assert self.roles == int(self.kind == "chat"), told + f"{self.roles} roles"
        self._check_usage(told)
        return EXACT

    def _check_usage(self, told: str) -> None:
        assert len(self.usages) == 1, told + f"usages {self.usages}"
        usage, prompt_tokens = self.usages[0], len(tokenize(self.prompt))
        right = (prompt_tokens, self.tokens, prompt_tokens + self.tokens)
        given = tuple(usage[f"{name}_tokens"] for name in ("prompt", "completion", "total"))
        assert given == right, told + f"usage {given}, not {right}"


def difference(words: list[str], expected: list[str]) -> str:
    """Say where a text leaves the expected one."""
    for at, (one, other) in enumerate(zip(words, expected, strict=False)):
        if one != other:
            return f"event {at} of {len(words)} has {one!r}, not {other!r}"
    return f"{len(words)} events, not {len(expected)}"
