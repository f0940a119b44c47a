"""anthropic-python, by `/v1/messages`."""

from __future__ import annotations

from typing import Any

import anthropic
from asked import (
    MODEL,
    NO_MODEL,
    PARAMETERS,
    PARIS,
    PARTS,
    STORY,
    STORY_TOKENS,
    URL,
    report,
)

GREEDY: Any = {"extra_body": {"temperature": 0}}
client: Any = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)

with client.messages.stream(model=MODEL, messages=PARIS, max_tokens=40, **GREEDY) as events:
    text = "".join(events.text_stream)
    usage = events.get_final_message().usage

calling = client.messages.stream(
    model=MODEL,
    messages=PARIS,
    max_tokens=40,
    **GREEDY,
    tools=[{"name": "weather", "input_schema": PARAMETERS}],
    tool_choice={"type": "tool", "name": "weather"},
)
with calling as events:
    (call,) = [one for one in events.get_final_message().content if one.type == "tool_use"]

try:
    client.messages.create(model=NO_MODEL, messages=PARIS, max_tokens=5)
    raise SystemExit("there is no such model")
except anthropic.NotFoundError as refused:
    error: Any = refused

story = client.messages.create(
    model=MODEL, messages=STORY, max_tokens=STORY_TOKENS, stream=True, **GREEDY
)
read = 0
for event in story:
    read += event.type == "content_block_delta"
    if read == PARTS:
        break
story.close()

report(
    f"anthropic {anthropic.__version__}",
    stream=text,
    usage=(usage.input_tokens, usage.output_tokens),
    tool=(call.name, call.input),
    # Anthropic's errors have types and no codes.
    error=(error.status_code, {"not_found_error": "model_not_found"}[error.body["error"]["type"]]),
    left_after=read,
)
