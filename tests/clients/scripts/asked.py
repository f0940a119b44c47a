"""What all the Python scripts ask for, and the form in which they report."""

from __future__ import annotations

import json
import sys
from typing import Any

URL, MODEL = sys.argv[1:3]
API = f"{URL}/v1"
NO_MODEL = "gpt-4"

PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a long story about a fox."}]
STORY_TOKENS = 110
"""Some seconds of decoding, so that a stream that is left has not ended by itself."""
PARTS = 3
"""After so many parts the story is left."""

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS},
}
TOOL_CHOICE: Any = {"type": "function", "function": {"name": "weather"}}
USAGE: Any = {"include_usage": True}


def report(
    client: str,
    *,
    stream: str,
    usage: tuple[int, int],
    tool: tuple[str, Any],
    error: tuple[int, str],
    left_after: int,
) -> None:
    """Write what a client got; `usage` is prompt and answer, `error` status and code."""
    told = {
        "client": client,
        "stream": stream,
        "usage": usage,
        "tool": [tool[0], json.loads(tool[1]) if isinstance(tool[1], str) else tool[1]],
        "error": error,
        "left_after": left_after,
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
