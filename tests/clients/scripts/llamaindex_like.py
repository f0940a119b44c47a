"""LlamaIndex's OpenAILike."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import openai
from asked import API, MODEL, NO_MODEL, PARIS, PARTS, STORY, STORY_TOKENS, USAGE, report
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

SETTINGS: dict[str, Any] = {
    "api_base": API,
    "api_key": "none",
    "is_chat_model": True,
    "is_function_calling_model": True,
    "context_window": 2048,
    "temperature": 0,
    "max_retries": 0,
}


def weather(city: str) -> str:
    """Tell the weather."""
    return city


def messages(asked: Any) -> list[Any]:
    return [ChatMessage(**one) for one in asked]


model: Any = OpenAILike(model=MODEL, additional_kwargs={"stream_options": USAGE}, **SETTINGS)
parts = list(model.stream_chat(messages(PARIS)))
usage = parts[-1].raw.usage

calling: Any = OpenAILike(model=MODEL, max_tokens=60, **SETTINGS)
answer = calling.chat_with_tools(
    tools=[FunctionTool.from_defaults(weather)],
    chat_history=messages(PARIS),
    tool_choice="weather",
)
(call,) = calling.get_tool_calls_from_response(answer)

try:
    OpenAILike(model=NO_MODEL, **SETTINGS).chat(messages(PARIS))
    raise SystemExit("there is no such model")
except openai.NotFoundError as refused:
    error = refused


async def leave() -> int:
    """Cancel a task that reads a story; a generator that is closed leaves its connection open."""
    parts = 0
    enough = asyncio.Event()

    async def read() -> None:
        nonlocal parts
        story = await model.astream_chat(messages(STORY), max_tokens=STORY_TOKENS)
        async for _ in story:
            parts += 1
            if parts == PARTS:
                enough.set()

    reading = asyncio.create_task(read())
    await enough.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return parts


left_after = asyncio.run(leave())

report(
    f"llama-index-llms-openai-like {version('llama-index-llms-openai-like')}",
    stream=str(parts[-1].message.content),
    usage=(usage.prompt_tokens, usage.completion_tokens),
    tool=(call.tool_name, call.tool_kwargs),
    error=(error.status_code, error.code or ""),
    left_after=left_after,
)
