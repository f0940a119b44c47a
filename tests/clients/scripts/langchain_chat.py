"""LangChain's ChatOpenAI."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import openai
from asked import API, MODEL, NO_MODEL, PARIS, PARTS, STORY, STORY_TOKENS, TOOL, report
from langchain_openai import ChatOpenAI

SETTINGS: dict[str, Any] = {"base_url": API, "api_key": "none", "temperature": 0, "max_retries": 0}
model: Any = ChatOpenAI(model=MODEL, stream_usage=True, **SETTINGS)

whole: Any = None
for chunk in model.stream(PARIS):
    whole = chunk if whole is None else whole + chunk
usage = whole.usage_metadata

called: Any = None
for chunk in model.bind_tools([TOOL], tool_choice="weather", max_tokens=40).stream(PARIS):
    called = chunk if called is None else called + chunk
(call,) = called.tool_calls

try:
    ChatOpenAI(model=NO_MODEL, **SETTINGS).invoke(PARIS)
    raise SystemExit("there is no such model")
except openai.NotFoundError as refused:
    error = refused

story = model.stream(STORY, max_tokens=STORY_TOKENS)
read = 0
for _ in story:
    read += 1
    if read == PARTS:
        break
story.close()

report(
    f"langchain-openai {version('langchain-openai')}",
    stream=whole.text if isinstance(whole.text, str) else whole.content,
    usage=(usage["input_tokens"], usage["output_tokens"]),
    tool=(call["name"], call["args"]),
    error=(error.status_code, error.code or ""),
    left_after=read,
)
