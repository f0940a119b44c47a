"""openai-python, the newest."""

from __future__ import annotations

from typing import Any

import openai
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

client: Any = openai.OpenAI(base_url=API, api_key="none", max_retries=0)
create = client.chat.completions.create

chunks = list(create(model=MODEL, messages=PARIS, temperature=0, stream=True, stream_options=USAGE))
text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
usage = chunks[-1].usage

calling = client.chat.completions.stream(
    model=MODEL, messages=PARIS, temperature=0, tools=[TOOL], tool_choice=TOOL_CHOICE, max_tokens=40
)
with calling as events:
    (call,) = events.get_final_completion().choices[0].message.tool_calls

try:
    create(model=NO_MODEL, messages=PARIS)
    raise SystemExit("there is no such model")
except openai.NotFoundError as refused:
    error = refused

story = create(model=MODEL, messages=STORY, temperature=0, max_tokens=STORY_TOKENS, stream=True)
read = 0
for _ in story:
    read += 1
    if read == PARTS:
        break
story.close()

report(
    f"openai {openai.__version__}",
    stream=text,
    usage=(usage.prompt_tokens, usage.completion_tokens),
    tool=(call.function.name, call.function.arguments),
    error=(error.status_code, error.code or ""),
    left_after=read,
)
