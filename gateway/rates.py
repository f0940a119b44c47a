"""A key's limits per minute as headers of its answers, with OpenAI's names and forms."""

from __future__ import annotations

from gateway.cors import RawHeaders
from shared.in_flight import Admission


def rate_headers(admission: Admission) -> RawHeaders:
    """Return what an answer says of its key's limits; nothing of those that it doesn't have."""
    headers: RawHeaders = []
    for name, window in (("requests", admission.requests), ("tokens", admission.tokens)):
        if window is not None:
            headers += [
                (f"x-ratelimit-limit-{name}".encode(), str(window.limit).encode()),
                (f"x-ratelimit-remaining-{name}".encode(), str(window.left).encode()),
                (f"x-ratelimit-reset-{name}".encode(), duration(window.reset_s).encode()),
            ]
    return headers


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: `0s`, `20ms`, `8.64s`, `1m0.5s`."""
    milliseconds = round(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
