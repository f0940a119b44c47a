"""openai-python 0.28, the last before its first major release: another library altogether."""

from __future__ import annotations

import importlib
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

openai: Any = importlib.import_module("openai")
openai.api_base, openai.api_key = API, "none"
create = openai.ChatCompletion.create

chunks = list(create(model=MODEL, messages=PARIS, temperature=0, stream=True, stream_options=USAGE))
text = "".join(one.choices[0].delta.get("content") or "" for one in chunks if one.choices)
usage = chunks[-1].usage

answer = create(
    model=MODEL, messages=PARIS, temperature=0, tools=[TOOL], tool_choice=TOOL_CHOICE, max_tokens=40
)
(call,) = answer.choices[0].message.tool_calls

try:
    create(model=NO_MODEL, messages=PARIS)
    raise SystemExit("there is no such model")
except openai.error.InvalidRequestError as refused:
    error = refused

story = create(model=MODEL, messages=STORY, temperature=0, max_tokens=STORY_TOKENS, stream=True)
read = 0
for _ in story:
    read += 1
    if read == PARTS:
        break
story.close()

report(
    f"openai {openai.version.VERSION}",
    stream=text,
    usage=(usage.prompt_tokens, usage.completion_tokens),
    tool=(call.function.name, call.function.arguments),
    error=(error.http_status, error.code),
    left_after=read,
)
