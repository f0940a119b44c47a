"""One whole request to an ASGI application, for the few that the engine asks of itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from worker.engine.interface import App, Message

SPEC_VERSION = "2.3"
"""From 2.4 on Starlette no longer listens for `http.disconnect` while it streams."""


def http_scope(method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Build the scope of a request that came through no socket."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": SPEC_VERSION},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
        "client": None,
        "server": None,
    }


async def ask(app: App, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    """Return the status and the body that the application answers with."""
    content = b"" if body is None else json.dumps(body).encode()
    asked = asyncio.Event()
    status = 500
    parts: list[bytes] = []

    async def receive() -> Message:
        if asked.is_set():
            # Nobody hangs up: the answer's end cancels this.
            await asyncio.Event().wait()
        asked.set()
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(http_scope(method, path, {"content-type": "application/json"}), receive, send)
    return status, b"".join(parts)
