"""Ask a model one question and print its answer as it comes, with Python's standard library alone.

python -m compose.ask http://127.0.0.1:8000/v1 "What is the capital of France?"
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 300


class AskError(Exception):
    """There is no whole answer; the message says why."""


def first_model(base: str) -> str:
    """Return the first model that the server lists."""
    with _open(urllib.request.Request(f"{base}/models")) as response:
        models = json.load(response)["data"]
    if not models:
        raise AskError("the server has no model")
    return str(models[0]["id"])


def stream_chat(base: str, model: str, question: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streaming chat. Raises `AskError` where the stream isn't whole."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{base}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    done = False
    with _open(request) as response:
        for line in response:  # to its very end: who leaves after [DONE] has left early
            field, _, data = line.decode().strip().partition(": ")
            if field != "data":
                continue  # a comment, or the empty line between two events
            if data == "[DONE]":
                done = True
                continue
            chunk: dict[str, Any] = json.loads(data)
            if "error" in chunk:
                raise AskError(chunk["error"]["message"])
            yield chunk
    if not done:
        raise AskError("the stream broke off")


def _open(request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")
        raise AskError(f"status {error.code}: {detail}") from error
    except OSError as error:
        raise AskError(str(error)) from error


def ask(base: str, model: str, question: str, max_tokens: int) -> None:
    """Print question and answer, each token when it comes, and how long it took."""
    print(f"\n  > {question}\n\n  ", end="", flush=True)
    begun = time.monotonic()
    first_s: float | None = None
    usage: dict[str, Any] = {}
    for chunk in stream_chat(base, model, question, max_tokens):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            if text and first_s is None:
                first_s = time.monotonic() - begun
            print(text, end="", flush=True)
    if first_s is None:
        raise AskError("the answer is empty")
    took_s = time.monotonic() - begun
    tokens = usage.get("completion_tokens", "?")
    print(f"\n\n  ({tokens} tokens, the first after {first_s:.2f} s, all after {took_s:.2f} s)\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model one question.")
    parser.add_argument("base", help="the API's address, ending in /v1")
    parser.add_argument("question")
    parser.add_argument("--model", help="by default the first that the server lists")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    try:
        ask(args.base, args.model or first_model(args.base), args.question, args.max_tokens)
    except (AskError, OSError) as error:
        sys.exit(f"\nask: {error}")


if __name__ == "__main__":
    main()
