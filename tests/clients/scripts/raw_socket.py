"""A raw socket, with a reader that refuses what HTTP and SSE don't allow (`tests.support.sse`)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from asked import (
    API,
    MODEL,
    NO_MODEL,
    PARIS,
    PARTS,
    STORY,
    STORY_TOKENS,
    TOOL,
    TOOL_CHOICE,
    USAGE,
    report,
)

from tests.support import sse

CHAT = f"{API}/chat/completions"
WHOLE = {"model": MODEL, "messages": PARIS, "temperature": 0}


async def streamed(**fields: Any) -> list[Any]:
    """Return a stream's chunks, having seen that it is right to the last byte."""
    async with sse.open_response(CHAT, {**WHOLE, "stream": True, **fields}) as response:
        assert response.headers["cache-control"] == "no-cache"
        *events, last = await response.all_events()
    assert response.ending == "complete"
    assert not response.leftover
    assert last.done
    chunks = [event.json() for event in events]
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in chunks}) == 1
    assert all(event.id is None and event.event is None for event in events)
    return chunks


async def main() -> None:
    chunks = await streamed(stream_options=USAGE)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    called = await streamed(tools=[TOOL], tool_choice=TOOL_CHOICE, max_tokens=40)
    calls = [
        call["function"]
        for one in called
        for choice in one["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    refused, raw = await sse.fetch(CHAT, {**WHOLE, "model": NO_MODEL})
    story = {**WHOLE, "messages": STORY, "max_tokens": STORY_TOKENS, "stream": True}
    async with sse.open_response(CHAT, story) as response:
        read = 0
        async for _ in response.events():
            read += 1
            if read == PARTS:
                break
    usage = chunks[-1]["usage"]
    report(
        "a raw socket",
        stream=text,
        usage=(usage["prompt_tokens"], usage["completion_tokens"]),
        tool=(
            "".join(call.get("name") or "" for call in calls),
            "".join(call.get("arguments") or "" for call in calls),
        ),
        error=(refused.status, json.loads(raw)["error"]["code"]),
        left_after=read,
    )


asyncio.run(main())
