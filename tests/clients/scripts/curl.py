"""`curl -N`, as in the README."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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

JSON = "content-type: application/json"


@contextmanager
def curl(**fields: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a chat; at the end curl is gone."""
    body = json.dumps({"model": MODEL, "messages": PARIS, "temperature": 0, **fields})
    command = ["curl", "-sN", f"{API}/chat/completions", "-H", JSON, "-d", body]
    command += ["-w", "\n%{http_code}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def events(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("data: "):
            yield line.removeprefix("data: ").rstrip("\n")


def whole(**fields: Any) -> tuple[Any, int]:
    """Return a whole answer and its status."""
    with curl(**fields) as process:
        body, _, status = process.communicate()[0].rpartition("\n")
    return json.loads(body), int(status)


with curl(stream=True, stream_options=USAGE) as process:
    *raw, done = events(process)
assert done == "[DONE]", done
chunks = [json.loads(one) for one in raw]
text = "".join(one["choices"][0]["delta"].get("content", "") for one in chunks if one["choices"])
usage = chunks[-1]["usage"]

answer, status = whole(tools=[TOOL], tool_choice=TOOL_CHOICE, max_tokens=40)
assert status == 200, answer
(call,) = answer["choices"][0]["message"]["tool_calls"]

refusal, refused = whole(model=NO_MODEL)

with curl(messages=STORY, stream=True, max_tokens=STORY_TOKENS) as process:
    read = 0
    for _ in events(process):
        read += 1
        if read == PARTS:
            break

version = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
report(
    " ".join(version.split()[:2]),
    stream=text,
    usage=(usage["prompt_tokens"], usage["completion_tokens"]),
    tool=(call["function"]["name"], call["function"]["arguments"]),
    error=(refused, refusal["error"]["code"]),
    left_after=read,
)
