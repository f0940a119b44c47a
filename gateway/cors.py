"""Which web pages may read answers: what browsers ask for, and are told, about other origins.

The headers are made once per request, with those that every answer has: nothing wraps a stream.
"""

from __future__ import annotations

from starlette.types import Scope

RawHeaders = list[tuple[bytes, bytes]]

_EXPOSED = ", ".join(
    (
        "x-job-id",
        "x-request-id",
        "x-should-retry",
        "retry-after",
        "retry-after-ms",
        *(
            f"x-ratelimit-{what}-{of}"
            for of in ("requests", "tokens")
            for what in ("limit", "remaining", "reset")
        ),
    )
).encode()
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_MAX_AGE_S = b"600"
_ASKS_METHOD = b"access-control-request-method"
_ASKS_HEADERS = b"access-control-request-headers"


class Cors:
    """The headers for pages of the given origins; `*` means all. Without origins there are none."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        self._vary: RawHeaders = [(b"vary", b"Origin")] if origins and not self._all else []

    def headers(self, request: RawHeaders) -> RawHeaders:
        """Return what an answer to a request with these headers has to carry."""
        if not self._origins:
            return []
        origin = _value(request, b"origin")
        if origin is None or not (self._all or origin in self._origins):
            return self._vary
        return [
            (b"access-control-allow-origin", b"*" if self._all else origin),
            (b"access-control-expose-headers", _EXPOSED),
            *self._vary,
        ]

    def preflight(self, scope: Scope) -> RawHeaders | None:
        """Return what to answer a browser that asks before it sends; None if it is no such."""
        if not self._origins or scope["method"] != "OPTIONS":
            return None
        request: RawHeaders = scope["headers"]
        if _value(request, b"origin") is None or _value(request, _ASKS_METHOD) is None:
            return None
        allowed = [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
        # Named rather than `*`, which doesn't cover `authorization`.
        if names := _value(request, _ASKS_HEADERS):
            allowed.append((b"access-control-allow-headers", names))
        return allowed


def _value(headers: RawHeaders, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)
