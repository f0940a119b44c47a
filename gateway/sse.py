"""Server-sent events that the gateway writes itself. Those of the answer pass through unread."""

from __future__ import annotations

import json

from gateway.error_forms import Form
from gateway.errors import error_json
from shared.errors import EngineFailed, HeadraceError

CONTENT_TYPE = "text/event-stream; charset=utf-8"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every client skips as long as no `id:` or `retry:` was sent."""
KEEP_ALIVE_BETWEEN_IDS = b": keep-alive\n"
"""Once an `id:` was sent, the blank line would be taken for the end of an event without data."""
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def is_stream(content_type: str) -> bool:
    """Tell whether an answer of this content type is a stream of events."""
    return content_type.startswith("text/event-stream")


def error_event(error: HeadraceError, form: Form) -> bytes:
    """Return the event that ends a stream that failed. SDKs raise only if the error is nested."""
    return form.event + b"data: " + error_json(error, form) + b"\n\n"


def answer_event(status: int, body: bytes, form: Form) -> bytes:
    """Return as one event a whole JSON answer that came when the stream's 200 was out already."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or (status >= 400 and "error" not in answer):
        return error_event(EngineFailed(), form)
    event = form.event if status >= 400 else b""
    return event + b"data: " + json.dumps(answer, separators=(",", ":")).encode() + b"\n\n"
