"""LiteLLM's SDK."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import litellm
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

SETTINGS: dict[str, Any] = {
    "api_base": API,
    "api_key": "none",
    "temperature": 0,
    "num_retries": 0,
    "max_retries": 0,
}
NAME = f"openai/{MODEL}"

chunks = list(
    litellm.completion(NAME, messages=PARIS, stream=True, stream_options=USAGE, **SETTINGS)
)
text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
usage = chunks[-1].usage

answer = litellm.completion(
    NAME, messages=PARIS, tools=[TOOL], tool_choice=TOOL_CHOICE, max_tokens=40, **SETTINGS
)
(call,) = answer.choices[0].message.tool_calls

try:
    litellm.completion(f"openai/{NO_MODEL}", messages=PARIS, **SETTINGS)
    raise SystemExit("there is no such model")
except litellm.NotFoundError as refused:
    error: Any = refused

story: Any = litellm.completion(
    NAME, messages=STORY, stream=True, max_tokens=STORY_TOKENS, **SETTINGS
)
read = 0
for _ in story:
    read += 1
    if read == PARTS:
        break
story.completion_stream.close()

report(
    f"litellm {version('litellm')}",
    stream=text,
    usage=(usage.prompt_tokens, usage.completion_tokens),
    tool=(call.function.name, call.function.arguments),
    error=(error.status_code, "model_not_found" if "does not exist" in str(error) else str(error)),
    left_after=read,
)
